"""The folder of a run: what is in it, and where the next one goes.

While a run trains, all that is needed to go on with it lies in ``checkpoint`` inside the folder:
its settings, its latest states, and the lock of the process at work. The files of the run itself
are written at the end, and the checkpoint is removed last.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from lpom.exceptions import ModelFileError
from lpom.files import check_writable, write_atomically
from lpom.training.checkpoint import hold

MODEL, SETTINGS, METRICS, HISTORY, PREDICTIONS = FILES = (
    "model.safetensors",
    "settings.json",
    "metrics.json",
    "history.jsonl",
    "predictions.csv",
)
REPORT = "report.html"  # which may lie beside them
CHECKPOINT = "checkpoint"
_BEGUN, _LOCK = "run.json", "run.lock"  # in the checkpoint
_RUNS = Path("runs")


@contextmanager
def run_folder(out: Path | None, name: str, *, force: bool = False) -> Iterator[Path]:
    """A folder to write a run to: ``out``, or the next free ``runs/<name>-<n>``.

    It is made and locked before training, so that a folder nobody can write to, or in which
    another process trains, is noticed in time; and taken away again if nothing was written to it.
    """
    if out is not None:
        _check_free(out, force)
    above = [path for path in (out or _RUNS / name).parents if not path.exists()]
    folder, new = _next_free(name) if out is None else _made(out)
    try:
        check_writable(folder)
        with hold(folder / CHECKPOINT, _LOCK):
            try:
                for old in [*_states(folder), folder / CHECKPOINT / _BEGUN]:
                    old.unlink(missing_ok=True)
                yield folder
            finally:
                if not _states(folder):
                    forget_checkpoint(folder)
    finally:
        for path in [folder, *above] if new else above:
            if not any(path.iterdir()):
                path.rmdir()


@contextmanager
def begun_folder(folder: Path) -> Iterator[dict[str, Any]]:
    """What :func:`begin` noted of a run that did not come to its end; the folder is locked."""
    if not begun(folder):
        state = "is finished" if (folder / MODEL).is_file() else "was never begun there"
        raise ValueError(
            f"{folder} has no run to go on with: it {state}."
            if folder.is_dir()
            else f"there is no folder {folder}; expected that of a run, as `lpom train` prints it."
        )
    with hold(folder / CHECKPOINT, _LOCK):
        yield read_begun(folder)


def begin(folder: Path, notes: dict[str, Any]) -> None:
    """Note, before training, all that is needed to go on with the run after whatever ends it."""
    text = json.dumps(notes, indent=2, ensure_ascii=False, default=str)
    write_atomically(folder / CHECKPOINT / _BEGUN, text.encode())


def begun(folder: Path) -> bool:
    """Whether a run was begun in the folder and not finished."""
    return (folder / CHECKPOINT / _BEGUN).is_file()


def resumable(folder: Path) -> bool:
    """Whether such a run has a state to go on from."""
    return begun(folder) and bool(_states(folder))


def read_begun(folder: Path) -> dict[str, Any]:
    """What :func:`begin` noted."""
    path = folder / CHECKPOINT / _BEGUN
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise ModelFileError(f"{path} is damaged ({error}). Train again.") from error


@contextmanager
def as_written(where: object) -> Iterator[None]:
    """Say of a file that was changed by hand what is wrong with it."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(
            f"{where} lacks what `lpom train` writes ({error!r}). Train again."
        ) from error


def forget_checkpoint(folder: Path) -> None:
    """Remove what a finished run no longer needs."""
    with suppress(OSError):  # what can't be removed does no harm
        (folder / CHECKPOINT / _BEGUN).unlink(missing_ok=True)
        shutil.rmtree(folder / CHECKPOINT)


def check_folder(folder: Path) -> None:
    """Raise unless a run was written to ``folder``."""
    if (folder / MODEL).is_file():
        return
    if begun(folder):
        raise ModelFileError(
            f"{folder} holds a run that has not come to its end and has no model yet; "
            f"`lpom train --resume {folder}` goes on with it."
        )
    what = f"has no {MODEL} in it" if folder.is_dir() else "does not exist"
    raise ModelFileError(
        f"{folder} {what}; expected the folder of a run, as `lpom train` prints it."
    )


def _states(folder: Path) -> list[Path]:
    return list((folder / CHECKPOINT).glob("*.pt"))


def _check_free(folder: Path, force: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; expected a folder for the run. Name another one.")
    if begun(folder) and not force:
        raise ValueError(
            f"{folder} already holds a run that has not come to its end. Go on with it by "
            f"`lpom train --resume {folder}`, name another folder, or use --force to start anew."
        )
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
