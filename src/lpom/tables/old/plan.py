"""What is done with each column of a table: decided from its values, printed, kept as data."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import pandas as pd
from pandas.api import types

from lpom.exceptions import DataError, unknown_name
from lpom.tables.old.columns import (
    KINDS,
    MISSING,
    OTHER,
    Column,
    Locale,
    decide,
    listed,
    plain,
    texts,
)
from lpom.tables.old.numbers import is_missing, like_thousands

_ALL_RARE = 10  # rows whose category is rare in all of them


@final
@dataclass(frozen=True)
class ColumnPlan:
    """One :class:`Column` for each column of the training table, in their order."""

    columns: tuple[Column, ...]

    @classmethod
    def decide(
        cls,
        frame: pd.DataFrame,
        *,
        ignore: str | Iterable[str] = (),
        kinds: Mapping[str, str] | None = None,
        locale: Locale | None = None,
    ) -> ColumnPlan:
        """Look at the values; what the user said of a column (``kinds``, ``ignore``) goes first.

        Raises
        ------
        DataError
            With everything that can't be told or done, all at once.
        """
        frame, locale = named(frame), locale or Locale()
        ignored = {ignore} if isinstance(ignore, str) else set(ignore)
        given = dict(kinds or {})
        problems = _unknown(ignored | set(given), list(frame.columns), given)
        made: list[Column] = []
        for name in frame.columns:
            if name in ignored:
                made.append(Column(name, "dropped", "as asked for"))
                continue
            try:
                made.append(decide(frame[name], locale, given.get(name)))
            except DataError as error:
                problems.append(f"column {name!r} {error}")
        problems += _points_or_thousands(frame, made, locale)
        if problems:
            raise DataError(f"{'; '.join(problems)}.")
        if all(column.kind == "dropped" for column in made):
            reasons = "; ".join(f"{column.name!r}: {column.why}" for column in made)
            raise DataError(f"there is no column to learn from ({reasons}).")
        return cls(tuple(made))

    @classmethod
    def plain(cls, names: Sequence[str]) -> ColumnPlan:
        """Numbers, all of them, whatever they are."""
        return cls(tuple(Column(name, "number") for name in names))

    @property
    def names(self) -> list[str]:
        """The columns that a table must have: numbers and dates, then categories."""
        return [column.name for column in (*self.numeric, *self.categorical)]

    @property
    def numeric(self) -> tuple[Column, ...]:
        return tuple(column for column in self.columns if column.is_numeric)

    @property
    def categorical(self) -> tuple[Column, ...]:
        return tuple(column for column in self.columns if column.kind == "category")

    def read(self, frame: pd.DataFrame, *, warn: bool = False) -> pd.DataFrame:
        """Numbers (NaN where missing) and texts of the columns in use, as the plan reads them.

        ``warn``: say what is here and was not in training.
        """
        frame = named(frame)
        self._check_columns(list(frame.columns))
        plain = [column.name for column in self.numeric]
        if len(plain) == len(self.columns) and (frame[plain].dtypes == np.float32).all():
            return frame[plain]  # pixels and the like, in one piece
        made: dict[str, pd.Series] = {}
        strange: list[str] = []
        for column in self.numeric:
            values = column.numbers(frame[column.name])
            if warn:
                strange += _strange_numbers(column, frame[column.name], values)
            date = column.date
            made |= {column.name: values} if date is None else date.inputs(column.name, values)
        for column in self.categorical:
            made[column.name] = column.categories(frame[column.name])
            if warn:
                strange += _strange_categories(column, frame[column.name])
        if strange:
            warnings.warn(f"unlike in training: {'; '.join(strange)}.", stacklevel=5)  # at predict
        return pd.DataFrame(made, index=frame.index)

    def rows(self) -> list[tuple[str, str, str]]:
        """Name, kind and remarks of each column, for a table to print."""
        return [(column.name, column.kind, _remark(column)) for column in self.columns]

    def __str__(self) -> str:
        width = max(len(name) for name, _, _ in self.rows())
        return "\n".join(f"{name:<{width}}  {kind:<8}  {why}" for name, kind, why in self.rows())

    def to_json(self) -> list[dict[str, Any]]:
        return [column.to_json() for column in self.columns]

    @classmethod
    def from_json(cls, state: list[dict[str, Any]]) -> ColumnPlan:
        return cls(tuple(map(Column.from_json, state)))

    def _check_columns(self, columns: list[str]) -> None:
        missing = [name for name in self.names if name not in columns]
        if missing:
            raise DataError(
                f"the table lacks {listed(missing)}; the columns expected are "
                f"{listed(self.names)}. Add or rename columns to match."
            )


def named(frame: pd.DataFrame) -> pd.DataFrame:
    """With texts as the names of its columns; an array becomes a frame."""
    frame = pd.DataFrame(frame)
    arrow = [k for k, dtype in enumerate(frame.dtypes) if isinstance(dtype, pd.ArrowDtype)]
    if arrow:
        frame = frame.copy()
        for k in arrow:
            frame.isetitem(k, plain(frame.iloc[:, k]))
    names = [str(name) for name in frame.columns]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"the table has more than one column {listed(twice)}; rename them.")
    return frame.set_axis(names, axis=1)


def _unknown(said: set[str], columns: list[str], kinds: Mapping[str, str]) -> list[str]:
    problems = [
        unknown_name("column", name, columns).rstrip(".") for name in sorted(said - set(columns))
    ]
    wrong = {kind for kind in kinds.values() if kind not in KINDS}
    return problems + [unknown_name("kind of column", kind, KINDS).rstrip(".") for kind in wrong]


def _points_or_thousands(frame: pd.DataFrame, columns: list[Column], locale: Locale) -> list[str]:
    """Points that would separate thousands if they were written as another column's commas are."""
    commas = [c.name for c in columns if c.number is not None and c.number.decimal == ","]
    if not commas or locale.decimal == "." or locale.thousands == ".":
        return []
    problems = []
    for column in columns:
        if column.kind == "number" and column.number is not None and not str(column.number):
            example = like_thousands(texts(frame[column.name]).dropna())
            if example is not None:
                problems.append(
                    f"column {column.name!r} holds {example!r}, which may be "
                    f"{example.replace('.', '')} since column {commas[0]!r} has decimal commas: "
                    "say --thousands '.' or --decimal '.' (in Python thousands='.' or decimal='.')"
                )
    return problems


