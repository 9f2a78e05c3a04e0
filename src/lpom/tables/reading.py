"""Tables of the user: CSV, Parquet, Excel and NPZ files, or a CSV from standard input."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import zip_longest
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lpom.checks import require
from lpom.exceptions import DataError

if TYPE_CHECKING:
    import pandas as pd

STDIN = "-"
SEPARATORS = (",", ";", "\t", "|")
ENDINGS = ".csv, .tsv, .csv.gz, .parquet, .xlsx or .npz"
_TIMES_OF_PARQUET = 1000  # columns of few values take a bit or less in each row
SHOWN = 5  # columns an error names
ROOM = 2**27  # bytes that any packed file may unpack to: a small one may claim much
TIMES = 100  # and this often its own size: text and numbers shrink to a tenth, rarely more

_MARKS = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


@dataclass(frozen=True, eq=False)
class Table:
    """The values of a file, and what a reader should know of how they were read.

    Those of a CSV file are texts as they stand there: what they mean is for
    :class:`lpom.tables.ColumnPlan` to decide.
    """

    frame: pd.DataFrame
    notes: tuple[str, ...] = ()


def read_table(
    path: str | PathLike[str], *, encoding: str | None = None, separator: str | None = None
) -> Table:
    """Read a table.

    Parameters
    ----------
    path : path, or "-" for a CSV from standard input
        ``.csv`` or ``.tsv`` (packed as ``.gz`` too; first line: the names), ``.parquet``,
        ``.xlsx`` (the first sheet), or ``.npz``: an array of one dimension is a column, one of
        two dimensions the columns ``NAME0``, ``NAME1``, ...
    encoding : of a CSV file, by default UTF-8, or UTF-16 if it starts with its mark
    separator : of a CSV file, by default that of ``, ; | tab`` which splits its first line most

    Raises
    ------
    DataError
        If the file cannot be read, has no names or no rows.
    """
    if separator is not None and (not isinstance(separator, str) or len(separator) != 1):
        raise DataError(f"the separator must be one character, such as ; or |, got {separator!r}.")
    if encoding is not None and not isinstance(encoding, str):
        raise DataError(f"the encoding must be a name, such as cp1252, got {encoding!r}.")
    if str(path) == STDIN:
        table = _read_csv(Path("standard input"), sys.stdin.buffer.read(), encoding, separator)
    else:
        path = Path(path)
        _check_file(path)
        ending = _ending(path)
        if ending in (".csv", ".tsv"):
            table = _read_csv(path, _content(path), encoding, separator)
        elif ending == ".parquet":
            table = _read_parquet(path)
        elif ending == ".xlsx":
            table = _read_excel(path)
        elif ending == ".npz":
            table = _read_npz(path)
        else:
            raise DataError(
                f"{path} should end in {ENDINGS}, got {path.suffix or 'no ending'!r}. Convert it, "
                "or rename it if it is one of these."
            )
    if len(table.frame) == 0:
        raise DataError(
            f"{path} should hold rows of data, got none after the names of its columns."
        )
    return table


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise DataError(f"{path} should be a file, but is a folder. Name a file in it.")
    if not path.exists():
        folder = path.parent
        there = [file.name for file in folder.iterdir()] if folder.is_dir() else []
        raise DataError(f"There is no file {path}.{_meant(path.name, there)} Check the path.")


def _ending(path: Path) -> str:
    name = path.name.lower()
    return Path(name.removesuffix(".gz")).suffix if name.endswith("sv.gz") else Path(name).suffix


def _content(path: Path) -> bytes:
    return gunzip(path) if path.suffix.lower() == ".gz" else path.read_bytes()


def _read_csv(path: Path, content: bytes, encoding: str | None, separator: str | None) -> Table:
    import pandas as pd

    text = _decoded(path, content, encoding)
    if "\0" in text:
        raise DataError(
            f"{path} should be text, but holds zero bytes. It is damaged, or no CSV file: save it "
            "again."
        )
    line = next((line for line in text.splitlines() if line.strip()), None)
    if line is None:
        raise DataError(
            f"{path} should start with a line of column names, but is empty. Save it again."
        )
    try:
        separator = _separator(line) if separator is None else separator
        frame = pd.read_csv(
            io.StringIO(text),
            sep=separator,
            header=None,
            dtype=str,
            keep_default_na=False,
            na_values=[""],
        )
        names = frame.iloc[0].fillna("").tolist()
        _check_header(path, names)
        frame = frame.iloc[1:].reset_index(drop=True)
    except (ValueError, TypeError, csv.Error) as error:
        if isinstance(error, DataError):
            raise
        expected = "a table with as many values in each line as its first line has names"
        raise _unreadable(path, expected, error) from error
    names, notes = _own_names(names)
    frame.columns = pd.Index(names)
    again = (frame == names).all(axis=1) if len(names) > 1 else pd.Series(False, index=frame.index)
    if again.any():
        frame = frame[~again].reset_index(drop=True)
        notes.append(f"{_count('line', int(again.sum()))} repeating the names left out")
    return Table(_without_index(frame), tuple(notes))


def _decoded(path: Path, content: bytes, encoding: str | None) -> str:
    mark = next((name for mark, name in _MARKS.items() if content.startswith(mark)), "utf-8-sig")
    try:
        return content.decode(encoding or mark)
    except LookupError:
        raise DataError(f"--encoding: there is no encoding {encoding!r}; try cp1252.") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not text in {encoding or 'UTF-8'} ({error}). Say what it is in, e.g. "
            "--encoding cp1252 (Windows, western Europe), or save it as UTF-8."
        ) from error


def _separator(line: str) -> str:
    split = {sign: len(next(csv.reader([line], delimiter=sign))) for sign in SEPARATORS}
    return max(SEPARATORS, key=lambda sign: split[sign])


def _check_header(path: Path, names: Sequence[str]) -> None:
    import pandas as pd

    numbers = pd.to_numeric(pd.Series(names), errors="coerce").notna()
    if numbers.all():
        raise DataError(
            f"{path} should start with a line of column names, got numbers: {_list(names)}. Add a "
            "line of names before them."
        )


def _own_names(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """A name for each column, its own, and what was changed to that end."""
    made: list[str] = []
    for k, name in enumerate(names):
        name = str(name).strip() or f"column {k + 1}"
        times = sum(other == name for other in map(str.strip, map(str, names[:k])))
        made.append(name if not times else f"{name} ({times + 1})")
    twice = [name for name, times in Counter(str(n).strip() for n in names).items() if times > 1]
    named = [name for name in twice if name]
    return made, [f"the second column {name!r} is called {name + ' (2)'!r}" for name in named]


def _without_index(frame: pd.DataFrame) -> pd.DataFrame:
    """Without the row numbers that pandas writes into a first column without a name."""
    numbers = [str(k) for k in range(len(frame))]
    counts = frame.columns[0] == "column 1" and frame.iloc[:, 0].tolist() == numbers
    return frame.iloc[:, 1:] if counts and len(frame.columns) > 1 else frame


def _read_parquet(path: Path) -> Table:
    parquet = require("pyarrow.parquet", "Reading .parquet files")
    try:
        file = parquet.ParquetFile(path)
        cells = file.metadata.num_rows * file.metadata.num_columns
        check_claim(path, 8 * cells, _TIMES_OF_PARQUET)
        frame = file.read().to_pandas()
        if any(name is not None for name in frame.index.names):  # pandas set columns aside
            frame = frame.reset_index()
    except (ValueError, OSError) as error:  # pyarrow's errors are one or the other
        if isinstance(error, DataError | PermissionError):
            raise
        raise _unreadable(path, "a Parquet file", error) from error
    return _renamed(frame)


def _read_excel(path: Path) -> Table:
    import pandas as pd

    openpyxl = require("openpyxl", "Reading .xlsx files")
    check_zip(path)
    try:
        book = openpyxl.load_workbook(path, read_only=True, data_only=True)
        frame = pd.DataFrame(list(zip_longest(*zip_longest(*book.worksheets[0].values))))
        book.close()
    except Exception as error:  # a damaged archive raises nearly anything
        if isinstance(error, PermissionError):
            raise
        raise _unreadable(path, "an Excel file", error) from error
    frame = frame.dropna(how="all").dropna(how="all", axis=1)
    if not len(frame):
        raise DataError(
            f"{path} should start with a line of column names, but is empty. Save it again."
        )
    names = ["" if pd.isna(name) else str(name) for name in frame.iloc[0]]
    _check_header(path, names)
    body = frame.iloc[1:].reset_index(drop=True).astype(object).infer_objects()
    return _renamed(body.set_axis(names, axis=1))


def _renamed(frame: pd.DataFrame) -> Table:
    names, notes = _own_names(list(map(str, frame.columns)))
    return Table(frame.set_axis(names, axis=1), tuple(notes))


def read_npz(path: Path) -> dict[str, Any]:
    """The arrays of an NPZ file by name."""
    _check_file(path)
    check_zip(path)
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as content:
            return {name: content[name] for name in content.files}
    except Exception as error:  # a damaged file raises nearly anything
        if isinstance(error, PermissionError):
            raise
        raise _unreadable(path, "an NPZ file of plain numbers and texts", error) from error


def _read_npz(path: Path) -> Table:
    import pandas as pd

    arrays = read_npz(path)
    columns: list[tuple[str, Any]] = []
    for name, array in arrays.items():
        if array.ndim not in (1, 2):
            raise DataError(
                f"{path} should hold arrays of one or two dimensions (rows are samples), got "
                f"{name!r} of shape {array.shape}. Reshape it to (n, features)."
            )
        if array.ndim == 1 or array.shape[1] == 1:
            columns.append((name, array.reshape(-1)))
        else:
            columns.extend((f"{name}{k}", column) for k, column in enumerate(array.T))
    if len({len(array) for array in arrays.values()}) > 1:
        lengths = ", ".join(f"{name!r} {len(array)}" for name, array in arrays.items())
        raise DataError(
            f"{path} should hold arrays with the same number of rows, got {lengths}. Save the "
            "arrays of one table together, and others in another file."
        )
    names, notes = _own_names([name for name, _ in columns])
    values = [column for _, column in columns]
    return Table(pd.DataFrame(dict(zip(names, values, strict=True))), tuple(notes))


def _unreadable(path: Path, expected: str, error: BaseException) -> DataError:
    reason = str(error).strip() or type(error).__name__
    return DataError(
        f"{path} should be {expected}, but cannot be read ({reason}). It is damaged, was cut off, "
        "or has the wrong ending: save it again."
    )


def _meant(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=3)
    return f" Did you mean {' or '.join(repr(match) for match in near)}?" if near else ""


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(repr(name) for name in names[:SHOWN]) + more


def _count(word: str, n: int) -> str:
    return f"{n} {word}{'' if n == 1 else 's'}"


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
