"""Tables of the user: CSV, Parquet and NPZ files, checked before anything is trained on them."""

from __future__ import annotations

import csv
import gzip
import io
import warnings
import zlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np

from lpom.checks import require
from lpom.exceptions import DataError

if TYPE_CHECKING:
    import pandas as pd

SEPARATORS = (",", ";", "\t")
SHOWN = 5  # columns or rows an error names


@dataclass(frozen=True, eq=False)
class Table:
    """Features, one column each, and the column to predict (None if there is none)."""

    features: pd.DataFrame
    target: pd.Series | None = None


def read_table(
    path: str | PathLike[str],
    target: str | None = None,
    *,
    ignore: Collection[str] = (),
    texts: Collection[str] = (),
) -> Table:
    """Read a table and split off its target column.

    Parameters
    ----------
    path : path
        ``.csv`` or ``.tsv`` (packed as ``.gz`` too; first line: the names), ``.parquet``, or
        ``.npz``: an array of one dimension is a column, one of two dimensions the columns
        ``NAME0``, ``NAME1``, ...
    target : str, optional
        Column to predict. Without it all columns are features, except that an ``.npz`` file with
        arrays ``X`` and ``y`` has the target ``y``.
    ignore : names
        Columns in which values may be missing.
    texts : names
        Columns of a CSV file that are texts, whatever they look like: 007 stays 007.

    Raises
    ------
    DataError
        If the file cannot be read, or something in it cannot be trained on: no rows, two columns
        of one name, missing or infinite values, no such target, no column besides it.
    """
    path = Path(path)
    _check_file(path)
    ending = _ending(path)
    if ending in (".csv", ".tsv"):
        frame = _read_csv(path, texts)
    elif ending == ".parquet":
        frame = _read_parquet(path)
    elif ending == ".npz":
        frame = _read_npz(path)
        if target is None and "y" in frame.columns and len(frame.columns) > 1:
            target = "y"
    else:
        raise DataError(
            f"{path} should end in .csv, .tsv, .csv.gz, .parquet or .npz, got "
            f"{path.suffix or 'no ending'!r}. Convert it, or rename it if it is one of these."
        )
    if len(frame) == 0:
        raise DataError(
            f"{path} should hold rows of data, got none after the names of its columns."
        )
    _check_values(frame.drop(columns=list(ignore), errors="ignore"), path)
    if target is None:
        return Table(frame)
    return _split(frame, target, path)


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


def _read_csv(path: Path, texts: Collection[str]) -> pd.DataFrame:
    import pandas as pd

    expected = "a table with as many values in each line as its first line has names"
    try:
        names, separator = _header(path)
        _check_names(names, path)
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # a line with more values
            frame = pd.read_csv(
                path,
                sep=separator,
                index_col=False,
                encoding="utf-8-sig",
                dtype=dict.fromkeys(texts, str),
                low_memory=False,  # else each piece of a long column gets a type of its own
            )
        return _without_index(frame) if names[0] == "" and len(names) > 1 else frame
    except (pd.errors.ParserWarning, ValueError, OSError, EOFError, csv.Error, zlib.error) as error:
        if isinstance(error, DataError | PermissionError):
            raise
        raise _unreadable(path, expected, error) from error


def _without_index(frame: pd.DataFrame) -> pd.DataFrame:
    """Without the row numbers that pandas writes into a first column without a name."""
    numbers = np.arange(len(frame))
    return frame.iloc[:, 1:] if np.array_equal(frame.iloc[:, 0].to_numpy(), numbers) else frame


def _header(path: Path) -> tuple[list[str], str]:
    """Names in the first line that is not empty, and what separates them."""
    binary = gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")
    with binary, io.TextIOWrapper(cast(BinaryIO, binary), "utf-8-sig", newline="") as file:
        line = next((line for line in file if line.strip()), None)
        if line is None:
            raise DataError(
                f"{path} should start with a line of column names, but is empty. Save it again."
            )
        if "\0" in line or any("\0" in piece for piece in iter(lambda: file.read(1 << 20), "")):
            raise DataError(
                f"{path} should be text, but holds zero bytes. It is damaged, or no CSV file: "
                "save it again."
            )
    split = {separator: next(csv.reader([line], delimiter=separator)) for separator in SEPARATORS}
    separator = max(SEPARATORS, key=lambda separator: len(split[separator]))
    return split[separator], separator


def _read_parquet(path: Path) -> pd.DataFrame:
    parquet = require("pyarrow.parquet", "Reading .parquet files", "'lpom[parquet]'")
    try:
        table = parquet.ParquetFile(path).read()
        _check_names(table.column_names, path)
        return table.to_pandas()
    except (ValueError, OSError) as error:  # pyarrow's errors are one or the other
        if isinstance(error, DataError | PermissionError):
            raise
        raise _unreadable(path, "a Parquet file", error) from error


def _read_npz(path: Path) -> pd.DataFrame:
    import pandas as pd

    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as content:
            arrays = {name: content[name] for name in content.files}
    except Exception as error:  # a damaged file raises nearly anything
        if isinstance(error, PermissionError):
            raise
        raise _unreadable(path, "an NPZ file of plain numbers and texts", error) from error

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
    _check_names([name for name, _ in columns], path)
    return pd.DataFrame(dict(columns))


def _unreadable(path: Path, expected: str, error: BaseException) -> DataError:
    if isinstance(error, UnicodeDecodeError):
        return DataError(f"{path} is not UTF-8 text ({error}). Save it with the encoding UTF-8.")
    reason = str(error).strip() or type(error).__name__
    return DataError(
        f"{path} should be {expected}, but cannot be read ({reason}). It is damaged, was cut off, "
        "or has the wrong ending: save it again."
    )


def _check_names(names: Sequence[str], path: Path) -> None:
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise DataError(
            f"{path} should give each column a name of its own, got {_list(twice)} more than "
            "once. Rename them; if the first line holds data, add a line of names before it."
        )


def _check_values(frame: pd.DataFrame, path: Path) -> None:
    """No value is missing or infinite."""
    bad = frame.isna() | frame.isin([np.inf, -np.inf])
    columns = [str(name) for name in frame.columns[bad.any(axis=0)]]
    if columns:
        rows = np.flatnonzero(bad.any(axis=1)) + 1
        more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
        raise DataError(
            f"{path} should have a finite value everywhere, but values are missing, NaN or "
            f"infinite in {_plural('column', len(columns))} {_list(columns)}, "
            f"{_plural('row', len(rows))} {', '.join(map(str, rows[:SHOWN]))}{more} (the first "
            "row of data is 1). Fill them in, or drop these rows or columns."
        )


def _split(frame: pd.DataFrame, target: str, path: Path) -> Table:
    columns = [str(name) for name in frame.columns]
    if target not in columns:
        raise DataError(
            f"{path} has no column {target!r} to predict.{_meant(target, columns)} Its columns "
            f"are {_list(columns)}."
        )
    if len(columns) == 1:
        raise DataError(
            f"{path} should have columns besides the target {target!r} to predict it from, got "
            "none."
        )
    name = frame.columns[columns.index(target)]
    return Table(frame.drop(columns=[name]), frame[name])


def _meant(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=3)
    return f" Did you mean {' or '.join(repr(match) for match in near)}?" if near else ""


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(repr(name) for name in names[:SHOWN]) + more


def _plural(word: str, n: int) -> str:
    return word if n == 1 else f"{word}s"
