"""Rows to train on and rows to hold back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_FOLDED, _MOST = 1500, 4000  # rows up to which there are three folds; most rows of one split


def split_rows(
    n: int,
    fraction: float,
    rng: np.random.Generator | np.random.RandomState,
    classes: NDArray[Any] | None = None,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Row numbers in two parts, ``fraction`` of them in the second, classes in equal shares.

    Rows are shuffled, sorted by class, and taken at equal distances: no class, however rare, can
    make it fail.

    >>> keep, hold = split_rows(10, 0.2, np.random.default_rng(0), np.repeat([0, 1], 5))
    >>> len(keep), hold // 5
    (8, array([0, 1]))
    """
    count = round(fraction * n)
    order = rng.permutation(n)
    if classes is not None:
        order = order[np.argsort(classes[order], kind="stable")]
    held = np.zeros(n, dtype=bool)
    held[order[((np.arange(count) + 0.5) * n / max(count, 1)).astype(int)]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def folds(
    n: int, rng: np.random.RandomState, classes: NDArray[Any] | None = None
) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Rows to train on and to judge by: three folds of a small table, one split of a larger one.

    A row whose class is not among those to train on is left out.
    """
    if n < 8:
        return []
    if n > _FOLDED:
        rows = split_rows(n, min(1.0, _MOST / n), rng, classes)[1]
        pairs = [split_rows(len(rows), 0.25, rng, None if classes is None else classes[rows])]
        pairs = [(rows[kept], rows[held]) for kept, held in pairs]
    else:
        order = rng.permutation(n)
        if classes is not None:
            order = order[np.argsort(classes[order], kind="stable")]
        place = np.empty(n, dtype=np.int64)
        place[order] = np.arange(n) % 3
        pairs = [(np.flatnonzero(place != k), np.flatnonzero(place == k)) for k in range(3)]
    if classes is None:
        return pairs
    return [(kept, held[np.isin(classes[held], classes[kept])]) for kept, held in pairs]
