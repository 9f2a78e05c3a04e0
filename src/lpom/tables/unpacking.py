"""Packed files are unpacked as far as their size makes it plausible: a small one may claim much."""

from __future__ import annotations

import gzip
import zipfile
import zlib
from pathlib import Path

from lpom.exceptions import DataError

ROOM = 2**27  # bytes that any file may unpack to
TIMES = (
    100  # and this often its own size: text and numbers shrink to a tenth, rarely to a hundredth
)


def check_claim(path: Path, claimed: int, times: int = TIMES) -> None:
    """Refuse a file that says it unpacks to more bytes than its own size makes plausible."""
    limit = ROOM + times * path.stat().st_size
    if claimed > limit:
        raise DataError(
            f"{path} should unpack to at most {limit / 2**20:,.0f} MiB for its size, but has "
            f"{claimed / 2**20:,.0f} MiB or more in it. It is damaged, or made to fill the memory: "
            "unpack it yourself if you trust it."
        )


def gunzip(path: Path) -> bytes:
    """The content of a gzip file; never more than a plausible part of it is in memory."""
    limit = ROOM + TIMES * path.stat().st_size
    try:
        with gzip.open(path) as file:
            content = file.read(limit + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} should be a gzip file, but it cannot be unpacked ({error}). It is damaged or "
            "was cut off: fetch or save it again."
        ) from error
    check_claim(path, len(content))
    return content


def check_zip(path: Path) -> None:
    """Look at the sizes that a zip archive (NPZ, Excel) claims; its reader keeps to them."""
    try:
        with zipfile.ZipFile(path) as archive:
            claimed = sum(member.file_size for member in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return  # its reader says what is wrong with it
    check_claim(path, claimed)
