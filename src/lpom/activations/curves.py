"""Curves from scattered readings: isotonic where they are monotone, smooth where not."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def fit_curves(z: Array, x: Array, cells: int = 96) -> tuple[Array, Array, Array]:
    """Knots, values at them, (units, knots), and of each unit whether it is monotone.

    Parameters
    ----------
    z, x : inputs and readings, (rows, units)
    """
    knots = _ends(z, cells)
    if len(knots) < 4:
        raise ValueError("a curve needs readings at different inputs, got nearly one alone.")
    curves, monotone = zip(
        *(_curve(a, b, knots) for a, b in zip(z.T, x.T, strict=True)), strict=True
    )
    return knots, np.array(curves), np.array(monotone)


def _curve(z: Array, x: Array, knots: Array) -> tuple[Array, bool]:
    """One unit: means over cells, then a monotone or a smooth line through them."""
    from scipy.interpolate import make_smoothing_spline
    from sklearn.isotonic import IsotonicRegression

    centre, mean, count, scatter = _means(z, x, len(knots) // 2)
    rises = bool((count * (centre - centre.mean()) * (mean - mean.mean())).sum() >= 0)
    isotonic = IsotonicRegression(increasing=rises).fit(centre, mean, count).predict(centre)
    missed = (count * (mean - isotonic) ** 2).sum()
    if missed <= 2 * scatter * len(count) + 1e-6 * np.ptp(mean) ** 2 or len(count) < 5:
        return np.interp(knots, centre, isotonic), True
    centre, mean, count, _ = _means(z, x, len(knots))  # what turns back needs more of them
    spline = make_smoothing_spline(centre, mean, count)
    return spline(np.clip(knots, centre[0], centre[-1])), False


def _means(z: Array, x: Array, cells: int) -> tuple[Array, Array, Array, float]:
    """Mean inputs, mean readings and how many, of each cell; and the scatter within cells."""
    ends = _ends(z, min(cells, len(z) // 8 + 2))
    cell = np.clip(np.searchsorted(ends, z, side="right") - 1, 0, len(ends) - 2)
    count = np.bincount(cell, minlength=len(ends) - 1)
    used = count > 0
    count = count[used]
    sums = (np.bincount(cell, value, len(ends) - 1)[used] for value in (z, x, x**2))
    centre, mean, square = (total / count for total in sums)
    scatter = np.maximum(square - mean**2, 0).sum() / max(len(count), 1)
    return centre, mean, count, float(scatter)


def _ends(z: Array, cells: int) -> Array:
    """Of about so many intervals: half of them hold as many inputs each, half are as wide."""
    share = np.linspace(0, 1, cells // 2 + 1)
    even = z.min() + share * (z.max() - z.min())
    return np.unique(np.concatenate([np.quantile(z, share), even]))
