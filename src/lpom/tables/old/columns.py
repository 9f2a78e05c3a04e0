"""What a column of a table holds, told from its values, and how it is read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.api import types

from lpom.exceptions import DataError
from lpom.tables.old.dates import DateFormat, date_format
from lpom.tables.old.numbers import NumberFormat, is_missing, number_format

Array = NDArray[Any]

KINDS = ("number", "yes/no", "category", "date", "dropped")
FEW = 20  # as many categories or classes are always fine; more must be few beside the rows
MOST = 30  # categories of a column with inputs of their own
SHOWN = 8  # names or values that a message lists
OTHER = "(other)"  # all categories too rare for an input of their own
MISSING = "(missing)"
NAMELESS = "column 1"  # a first column without a name: where pandas writes its row numbers

_NUMBERS = 0.9  # share of texts that must be numbers for a column of numbers
_ENOUGH = 3  # rows of a category among many, for an input of its own
_ROWS = 20  # from so many rows on, values that all differ tell something
_IDENTIFIER = re.compile(
    r"(^|[_\W])(?i:id|key|index|nr|no|uuid|guid)$|[a-z](Id|ID|Key|Nr|No|Index)$"
)
_YES_NO = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0, "t": 1.0, "f": 0.0, "y": 1.0, "n": 0.0}
_AS_FLAG = _YES_NO | {"1": 1.0, "0": 0.0, "1.0": 1.0, "0.0": 0.0}


@final
@dataclass(frozen=True)
class Column:
    """One column: its kind, how it is read, and what is to be said about it.

    Attributes
    ----------
    why : why it was dropped, or what else a reader of the plan should know
    number, date : how texts are read
    values : the categories with an input of their own, MISSING and OTHER among them if they have
    missing : rows without a value among those it was decided from
    """

    name: str
    kind: str
    why: str = ""
    number: NumberFormat | None = None
    date: DateFormat | None = None
    values: tuple[str, ...] = ()
    missing: int = 0

    @property
    def is_numeric(self) -> bool:
        return self.kind in ("number", "yes/no", "date")

    def numbers(self, column: pd.Series) -> pd.Series:
        """The values as numbers, NaN where there is none."""
        if self.kind == "date":
            assert self.date is not None
            return self.date.read(column)
        if types.is_bool_dtype(column.dtype) or (
            types.is_numeric_dtype(column.dtype) and not types.is_complex_dtype(column.dtype)
        ):
            values = column.to_numpy(np.float64, na_value=np.nan)
            good = np.isin(values, (0, 1)) if self.kind == "yes/no" else np.isfinite(values)
            return pd.Series(np.where(good, values, np.nan), index=column.index)
        known = texts(column)
        if self.kind == "yes/no":
            return known.str.lower().map(_AS_FLAG).astype(np.float64)
        return (self.number or NumberFormat()).read(known.fillna(""))

    def categories(self, column: pd.Series) -> pd.Series:
        """The values as texts, those without an input of their own as OTHER."""
        known = texts(column).fillna(MISSING)
        return known.where(known.isin(self.values), OTHER)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> Column:
        number, date = state["number"], state["date"]
        return cls(
            **{
                **state,
                "number": number and NumberFormat(**number),
                "date": date and DateFormat(date["form"], tuple(date["cycles"])),
                "values": tuple(state["values"]),
            }
        )


@dataclass(frozen=True)
class Locale:
    """What settles texts that can be read in two ways."""

    decimal: str | None = None
    thousands: str | None = None
    date_order: str | None = None


def decide(column: pd.Series, locale: Locale, kind: str | None = None) -> Column:
    """What a column is, from its values; ``kind`` if the user said it.

    Raises
    ------
    DataError
        If it can't be told, or can't be what it is said to be; without the name of the column.
    """
    words = texts(column)
    found = _of_kind(column, words, locale, kind) if kind else _decide(column, words, locale)
    if found.kind == "dropped":
        return found
    if found.kind == "category":
        missing = int(words.isna().sum())
        values = {*found.values, MISSING} if missing else {*found.values}
        ordered = sorted(values, key=lambda value: (value in (OTHER, MISSING), value))
        return replace(found, values=tuple(ordered), missing=missing)
    read = found.numbers(column)
    if found.date is not None:
        found = replace(found, date=found.date.with_cycles(read))
    if not kind and (reason := _teaches_nothing(found, read, column)):
        return Column(found.name, "dropped", reason)
    _check_size(read)
    return replace(found, missing=int(read.isna().sum()))


def _decide(column: pd.Series, words: pd.Series, locale: Locale) -> Column:
    name, dtype = str(column.name), column.dtype
    known = words.dropna()
    if not len(known):
        return Column(name, "dropped", "empty")
    if types.is_bool_dtype(dtype):
        return Column(name, "yes/no")
    if types.is_datetime64_any_dtype(dtype):
        return Column(name, "date", date=DateFormat())
    if (
        _is_arrow(dtype, "duration")
        or types.is_timedelta64_dtype(dtype)
        or types.is_complex_dtype(dtype)
    ):
        raise DataError(f"holds values of type {dtype}; turn them into numbers")
    if types.is_numeric_dtype(dtype):
        return Column(name, "number")
    marks = is_missing(known)
    said, known = known[marks], known[~marks]
    if not len(known):
        return Column(name, "dropped", "empty")
    if known.str.lower().isin(_YES_NO).all():
        return Column(name, "yes/no")
    if isinstance(dtype, pd.CategoricalDtype):  # of numbers too: somebody said so
        return _worded(words.dropna(), name)
    form = number_format(known, locale.decimal, locale.thousands)
    if form is not None:
        no_numbers = known[form.read(known).isna()]
        if len(no_numbers) <= (1 - _NUMBERS) * len(known):
            return Column(name, "number", _note(form, pd.concat([said, no_numbers])), form)
    dated = date_format(known, locale.date_order)
    return Column(name, "date", date=dated) if dated else _worded(words.dropna(), name)


def _of_kind(column: pd.Series, words: pd.Series, locale: Locale, kind: str) -> Column:
    name, why = str(column.name), "as asked for"
    known = words.dropna()
    known = known[~is_missing(known)]
    if kind == "category":
        return replace(_categorical(words.dropna(), name), why=why)
    found = Column(name, kind, why)
    if kind == "number" and not types.is_numeric_dtype(column.dtype):
        found = replace(found, number=number_format(known, locale.decimal, locale.thousands))
    elif kind == "date":
        typed = types.is_datetime64_any_dtype(column.dtype)
        dated = None if typed else date_format(known, locale.date_order)
        found = replace(found, date=dated or DateFormat())
    if found.is_numeric and found.numbers(column).isna().all():
        example = repr(known.iloc[0]) if len(known) else "it is empty"
        raise DataError(f"should be a {kind}, as asked for, but no value of it is, e.g. {example}")
    return found


def _worded(words: pd.Series, name: str) -> Column:
    """Texts that are nothing else: categories, names of rows, or sentences."""
    n_values, n = words.nunique(), len(words)
    if n_values == 1:
        return Column(name, "dropped", f"{_short(words.iloc[0])} in every row")
    if n_values > max(FEW, n / 2):
        spaces = words.str.count(" ").mean()
        what = "free text" if spaces > 3 else "an identifier"
        return Column(name, "dropped", f"{what}: {n_values:,} different values in {n:,} rows")
    return _categorical(words, name)


def _categorical(words: pd.Series, name: str) -> Column:
    counts = words.value_counts()
    kept = counts[counts >= _ENOUGH].index[:MOST] if len(counts) > FEW else counts.index
    if len(kept) == len(counts):
        return Column(name, "category", values=tuple(kept))
    why = f"the {len(kept)} most frequent of {len(counts):,}, the others as one"
    return Column(name, "category", why, values=(*kept, OTHER))


def _teaches_nothing(found: Column, values: pd.Series, column: pd.Series) -> str | None:
    """Why a column of numbers is dropped: one value, or only names or counts of the rows."""
    known = values.dropna()
    if len(known) == len(values) and known.nunique() == 1:
        return f"{_short(column.iloc[0])} in every row"
    whole = found.kind == "number" and bool((known % 1 == 0).all())
    if not (whole and len(known) >= _ROWS and known.is_unique):
        return None
    first, last = float(known.iloc[0]), float(known.iloc[-1])
    dense = last - first < 2 * len(known) and first <= max(5, 0.05 * len(known))
    if dense and bool((known.diff().dropna() > 0).all()):
        return "counts the rows"
    named = _IDENTIFIER.search(found.name) or found.name == NAMELESS
    return "an identifier: another number in every row" if named else None


def _note(form: NumberFormat, no_numbers: pd.Series) -> str:
    notes = [str(form)] if str(form) else []
    if len(no_numbers):
        notes.append(f"{listed(no_numbers.value_counts().index, 3)} taken as missing")
    return "; ".join(notes)


def _check_size(values: pd.Series) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        spread = float(np.std(values.to_numpy()[values.notna()]))
    if not np.isfinite(spread):
        raise DataError(
            f"holds values up to {values.abs().max():g}, whose squares are not finite; change its "
            "unit"
        )


def texts(column: pd.Series) -> pd.Series:
    """Values as texts without spaces around them, missing ones (and empty ones) as such.

    An integer reads the same as an integer and as a float.
    """
    if isinstance(column.dtype, pd.CategoricalDtype):
        column = column.astype(column.dtype.categories.dtype)
    if types.is_float_dtype(column.dtype) or types.is_object_dtype(column.dtype):
        column = column.map(_text, na_action="ignore").astype("string")
    elif not types.is_string_dtype(column.dtype):
        column = column.astype("string")
    made = column.str.strip()
    return made.mask(made == "")


def plain(column: pd.Series) -> pd.Series:
    """With pandas' own dates in place of pyarrow's, whose arithmetic is not theirs."""
    dtype = column.dtype
    if _is_arrow(dtype, "timestamp") or _is_arrow(dtype, "date"):
        return pd.to_datetime(column.astype(object), errors="coerce", utc=True).dt.tz_localize(None)
    return column


def _is_arrow(dtype: Any, kind: str) -> bool:
    """Whether values are pyarrow's, of a type whose name begins so."""
    return isinstance(dtype, pd.ArrowDtype) and str(dtype.pyarrow_dtype).startswith(kind)


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value % 1 == 0 else str(value)


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) < 30 else f"{text[:27]}..."


def listed(names: Iterable[Any], shown: int = SHOWN) -> str:
    """Names for a message, the first few of them."""
    all_names = [str(name) for name in names]
    more = f" and {len(all_names) - shown} more" if len(all_names) > shown else ""
    return ", ".join(map(repr, all_names[:shown])) + more
