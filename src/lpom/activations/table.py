"""Functions known by readings: tables of values, one for all units or one for each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from lpom.activations.base import Activation, double, infinite

Array = np.ndarray[Any, Any]
Numbers = tuple[float, ...]


@final
@dataclass(frozen=True)
class Table(Activation):
    r"""Straight lines between the points ``(z[k], values[k])``, constant beyond the ends.

    ``values`` may hold one list per unit: unit j along the dimension ``dim`` of the input then
    has the curve ``values[j]``. With :math:`A_k` the area up to :math:`z_k` and
    :math:`u = z - z_k`, :math:`\Phi(z) = A_k + v_k u + s_k u^2 / 2` on a piece of slope
    :math:`s_k`, and :math:`\Phi^*(x) = x p - \Phi(p)` at any :math:`p` with
    :math:`\phi(p) = x`.

    ``noise`` is the standard deviation of a value, where values are readings: the displacement
    that the rule reads it at follows from it.
    """

    z: Numbers
    values: Numbers | tuple[Numbers, ...]
    noise: float = 0.0
    dim: int = -1

    name, formula = "table", "lines between measured values"

    def __post_init__(self) -> None:
        object.__setattr__(self, "z", tuple(map(float, self.z)))
        shared = not self.values or not isinstance(self.values[0], tuple | list)
        curves = [self.values] if shared else self.values
        rows = tuple(tuple(map(float, row)) for row in curves)  # type: ignore[arg-type]
        object.__setattr__(self, "values", rows[0] if shared else rows)
        for row in rows:
            if len(self.z) != len(row) or len(row) < 2:
                raise ValueError(
                    "a table needs as many values as z, and at least 2, "
                    f"got {len(row)} values and {len(self.z)} z."
                )
        if not all(map(math.isfinite, [*self.z, *(value for row in rows for value in row)])):
            raise ValueError("a table needs finite numbers, got NaN or infinity; leave them out.")
        for low, high in zip(self.z, self.z[1:], strict=False):
            if not low < high:
                raise ValueError(
                    f"z of a table must increase, got {low:g} and then {high:g}; sort the points, "
                    "and average those measured at the same z."
                )
        if self.lower == self.upper:
            raise ValueError(f"values of a table must differ, got {self.lower:g} for all of them.")

    @property
    def measured(self) -> bool:  # type: ignore[override]
        return self.noise > 0

    def displacement(self, z: Tensor, x: Tensor) -> Tensor:
        return noisy_displacement(z, x, torch.as_tensor(self.noise), self.dim)

    @cached_property
    def _rows(self) -> Array:
        """Values, one row per unit."""
        return np.atleast_2d(np.asarray(self.values, dtype=np.float64))

    # Arrays and not tensors: what is made while torch traces a module must not be kept.
    @cached_property
    def _slopes(self) -> Array:
        slopes: Array = np.diff(self._rows) / np.diff(self.z)
        return slopes

    @cached_property
    def _areas(self) -> Array:
        """The area up to every knot."""
        panels = np.diff(self.z) * (self._rows[:, 1:] + self._rows[:, :-1]) / 2
        return np.pad(panels.cumsum(1), ((0, 0), (1, 0)))

    @property
    def lipschitz(self) -> float:
        return float(np.abs(self._slopes).max())

    @property
    def slope_bound(self) -> float:  # type: ignore[override]
        return max(0.0, -float(self._slopes.min()))

    @property
    def lower(self) -> float:
        return float(self._rows.min())

    @property
    def upper(self) -> float:
        return float(self._rows.max())

    @property
    def kinks(self) -> Numbers | None:
        return self.z if len(self._rows) == 1 else None

    def phi(self, z: Tensor) -> Tensor:
        return self._by_unit(_interpolated, z)

    def primitive(self, z: Tensor) -> Tensor:
        return self._by_unit(_area, double(z)).to(z.dtype)

    def conjugate(self, x: Tensor) -> Tensor:
        if self.slope_bound > 0:
            raise ValueError(
                "a table that is not monotone has no conjugate; use that of its monotone part, "
                "lpom.activations.split(activation)[1]."
            )
        inside, outside = self._within(x)
        wide = double(inside)
        return infinite(outside, self._by_unit(_conjugate, wide).to(x.dtype))

    def _within(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inside = self._by_unit(lambda x, _, values, *__: x.clamp(values[:, :1], values[:, -1:]), x)
        return inside, (inside - x).abs() > 0

    def _by_unit(self, function: Callable[..., Tensor], z: Tensor) -> Tensor:
        """``function`` of z as one row per unit, knots, values, slopes and areas."""
        curves = np.asarray(self.z), self._rows, self._slopes, self._areas
        tables = [torch.as_tensor(each, dtype=z.dtype, device=z.device) for each in curves]
        units = len(self._rows)
        if units == 1:
            return function(z.reshape(1, -1), *tables).reshape(z.shape)
        if z.ndim < max(-self.dim, self.dim + 1) or z.shape[self.dim] != units:
            raise ValueError(
                f"a table of {units} units needs an input with as many along dimension "
                f"{self.dim}, got one of shape {tuple(z.shape)}."
            )
        moved = z.movedim(self.dim, 0)
        return function(moved.reshape(units, -1), *tables).reshape(moved.shape).movedim(0, self.dim)


def from_table(z: Any, values: Any, *, noise: float = 0.0, dim: int = -1) -> Activation:
    """An activation from measured values, monotone or not.

    Between the points it is linear, beyond the first and the last it stays constant: nothing was
    measured there. Unlike a function of your own it is saved with the network, as data.

    Parameters
    ----------
    z : numbers
        The inputs, increasing; a list, an array or a tensor.
    values : numbers
        What came out at each, or one list of that for every unit.
    noise : float
        Standard deviation of a reading.
    dim : int
        The dimension of the input along which units differ.

    Examples
    --------
    >>> import torch
    >>> from_table([-1, 0, 2], [0, 0.5, 1]).phi(torch.tensor([-3.0, -0.5, 1.0, 9.0]))
    tensor([0.0000, 0.2500, 0.7500, 1.0000])
    >>> from_table([0, 1], [[0, 1], [3, 1]]).phi(torch.tensor([[0.5, 0.5]]))
    tensor([[0.5000, 2.0000]])
    """
    return Table(_listed("z", z), _listed("values", values), noise, dim)


def noisy_displacement(z: Tensor, x: Tensor, noise: Tensor, dim: int) -> Tensor:
    r""":math:`s_z (4 \sigma / s_x)^{1/3}`, at least 0.01 and at most 1.5 in units of z's spread.

    There the noise of a difference and its bias together are least, see `measured`. It is never
    above 1.5 in the units of the function's own argument.
    """
    units = z.shape[dim] if noise.numel() > 1 else 1
    rows = x.movedim(dim, -1).reshape(-1, units)
    share = 4 * noise.to(x) / rows.std(0, correction=0).clamp(min=1e-30)
    size = share.pow(1 / 3).clamp(0.01, 1.5) * bounded_spread(z)
    return size if units == 1 else size.reshape(-1, *[1] * (z.ndim - 1 - dim % z.ndim))


def bounded_spread(z: Tensor) -> Tensor:
    """The standard deviation of all of z, at most 1; 1 where there is none."""
    return z.std().clamp(1e-6, 1) if z.numel() > 1 else torch.ones_like(z).squeeze()


def _listed(name: str, numbers: Any) -> tuple[Any, ...]:
    if isinstance(numbers, Tensor | np.ndarray):
        numbers = numbers.tolist()
    if not isinstance(numbers, list | tuple):
        raise TypeError(
            f"{name} of from_table must be a list, an array or a tensor of numbers, got "
            f"{type(numbers).__name__}."
        )
    return tuple(_listed(name, each) if not _is_number(each) else each for each in numbers)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number)


def _interpolated(
    z: Tensor, knots: Tensor, values: Tensor, slopes: Tensor, areas: Tensor
) -> Tensor:
    k, u = _piece(knots, z)
    start, stop = values.gather(1, k), values.gather(1, k + 1)
    line = start + slopes.gather(1, k) * u
    # rounding must not leave the piece's range
    return torch.clamp(line, torch.minimum(start, stop), torch.maximum(start, stop))


def _area(z: Tensor, knots: Tensor, values: Tensor, slopes: Tensor, areas: Tensor) -> Tensor:
    k, u = _piece(knots, z)
    area = areas.gather(1, k) + values.gather(1, k) * u + slopes.gather(1, k) / 2 * u**2
    below, above = torch.relu(knots[0] - z), torch.relu(z - knots[-1])
    return area - values[:, :1] * below + values[:, -1:] * above


def _conjugate(x: Tensor, knots: Tensor, values: Tensor, slopes: Tensor, areas: Tensor) -> Tensor:
    at = x.detach().contiguous()
    k = (torch.searchsorted(values, at) - 1).clamp(0, len(knots) - 2)
    slope = slopes.gather(1, k)
    climb = torch.where(slope > 0, (at - values.gather(1, k)) / slope, 0)
    p = knots[k] + climb
    return x * p - _area(p, knots, values, slopes, areas)


def _piece(knots: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """The piece that holds ``z``, by the number of its left knot, and how far into it z lies."""
    inner = z.clamp(knots[0], knots[-1])
    if torch.compiler.is_exporting():  # ONNX has no search
        right = (inner[..., None] >= knots).sum(-1)
    else:
        right = torch.searchsorted(knots, inner.detach().contiguous(), right=True)
    k = (right - 1).clamp(0, len(knots) - 2)
    return k, inner - knots[k]


# Curves from scattered readings: isotonic where they are monotone, smooth where not


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
