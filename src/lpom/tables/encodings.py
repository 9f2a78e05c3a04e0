"""Values as inputs of a network: numbers near 1, and texts by the pieces that they share."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from lpom.tables.values import Array

_TAIL = 3.0  # values may lie so many times the central 98 % outside of these
_ROWS_PER_KNOT = 100
_KNOTS = 12  # of the curve of a number
_ROWS_PER_PART, _FEWEST = 100, 4  # of the directions that texts are compared in
_TOKEN = re.compile(r"\b[^\W\d_]{2,}\b")
_SAMPLE = 5000  # texts that are looked at


@final
@dataclass(frozen=True)
class Scaling:
    """``(x - mean) / scale`` of numbers clipped to where training had most of its own.

    A missing one is the median; that it is missing is an input of its own where training had such
    rows (``indicated``). ``knots`` add hat functions: between them, the first layer can bend.
    """

    low: float
    high: float
    median: float
    mean: float = 0.0
    scale: float = 1.0
    indicated: bool = False
    knots: tuple[float, ...] = ()

    @classmethod
    def fit(cls, values: Array, *, curved: bool = True) -> Scaling:
        known = values[~np.isnan(values)]
        indicated = len(known) < len(values)
        if not len(known):
            return cls(-np.inf, np.inf, 0.0, indicated=indicated)
        first, last = np.quantile(known, (0.01, 0.99))
        reach = (last - first) * _TAIL
        low, high = float(known.min()), float(known.max())
        margin = (high - low) / 2
        low, high = low - margin, high + margin
        if reach > 0:
            low, high = max(low, first - reach), min(high, last + reach)
        clipped = known.clip(low, high)
        scale = float(clipped.std())
        return cls(
            float(low),
            float(high),
            float(np.median(clipped)),
            float(clipped.mean()),
            scale if scale > 0 else 1.0,
            indicated,
            _knots(clipped) if curved else (),
        )

    def names(self, name: str) -> list[str]:
        hats = [f"{name} near {knot:.4g}" for knot in self.knots]
        return [name, *([f"{name} is missing"] if self.indicated else []), *hats]

    def inputs(self, values: Array) -> Array:
        missing = np.isnan(values)
        filled = np.where(missing, self.median, values.clip(self.low, self.high))
        parts = [(filled - self.mean) / self.scale]
        parts += [missing.astype(np.float64)] if self.indicated else []
        parts += [hat * ~missing for hat in _hats(filled, self.knots)]
        return np.stack(parts, axis=1)


def _knots(values: Array) -> tuple[float, ...]:
    """Quantiles of the values, or each of a few different values."""
    count = min(_KNOTS, len(values) // _ROWS_PER_KNOT)
    distinct, counts = np.unique(values, return_counts=True)
    if count < 4 or len(distinct) < 3:
        return ()
    if len(distinct) <= count:
        return tuple(distinct.tolist())
    return tuple(np.unique(np.quantile(values, np.linspace(0, 1, count))).tolist())


def _hats(values: Array, knots: Sequence[float]) -> list[Array]:
    """Linear B-splines: largest at a knot, 0 at its neighbours, constant outside of all.

    They are half as high as other inputs are wide, so a penalty prefers a straight line.
    """
    return [np.interp(values, knots, unit) for unit in 0.5 * np.eye(len(knots))]


@final
@dataclass(frozen=True, eq=False)
class Pieces:
    """Texts by n-grams, weighted by how rare they are, in a few directions (truncated SVD)."""

    words: bool  # n-grams of words, else of characters
    vocabulary: list[str]
    idf: Array
    directions: Array  # (n_components, n-grams)

    @classmethod
    def fit(cls, texts: Sequence[str], weights: Array, n_components: int) -> Pieces | None:
        """From different texts and how many rows each has; None if they share too little."""
        from sklearn.decomposition import TruncatedSVD

        words = bool(np.mean([text.count(" ") for text in texts[:_SAMPLE]]) > 8)
        try:
            vectorizer = _vectorizer(words, min_df=2, max_features=4000)
            found = vectorizer.fit_transform(texts)
        except ValueError:  # no n-gram comes twice
            return None
        enough = max(_FEWEST, int(weights.sum()) // _ROWS_PER_PART)
        n_components = min(n_components, enough, min(found.shape) - 1)
        if n_components < 1:
            return None
        svd = TruncatedSVD(n_components, random_state=0).fit(found)
        projected = found @ svd.components_.T
        center = np.average(projected, axis=0, weights=weights)
        # as one-hot inputs, all of them together have a variance of about one
        spread = np.sqrt(np.average((projected - center) ** 2, axis=0, weights=weights).sum())
        directions = (svd.components_ / max(float(spread), 1e-12)).astype(np.float32)
        return cls(words, vectorizer.get_feature_names_out().tolist(), vectorizer.idf_, directions)

    def inputs(self, texts: Sequence[str]) -> Array:
        """One row for each text."""
        if not len(texts):
            return np.empty((0, len(self.directions)))
        vectorizer = _vectorizer(self.words, vocabulary=self.vocabulary)
        vectorizer.idf_ = self.idf
        found: Array = vectorizer.transform(texts) @ self.directions.T
        return found


def _vectorizer(words: bool, **options: Any) -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer

    kind, n = ("word", (1, 2)) if words else ("char_wb", (2, 4))
    return TfidfVectorizer(analyzer=kind, ngram_range=n, sublinear_tf=True, **options)


def share_words(texts: Sequence[str]) -> bool:
    """Whether words come again in several texts, but not in nearly all."""
    found = [set(_TOKEN.findall(text.lower())) for text in texts[:_SAMPLE]]
    times = Counter(word for words in found for word in words)
    telling = {word for word, n in times.items() if 3 <= n <= 0.9 * len(found)}
    return sum(not telling.isdisjoint(words) for words in found) > 0.3 * len(found)
