"""One transformer from tables as they come to inputs of a network."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, final

import numpy as np
from scipy.sparse import issparse
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import _check_feature_names, check_is_fitted, validate_data

from lpom.exceptions import DataError, unknown_name
from lpom.tables.columns import KINDS, Column, Dropped, Number, decide
from lpom.tables.numbers import like_thousands
from lpom.tables.values import Array, Values, columns_of, listed, values_of

_ENOUGH_ROWS, _MOST_ROWS = 40, 2000  # to look for a column that predicts the target alone
_ALONE = 0.995  # accuracy or R2 of one column


@final
class TableEncoder(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """A table of any columns as numbers near 1: the first step of a pipeline.

    The kind of each column is inferred from its values:

    - *number* (also in texts, such as "€1,200.50" or "12 %"), *yes/no* and *date*: standardised
      after values far from all others were clipped; a number also as a piecewise linear curve
      where there are rows enough for one, a date also as its place in the year, week and day. A
      missing value is the median, and an input tells so.
    - *category*: an input for each frequent value; of the others, how frequent each is and, where
      they share words, their letters.
    - *text*: TF-IDF of n-grams and a truncated SVD.
    - *dropped*: constants, identifiers, numbers of rows.

    Texts that can be read in two ways ("29,477", "03/04/2024") raise an error that says which
    parameter settles them.

    Parameters
    ----------
    ignore : names of columns to leave out
    kinds : name -> "number", "yes/no", "category", "text", "date" or "dropped", where inference
        is wrong
    decimal, thousands, date_order : settle "29,477" and "03/04/2024" ("dmy" or "mdy")
    max_categories : most categories of one column that have inputs of their own
    n_components : most inputs of a column of texts; one for each hundred rows, and four at least
    scale : False leaves numbers as they are: for pixels, say

    Attributes
    ----------
    columns_ : dict of name -> :class:`~lpom.tables.columns.Column`
    hints_ : what to look at before trusting a score, as sentences
    n_features_in_, feature_names_in_ : as in scikit-learn

    >>> table = {"price": ["€1,200", "€80", "?"], "colour": ["red", "blue", "red"]}
    >>> encoder = TableEncoder(thousands=",").fit(table)
    >>> list(encoder.get_feature_names_out())
    ['price', 'price is missing', 'colour = blue', 'colour = red']
    """

    def __init__(
        self,
        *,
        ignore: str | Iterable[str] = (),
        kinds: Mapping[str, str] | None = None,
        decimal: str | None = None,
        thousands: str | None = None,
        date_order: str | None = None,
        max_categories: int = 300,
        n_components: int = 30,
        scale: bool = True,
    ) -> None:
        self.ignore = ignore
        self.kinds = kinds
        self.decimal = decimal
        self.thousands = thousands
        self.date_order = date_order
        self.max_categories = max_categories
        self.n_components = n_components
        self.scale = scale

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.string = tags.input_tags.categorical = True
        tags.transformer_tags.preserves_dtype = []
        return tags

    def fit(self, X: Any, y: Any = None) -> TableEncoder:
        """Decide what each column is and learn how to encode it; ``y`` is only for ``hints_``.

        ``X`` is a data frame, a dictionary of columns, or a 2-D array.

        Raises
        ------
        DataError
            With everything that can't be told or done, all at once.
        """
        columns = self._columns(X, reset=True)
        ignored = {self.ignore} if isinstance(self.ignore, str) else set(self.ignore)
        kinds = dict(self.kinds or {})
        problems = _unknown(ignored | set(kinds), list(columns), kinds)
        decided: dict[str, Column] = {}
        values: dict[str, Values] = {}
        for name, column in columns.items():
            if name in ignored:
                decided[name] = Dropped(name, "as asked for")
                continue
            try:
                values[name] = values_of(column, name)
                decided[name] = decide(values[name], self, kinds.get(name))
            except DataError as error:
                problems.append(f"column {name!r} {error}")
        problems += _points_or_thousands(values, decided, self)
        if problems:
            raise DataError(f"{'; '.join(problems)}.")
        if all(column.kind == "dropped" for column in decided.values()):
            reasons = "; ".join(f"{column.name!r}: {column.why}" for column in decided.values())
            n = len(next(iter(columns.values())))
            raise DataError(f"there is no column to learn from, with n_samples={n} ({reasons}).")
        self.columns_ = decided
        self.hints_ = [] if y is None else _telling_alone(self._blocks(values), y)
        return self

    def transform(self, X: Any) -> Array:
        """The inputs, float32; a warning tells what is unlike training.

        Columns are found by their names, in any order and beside others; those of an array by
        their places.
        """
        check_is_fitted(self)
        columns = self._columns(X, reset=False)
        used = [column for column in self.columns_.values() if column.kind != "dropped"]
        missing = [column.name for column in used if column.name not in columns]
        if missing:
            raise DataError(
                f"the table lacks {listed(missing)}; the columns expected are "
                f"{listed(column.name for column in used)}. Add or rename columns to match."
            )
        values = {column.name: values_of(columns[column.name], column.name) for column in used}
        strange = [note for column in used for note in column.strange(values[column.name])]
        if strange:
            warnings.warn(f"unlike in training: {'; '.join(strange)}.", stacklevel=3)
        return np.hstack(list(self._blocks(values).values()))

    def get_feature_names_out(self, input_features: Any = None) -> Array:
        """A name for each input."""
        check_is_fitted(self)
        names = [name for column in self.columns_.values() for name in column.names()]
        return np.array(names, dtype=object)

    @property
    def inputs_of_(self) -> dict[str, range]:
        """Which inputs each column makes."""
        found, end = {}, 0
        for name, column in self.columns_.items():
            start, end = end, end + len(column.names())
            found[name] = range(start, end)
        return found

    def plan(self) -> list[tuple[str, str, str]]:
        """Name, kind and remarks of each column, for a table to print."""
        check_is_fitted(self)
        return [(name, column.kind, column.remark()) for name, column in self.columns_.items()]

    def _columns(self, X: Any, *, reset: bool) -> dict[str, Any]:
        """The columns by name; an array's after scikit-learn's checks."""
        if issparse(X) or not (isinstance(X, Mapping) or hasattr(X, "columns")):
            array = validate_data(
                self, X, dtype=None, ensure_all_finite=False, ensure_min_samples=1, reset=reset
            )
            columns = columns_of(array)
            if not reset:
                return dict(zip(self.columns_, columns.values(), strict=True))
            return columns
        columns = columns_of(X)
        if not columns or not len(next(iter(columns.values()))):
            raise DataError(
                f"a table should have columns and rows, got {len(columns)} columns"
                + (" with 0 rows." if columns else ".")
            )
        if reset:
            self.n_features_in_ = len(columns)
            _check_feature_names(self, X, reset=True)
        return columns

    def _blocks(self, values: Mapping[str, Values]) -> dict[str, Array]:
        """The inputs of each column."""
        return {
            name: column.inputs(values[name]).astype(np.float32)
            for name, column in self.columns_.items()
            if column.kind != "dropped"
        }


def _unknown(said: set[str], columns: list[str], kinds: Mapping[str, str]) -> list[str]:
    problems = [
        unknown_name("column", name, columns).rstrip(".") for name in sorted(said - set(columns))
    ]
    wrong = {kind for kind in kinds.values() if kind not in KINDS}
    return problems + [unknown_name("kind of column", kind, KINDS).rstrip(".") for kind in wrong]


def _points_or_thousands(
    values: Mapping[str, Values], columns: Mapping[str, Column], options: TableEncoder
) -> list[str]:
    """Points that would separate thousands if they were written as another column's commas are."""
    numbers = {n: c for n, c in columns.items() if isinstance(c, Number)}
    commas = [name for name, column in numbers.items() if column.number.decimal == ","]
    if not commas or options.decimal == "." or options.thousands == ".":
        return []
    problems = []
    for name, column in numbers.items():
        if values[name].numbers is None and not str(column.number):
            example = like_thousands(values[name].texts.distinct)
            if example is not None:
                problems.append(
                    f"column {name!r} holds {example!r}, which may be "
                    f"{example.replace('.', '')} since column {commas[0]!r} has decimal commas: "
                    "say --thousands '.' or --decimal '.' (in Python thousands='.' or decimal='.')"
                )
    return problems


