"""The columns of a data frame, a dictionary or an array, in two forms only: numbers or texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import cached_property
from numbers import Complex, Real
from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from lpom.exceptions import DataError

Array: TypeAlias = NDArray[Any]

DAY = 86_400e6  # microseconds
SHOWN = 8  # names or values that a message lists


@final
@dataclass(frozen=True, eq=False)
class Texts:
    """Texts without spaces around them: each different one, and its place in each row."""

    distinct: list[str]
    codes: Array  # -1 where there is none

    @cached_property
    def counts(self) -> Array:
        """How many rows each distinct text has."""
        return np.bincount(self.codes[self.codes >= 0], minlength=len(self.distinct))

    def spread(self, values: Array, missing: Any = np.nan) -> Array:
        """A value per distinct text, as a value per row."""
        return np.append(values, missing)[self.codes]

    def where(self, kept: Iterable[bool]) -> Texts:
        """Only those texts; a row of another one has none."""
        mask = np.fromiter(kept, bool, len(self.distinct))
        places = np.where(mask, np.cumsum(mask) - 1, -1)
        texts = [text for text, keep in zip(self.distinct, mask, strict=True) if keep]
        return Texts(texts, self.spread(places, -1).astype(np.int64))

    def listed(self) -> list[str | None]:
        """The text of every row."""
        return [self.distinct[code] if code >= 0 else None for code in self.codes.tolist()]


@final
@dataclass(frozen=True, eq=False)
class Values:
    """A column in memory.

    Attributes
    ----------
    form : "yes/no", "integer", "number" or "date" (with ``numbers``), "category" or "text"
    numbers : float64, NaN where there is no (finite) one; dates as days since 1970
    """

    name: str
    form: str
    numbers: Array | None = None
    given_texts: Texts | None = None

    def __len__(self) -> int:
        return len(self.texts.codes if self.numbers is None else self.numbers)

    @cached_property
    def texts(self) -> Texts:
        """The values as texts; an integer reads the same as an integer and as a float."""
        if self.given_texts is not None:
            return self.given_texts
        assert self.numbers is not None
        known = ~np.isnan(self.numbers)
        found, places = np.unique(self.numbers[known], return_inverse=True)
        codes = np.full(len(self.numbers), -1)
        codes[known] = places
        if self.form == "yes/no":
            return Texts([str(bool(value)) for value in found], codes)
        if self.form == "date":
            return Texts([str(np.datetime64(int(day * DAY), "us")) for day in found], codes)
        return Texts([_text(value) for value in found.tolist()], codes)

    @property
    def missing(self) -> Array:
        return self.texts.codes < 0 if self.numbers is None else np.isnan(self.numbers)


def columns_of(X: Any) -> dict[str, Any]:
    """Each column by its name as a text: of a data frame, a dictionary, or a 2-D array."""
    if isinstance(X, Mapping):
        pairs = list(X.items())
    elif hasattr(X, "columns") and hasattr(X, "shape"):
        pairs = [(name, X.iloc[:, k] if hasattr(X, "iloc") else X[name])
                 for k, name in enumerate(X.columns)]  # fmt: skip
    else:
        array = np.asarray(X)
        if array.ndim != 2:
            raise DataError(
                f"a table should have two dimensions, rows and columns, got shape {array.shape}. "
                "Reshape your data to (n, columns)."
            )
        pairs = [(f"x{k}", array[:, k]) for k in range(array.shape[1])]
    names = [str(name) for name, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"the table has more than one column {listed(twice)}; rename them.")
    lengths = {len(column) for _, column in pairs}
    if len(lengths) > 1:
        raise DataError(f"all columns should have as many rows, got {sorted(lengths)}.")
    return {name: column for name, (_, column) in zip(names, pairs, strict=True)}


def values_of(column: Any, name: str) -> Values:
    """What a column holds: a list, an array, or a series of pandas or another library."""
    if isinstance(column, Values):
        return column
    dtype = getattr(column, "dtype", None)
    if hasattr(dtype, "categories") and hasattr(column, "to_numpy"):
        return Values(name, "category", given_texts=_texts(_objects(column)))
    kind = getattr(dtype, "kind", "O")
    if kind in "mc":
        raise DataError(f"holds values of type {dtype}; turn them into numbers")
    if kind in "iuf":
        return _numbers(column, name, "number" if kind == "f" else "integer")
    if isinstance(dtype, np.dtype) or kind == "M":
        array = np.asarray(column)
        if array.dtype.kind == "b":
            return Values(name, "yes/no", array.astype(np.float64))
        if array.dtype.kind == "M":
            return _dates(array, name)
    return _guessed(_objects(column), name)


def _numbers(column: Any, name: str, form: str) -> Values:
    if isinstance(column.dtype, np.dtype):
        values = np.asarray(column, dtype=np.float64)
    else:  # of pandas, where a missing integer is no number
        values = column.to_numpy(dtype=np.float64, na_value=np.nan)
    return Values(name, form, np.where(np.isfinite(values), values, np.nan))


def _dates(moments: Array, name: str) -> Values:
    """The year 9999, by which tables say that there is no end, is none."""
    moments = moments.astype("datetime64[us]")  # nanoseconds do not go as far
    none = np.isnat(moments) | (moments >= np.datetime64("9999-01-01"))
    return Values(name, "date", np.where(none, np.nan, moments.astype(np.int64) / DAY))


def _guessed(objects: list[Any], name: str) -> Values:
    """Of Python's own values: what all of them are."""
    known = [value for value in objects if value is not None]
    kinds = set(map(type, known))
    if any(issubclass(kind, timedelta | np.timedelta64) for kind in kinds) or any(
        issubclass(kind, Complex) and not issubclass(kind, Real) for kind in kinds
    ):
        raise DataError(
            f"holds values of type {' and '.join(kind.__name__ for kind in kinds)}; "
            "turn them into numbers"
        )
    if kinds and kinds <= {bool, np.bool_} and len(known) == len(objects):
        return Values(name, "yes/no", np.array(objects, dtype=np.float64))
    if kinds and bool not in kinds and all(issubclass(kind, Real) for kind in kinds):
        whole = all(issubclass(kind, int | np.integer) for kind in kinds)
        numbers = np.array([np.nan if v is None else float(v) for v in objects])
        numbers[~np.isfinite(numbers)] = np.nan
        return Values(name, "integer" if whole else "number", numbers)
    if kinds and all(issubclass(kind, date | np.datetime64) for kind in kinds):
        return _dates(np.array([_moment(v) for v in objects], "datetime64[us]"), name)
    return Values(name, "text", given_texts=_texts(objects))


