"""How the columns of a table become the inputs of a network: a plan, and what fitting it found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.validation import check_is_fitted

from lpom.exceptions import DataError
from lpom.tables.old.columns import Array, Locale
from lpom.tables.old.plan import ColumnPlan, named

_NUMBERS, _CATEGORIES = "numbers", "categories"


@final
@dataclass(frozen=True)
class Features:
    """A column plan with its statistics; goes to JSON and back exactly.

    Numbers, yes/no and dates enter as ``(x - mean) / scale``, a missing one as the median and
    with an input that says so if any was missing in training; categories as one input each.

    Attributes
    ----------
    plan : ColumnPlan
    medians, indicated : one per number
        What stands in for a missing value, and whether an input tells that it does.
    means, scales : one per number and indicator
        None leaves numbers as they are.
    """

    plan: ColumnPlan
    medians: tuple[float, ...]
    indicated: tuple[bool, ...]
    means: tuple[float, ...] | None
    scales: tuple[float, ...] | None

    @classmethod
    def fit(
        cls,
        frame: pd.DataFrame,
        *,
        ignore: Iterable[str] = (),
        kinds: Mapping[str, str] | None = None,
        locale: Locale | None = None,
        scale: bool = True,
    ) -> Features:
        """Decide and learn from all rows of ``frame``; without ``scale`` all numbers stay so."""
        if scale:
            plan = ColumnPlan.decide(frame, ignore=ignore, kinds=kinds, locale=locale)
        else:
            plan = ColumnPlan.plain(list(named(frame).columns))
        read = plan.read(frame)
        transformer = _unfitted(plan, read, scale).fit(read)
        if not plan.numeric:
            return cls(plan, (), (), () if scale else None, () if scale else None)
        steps = transformer.named_transformers_[_NUMBERS]
        imputer = steps["impute"]
        indicated = np.zeros(len(imputer.statistics_), dtype=bool)
        indicated[imputer.indicator_.features_] = True
        scaler = steps["scale"] if scale else None
        return cls(
            plan,
            tuple(map(float, imputer.statistics_)),
            tuple(map(bool, indicated)),
            None if scaler is None else tuple(map(float, scaler.mean_)),
            None if scaler is None else tuple(map(float, scaler.scale_)),
        )

    @cached_property
    def transformer(self) -> ColumnTransformer:
        """scikit-learn's transformer from what :meth:`ColumnPlan.read` makes to the inputs.

        Fitted to one row of medians and one of what may be missing, which gives back medians and
        indicators; means and scales are then set.
        """
        names = self._numeric_names
        medians = np.array(self.medians, dtype=np.float64)
        rows = np.stack([medians, np.where(self.indicated, np.nan, medians)])
        frame = pd.DataFrame(rows, columns=names)
        for column in self.plan.categorical:
            frame[column.name] = column.values[0]
        made = _unfitted(self.plan, frame, self.means is not None).fit(frame)
        if names and self.means is not None and self.scales is not None:
            scaler = made.named_transformers_[_NUMBERS]["scale"]
            scaler.mean_, scaler.scale_ = np.array(self.means), np.array(self.scales)
            scaler.var_ = scaler.scale_**2
        return made

    @property
    def names(self) -> list[str]:
        """The columns that a table must have."""
        return self.plan.names

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns of the training table in their order."""
        return tuple(column.name for column in self.plan.columns)

    @property
    def numbers(self) -> dict[str, tuple[float, float]]:
        """Mean and scale of each number."""
        names = self._numeric_names
        if self.means is None or self.scales is None:
            return {name: (0.0, 1.0) for name in names}
        return dict(zip(names, zip(self.means, self.scales, strict=True), strict=False))

    @property
    def input_names(self) -> list[str]:
        """One name per input of the network."""
        indicated = [
            f"{name} is missing"
            for name, told in zip(self._numeric_names, self.indicated, strict=True)
            if told
        ]
        one_hot = [f"{c.name} = {value}" for c in self.plan.categorical for value in c.values]
        return [*self._numeric_names, *indicated, *one_hot]

    @property
    def n_inputs(self) -> int:
        return len(self.input_names)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.n_inputs,)

    @property
    def inputs_of(self) -> dict[str, list[int]]:
        """Which inputs of the network each column in use makes."""
        place = {name: k for k, name in enumerate(self.input_names)}
        numbers = {
            column: [*names, *(f"{name} is missing" for name in names)]
            for column, names in self._numeric.items()
        }
        categories = {
            column.name: [f"{column.name} = {value}" for value in column.values]
            for column in self.plan.categorical
        }
        return {
            column: [place[name] for name in names if name in place]
            for column, names in (numbers | categories).items()
        }

    def encode(self, frame: pd.DataFrame, *, warn: bool = False) -> Array:
        """The inputs, (n, n_inputs) float32; ``warn``: say what is unlike training."""
        with np.errstate(over="ignore", invalid="ignore"):  # said in words below
            inputs = self.transformer.transform(self.plan.read(frame, warn=warn))
            made = np.asarray(inputs, dtype=np.float32)
        bad = ~np.isfinite(made)
        if bad.any():
            row, k = (int(place[0]) for place in bad.nonzero())
            raise DataError(
                f"column {self.input_names[k]!r} is too far from all of training in row {row + 1}; "
                "expected numbers of the same unit."
            )
        return made

    def to_json(self) -> dict[str, Any]:
        return {
            "columns": self.plan.to_json(),
            "medians": list(self.medians),
            "indicated": list(self.indicated),
            "means": self.means and list(self.means),
            "scales": self.scales and list(self.scales),
        }

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> Features:
        means, scales = state["means"], state["scales"]
        return cls(
            ColumnPlan.from_json(state["columns"]),
            tuple(map(float, state["medians"])),
            tuple(map(bool, state["indicated"])),
            None if means is None else tuple(map(float, means)),
            None if scales is None else tuple(map(float, scales)),
        )

    @property
    def _numeric(self) -> dict[str, list[str]]:
        """The numbers that each column gives: one, or several of a date."""
        empty = pd.Series(dtype=np.float64)
        return {
            column.name: [column.name]
            if column.date is None
            else list(column.date.inputs(column.name, empty))
            for column in self.plan.numeric
        }

    @property
    def _numeric_names(self) -> list[str]:
        return [name for names in self._numeric.values() for name in names]


