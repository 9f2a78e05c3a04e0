"""Sigmoid, tanh, ELU and softplus."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from numpy.polynomial.legendre import leggauss
from torch import Tensor, nn
from torch.special import xlog1py

from lpom.activations.base import Activation, infinite, positive


@final
@dataclass(frozen=True)
class Sigmoid(Activation):
    r"""Logistic function :math:`1 / (1 + e^{-z})`; its primitive is :math:`\log(1 + e^z)`."""

    name = "sigmoid"
    lipschitz = 0.25
    lower = 0.0
    upper = 1.0

    def phi(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z)

    def primitive(self, z: Tensor) -> Tensor:
        return -F.logsigmoid(-z)

    def conjugate(self, x: Tensor) -> Tensor:
        x, outside = self._within(x)
        return infinite(outside, torch.xlogy(x, x) + xlog1py(1 - x, -x))

    def gap(self, x: Tensor, z: Tensor) -> Tensor:
        # log(1 + e^z) - x z, without the two large terms that cancel where phi saturates.
        size = _size(z)
        miss = torch.where(z > 0, 1 - x, x) * size - F.logsigmoid(size)
        return _infinite_first(self.conjugate(x), miss)

    def to_module(self) -> nn.Module:
        return nn.Sigmoid()


@final
@dataclass(frozen=True)
class Tanh(Activation):
    r"""Hyperbolic tangent; its primitive is :math:`\log \cosh z`."""

    name = "tanh"
    lipschitz = 1.0
    lower = -1.0
    upper = 1.0

    def phi(self, z: Tensor) -> Tensor:
        return torch.tanh(z)

    def primitive(self, z: Tensor) -> Tensor:
        size = _size(z)
        return size + (torch.log1p(torch.exp(-2 * size)) - math.log(2))

    def conjugate(self, x: Tensor) -> Tensor:
        x, outside = self._within(x)
        return infinite(outside, (xlog1py(1 + x, x) + xlog1py(1 - x, -x)) / 2)

    def gap(self, x: Tensor, z: Tensor) -> Tensor:
        # log cosh z - x z, arranged as for the sigmoid.
        size = _size(z)
        miss = torch.where(z > 0, 1 - x, 1 + x) * size
        tail = torch.log1p(torch.exp(-2 * size)) - math.log(2)
        return _infinite_first(self.conjugate(x), miss + tail)

    def to_module(self) -> nn.Module:
        return nn.Tanh()


@final
@dataclass(frozen=True)
class ELU(Activation):
    r"""Exponential linear unit: :math:`z` for :math:`z \ge 0`, else :math:`\alpha (e^z - 1)`."""

    alpha: float = 1.0

    name = "elu"
    upper = math.inf

    def __post_init__(self) -> None:
        positive(self.alpha, "alpha of elu")

    @property
    def lipschitz(self) -> float:
        return max(1.0, self.alpha)

    @property
    def lower(self) -> float:
        return -self.alpha

    def phi(self, z: Tensor) -> Tensor:
        return F.elu(z, self.alpha)

    def primitive(self, z: Tensor) -> Tensor:
        return z.relu() ** 2 / 2 + self._left_primitive(z.clamp(max=0))

    def conjugate(self, x: Tensor) -> Tensor:
        x, outside = self._within(x)
        return infinite(outside, x.relu() ** 2 / 2 + self._left_conjugate(x.clamp(max=0)))

    def gap(self, x: Tensor, z: Tensor) -> Tensor:
        # Split by sign, so that no two large terms cancel in float32.
        x, outside = self._within(x)
        right, up = z.clamp(min=0), x.clamp(min=0)
        left, down = z - right, x - up
        above = (up - right) ** 2 / 2 - up * left + self._left_primitive(left)
        below = right**2 / 2 - down * right + self._left_conjugate(down)
        below = below + self.alpha * torch.expm1(left) - (self.alpha + down) * left
        return infinite(outside, torch.where(x >= 0, above, below))

    def _left_primitive(self, z: Tensor) -> Tensor:
        return self.alpha * (torch.expm1(z) - z)

    def _left_conjugate(self, x: Tensor) -> Tensor:
        ratio = (x / self.alpha).clamp(min=-1)
        entropy: Tensor = xlog1py(1 + ratio, ratio)
        return self.alpha * entropy - x

    def to_module(self) -> nn.Module:
        return nn.ELU(self.alpha)


@final
@dataclass(frozen=True)
class Softplus(Activation):
    r""":math:`\log(1 + e^{\beta z}) / \beta`, a smooth ReLU.

    For :math:`\beta = 1` the primitive is a dilogarithm, :math:`-\mathrm{Li}_2(-e^z)`, with

    .. math:: \Phi(z) + \Phi(-z) = z^2 / 2 + \pi^2 / 6,

    so that only :math:`z \le 0` is integrated numerically. Other :math:`\beta` follow from
    :math:`\Phi_\beta(z) = \Phi(\beta z) / \beta^2`. As in ``nn.Softplus``, :math:`\phi` is
    exactly linear above :math:`\beta z = 20`, where it differs by less than 3e-9.
    """

    beta: float = 1.0

    name = "softplus"
    lipschitz = 1.0
    lower = 0.0
    upper = math.inf

    def __post_init__(self) -> None:
        positive(self.beta, "beta of softplus")

    def phi(self, z: Tensor) -> Tensor:
        return F.softplus(z, self.beta)

    def primitive(self, z: Tensor) -> Tensor:
        z = self.beta * z
        tail = _dilogarithm(z)
        return torch.where(z > 0, z**2 / 2 + (math.pi**2 / 6 - tail), tail) / self.beta**2

    def conjugate(self, x: Tensor) -> Tensor:
        x, outside = self._within(x)
        x, p, excess = self._preimage(x)
        tail = _dilogarithm(p)
        right = (x**2 - excess**2) / 2 - (math.pi**2 / 6 - tail)
        return infinite(outside, torch.where(p > 0, right, x * p - tail) / self.beta**2)

    def gap(self, x: Tensor, z: Tensor) -> Tensor:
        # Where both sides are nearly quadratic, subtract the squares before they grow.
        outer = super().gap(x, z)
        _, p, excess = self._preimage(x.clamp(min=0))
        rest = _dilogarithm(p) - _dilogarithm(self.beta * z) - excess**2 / 2
        inner = (x - z) ** 2 / 2 + rest / self.beta**2
        return torch.where((p > 0) & (z > 0), inner, outer)

    def _preimage(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``x`` and ``p`` with ``phi(p) = x`` in units where beta is 1, and ``x - p``."""
        x = self.beta * x
        tiny = torch.finfo(x.dtype).tiny  # keeps the logarithm finite at x = 0
        excess = -torch.log(-torch.expm1(-x.clamp(min=tiny)))
        return x, x - excess, excess

    def to_module(self) -> nn.Module:
        return nn.Softplus(self.beta)


def _size(z: Tensor) -> Tensor:
    """``abs(z)`` with slope -1 at 0, so that autograd gets the sum with an odd term right."""
    return torch.where(z > 0, z, -z)


def _infinite_first(conjugate: Tensor, rest: Tensor) -> Tensor:
    """Their sum, where an infinite conjugate wins over whatever the rest overflows to."""
    return torch.where(torch.isinf(conjugate), conjugate, conjugate + rest)


_NODES = [((1 + float(t)) / 2, float(w) / 2) for t, w in zip(*leggauss(14), strict=True)]


def _dilogarithm(z: Tensor) -> Tensor:
    r""":math:`-\mathrm{Li}_2(-q) = \int_0^1 \log(1 + q t) / t \, dt` at :math:`q = e^{-|z|}`."""
    q = torch.exp(-_size(z))
    total = torch.zeros_like(q)
    for t, weight in _NODES:
        total = total + (weight / t) * torch.log1p(q * t)
    return total
