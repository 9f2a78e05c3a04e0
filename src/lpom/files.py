"""Files are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def check_writable(folder: Path) -> None:
    """Raise the system's error now if no file can be made in ``folder``."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(folder)) from None


def write_atomically(path: str | Path, content: bytes) -> None:
    """Write beside ``path``, then rename over it: no reader ever sees half a file.

    A link stays, what it points to is written; a pipe or a device is written to as it is.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_bytes(content)
        return
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # else a power cut may leave the new name with no content
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp's own mode is private to the user
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
