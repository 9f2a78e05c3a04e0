"""How the columns of a table become the inputs of a network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, final

import numpy as np
import pandas as pd

from lpom.exceptions import DataError, unknown_name
from lpom.tables.columns import FEW, Array, codes, distinct, kind, listed, matrix

_FALSE_TRUE = {"false": 0.0, "0": 0.0, "0.0": 0.0, "true": 1.0, "1": 1.0, "1.0": 1.0}


@final
@dataclass(frozen=True)
class Features:
    """Inputs are the numbers, then the flags, then one input per category.

    Attributes
    ----------
    columns : names
        All columns of the training table in their order; those in none of the others are ignored.
    numbers : name -> (mean, scale)
        Enter as ``(x - mean) / scale``.
    flags : names
        True enters as 1, false as 0.
    categories : name -> values
        1 for the value that is there, 0 for the others.
    """

    columns: tuple[str, ...]
    numbers: dict[str, tuple[float, float]]
    flags: tuple[str, ...] = ()
    categories: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def fit(
        cls, frame: pd.DataFrame, rows: Any = slice(None), ignored: Iterable[str] = ()
    ) -> Features:
        """Learn from ``rows``, the row numbers to train on.

        Means and standard deviations are theirs; categories are those of the whole table, so that
        none is unknown in the rows held back. A column in which ``rows`` all hold one value has
        nothing to teach and is ignored too.
        """
        frame = _named(frame)
        columns = tuple(frame.columns)
        ignored = list(ignored)
        for name in ignored:
            if name not in frame.columns:
                raise DataError(unknown_name("column to ignore", name, frame.columns))
        frame = frame.drop(columns=ignored)
        numeric = [name for name in frame.columns if kind(frame[name]) == "number"]
        numbers = _scales(frame[numeric], rows)
        varied = [
            name
            for name in frame.columns
            if name not in numeric and frame[name].iloc[rows].nunique() > 1
        ]
        flags = tuple(name for name in varied if kind(frame[name]) == "flag")
        categories = {name: _categories(frame[name]) for name in varied if name not in flags}
        if not (numbers or flags or categories):
            raise DataError(
                "no column differs from row to row, so there is nothing to learn from: got "
                f"{listed(frame.columns)}."
            )
        return cls(columns, numbers, flags, categories)

    @classmethod
    def unscaled(cls, names: Sequence[str]) -> Features:
        """Numbers that enter as they are."""
        return cls(tuple(names), {name: (0.0, 1.0) for name in names})

    @property
    def names(self) -> list[str]:
        """The columns that a table must have."""
        return [*self.numbers, *self.flags, *self.categories]

    @property
    def n_inputs(self) -> int:
        return len(self.numbers) + len(self.flags) + sum(map(len, self.categories.values()))

    def encode(self, frame: pd.DataFrame) -> Array:
        """The inputs, (n, n_inputs) float32."""
        frame = _named(frame)
        self._check_columns(list(frame.columns))
        parts = [self._scaled(frame)] if self.numbers else []
        parts += [_flag(frame[name]) for name in self.flags]
        for name, values in self.categories.items():
            one_hot = np.eye(len(values), dtype=np.float32)
            parts.append(one_hot[codes(frame[name], values, f"column {name!r}")])
        return np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> Features:
        return cls(
            tuple(state["columns"]),
            {name: (float(mean), float(scale)) for name, (mean, scale) in state["numbers"].items()},
            tuple(state["flags"]),
            {name: tuple(values) for name, values in state["categories"].items()},
        )

    def _scaled(self, frame: pd.DataFrame) -> Array:
        raw = matrix(frame[list(self.numbers)])
        mean, scale = np.array(list(self.numbers.values()), dtype=raw.dtype).T
        with np.errstate(over="ignore", invalid="ignore"):  # said in words below
            block = raw - mean
            block /= scale
            block = np.asarray(block, dtype=np.float32)
        bad = ~np.isfinite(block)
        if bad.any():
            row, k = (int(place[0]) for place in bad.nonzero())
            raise DataError(
                f"column {list(self.numbers)[k]!r} holds {raw[row, k]} in row {row + 1}; expected "
                f"a number like those of training (mean {mean[k]:g}, standard deviation "
                f"{scale[k]:g})."
            )
        return block

    def _check_columns(self, columns: list[str]) -> None:
        missing = [name for name in self.names if name not in columns]
        known = set(self.columns)
        extra = [name for name in columns if name not in known]
        if missing or extra:
            lacks = f"lacks {listed(missing)}" if missing else ""
            has = f"has {listed(extra)}, which training never saw" if extra else ""
            raise DataError(
                f"the table {' and '.join(filter(None, (lacks, has)))}; the columns expected are "
                f"{listed(self.names)}. Add, remove or rename columns to match."
            )


def _named(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.set_axis([str(name) for name in frame.columns], axis=1)


def _scales(frame: pd.DataFrame, rows: Any) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of each column that varies."""
    block = matrix(frame)[rows]
    with np.errstate(over="ignore", invalid="ignore"):  # said in words below
        mean, scale = block.mean(0, dtype=np.float64), block.std(0, dtype=np.float64)
    for k, name in enumerate(frame.columns):
        if not np.isfinite(scale[k]):
            raise DataError(
                f"column {name!r} holds values up to {np.abs(block[:, k]).max():g}, or none at "
                "all; expected finite numbers whose squares are finite too. Change its unit."
            )
    varies = block.min(0) < block.max(0)
    return {
        name: (float(mean[k]), float(scale[k]))
        for k, name in enumerate(frame.columns)
        if varies[k] and scale[k] > 0
    }


def _flag(column: pd.Series) -> Array:
    texts = column.astype(str)
    values = np.asarray(texts.str.lower().map(_FALSE_TRUE), dtype=np.float32)
    unknown = np.flatnonzero(np.isnan(values))
    if len(unknown):
        raise DataError(
            f"column {column.name!r} holds {texts.iloc[unknown[0]]!r} in row {unknown[0] + 1}; "
            "expected true or false."
        )
    return values[:, None]


def _categories(column: pd.Series) -> tuple[str, ...]:
    values = distinct(column)
    if len(values) > max(FEW, len(column) / 2):
        raise DataError(f"column {column.name!r} {_no_category(column.astype(str), len(values))}")
    return tuple(values)


def _no_category(column: pd.Series, n_values: int) -> str:
    """What texts that nearly all differ are instead: numbers, dates, or names of rows."""
    ignore = f"leave the column out (--ignore {column.name})"
    numbers = pd.to_numeric(column, errors="coerce")
    if numbers.notna().all():
        return "holds numbers that are stored as texts. Store them as numbers."
    if numbers.notna().mean() > 0.5:
        row = int(np.flatnonzero(numbers.isna())[0])
        return (
            f"holds {column.iloc[row]!r} in row {row + 1}, where most other rows hold numbers. "
            f"Correct the value or remove the row, or {ignore}."
        )
    first = column.iloc[0]
    if pd.to_numeric(column.str.replace(",", "."), errors="coerce").notna().mean() > 0.5:
        return f"holds numbers with a decimal comma, like {first!r}. Write them with a point."
    if pd.to_datetime(column, errors="coerce", format="ISO8601").notna().mean() > 0.5:
        return (
            f"holds dates, like {first!r}. Turn them into numbers, such as days since the first, "
            f"or {ignore}."
        )
    return (
        f"holds {n_values} different texts in {len(column)} rows, so it looks like an identifier "
        f"that cannot generalise; {ignore}."
    )
