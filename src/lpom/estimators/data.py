"""Rows that are held back, and what columns are divided by while a network learns from them.

Networks learn from numbers near 1. A table whose columns' largest numbers lie, in the middle,
between `SMALL` and `LARGE` stays as it is; another one is divided by that one number, which keeps
pictures as they look. Columns that stand out of their table by a factor of `APART` are divided by
their own: fewer would be those with a long tail. The trained network takes the columns as they
were: the first weights carry the division.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import issparse
from torch import nn

SMALL, LARGE, APART = 0.02, 10.0, 100.0
_NOTHING = 1e-30  # by less nothing can be divided in float32


def units(X: Any) -> NDArray[Any] | None:
    """What each column of an array or a CSR matrix is to be divided by; None for nothing."""
    largest = abs(X).max(axis=0)
    size = np.asarray(largest.todense() if issparse(X) else largest, dtype=np.float64).reshape(-1)
    filled = size > _NOTHING
    common = float(np.median(size[filled])) if filled.any() else 1.0
    if SMALL <= common <= LARGE:
        common = 1.0
    usual = (SMALL * common <= size) & (size <= APART * common)
    found = np.where(usual | ~filled, common, size)
    return None if bool((found == 1).all()) else found


def divided(X: Any, by: NDArray[Any] | None) -> Any:
    """``X`` in those units; itself where there are none."""
    if by is None:
        return X
    factor = (1 / by).astype(X.dtype)
    return X.multiply(factor).tocsr() if issparse(X) else X * factor


@torch.no_grad()
def scale_inputs(model: nn.Sequential, by: NDArray[Any] | None, *, into: bool) -> None:
    """Make a network of raw columns one of columns in units (``into``), or the other way round."""
    first = next((module for module in model if isinstance(module, nn.Linear)), None)
    if by is not None and first is not None:
        factor = torch.as_tensor(by if into else 1 / by).to(first.weight)
        first.weight.mul_(factor)


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
