"""Curves from scattered readings: isotonic where they are monotone, smooth where not."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def fit_curves(z: Array, x: Array, cells: int = 48) -> tuple[Array, Array, Array]:
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

    ends = _ends(z, min(len(knots), len(z) // 4 + 2))
    cell = np.clip(np.searchsorted(ends, z, side="right") - 1, 0, len(ends) - 2)
    count = np.bincount(cell, minlength=len(ends) - 1)
    used = count > 0
    count = count[used]
    centre = np.bincount(cell, z, minlength=len(ends) - 1)[used] / count
    mean = np.bincount(cell, x, minlength=len(ends) - 1)[used] / count
    square = np.bincount(cell, x**2, minlength=len(ends) - 1)[used] / count
    scatter = np.maximum(square - mean**2, 0).sum() / max(len(count), 1)
    rises = bool((count * (centre - centre.mean()) * (mean - mean.mean())).sum() >= 0)
    isotonic = IsotonicRegression(increasing=rises).fit(centre, mean, count).predict(centre)
    missed = (count * (mean - isotonic) ** 2).sum()
    monotone = bool(missed <= 2 * scatter * len(count) + 1e-6 * np.ptp(mean) ** 2)
    if monotone or len(count) < 5:
        return np.interp(knots, centre, isotonic), monotone
    spline = make_smoothing_spline(centre, mean, count)
    return spline(np.clip(knots, centre[0], centre[-1])), monotone


def _ends(z: Array, cells: int) -> Array:
    """Of about so many intervals: half of them hold as many inputs each, half are as wide."""
    share = np.linspace(0, 1, cells // 2 + 1)
    even = z.min() + share * (z.max() - z.min())
    return np.unique(np.concatenate([np.quantile(z, share), even]))
