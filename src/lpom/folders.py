"""The folder of a run: what is in it, and where the next one goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from lpom.exceptions import ModelFileError
from lpom.files import check_writable

MODEL, CONFIG, HISTORY, CURVES = FILES = (
    "model.safetensors",
    "config.json",
    "history.jsonl",
    "curves.png",
)
REPORT, TENSORBOARD = "report.html", "tensorboard"  # what may lie beside them
_RUNS = Path("runs")


@contextmanager
def run_folder(out: Path | None, name: str, *, force: bool = False) -> Iterator[Path]:
    """A folder to write a run to: ``out``, or the next free ``runs/<name>-<n>``.

    It is made before training, so that a folder nobody can write to is noticed in time, and taken
    away again if nothing was written to it.
    """
    if out is not None:
        _check_free(out, force)
    above = [path for path in (out or _RUNS / name).parents if not path.exists()]
    folder, new = _next_free(name) if out is None else _made(out)
    try:
        check_writable(folder)
        yield folder
    finally:
        for path in [folder, *above] if new else above:
            if not any(path.iterdir()):
                path.rmdir()


def check_folder(folder: Path) -> None:
    """Raise unless a run was written to ``folder``."""
    if not (folder / MODEL).is_file():
        what = f"has no {MODEL} in it" if folder.is_dir() else "does not exist"
        raise ModelFileError(
            f"{folder} {what}; expected the folder of a run, as `lpom train` prints it."
        )


def forget_events(folder: Path) -> None:
    """Remove what TensorBoard has of an old run that is overwritten."""
    for old in (folder / TENSORBOARD).glob("events.out.tfevents.*"):
        old.unlink()


def _check_free(folder: Path, force: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; expected a folder for the run. Name another one.")
    there = [file for file in FILES if (folder / file).exists()]
    if there and not force:
        raise ValueError(
            f"{folder} already holds a run ({', '.join(there)}). Name another folder, or use "
            "--force to overwrite it."
        )


def _made(folder: Path) -> tuple[Path, bool]:
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    return folder, new


def _next_free(name: str) -> tuple[Path, bool]:
    _RUNS.mkdir(parents=True, exist_ok=True)
    for n in count(1):
        folder = _RUNS / f"{name}-{n}"
        try:
            folder.mkdir()  # of two processes at once only one makes it
        except FileExistsError:
            continue
        return folder, True
    raise AssertionError("there is always a next number")
