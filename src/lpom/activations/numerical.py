"""Primitive and conjugate by numbers alone; functions that turn back, and their split."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import torch
import torch.nn.functional as F
from numpy.polynomial.legendre import leggauss
from torch import Tensor, nn

from lpom.activations.base import Activation, double, infinite

Function = Callable[[Tensor], Tensor]


def gauss_legendre(order: int) -> list[tuple[float, float]]:
    """Nodes and weights of the quadrature on [0, 1]."""
    return [((1 + float(t)) / 2, float(w) / 2) for t, w in zip(*leggauss(order), strict=True)]


_NODES = gauss_legendre(8)


class Numerical(Activation):
    r"""An elementwise function of which phi alone is known.

    The primitive is integrated from 0 by Gauss-Legendre quadrature of order 8, from stored areas
    at knots: 1/64 apart up to 16, then wider up to 1e6. The conjugate solves
    :math:`\phi(p) = x` by bisection between knots and is :math:`x p - \Phi(p)`, a lower bound
    for values that are only reached beyond the knots.
    """

    def primitive(self, z: Tensor) -> Tensor:
        wide = double(z)
        knots, areas = (table.to(wide) for table in _areas(self))
        above = torch.searchsorted(knots, wide.detach().contiguous()).clamp(max=len(knots) - 1)
        nearest = torch.where(wide > 0, above - 1, above)  # the first knot from z towards 0
        return (areas[nearest] + integral(self.phi, knots[nearest], wide)).to(z.dtype)

    def conjugate(self, x: Tensor) -> Tensor:
        if self.slope_bound > 0:
            raise ValueError(
                f"{self.name} is not monotone, so it has no conjugate; use that of its monotone "
                "part, lpom.activations.split(activation)[1]."
            )
        x, outside = self._within(x)
        wide = double(x)
        p = self._inverse(wide.detach())
        return infinite(outside, (wide * p - self.primitive(p)).to(x.dtype))

    def _inverse(self, x: Tensor) -> Tensor:
        """``p`` with ``phi(p) = x``, or the end of the knots where that is out of reach."""
        knots = _areas(self)[0].to(x)
        after = torch.searchsorted(self.phi(knots).cummax(0).values, x.contiguous())
        low = knots[(after - 1).clamp(min=0)]
        high = knots[after.clamp(max=len(knots) - 1)]
        for _ in range(60):
            middle = (low + high) / 2
            below = self.phi(middle) < x
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (low + high) / 2


@final
@dataclass(frozen=True)
class Raised(Numerical):
    r""":math:`\phi_1(z) = \phi(z) + c z`, which never decreases: the monotone part of a split."""

    activation: Activation
    slope: float

    name, formula = "raised", "phi(z) + c z"

    @property
    def elementwise(self) -> bool:  # type: ignore[override]
        return self.activation.elementwise

    @property
    def lipschitz(self) -> float:
        return self.activation.lipschitz + self.slope

    @property
    def lower(self) -> float:
        return limits(self)[0]

    @property
    def upper(self) -> float:
        return limits(self)[1]

    def phi(self, z: Tensor) -> Tensor:
        return self.activation.phi(z) + self.slope * z

    def primitive(self, z: Tensor) -> Tensor:
        return self.activation.primitive(z) + self.slope / 2 * z**2


@final
@dataclass(frozen=True)
class GELU(Numerical):
    r""":math:`z` times the normal distribution function, or its approximation by tanh."""

    approximate: str = "none"

    name, module = "gelu", nn.GELU
    formula = "z times the probability that a normal number is below z"
    upper = math.inf

    def __post_init__(self) -> None:
        if self.approximate not in ("none", "tanh"):
            raise ValueError(
                f"approximate of gelu must be 'none' or 'tanh', got {self.approximate!r}."
            )

    @property
    def slope_bound(self) -> float:  # type: ignore[override]
        return 0.1289041452 if self.approximate == "none" else 0.1289930688

    @property
    def lipschitz(self) -> float:
        return 1 + self.slope_bound

    @property
    def lower(self) -> float:
        return -0.1699712075 if self.approximate == "none" else -0.1700407506

    def phi(self, z: Tensor) -> Tensor:
        return F.gelu(z, approximate=self.approximate)


@final
@dataclass(frozen=True)
class SiLU(Numerical):
    """``z`` times its sigmoid, also called swish."""

    name, module, formula = "silu", nn.SiLU, "z / (1 + exp(-z))"
    slope_bound, lipschitz, lower, upper = 0.0998393202, 1.0998393202, -0.2784645428, math.inf

    def phi(self, z: Tensor) -> Tensor:
        return F.silu(z)


@final
@dataclass(frozen=True)
class Mish(Numerical):
    """``z`` times the tanh of its softplus."""

    name, module, formula = "mish", nn.Mish, "z tanh(log(1 + exp(z)))"
    slope_bound, lipschitz, lower, upper = 0.1125261224, 1.0884981613, -0.3088434131, math.inf

    def phi(self, z: Tensor) -> Tensor:
        return F.mish(z)


@final
@dataclass(frozen=True)
class Hardswish(Numerical):
    """``z`` times its hardsigmoid."""

    name, module, formula = "hardswish", nn.Hardswish, "z times (z + 3) / 6 clipped to [0, 1]"
    slope_bound, lipschitz, lower, upper = 0.5, 1.5, -0.375, math.inf

    def phi(self, z: Tensor) -> Tensor:
        return F.hardswish(z)


class _Wave(Numerical):
    slope_bound, lipschitz, lower, upper = 1.0, 1.0, -1.0, 1.0


@final
@dataclass(frozen=True)
class Sine(_Wave):
    """The sine, as in networks for signals and coordinates."""

    name, formula = "sine", "sin(z)"

    def phi(self, z: Tensor) -> Tensor:
        return torch.sin(z)

    def primitive(self, z: Tensor) -> Tensor:
        return -torch.cos(z)


@final
@dataclass(frozen=True)
class Cosine(_Wave):
    """The cosine."""

    name, formula = "cosine", "cos(z)"

    def phi(self, z: Tensor) -> Tensor:
        return torch.cos(z)

    def primitive(self, z: Tensor) -> Tensor:
        return torch.sin(z)


@final
@dataclass(frozen=True)
class Gaussian(Numerical):
    r"""A bump, :math:`e^{-z^2}`: a unit that answers near one value alone."""

    name, formula = "gaussian", "exp(-z^2)"
    slope_bound = lipschitz = math.sqrt(2 / math.e)
    lower, upper = 0.0, 1.0

    def phi(self, z: Tensor) -> Tensor:
        return torch.exp(-(z**2))

    def primitive(self, z: Tensor) -> Tensor:
        return math.sqrt(math.pi) / 2 * torch.erf(z)


@final
@dataclass(frozen=True)
class Absolute(Numerical):
    """The absolute value."""

    name, formula = "absolute", "|z|"
    kinks = (0.0,)
    slope_bound, lipschitz, lower, upper = 1.0, 1.0, 0.0, math.inf

    def phi(self, z: Tensor) -> Tensor:
        return z.abs()

    def primitive(self, z: Tensor) -> Tensor:
        return z * z.abs() / 2


def split(activation: Activation) -> tuple[float, Activation]:
    r"""``c, phi_1`` with :math:`\phi(z) = \phi_1(z) - c z`, :math:`\phi_1` monotone.

    A node of the graph becomes two states by it, z itself and :math:`\phi_1(z)`, and whoever
    read the value reads their difference. A monotone function is its own second part, with c = 0.

    Examples
    --------
    >>> from lpom.activations import get
    >>> split(get("sine"))
    (1.0, Raised(activation=Sine(), slope=1.0))
    """
    c = activation.slope_bound
    if c == 0:
        return 0.0, activation
    if not activation.elementwise:
        raise ValueError(
            f"{activation.name} is not monotone and works on whole slices, for which there is no "
            "split. Train with the default step, which takes any function."
        )
    return c, Raised(activation, c)


def grid() -> Tensor:
    """Points that a function is looked at on: dense between -16 and 16, sparse to 1e3."""
    near = torch.arange(1, 1025, dtype=torch.float64) / 64
    far = torch.logspace(math.log10(16), 3, 129, dtype=torch.float64)[1:]
    right = torch.cat([near, far])
    return torch.cat([-right.flip(0), torch.zeros(1, dtype=torch.float64), right])


def integral(phi: Function, start: Tensor, stop: Tensor) -> Tensor:
    """Of phi from start to stop, by Gauss-Legendre quadrature."""
    width = stop - start
    total = torch.zeros_like(width)
    for t, weight in _NODES:
        total = total + weight * phi(start + t * width)
    return width * total


@lru_cache(maxsize=64)
def limits(activation: Activation) -> tuple[float, float]:
    """Infimum and supremum of a monotone phi.

    Infinite unless its growth from 1e6 to 1e9 has all but stopped.
    """
    points = torch.tensor([1e3, 1e6, 1e9], dtype=torch.float64)
    with torch.no_grad():
        below, above = activation.phi(-points), activation.phi(points)
    if not bool(torch.isfinite(torch.cat([below, above])).all()):
        raise ValueError(f"{activation.name!r} must be finite everywhere, but is not at 1e9.")
    ends = []
    for a, b, c in ((-below).tolist(), above.tolist()):
        grows = c - b > max((b - a) / 2, 1e-9 * (1 + abs(c)))
        ends.append(math.inf if grows else c)
    return -ends[0], ends[1]


@lru_cache(maxsize=64)
def _areas(activation: Activation) -> tuple[Tensor, Tensor]:
    """Knots, and the area under phi from 0 to each."""
    far = torch.tensor([1e6], dtype=torch.float64)
    knots = torch.cat([-far, grid(), far])
    with torch.no_grad():
        panels = integral(activation.phi, knots[:-1], knots[1:])
    centre = int((knots < 0).sum())
    left, right = -panels[:centre].flip(0).cumsum(0).flip(0), panels[centre:].cumsum(0)
    return knots, torch.cat([left, torch.zeros_like(far), right])
