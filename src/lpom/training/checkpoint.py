"""Checkpoints: a run on disk, from which it resumes bit for bit.

A checkpoint is what ``torch.save`` writes of ``Trainer.state_dict()``: tensors, plain values, lists
and dictionaries. Its name ends with the checksum of its bytes, and it is read with
``weights_only=True``, so that no file can run code.
"""

from __future__ import annotations

import hashlib
import io
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from lpom.checks import check_number
from lpom.exceptions import CheckpointError, warn
from lpom.files import check_writable, remove_parts, write_atomically
from lpom.training.callbacks import Signals


@dataclass(frozen=True)
class Checkpoint:
    """Where a run is kept, and how often.

    Parameters
    ----------
    folder : path
        Of this one run; it is made if it is not there.
    every_minutes, every_epochs : numbers, or None
        A checkpoint is due when this long has passed since the last one, after a step; and at the
        end of every so many epochs. 0 minutes: after every step.
    keep : int
        How many of the latest are kept. Should one turn out damaged, the one before it serves.
    """

    folder: str | Path
    every_minutes: float | None = 1.0
    every_epochs: int | None = None
    keep: int = 2

    def __post_init__(self) -> None:
        if self.every_minutes is not None:
            check_number("every_minutes", self.every_minutes, strict=False)
        if self.every_epochs is not None:
            check_number("every_epochs", self.every_epochs, whole=True)
        check_number("keep", self.keep, whole=True)


class RunFolder:
    """The folder of a run while this process is the one that may write to it.

    A context manager: inside, the folder is locked, and signals that would end the process wait
    for the next checkpoint. The lock is the system's, so a process that died holds none.
    """

    def __init__(self, plan: Checkpoint) -> None:
        self.plan = plan
        self.folder = Path(plan.folder)
        self.signals = Signals()
        self._lock: IO[bytes] | None = None
        self._written = time.monotonic()

    def __enter__(self) -> RunFolder:
        self._lock = hold(self.folder)
        remove_parts(self.folder)  # of a process that was killed while it wrote
        self.signals.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._lock is not None:
            self._lock.close()
        self.signals.__exit__(kind, *rest)

    def files(self) -> list[Path]:
        """All checkpoints, the latest first."""
        return sorted(self.folder.glob("*-*.pt"), reverse=True)

    def newest(self) -> dict[str, Any] | None:
        """The latest checkpoint that is whole; None if there has never been one."""
        damaged = []
        for path in self.files():
            try:
                found = read(path)
            except CheckpointError as error:
                damaged.append(str(error))
                continue
            if damaged:
                warn(f"{' '.join(damaged)} The run goes on from {path.name}.", UserWarning)
            return found
        if damaged:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is whole: {' '.join(damaged)} Copy them again, or "
                "remove the folder to start again."
            )
        return None

    def due(self, epochs: int, epoch_ended: bool) -> bool:
        """Whether it is time for a checkpoint."""
        minutes, every = self.plan.every_minutes, self.plan.every_epochs
        if minutes is not None and time.monotonic() - self._written >= 60 * minutes:
            return True
        return every is not None and epoch_ended and epochs % every == 0

    def write(self, run: dict[str, Any]) -> bool:
        """Keep the run, and of the earlier checkpoints as many as planned; whether that went well.

        Where there is no room, what was kept before stays, and the run can go on.
        """
        kept = self.files()
        number = int(kept[0].name.partition("-")[0]) + 1 if kept else 1
        content = encode(run)
        path = self.folder / f"{number:08d}-{checksum(content)}.pt"
        try:
            write_atomically(path, content)
        except OSError as error:
            left = f"{kept[0].name} stays as it was" if kept else "there is none yet"
            warn(
                f"no checkpoint could be written to {self.folder} ({error.strerror}); {left}, and "
                "training goes on.",
                UserWarning,
            )
            return False
        finally:
            self._written = time.monotonic()
        for old in kept[self.plan.keep - 1 :]:
            old.unlink(missing_ok=True)
        return True


def hold(folder: Path, name: str = "lock") -> IO[bytes]:
    """An open file in ``folder``, locked until it is closed or the process dies.

    Raises
    ------
    CheckpointError
        If the folder can't be made or written to, or another process has the lock.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_writable(folder)
        file = (folder / name).open("ab")
    except OSError as error:
        raise CheckpointError(
            f"no checkpoint can be written to {folder} ({error.strerror}). Choose a folder that "
            "can be written to, with room for a few times the model."
        ) from error
    try:
        if os.name == "posix":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise CheckpointError(
            f"another process is training in {folder}. Wait until it has ended, or use another "
            "folder."
        ) from None
    return file


def read(path: Path) -> dict[str, Any]:
    """What :meth:`RunFolder.write` was given, or what is wrong with the file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} can't be read ({error.strerror}).") from error
    if checksum(content) != path.stem.partition("-")[2]:
        raise CheckpointError(f"{path} is damaged: it does not have the checksum in its name.")
    try:
        return decode(content)
    except Exception as error:  # whatever torch says of a file that is not one of its own
        raise CheckpointError(f"{path} is not a checkpoint of this version ({error}).") from error


def decode(content: bytes) -> dict[str, Any]:
    """What :func:`encode` was given."""
    run: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return run


def encode(run: dict[str, Any]) -> bytes:
    """Tensors and plain values, nested in lists and dictionaries, as ``torch.save`` writes them."""
    buffer = io.BytesIO()
    torch.save(_writable(run), buffer)
    return buffer.getvalue()


def _writable(value: Any) -> Any:
    """The same, checked; a tensor that is part of a larger memory is copied out of it."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            value = value.detach()
            return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()
        case dict():
            return {name: _writable(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_writable(inner) for inner in value]
    raise TypeError(
        f"a checkpoint holds tensors and plain values, got {type(value).__name__}: {value!r}."
    )


def checksum(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
