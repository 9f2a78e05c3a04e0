"""Finding the files of a data set: in the user's folder, in the cache, or where they are published.

Files are looked for under `data_dir`, or under the folder that the environment variable
``LPOM_DATA`` names. What is not there is downloaded into the cache of the user (``LPOM_CACHE``
puts that elsewhere) and checked by hash; a file that is not the published one is not kept.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from lpom.checks import require
from lpom.datasets.base import DataDir
from lpom.exceptions import DataError

TIMEOUT = 30  # seconds without an answer


@dataclass(frozen=True)
class Source:
    """Where a data set is published, and the hash of each of its files.

    Attributes
    ----------
    folder : str
        Name of its folder under the data folder, and in the cache.
    base_url : str
        Address that a file name is appended to.
    hashes : mapping of str to str
        File name to "algorithm:hexdigest".
    """

    folder: str
    base_url: str
    hashes: Mapping[str, str]

    def url(self, name: str) -> str:
        return f"{self.base_url.rstrip('/')}/{name}"


def data_folder(data_dir: DataDir = None) -> Path | None:
    """The folder to look for data in: `data_dir`, else ``LPOM_DATA``, else none."""
    origin, chosen = "data_dir", os.fspath(data_dir) if data_dir is not None else ""
    if not chosen:
        origin, chosen = "LPOM_DATA", os.environ.get("LPOM_DATA", "")
    if not chosen:
        return None
    folder = Path(chosen).expanduser()
    if not folder.is_dir():
        raise DataError(
            f"{origin} should name a folder that holds the data sets, got {chosen!r}, which is "
            f"{'a file' if folder.exists() else 'not there'}. Correct it, or leave it out to "
            "download what is needed."
        )
    return folder


def cache_folder() -> Path:
    """The user's cache for data sets: ``LPOM_CACHE``, or the usual place of the system."""
    chosen = os.environ.get("LPOM_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(require("pooch", "Caching data sets").os_cache("lpom"))


def find(names: Sequence[str], folders: Sequence[str], data_dir: DataDir = None) -> Path | None:
    """First of `names` that exists in one of `folders` (``""`` is the data folder itself)."""
    root = data_folder(data_dir)
    if root is None:
        return None
    places = (root / folder / name for folder in folders for name in names)
    return next((place for place in places if place.is_file()), None)


def fetch(source: Source, name: str) -> Path:
    """Path of a published file in the cache, downloaded first if it is not there yet.

    The file appears under its name only when it is complete and its hash is the published one.
    """
    pooch = require("pooch", f"Downloading {name}")
    requests = require("requests", f"Downloading {name}")
    folder, url = cache_folder() / source.folder, source.url(name)
    try:
        path = pooch.retrieve(
            url,
            known_hash=source.hashes[name],
            fname=name,
            path=folder,
            downloader=_download,
        )
    except requests.exceptions.RequestException as error:
        raise DataError(_by_hand(source, name, _reason(url, error))) from error
    except ValueError as error:  # pooch's word for a hash that does not match
        reason = (
            f"what came is not the published file (expected {source.hashes[name]}), "
            "and was thrown away"
        )
        raise DataError(_by_hand(source, name, reason)) from error
    except OSError as error:
        raise DataError(_by_hand(source, name, f"it cannot be written to {folder}")) from error
    return Path(path)


def find_or_fetch(source: Source, name: str, data_dir: DataDir = None) -> Path:
    """A published file: from the data folder if it is there, else from the cache or the network."""
    return find([name], [source.folder, ""], data_dir) or fetch(source, name)


def _download(url: str, output_file: str, pooch: object) -> None:
    """What pooch calls a downloader; unlike its own, this one closes a connection that failed."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    requests = require("requests", "Downloading")
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    as_it_is = {"Accept-Encoding": "identity"}  # the hash is that of the file, not of its content
    with (
        requests.get(url, stream=True, timeout=TIMEOUT, headers=as_it_is) as response,
        Progress(*columns, console=Console(stderr=True)) as progress,
        open(output_file, "wb") as file,
    ):
        response.raise_for_status()
        size = response.headers.get("Content-Length")
        task = progress.add_task(url.rpartition("/")[2], total=float(size) if size else None)
        for piece in response.iter_content(chunk_size=1 << 16):
            file.write(piece)
            progress.advance(task, len(piece))


def _reason(url: str, error: Exception) -> str:
    requests = require("requests", "Downloading")
    host = urlsplit(url).netloc
    if isinstance(error, requests.exceptions.HTTPError):
        return f"{host} answered {error.response.status_code} {error.response.reason}"
    if isinstance(error, requests.exceptions.Timeout):
        return f"{host} did not answer in time"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return f"{host} broke off in the middle; what had come was thrown away"
    if isinstance(error, requests.exceptions.ConnectionError):
        return f"no connection to {host}"
    return str(error)


def _by_hand(source: Source, name: str, reason: str) -> str:
    others = [other for other in source.hashes if other != name]
    beside = f" (beside it belong {', '.join(others)})" if others else ""
    return (
        f"Could not download {name}: {reason}. Try again, or fetch {source.url(name)} by other "
        f"means, put it into DIR/{source.folder}/{beside} and set LPOM_DATA=DIR, or pass "
        "data_dir=DIR (--data-dir DIR on the command line)."
    )