def _telling_alone(blocks: Mapping[str, Array], y: Any) -> list[str]:
    """A sentence for each column that a tree predicts nearly all of ``y`` from."""
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

    target = np.asarray(y)
    if len(blocks) < 2 or target.ndim != 1 or len(target) < _ENOUGH_ROWS:
        return []
    rows = np.random.default_rng(0).permutation(len(target))[:_MOST_ROWS]
    distinct, codes = np.unique(target, return_inverse=True)
    numbers = target.dtype.kind == "f" or (
        target.dtype.kind in "iu" and len(distinct) > min(20, len(target) / 2)
    )
    target = target[rows] if numbers else codes[rows]
    if not (np.isfinite(target).all() if numbers else np.bincount(target).max() < 0.9 * len(rows)):
        return []
    half = len(rows) // 2
    tree = DecisionTreeRegressor if numbers else DecisionTreeClassifier
    hints = []
    for name, block in blocks.items():
        part = block[rows]
        model = tree(random_state=0).fit(part[:half], target[:half])
        score = model.score(part[half:], target[half:])
        if score >= _ALONE:
            hints.append(
                f"column {name!r} alone predicts the target ({'R2' if numbers else 'accuracy'} "
                f"{score:.3f}): is it known before the target is? If not, ignore it."
            )
    return hints
