"""Files are written whole or not at all, and told apart by checksums."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import tempfile
from pathlib import Path


def checksum(path: Path) -> str:
    """SHA-256 of a file, read a piece at a time."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_writable(folder: Path) -> None:
    """Raise the system's error now if no file can be made in ``folder``."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(folder)) from None


def remove_parts(folder: Path) -> None:
    """Remove what was left by processes that died in :func:`write_atomically`."""
    for part in folder.glob(".*.part"):
        part.unlink(missing_ok=True)


def write_atomically(path: str | Path, content: bytes) -> None:
    """Write beside ``path``, then rename over it: no reader ever sees half a file.

    A link stays, what it points to is written; a pipe or a device is written to as it is.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_bytes(content)
        return
    temporary = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # else a power cut may leave the new name with no content
        if path.exists():
            shutil.copymode(path, temporary)
        temporary.replace(path)
        _sync(path.parent)
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # and not the temporary one
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Have the names in a folder written, where the system can do that."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
