"""What is predicted: the columns of a table as ``y``, and predictions in the table's own words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from lpom.checks import check_choice
from lpom.exceptions import DataError, unknown_name
from lpom.tables.columns import FEW
from lpom.tables.numbers import NumberFormat, is_missing, number_format, plain_number
from lpom.tables.values import Array, Texts, Values, columns_of, listed, values_of

TASKS = ("auto", "classification", "regression")
_WHOLE = re.compile(r"[+-]?(0|[1-9]\d{0,14})(\.0+)?", re.ASCII)
_NO_LABEL = ("na", "n/a", "#n/a", "nan", "null", "?")  # "none" may well be a class


@final
@dataclass(frozen=True)
class Target:
    """Columns to predict: one of classes or numbers, or several numbers or pairs of classes.

    Attributes
    ----------
    task : "classification" or "regression"
    formats : how the numbers of each column are written, for regression
    classes : the classes of each column in order, for classification; integers where all are
    hints : what may have been meant otherwise
    """

    names: tuple[str, ...]
    task: str
    formats: tuple[NumberFormat, ...] = ()
    classes: tuple[tuple[Any, ...], ...] = ()
    hints: tuple[str, ...] = ()

    @classmethod
    def fit(
        cls,
        table: Any,
        names: str | Sequence[str],
        task: str = "auto",
        *,
        decimal: str | None = None,
        thousands: str | None = None,
    ) -> Target:
        """Texts, yes/no and few integers are classes, all else are numbers.

        Rows without a value are passed over.
        """
        check_choice("task", task, TASKS)
        names = (names,) if isinstance(names, str) else tuple(names)
        columns = columns_of(table)
        parts = [_fit(_values(columns, name), task, decimal, thousands) for name in names]
        if len({part.task for part in parts}) > 1 or (
            len(parts) > 1 and any(len(part.classes[0]) != 2 for part in parts if part.classes)
        ):
            what = ", ".join(f"{part.names[0]!r} is {part._what()}" for part in parts)
            raise DataError(
                "several targets must be numbers, all of them, or have two classes each; "
                f"{what}. Train a model for each, or say --task (in Python task=...)."
            )
        return cls(
            names,
            parts[0].task,
            tuple(format for part in parts for format in part.formats),
            tuple(classes for part in parts for classes in part.classes),
            tuple(hint for part in parts for hint in part.hints),
        )

    @property
    def name(self) -> str:
        return ", ".join(self.names)

    def read(self, table: Any) -> tuple[Array, Array]:
        """``y`` of the rows that have a target, as estimators take it, and which rows these are.

        Classes of several columns are a matrix of 0 and 1, one where it is the second class.
        """
        columns = columns_of(table)
        parts = [self._part(_values(columns, name), k) for k, name in enumerate(self.names)]
        known = np.all([has for _, has in parts], axis=0)
        y = np.stack([part for part, _ in parts], axis=1)[known]
        if len(parts) > 1:
            return y.astype(np.int64 if self.classes else np.float64), known
        y = y[:, 0]
        if self.task == "regression":
            return y.astype(np.float64), known
        return y.astype(np.int64 if all(isinstance(label, int) for label in y) else str), known

    def answers(self, predicted: Array) -> dict[str, Array]:
        """A column of predictions for each target, from what an estimator predicts."""
        if len(self.names) == 1:
            return {"prediction": np.asarray(predicted)}
        made = {}
        for k, name in enumerate(self.names):
            column = np.asarray(predicted)[:, k]
            if self.classes:
                column = np.array(self.classes[k], dtype=object)[column.astype(int)]
            made[f"prediction_{name}"] = column
        return made

    def probabilities(self, shares: Array) -> dict[str, Array]:
        """A column for each class from ``predict_proba``: of several targets their second class."""
        if len(self.names) == 1:
            names = [f"probability_{label}" for label in self.classes[0]]
        else:
            pairs = zip(self.names, self.classes, strict=True)
            names = [f"probability_{name}_{classes[1]}" for name, classes in pairs]
        return dict(zip(names, shares.T, strict=True))

    def _part(self, values: Values, k: int) -> tuple[Array, Array]:
        """One column of y, and where it has a value."""
        if self.task == "regression":
            numbers = _as_floats(values, self.formats[k])
            return numbers, ~np.isnan(numbers)
        texts = _labels(values)
        labels = [self._label(text, k) for text in texts.distinct]
        if len(self.names) > 1:
            places = [self.classes[k].index(t) if t in self.classes[k] else -1 for t in labels]
            codes = texts.spread(np.array(places, dtype=np.int64), -1).astype(np.int64)
            return codes, codes >= 0
        return np.array([*labels, None], dtype=object)[texts.codes], texts.codes >= 0

    def _label(self, text: str, k: int) -> Any:
        """As the classes are, integers or texts."""
        number = _integer(text) if isinstance(self.classes[k][0], int) else None
        return text if number is None else number

    def _what(self) -> str:
        return f"one of {len(self.classes[0])} classes" if self.classes else "a number"


def _values(columns: Mapping[str, Any], name: str) -> Values:
    if name not in columns:
        raise DataError(unknown_name("column to predict", name, columns))
    try:
        return values_of(columns[name], name)
    except DataError as error:
        raise DataError(f"the target {name!r} {error}.") from error


def _fit(values: Values, task: str, decimal: str | None, thousands: str | None) -> Target:
    name, labels = values.name, _labels(values)
    if not labels.distinct:
        raise DataError(f"the target {name!r} has no value in any row.")
    form = None if task == "classification" else _format(values, task, decimal, thousands)
    if form is None:
        return _classes(labels, name)
    numbers = _as_floats(values, form)
    numbers = numbers[~np.isnan(numbers)]
    n_values = len(np.unique(numbers))
    few = bool((numbers % 1 == 0).all()) and n_values <= min(FEW, len(numbers) / 2)
    if task == "auto" and values.form != "number" and few:
        made = _classes(labels, name)
        if n_values == 2:
            return made
        hint = (
            f"the {n_values} integers of {name!r} are taken as classes: say --task regression (in "
            "Python task='regression') if they are quantities"
        )
        return Target(made.names, made.task, classes=made.classes, hints=(hint,))
    if n_values == 1:
        raise DataError(
            f"the target {name!r} is {numbers[0]:g} in every row; there is nothing to learn."
        )
    with np.errstate(over="ignore", invalid="ignore"):
        if not np.isfinite(np.std(numbers)):
            raise DataError(
                f"the target {name!r} goes from {numbers.min():g} to {numbers.max():g}, which "
                "can't be computed with. Give it in another unit."
            )
    return Target((name,), "regression", formats=(form,))


def _format(
    values: Values, task: str, decimal: str | None, thousands: str | None
) -> NumberFormat | None:
    """How all values are numbers; None if they are none."""
    name = values.name
    if values.form in ("integer", "number") or (values.form == "yes/no" and task == "regression"):
        return NumberFormat()
    if values.form in ("yes/no", "date"):
        return None
    texts = values.texts.where(not is_missing(text) for text in values.texts.distinct)
    try:
        form = number_format(texts.distinct, decimal, thousands)
    except DataError as error:
        raise DataError(f"the target {name!r} {error}.") from error
    form = form or NumberFormat()
    bad = np.flatnonzero(np.isnan(form.read(texts.distinct)))
    if not len(bad):
        return form
    wrong = np.flatnonzero(np.isin(texts.codes, bad))
    if task == "regression" or len(wrong) < 0.05 * texts.counts.sum():
        raise DataError(
            f"the target {name!r} holds {texts.distinct[texts.codes[wrong[0]]]!r} in row "
            f"{wrong[0] + 1} (and {len(wrong) - 1} more that are no numbers). Correct or empty "
            "these values"
            + ("." if task == "regression" else ", or ask for --task classification.")
        )
    return None


def _classes(labels: Texts, name: str) -> Target:
    found: list[Any] = list(labels.distinct)
    whole = [_integer(label) for label in found]
    if None not in whole:
        found = sorted(set(whole))  # 1 and 1.0 are one class
    else:
        numbers = [plain_number(label) for label in found]
        by_size = not np.isnan(numbers).any()
        found = [found[k] for k in np.argsort(numbers)] if by_size else sorted(found)
    if len(found) == 1:
        raise DataError(
            f"the target {name!r} has one class only, {found[0]!r}; at least two are needed to "
            "tell apart."
        )
    n = int(labels.counts.sum())
    if len(found) > max(FEW, n / 2):
        raise DataError(
            f"the target {name!r} has {len(found)} different values in {n} rows, too many to be "
            "classes. Name another column, or ask for --task regression if they are quantities. "
            f"It holds {listed(found, 3)}."
        )
    return Target((name,), "classification", classes=(tuple(found),))


def _labels(values: Values) -> Texts:
    """Names of classes, none where a row has none."""
    return values.texts.where(text.lower() not in _NO_LABEL for text in values.texts.distinct)


def _integer(text: str) -> int | None:
    """1 of "1" and "1.0"; None of "01", a code, and of all else."""
    return int(float(text)) if _WHOLE.fullmatch(text) else None


def _as_floats(values: Values, form: NumberFormat) -> Array:
    if values.numbers is not None:
        return values.numbers
    texts = values.texts.where(not is_missing(text) for text in values.texts.distinct)
    return texts.spread(form.read(texts.distinct))
