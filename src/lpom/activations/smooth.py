"""Sigmoid, tanh, softsign, softplus and log-sigmoid."""

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
    formula = "1 / (1 + exp(-z))"
    lipschitz = 0.25
    lower = 0.0
    upper = 1.0

    def phi(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z)

    def response(
        self,
        z: Tensor,
        pull: Tensor,
        out: Tensor | None = None,
        said: Tensor | None = None,
        spare: Tensor | None = None,
    ) -> Tensor:
        said = self.phi(z) if said is None else said
        moved = torch.sub(z, pull, out=out).sigmoid_()  # the cells of an LSTM live on this
        return torch.sub(said, moved, out=moved)

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
    formula = "tanh(z)"
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
    formula = "log(1 + exp(beta z)) / beta"
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


@final
@dataclass(frozen=True)
class LogSigmoid(Activation):
    r""":math:`\log(1 / (1 + e^{-z}))`, a softplus turned by half a circle: :math:`-\phi(-z)`."""

    name = "logsigmoid"
    formula = "-log(1 + exp(-z))"
    lipschitz = 1.0
    lower = -math.inf
    upper = 0.0

    def phi(self, z: Tensor) -> Tensor:
        return F.logsigmoid(z)

    def primitive(self, z: Tensor) -> Tensor:
        return Softplus().primitive(-z)

    def conjugate(self, x: Tensor) -> Tensor:
        return Softplus().conjugate(-x)

    def gap(self, x: Tensor, z: Tensor) -> Tensor:
        return Softplus().gap(-x, -z)

    def to_module(self) -> nn.Module:
        return nn.LogSigmoid()


@final
@dataclass(frozen=True)
class Softsign(Activation):
    r""":math:`z / (1 + |z|)`; its primitive is :math:`|z| - \log(1 + |z|)`.

    The conjugate :math:`-|x| - \log(1 - |x|)` is infinite at the ends of the range, which
    :math:`\phi` reaches by rounding alone: they count as the number next to them.
    """

    name = "softsign"
    formula = "z / (1 + |z|)"
    lipschitz = 1.0
    lower = -1.0
    upper = 1.0

    def phi(self, z: Tensor) -> Tensor:
        return F.softsign(z)

    def primitive(self, z: Tensor) -> Tensor:
        size = _size(z)
        return size - torch.log1p(size)

    def conjugate(self, x: Tensor) -> Tensor:
        x, outside = self._within(x)
        size = self._inner(x)
        return infinite(outside, -size - torch.log1p(-size))

    def gap(self, x: Tensor, z: Tensor) -> Tensor:
        # q - 1 - log q with q = (1 - |x|) (1 + |z|), and 2 |x z| more where the signs differ.
        x, outside = self._within(x)
        a, b = self._inner(x), _size(z)
        differ = torch.where(z > 0, x <= 0, x > 0)
        total = b - a * (1 + b) - torch.log1p(-a) - torch.log1p(b)
        return infinite(outside, total + torch.where(differ, 2 * a * b, 0))

    def _inner(self, x: Tensor) -> Tensor:
        """``abs(x)``, at most the largest number below 1."""
        return _size(x).clamp(max=1 - torch.finfo(x.dtype).eps / 2)

    def to_module(self) -> nn.Module:
        return nn.Softsign()


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
