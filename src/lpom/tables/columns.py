"""What a column holds, and how it is read; a value that does not fit is named in the error."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.api import types

from lpom.exceptions import DataError

Array = NDArray[Any]

FEW = 20  # as many classes or categories are always fine; more must be few beside the rows
SHOWN = 8  # names or values that a message lists


def kind(column: pd.Series) -> str:
    """One of number, flag (true or false) and category (texts)."""
    dtype = column.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        return "category"
    if types.is_bool_dtype(dtype):
        return "flag"
    if types.is_numeric_dtype(dtype) and not types.is_complex_dtype(dtype):
        return "number"
    if types.is_object_dtype(dtype) or types.is_string_dtype(dtype):
        return "category"
    raise DataError(
        f"column {column.name!r} holds values of type {dtype}; expected numbers, true/false or "
        f"texts. Turn it into one of these, or leave it out (--ignore {column.name})."
    )


def matrix(frame: pd.DataFrame) -> Array:
    """Columns of numbers, in float32 if all of them are, else in float64."""
    single = len(frame.columns) > 0 and bool((frame.dtypes == np.float32).all())
    try:
        return np.asarray(frame.to_numpy(dtype=np.float32 if single else np.float64))
    except (TypeError, ValueError) as error:
        for name in frame.columns:
            bad = np.flatnonzero(pd.to_numeric(frame[name], errors="coerce").isna())
            if len(bad):
                value, row = frame[name].iloc[bad[0]], bad[0] + 1
                raise DataError(
                    f"column {name!r} holds {value!r} in row {row}; expected a number."
                ) from error
        raise


def texts(column: pd.Series) -> pd.Series:
    """Values as texts; an integer reads the same as an integer and as a float."""
    if types.is_float_dtype(column.dtype):
        return column.map(lambda value: str(int(value)) if value % 1 == 0 else str(value))
    return column.astype(str)


def distinct(column: pd.Series) -> list[str]:
    """The different values as texts, numbers in the order of their size."""
    values = column.drop_duplicates()
    if types.is_numeric_dtype(column.dtype):
        return list(texts(values.sort_values()))
    return sorted(set(texts(values)))


def codes(values: pd.Series, known: Sequence[str], what: str) -> Array:
    """The place of each value among those known, int64."""
    found = pd.Index(known).get_indexer(texts(values))
    unknown = np.flatnonzero(found < 0)
    if len(unknown):
        row = unknown[0]
        raise DataError(
            f"{what} holds {texts(values).iloc[row]!r} in row {row + 1}, which training never "
            f"saw; expected one of {listed(known)}."
        )
    return np.asarray(found, dtype=np.int64)


def listed(names: Iterable[str]) -> str:
    """Names for a message, the first few of them."""
    all_names = list(names)
    more = f" and {len(all_names) - SHOWN} more" if len(all_names) > SHOWN else ""
    return ", ".join(map(repr, all_names[:SHOWN])) + more
