"""Monotone elementwise functions without jumps: clipped lines and smooth ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.special import xlog1py

from lpom.activations.base import Activation, double, infinite
from lpom.activations.numerical import gauss_legendre


class Clipped(Activation):
    r"""A line :math:`s z + b` cut at ``lower`` and ``upper``.

    Its conjugate is :math:`x (x / 2 - b) / s` between them.
    """

    slope = 1.0
    offset = 0.0

    @property
    def lipschitz(self) -> float:
        return self.slope

    @property
    def kinks(self) -> tuple[float, ...]:
        return tuple(end for end in self._ends if math.isfinite(end))

    @property
    def _ends(self) -> tuple[float, float]:
        """Where the line is cut, in units of z."""
        return (self.lower - self.offset) / self.slope, (self.upper - self.offset) / self.slope

    def conjugate(self, x: Tensor) -> Tensor:
        x, outside = self._within(x)
        return infinite(outside, x * (x / 2 - self.offset) / self.slope)

    def response(self, z: Tensor, pull: Tensor) -> Tensor:
        # phi is a projection: what part of the pull it lets through, without a difference
        low, high = self._ends
        inside = z.clamp(low, high)
        answer = torch.clamp(pull - (z - inside), min=inside - high, max=inside - low)
        return answer if self.slope == 1 else self.slope * answer


@final
@dataclass(frozen=True)
class Identity(Clipped):
    """No activation at all."""

    name, module, formula = "identity", nn.Identity, "z"
    lower, upper = -math.inf, math.inf

    def phi(self, z: Tensor) -> Tensor:
        return z


@final
@dataclass(frozen=True)
class ReLU(Clipped):
    r"""Rectifier :math:`\max(z, 0)`."""

    name, module, formula = "relu", nn.ReLU, "max(z, 0)"
    lower, upper = 0.0, math.inf

    def phi(self, z: Tensor) -> Tensor:
        return torch.relu(z)

    def response(self, z: Tensor, pull: Tensor) -> Tensor:
        return torch.minimum(z, pull) - z.clamp(max=0)


@final
@dataclass(frozen=True)
class Clamp(Clipped):
    """``z`` cut at ``min`` and at ``max``; None leaves that side open."""

    min: float | None = 0.0
    max: float | None = None

    name, formula = "clamp", "z, at least min and at most max"

    def __post_init__(self) -> None:
        if math.isnan(self.lower + self.upper) or not self.lower < self.upper:
            raise ValueError(f"clamp needs min < max or None, got {self.min!r} and {self.max!r}.")

    @property
    def lower(self) -> float:
        return -math.inf if self.min is None else self.min

    @property
    def upper(self) -> float:
        return math.inf if self.max is None else self.max

    def phi(self, z: Tensor) -> Tensor:
        return z.clamp(self.lower, self.upper)


@final
@dataclass(frozen=True)
class Hardtanh(Clipped):
    """``z`` clipped to ``[min_val, max_val]``."""

    min_val: float = -1.0
    max_val: float = 1.0

    name, module, formula = "hardtanh", nn.Hardtanh, "z clipped to its range"

    def __post_init__(self) -> None:
        if not -math.inf < self.min_val < self.max_val < math.inf:
            raise ValueError(
                f"hardtanh needs finite min_val < max_val, got {self.min_val!r}, {self.max_val!r}."
            )

    @property
    def lower(self) -> float:
        return self.min_val

    @property
    def upper(self) -> float:
        return self.max_val

    def phi(self, z: Tensor) -> Tensor:
        return F.hardtanh(z, self.min_val, self.max_val)


@final
@dataclass(frozen=True)
class Hardsigmoid(Clipped):
    """``z / 6 + 1 / 2`` clipped to ``[0, 1]``."""

    name, module, formula = "hardsigmoid", nn.Hardsigmoid, "z / 6 + 1 / 2 clipped to its range"
    slope = 1 / 6
    offset = 0.5
    lower, upper = 0.0, 1.0
    _ends = (-3.0, 3.0)

    def phi(self, z: Tensor) -> Tensor:
        return F.hardsigmoid(z)


@final
@dataclass(frozen=True)
class ReLU6(Clipped):
    """``z`` clipped to ``[0, 6]``."""

    name, module, formula = "relu6", nn.ReLU6, "z clipped to its range"
    lower, upper = 0.0, 6.0

    def phi(self, z: Tensor) -> Tensor:
        return F.relu6(z)


@final
@dataclass(frozen=True)
class LeakyReLU(Activation):
    r""":math:`z` for :math:`z \ge 0`, else :math:`s z` with a slope :math:`0 < s \le 1`."""

    negative_slope: float = 0.01

    name, module, formula = "leaky_relu", nn.LeakyReLU, "z if z > 0, else slope z"
    kinks = (0.0,)
    lipschitz, lower, upper = 1.0, -math.inf, math.inf

    def __post_init__(self) -> None:
        if not 0 < self.negative_slope <= 1:
            raise ValueError(
                "negative_slope of leaky_relu must lie in (0, 1], "
                f"got {self.negative_slope!r}; for 0 use 'relu'."
            )

    def phi(self, z: Tensor) -> Tensor:
        return F.leaky_relu(z, self.negative_slope)

    def conjugate(self, x: Tensor) -> Tensor:
        return torch.where(x >= 0, x**2 / 2, x**2 / (2 * self.negative_slope))

    def response(self, z: Tensor, pull: Tensor) -> Tensor:
        above = torch.minimum(z, pull) - z.clamp(max=0)
        return self.negative_slope * pull + (1 - self.negative_slope) * above


@final
@dataclass(frozen=True)
class Softshrink(Activation):
    r"""``z`` moved towards 0 by ``lambd``, and 0 where that would pass it.

    The proximal operator of :math:`\lambda |x|`, so :math:`\Phi^*(x) = x^2 / 2 + \lambda |x|`.
    """

    lambd: float = 0.5

    name, module, formula = "softshrink", nn.Softshrink, "z moved towards 0 by lambd, at most to 0"
    lipschitz, lower, upper = 1.0, -math.inf, math.inf

    @property
    def kinks(self) -> tuple[float, ...]:
        return (-self.lambd, self.lambd)

    def phi(self, z: Tensor) -> Tensor:
        return F.softshrink(z, self.lambd)

    def conjugate(self, x: Tensor) -> Tensor:
        return x**2 / 2 + self.lambd * x.abs()


@final
@dataclass(frozen=True)
class Sigmoid(Activation):
    r"""Logistic function :math:`1 / (1 + e^{-z})`; its primitive is :math:`\log(1 + e^z)`."""

    name, module, formula = "sigmoid", nn.Sigmoid, "1 / (1 + exp(-z))"
    lipschitz, lower, upper = 0.25, 0.0, 1.0

    def phi(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z)

    def primitive(self, z: Tensor) -> Tensor:
        return -F.logsigmoid(-z)

    def conjugate(self, x: Tensor) -> Tensor:
        x, outside = self._within(x)
        return infinite(outside, torch.xlogy(x, x) + xlog1py(1 - x, -x))


@final
@dataclass(frozen=True)
class Tanh(Activation):
    r"""Hyperbolic tangent; its primitive is :math:`\log \cosh z`."""

    name, module, formula = "tanh", nn.Tanh, "tanh(z)"
    lipschitz, lower, upper = 1.0, -1.0, 1.0

    def phi(self, z: Tensor) -> Tensor:
        return torch.tanh(z)

    def primitive(self, z: Tensor) -> Tensor:
        size = _size(z)
        return size + (torch.log1p(torch.exp(-2 * size)) - math.log(2))

    def conjugate(self, x: Tensor) -> Tensor:
        x, outside = self._within(x)
        return infinite(outside, (xlog1py(1 + x, x) + xlog1py(1 - x, -x)) / 2)


@final
@dataclass(frozen=True)
class Softsign(Activation):
    r""":math:`z / (1 + |z|)`.

    The conjugate :math:`-|x| - \log(1 - |x|)` is infinite at the ends of the range, which
    :math:`\phi` reaches by rounding alone: they count as the number next to them.
    """

    name, module, formula = "softsign", nn.Softsign, "z / (1 + |z|)"
    lipschitz, lower, upper = 1.0, -1.0, 1.0

    def phi(self, z: Tensor) -> Tensor:
        return F.softsign(z)

    def conjugate(self, x: Tensor) -> Tensor:
        x, outside = self._within(x)
        size = _size(x)
        return infinite(outside, -size - torch.log1p(-size))

    def _within(self, x: Tensor) -> tuple[Tensor, Tensor]:
        most = 1 - torch.finfo(x.dtype).eps / 2  # the largest number below 1
        return x.clamp(-most, most), x.abs() > 1


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

    name, module, formula = "softplus", nn.Softplus, "log(1 + exp(beta z)) / beta"
    lipschitz, lower, upper = 1.0, 0.0, math.inf

    def phi(self, z: Tensor) -> Tensor:
        return F.softplus(z, self.beta)

    def primitive(self, z: Tensor) -> Tensor:
        return _softplus_area(self.beta * z) / self.beta**2

    def conjugate(self, x: Tensor) -> Tensor:
        inside, outside = self._within(x)
        wide = self.beta * double(inside)
        p = wide + torch.log(-torch.expm1(-wide.clamp(min=1e-307)))  # phi(p) = x
        conjugate = (wide * p - _softplus_area(p)) / self.beta**2
        return infinite(outside, conjugate.to(x.dtype))


@final
@dataclass(frozen=True)
class LogSigmoid(Activation):
    r""":math:`\log(1 / (1 + e^{-z}))`, a softplus turned by half a circle: :math:`-\phi(-z)`."""

    name, module, formula = "logsigmoid", nn.LogSigmoid, "-log(1 + exp(-z))"
    lipschitz, lower, upper = 1.0, -math.inf, 0.0

    def phi(self, z: Tensor) -> Tensor:
        return F.logsigmoid(z)

    def primitive(self, z: Tensor) -> Tensor:
        return _softplus_area(-z)

    def conjugate(self, x: Tensor) -> Tensor:
        return Softplus().conjugate(-x)


class _Exponential(Activation):
    r""":math:`s z` for :math:`z \ge 0`, else :math:`a (e^{z / c} - 1)`, all three above 0.

    With :math:`r = x / a` for :math:`x < 0`,
    :math:`\Phi^*(x) = a c (1 + r) \log(1 + r) - c x`.
    """

    alpha: float
    scale = decay = 1.0
    upper = math.inf

    @property
    def lipschitz(self) -> float:
        return max(self.scale, -self.lower / self.decay)

    @property
    def lower(self) -> float:
        return -self.scale * self.alpha

    def primitive(self, z: Tensor) -> Tensor:
        left = z.clamp(max=0)
        area = self.lower * (left - self.decay * torch.expm1(left / self.decay))
        return self.scale / 2 * z.relu() ** 2 + area

    def conjugate(self, x: Tensor) -> Tensor:
        x, outside = self._within(x)
        left = x.clamp(max=0)
        ratio = (-left / self.lower).clamp(min=-1)
        entropy: Tensor = -self.lower * xlog1py(1 + ratio, ratio)
        return infinite(outside, x.relu() ** 2 / (2 * self.scale) + self.decay * (entropy - left))


@final
@dataclass(frozen=True)
class ELU(_Exponential):
    r"""Exponential linear unit: :math:`z` for :math:`z \ge 0`, else :math:`\alpha (e^z - 1)`."""

    alpha: float = 1.0

    name, module, formula = "elu", nn.ELU, "z if z > 0, else alpha (exp(z) - 1)"

    def phi(self, z: Tensor) -> Tensor:
        return F.elu(z, self.alpha)


@final
@dataclass(frozen=True)
class CELU(_Exponential):
    r"""ELU with slope 1 on both sides of 0: :math:`\alpha (e^{z / \alpha} - 1)` to the left."""

    alpha: float = 1.0

    name, module, formula = "celu", nn.CELU, "z if z > 0, else alpha (exp(z / alpha) - 1)"

    @property
    def decay(self) -> float:  # type: ignore[override]
        return self.alpha

    def phi(self, z: Tensor) -> Tensor:
        return F.celu(z, self.alpha)


@final
@dataclass(frozen=True)
class SELU(_Exponential):
    """ELU scaled by the two constants of self-normalising networks, as in ``nn.SELU``."""

    name, module, formula = "selu", nn.SELU, "1.0507 z if z > 0, else 1.7581 (exp(z) - 1)"

    alpha = 1.6732632423543772848170429916717
    scale = 1.0507009873554804934193349852946

    def phi(self, z: Tensor) -> Tensor:
        return F.selu(z)


def _size(z: Tensor) -> Tensor:
    """``abs(z)`` with slope -1 at 0, so that autograd gets the sum with an odd term right."""
    return torch.where(z > 0, z, -z)


_NODES = gauss_legendre(14)


def _softplus_area(z: Tensor) -> Tensor:
    r""":math:`-\mathrm{Li}_2(-e^z)`; by quadrature of :math:`\log(1 + q t) / t`, q = e^{-|z|}."""
    q = torch.exp(-_size(z))
    tail = torch.zeros_like(q)
    for t, weight in _NODES:
        tail = tail + (weight / t) * torch.log1p(q * t)
    return torch.where(z > 0, z**2 / 2 + (math.pi**2 / 6 - tail), tail)
