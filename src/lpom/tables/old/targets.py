"""How the columns to predict become targets, and what an estimator says becomes answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, final

import numpy as np
import pandas as pd
from pandas.api import types

from lpom.checks import check_choice
from lpom.exceptions import DataError
from lpom.tables.old.columns import FEW, Array, Locale, texts
from lpom.tables.old.numbers import NumberFormat, is_missing, number_format

_NO_LABEL = ("na", "n/a", "#n/a", "nan", "null", "?")

TASKS = ("auto", "classification", "regression")


class Target(ABC):
    """What is predicted; ``task`` is classification or regression."""

    task: ClassVar[str]

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The columns of the table that it is made of."""

    @property
    def name(self) -> str:
        return ", ".join(self.names)

    @abstractmethod
    def encode(self, frame: pd.DataFrame) -> Array:
        """Targets as the estimators take them; for a row without one see :meth:`known`."""

    @abstractmethod
    def known(self, frame: pd.DataFrame) -> Array:
        """Where a row has a target that :meth:`encode` can code."""

    @abstractmethod
    def given(self, frame: pd.DataFrame) -> Array:
        """Where a row has a target at all."""

    @abstractmethod
    def answers(self, decided: Array) -> pd.DataFrame:
        """A column of predictions per target, from what an estimator predicts."""

    def shares(self, probabilities: Array) -> pd.DataFrame:
        """A column per class with its probability."""
        raise ValueError("probabilities belong to classes; this model predicts a number.")

    @abstractmethod
    def to_json(self) -> dict[str, Any]: ...


@final
@dataclass(frozen=True)
class Classes(Target):
    """One of several classes; coded by their places, answered by their names."""

    column: str
    classes: tuple[str, ...]

    task = "classification"

    @property
    def names(self) -> tuple[str, ...]:
        return (self.column,)

    def encode(self, frame: pd.DataFrame) -> Array:
        labels = _labels(frame[self.column])
        codes = np.asarray(pd.Index(self.classes).get_indexer(labels))
        numbers = pd.to_numeric(pd.Series(self.classes), errors="coerce")
        if (codes < 0).any() and numbers.notna().all() and numbers.is_unique:
            # 1 may stand as 1.0 in another file: there it was beside a row that has none
            read = pd.to_numeric(labels, errors="coerce").astype("float64")
            codes = np.where(codes < 0, pd.Index(numbers).get_indexer(read), codes)
        return codes

    def known(self, frame: pd.DataFrame) -> Array:
        return self.encode(frame) >= 0

    def given(self, frame: pd.DataFrame) -> Array:
        return np.asarray(_labels(frame[self.column]).notna(), dtype=bool)

    def answers(self, decided: Array) -> pd.DataFrame:
        return pd.DataFrame({"prediction": np.array(self.classes, dtype=object)[decided]})

    def shares(self, probabilities: Array) -> pd.DataFrame:
        columns = [f"probability_{name}" for name in self.classes]
        return pd.DataFrame(probabilities, columns=columns)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "classes", "column": self.column, "classes": list(self.classes)}


@final
@dataclass(frozen=True)
class Quantity(Target):
    """A number, in its own unit."""

    column: str
    number: NumberFormat = NumberFormat()

    task = "regression"

    @property
    def names(self) -> tuple[str, ...]:
        return (self.column,)

    def encode(self, frame: pd.DataFrame) -> Array:
        column = frame[self.column]
        if types.is_numeric_dtype(column.dtype):
            values = column.to_numpy(np.float64, na_value=np.nan)
        else:
            values = self.number.read(texts(column).fillna("")).to_numpy()
        return np.where(np.isfinite(values), values, np.nan)

    def known(self, frame: pd.DataFrame) -> Array:
        return ~np.isnan(self.encode(frame))

    def given(self, frame: pd.DataFrame) -> Array:
        words = texts(frame[self.column])
        return np.asarray(words.notna() & ~is_missing(words.fillna("")), dtype=bool)

    def answers(self, decided: Array) -> pd.DataFrame:
        return pd.DataFrame({"prediction": np.asarray(decided, dtype=np.float64)})

    def to_json(self) -> dict[str, Any]:
        return {"kind": "quantity", "column": self.column, "number": asdict(self.number)}


@final
@dataclass(frozen=True)
class Several(Target):
    """Several numbers, or several classes of two each: one output per column."""

    parts: tuple[Classes | Quantity, ...]

    @property
    def task(self) -> str:  # type: ignore[override]
        return self.parts[0].task

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(part.column for part in self.parts)

    def encode(self, frame: pd.DataFrame) -> Array:
        return np.stack([part.encode(frame) for part in self.parts], axis=1)

    def known(self, frame: pd.DataFrame) -> Array:
        found: Array = np.all([part.known(frame) for part in self.parts], axis=0)
        return found

    def given(self, frame: pd.DataFrame) -> Array:
        found: Array = np.all([part.given(frame) for part in self.parts], axis=0)
        return found

    def answers(self, decided: Array) -> pd.DataFrame:
        columns = [
            part.answers(column)["prediction"].rename(f"prediction_{part.column}")
            for part, column in zip(self.parts, decided.T, strict=True)
        ]
        return pd.concat(columns, axis=1)

    def shares(self, probabilities: Array) -> pd.DataFrame:
        if not isinstance(self.parts[0], Classes):
            return super().shares(probabilities)
        named = {
            f"probability_{part.column}_{part.classes[1]}": probabilities[:, k]
            for k, part in enumerate(self.parts)
            if isinstance(part, Classes)
        }
        return pd.DataFrame(named)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "several", "parts": [part.to_json() for part in self.parts]}


