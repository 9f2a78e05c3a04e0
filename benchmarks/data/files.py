"""The published files of a data set: in the user's folder, in the cache, or downloaded."""

from __future__ import annotations

import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lpom.exceptions import DataError
from lpom.files import write_atomically

TIMEOUT = 30  # seconds without an answer


@dataclass(frozen=True)
class Source:
    """Where a data set is published, and the MD5 of each of its files.

    ``folder`` is the name of its folder below that of the user, and in the cache.
    """

    folder: str
    url: str
    hashes: Mapping[str, str]


def folders(source: Source) -> list[Path]:
    """Where the user may have put its files: below ``LPOM_DATA``, in its folder or beside it."""
    chosen = os.environ.get("LPOM_DATA", "")
    if not chosen:
        return []
    root = Path(chosen).expanduser()
    if not root.is_dir():
        raise DataError(
            f"LPOM_DATA should name a folder that holds the data sets, got {chosen!r}, which is "
            "none. Correct it, or unset it to download what is needed."
        )
    return [root / source.folder, root]


def find(source: Source, names: Sequence[str]) -> Path | None:
    """The first of these files that is in one of the user's folders."""
    places = (folder / name for folder in folders(source) for name in names)
    return next((place for place in places if place.is_file()), None)


def fetch(source: Source, name: str) -> Path:
    """A published file in the cache, downloaded first if it is not there yet, and checked."""
    cache = Path(os.environ.get("LPOM_CACHE", "~/.cache/lpom")).expanduser()
    path = cache / source.folder / name
    if path.is_file() and _md5(path.read_bytes()) == source.hashes[name]:
        return path
    url = f"{source.url}/{name}"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
            content: bytes = answer.read()
    except (urllib.error.URLError, OSError) as error:
        raise _by_hand(source, name, str(error)) from error
    if _md5(content) != source.hashes[name]:
        raise _by_hand(source, name, "what came is not the published file")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)
    return path


def find_or_fetch(source: Source, name: str) -> Path:
    return find(source, [name]) or fetch(source, name)


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _by_hand(source: Source, name: str, reason: str) -> DataError:
    return DataError(
        f"could not download {name}: {reason}. Try again, or fetch {source.url}/{name} by other "
        f"means, put it into DIR/{source.folder}/ and set LPOM_DATA=DIR."
    )