def _objects(column: Any) -> list[Any]:
    """Python's values, None for every kind of nothing."""
    array = column.to_numpy(dtype=object) if hasattr(column, "iloc") else np.asarray(column, object)
    return [None if is_nothing(value) else value for value in array.tolist()]


def is_nothing(value: Any) -> bool:
    """Whether Python, NumPy or pandas means a missing value by it."""
    if isinstance(value, str):
        return False
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float | np.floating | np.datetime64) and bool(value != value)


def _moment(value: Any) -> np.datetime64:
    if isinstance(value, datetime) and value.tzinfo is not None:
        value = value.astimezone(UTC).replace(tzinfo=None)
    return np.datetime64("NaT") if value is None else np.datetime64(value, "us")


def _texts(objects: list[Any]) -> Texts:
    places: dict[str, int] = {}
    codes = np.empty(len(objects), dtype=np.int64)
    for row, value in enumerate(objects):
        text = value.strip() if isinstance(value, str) else "" if value is None else _text(value)
        codes[row] = places.setdefault(text, len(places)) if text else -1
    return Texts(list(places), codes)


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value % 1 == 0 else str(value)


def listed(names: Iterable[Any], shown: int = SHOWN) -> str:
    """Names for a message, the first few of them."""
    all_names = [str(name) for name in names]
    more = f" and {len(all_names) - shown} more" if len(all_names) > shown else ""
    return ", ".join(map(repr, all_names[:shown])) + more


def rows(n: int) -> str:
    return f"{n:,} row{'' if n == 1 else 's'}"