def _remark(column: Column) -> str:
    parts = [column.why] if column.why else []
    if column.kind == "category" and not column.why:
        shown = [value for value in column.values if value not in (MISSING, OTHER)]
        parts.append(f"{len(shown)}: {listed(shown, 4)}")
    if column.date is not None and column.date.cycles:
        parts.append(f"time, and place in the {', '.join(column.date.cycles)}")
    if column.missing:
        parts.append(f"missing in {_rows(column.missing)}")
    return "; ".join(parts)


def _strange_numbers(column: Column, raw: pd.Series, values: pd.Series) -> list[str]:
    said = texts(raw)
    nothing = said.isna() | is_missing(said.fillna(""))
    unread = np.flatnonzero(values.isna() & ~nothing)
    notes = []
    if len(unread):
        notes.append(
            f"column {column.name!r} holds {said.iloc[unread[0]]!r} in row {unread[0] + 1}, which "
            f"is no {column.kind} ({len(unread)} such)"
        )
    empty = int(nothing.sum())
    if empty and not column.missing:
        notes.append(f"column {column.name!r} has no value in {_rows(empty)}")
    return notes


def _strange_categories(column: Column, raw: pd.Series) -> list[str]:
    said = texts(raw).fillna(MISSING)
    unknown = said[~said.isin(column.values)]
    notes = []
    padded = [value for value in column.values if value.isdigit() and value[0] == "0" != value]
    if padded and types.is_numeric_dtype(raw.dtype):
        notes.append(
            f"column {column.name!r} held texts such as {padded[0]!r} and holds numbers here, "
            "without the zeros in front: read it as text (dtype=str)"
        )
    elif OTHER in column.values and len(unknown) == len(said) >= _ALL_RARE:
        notes.append(
            f"every row of column {column.name!r} holds a value that was rare or absent, e.g. "
            f"{said.iloc[0]!r}"
        )
    if OTHER in column.values:
        unknown = unknown[unknown == MISSING]  # rare values were met in training, one or another
    if len(new := unknown[unknown != MISSING]):
        notes.append(f"column {column.name!r} holds {listed(new.unique(), 3)}")
    if len(empty := unknown[unknown == MISSING]):
        notes.append(f"column {column.name!r} has no value in {_rows(len(empty))}")
    return notes


def _rows(n: int) -> str:
    return f"{n:,} row{'' if n == 1 else 's'}"