@final
class TableEncoder(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """A data frame of any columns to numbers, as `lpom train` does it: a first step of pipelines.

    Parameters
    ----------
    ignore : names of columns to leave out
    kinds : name -> "number", "yes/no", "category", "date" or "dropped", where values mislead
    decimal, thousands, date_order : settle "29,477" and "03/04/2024" ("dmy" or "mdy")

    Attributes
    ----------
    features_ : Features
        ``features_.plan`` tells what was decided of each column.

    >>> import pandas as pd
    >>> frame = pd.DataFrame({"price": ["€1,200", "€80", "?"], "colour": ["red", "blue", "red"]})
    >>> encoder = TableEncoder(thousands=",").fit(frame)
    >>> list(encoder.get_feature_names_out())
    ['price', 'price is missing', 'colour = blue', 'colour = red']
    """

    def __init__(
        self,
        *,
        ignore: Iterable[str] = (),
        kinds: Mapping[str, str] | None = None,
        decimal: str | None = None,
        thousands: str | None = None,
        date_order: str | None = None,
    ) -> None:
        self.ignore = ignore
        self.kinds = kinds
        self.decimal = decimal
        self.thousands = thousands
        self.date_order = date_order

    def fit(self, X: pd.DataFrame, y: Any = None) -> TableEncoder:
        """Decide what each column is, and learn medians, means, scales and categories."""
        locale = Locale(self.decimal, self.thousands, self.date_order)
        self.features_ = Features.fit(X, ignore=self.ignore, kinds=self.kinds, locale=locale)
        return self

    def transform(self, X: pd.DataFrame) -> Array:
        """The inputs, float32; a warning tells what is unlike training."""
        check_is_fitted(self)
        return self.features_.encode(X, warn=True)

    def get_feature_names_out(self, input_features: Any = None) -> Array:
        check_is_fitted(self)
        return np.array(self.features_.input_names, dtype=object)


def _unfitted(plan: ColumnPlan, read: pd.DataFrame, scale: bool) -> ColumnTransformer:
    categories = [column.name for column in plan.categorical]
    numbers = [name for name in read.columns if name not in set(categories)]
    steps = [("impute", SimpleImputer(strategy="median", add_indicator=True))]
    steps += [("scale", StandardScaler())] if scale else []
    one_hot = OneHotEncoder(
        categories=[list(column.values) for column in plan.categorical],
        handle_unknown="ignore",
        sparse_output=False,
        dtype=np.float32,
    )
    parts = [(_NUMBERS, Pipeline(steps), numbers)] if numbers else []
    parts += [(_CATEGORIES, one_hot, categories)] if categories else []
    return ColumnTransformer(parts)
