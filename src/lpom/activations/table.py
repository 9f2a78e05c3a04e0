"""An activation known by a table of measured values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from lpom.activations.base import Activation, infinite


@final
@dataclass(frozen=True)
class Table(Activation):
    r"""Straight lines between the points ``(z[k], values[k])``, constant beyond the ends.

    Primitive and conjugate are exact: with :math:`A_k` the area up to :math:`z_k` and
    :math:`u = z - z_k`, :math:`\Phi(z) = A_k + v_k u + s_k u^2 / 2` on a piece of slope
    :math:`s_k`, and :math:`\Phi^*(x) = x p - \Phi(p)` at any :math:`p` with
    :math:`\phi(p) = x`. Both, and the gap, are computed in float64 and rounded at the end.
    """

    z: tuple[float, ...]
    values: tuple[float, ...]

    name = "table"
    formula = "lines between measured values"

    def __post_init__(self) -> None:
        for field in ("z", "values"):
            object.__setattr__(self, field, tuple(map(float, getattr(self, field))))
        if len(self.z) != len(self.values) or len(self.z) < 2:
            raise ValueError(
                "a table needs as many values as z, and at least 2, "
                f"got {len(self.values)} values and {len(self.z)} z."
            )
        if not all(map(math.isfinite, self.z + self.values)):
            raise ValueError("a table needs finite numbers, got NaN or infinity; leave them out.")
        for k, (low, high) in enumerate(itertools.pairwise(self.z)):
            if not low < high:
                raise ValueError(
                    f"z of a table must increase, got {low:g} and then {high:g}; sort the points, "
                    "and average those measured at the same z."
                )
            if self.values[k] > self.values[k + 1]:
                raise ValueError(
                    f"values of a table must not decrease, got {self.values[k]:g} at z = {low:g} "
                    f"and {self.values[k + 1]:g} at z = {high:g}; smooth the noise away first, "
                    "for example by isotonic regression."
                )
        if self.lower == self.upper:
            raise ValueError(f"values of a table must differ, got {self.lower:g} for all of them.")

    @property
    def lipschitz(self) -> float:
        return max(self._slopes)

    @property
    def lower(self) -> float:
        return self.values[0]

    @property
    def upper(self) -> float:
        return self.values[-1]

    @property
    def kinks(self) -> tuple[float, ...]:
        return self.z

    def phi(self, z: Tensor) -> Tensor:
        knots, values, slopes = _tensors(z, self.z, self.values, self._slopes)
        z = z.clamp(self.z[0], self.z[-1])
        k = _piece(knots, z)
        x = values[k] + slopes[k] * (z - knots[k])
        return torch.minimum(x, values[k + 1])  # rounding must not leave the range

    def primitive(self, z: Tensor) -> Tensor:
        return self._area(z.double()).to(z.dtype)

    def conjugate(self, x: Tensor) -> Tensor:
        return self._conjugate(x).to(x.dtype)

    def gap(self, x: Tensor, z: Tensor) -> Tensor:
        # In float64, where nothing is lost by the subtraction.
        wide = z.double()
        gap = self._conjugate(x) + self._area(wide) - x.double() * wide
        return gap.to(x.dtype)

    # Numbers and not tensors: what is made while torch traces a module must not be kept.
    @cached_property
    def _pieces(self) -> list[tuple[tuple[float, float], tuple[float, float]]]:
        """Ends and values of every piece."""
        ends, values = itertools.pairwise(self.z), itertools.pairwise(self.values)
        return list(zip(ends, values, strict=True))

    @cached_property
    def _slopes(self) -> tuple[float, ...]:
        return tuple((top - bottom) / (end - start) for (start, end), (bottom, top) in self._pieces)

    @cached_property
    def _areas(self) -> tuple[float, ...]:
        """The area up to every knot."""
        areas = [(end - start) * (bottom + top) / 2 for (start, end), (bottom, top) in self._pieces]
        return tuple(itertools.accumulate(areas, initial=0.0))

    def _area(self, z: Tensor) -> Tensor:
        knots, values, slopes, areas = _tensors(z, self.z, self.values, self._slopes, self._areas)
        inner = z.clamp(self.z[0], self.z[-1])
        k = _piece(knots, inner)
        u = inner - knots[k]
        area = areas[k] + values[k] * u + slopes[k] / 2 * u**2
        below, above = torch.relu(self.z[0] - z), torch.relu(z - self.z[-1])
        return area - self.lower * below + self.upper * above

    def _conjugate(self, x: Tensor) -> Tensor:
        x, outside = self._within(x)
        x = x.double()
        knots, values, slopes = _tensors(x, self.z, self.values, self._slopes)
        k = (torch.searchsorted(values, x.detach().contiguous()) - 1).clamp(0, len(slopes) - 1)
        climb = torch.where(slopes[k] > 0, (x.detach() - values[k]) / slopes[k], 0)
        p = knots[k] + climb
        return infinite(outside, x * p - self._area(p))


def from_table(z: Iterable[float], values: Iterable[float]) -> Activation:
    """An activation from measured values that never decrease.

    Between the points it is linear, beyond the first and the last it stays constant: nothing was
    measured there. Unlike a function of one's own it is saved with the network, as data.

    Parameters
    ----------
    z, values : numbers
        The inputs, increasing, and what came out at each; a list, an array or a tensor.

    Examples
    --------
    >>> import torch
    >>> from_table([-1, 0, 2], [0, 0.5, 1]).phi(torch.tensor([-3.0, -0.5, 1.0, 9.0]))
    tensor([0.0000, 0.2500, 0.7500, 1.0000])
    """
    return Table(_listed("z", z), _listed("values", values))


def _listed(name: str, numbers: Any) -> tuple[Any, ...]:
    if isinstance(numbers, Tensor | np.ndarray):
        numbers = numbers.tolist()
    if not isinstance(numbers, list | tuple):
        raise TypeError(
            f"{name} of from_table must be a list, an array or a tensor of numbers, got "
            f"{type(numbers).__name__}."
        )
    return tuple(numbers)


def _tensors(like: Tensor, *numbers: tuple[float, ...]) -> list[Tensor]:
    return [torch.tensor(each, dtype=like.dtype, device=like.device) for each in numbers]


def _piece(knots: Tensor, z: Tensor) -> Tensor:
    """The piece that holds ``z``, by the number of its left knot."""
    right = torch.searchsorted(knots, z.detach().contiguous(), right=True)
    return (right - 1).clamp(0, len(knots) - 2)
