"""Rows to train on and rows to hold back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


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