def fit_target(
    frame: pd.DataFrame,
    names: Sequence[str],
    task: str = "auto",
    locale: Locale | None = None,
) -> Target:
    """What the columns to predict are: texts, yes/no and few integers are classes, else numbers.

    Rows without a value are passed over.
    """
    check_choice("task", task, TASKS)
    parts = [_fit(frame[name], task, locale or Locale()) for name in names]
    if len(parts) == 1:
        return parts[0]
    quantities = [part for part in parts if isinstance(part, Quantity)]
    pairs = [part for part in parts if isinstance(part, Classes) and len(part.classes) == 2]
    if len(parts) in (len(quantities), len(pairs)):
        return Several(tuple(parts))
    what = ", ".join(f"{part.column!r} is {_what(part)}" for part in parts)
    raise DataError(
        "several targets must be numbers, all of them, or have two classes each; "
        f"{what}. Train a model for each, or say --task."
    )


def _what(part: Classes | Quantity) -> str:
    return "a number" if isinstance(part, Quantity) else f"one of {len(part.classes)} classes"


def target_from_json(state: dict[str, Any]) -> Target:
    """The target whose ``to_json`` this is."""
    if state["kind"] == "several":
        return Several(tuple(map(_from_json, state["parts"])))
    return _from_json(state)


def _from_json(state: dict[str, Any]) -> Classes | Quantity:
    if state["kind"] == "classes":
        return Classes(state["column"], tuple(state["classes"]))
    return Quantity(state["column"], NumberFormat(**state["number"]))


def _fit(column: pd.Series, task: str, locale: Locale) -> Classes | Quantity:
    name = str(column.name)
    column = column[_labels(column).notna()]
    if not len(column):
        raise DataError(f"the target {name!r} has no value in any row.")
    number, values = _as_numbers(column, task, locale)
    if task == "auto":
        task = "classification"
        if number is not None:
            whole, n_values = bool((values % 1 == 0).all()), len(np.unique(values))
            as_given = whole and not types.is_float_dtype(column.dtype)
            few = as_given and n_values <= min(FEW, len(values) / 2)
            task = "classification" if few else "regression"
    if task == "classification":
        return _classes(column, name)
    assert number is not None
    if values.min() == values.max():
        raise DataError(
            f"the target {name!r} is {values[0]:g} in every row; there is nothing to learn."
        )
    with np.errstate(over="ignore", invalid="ignore"):
        if not np.isfinite(np.std(values)):
            raise DataError(
                f"the target {name!r} goes from {values.min():g} to {values.max():g}, which can't "
                "be computed with. Give it in another unit."
            )
    return Quantity(name, number)


def _as_numbers(column: pd.Series, task: str, locale: Locale) -> tuple[NumberFormat | None, Array]:
    """How all values are numbers, and these; None if one of them is none."""
    name = str(column.name)
    if types.is_bool_dtype(column.dtype):
        number: NumberFormat | None = NumberFormat() if task == "regression" else None
        return number, column.to_numpy(np.float64)
    if types.is_numeric_dtype(column.dtype):
        values = column.to_numpy(np.float64)
        if task != "classification" and not np.isfinite(values).all():
            raise DataError(f"the target {name!r} is infinite in some rows; remove them.")
        return NumberFormat(), values
    if task == "classification":
        return None, np.empty(0)
    words = texts(column)
    words = words[~is_missing(words)]
    try:
        number = number_format(words, locale.decimal, locale.thousands)
    except DataError as error:
        raise DataError(f"the target {name!r} {error}.") from error
    values = (number or NumberFormat()).read(words).to_numpy()
    bad = np.flatnonzero(np.isnan(values))
    if not len(bad):
        return number or NumberFormat(), values
    if task == "regression" or len(bad) < 0.05 * len(values):
        raise DataError(
            f"the target {name!r} holds {words.iloc[bad[0]]!r} in row {words.index[bad[0]] + 1} "
            f"(and {len(bad) - 1} more that are no numbers). Correct or empty these values"
            f"{'' if task == 'regression' else ', or ask for --task classification'}."
        )
    return None, values


def _classes(column: pd.Series, name: str) -> Classes:
    labels = _labels(column)
    whole = labels.str.fullmatch(r"[+-]?\d+(\.0+)?")
    if bool(whole.all()):  # 1 and 1.0 are one class
        labels = labels.str.replace(r"\.0+$", "", regex=True)
    found = list(labels.unique())
    numbers = pd.to_numeric(pd.Series(found), errors="coerce")
    by_size = numbers.notna().all()
    classes = [found[k] for k in np.argsort(numbers)] if by_size else sorted(found)
    if len(classes) == 1:
        raise DataError(
            f"the target {name!r} has one class only, {classes[0]!r}; at least two are needed to "
            "tell apart."
        )
    if len(classes) > max(FEW, len(labels) / 2):
        raise DataError(
            f"the target {name!r} has {len(classes)} different values in {len(labels)} rows, too "
            "many to be classes. Name another column, or ask for --task regression if they are "
            "quantities."
        )
    return Classes(name, tuple(classes))


def _labels(column: pd.Series) -> pd.Series:
    """Names of classes, missing where a row has none; "none" may well be one."""
    words = texts(column)
    return words.mask(words.str.lower().isin(_NO_LABEL))
