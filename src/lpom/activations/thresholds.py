"""Lines cut at a threshold: clamp, softshrink, and with jumps threshold and hardshrink."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpom.activations.base import Activation, check_width, infinite, positive
from lpom.activations.piecewise import ReLU


@final
@dataclass(frozen=True)
class Clamp(Activation):
    """``z`` cut at ``min`` and at ``max``; None leaves that side open.

    The projection on an interval: its conjugate is ``x**2 / 2`` there.
    """

    min: float | None = 0.0
    max: float | None = None

    name = "clamp"
    formula = "z, at least min and at most max"
    lipschitz = 1.0

    def __post_init__(self) -> None:
        if math.isnan(self.lower + self.upper) or not self.lower < self.upper:
            raise ValueError(
                f"clamp needs min < max, got min={self.min!r} and max={self.max!r}; use None for "
                "no bound."
            )

    @property
    def lower(self) -> float:
        return -math.inf if self.min is None else self.min

    @property
    def upper(self) -> float:
        return math.inf if self.max is None else self.max

    @property
    def kinks(self) -> tuple[float, ...]:
        return tuple(end for end in (self.lower, self.upper) if math.isfinite(end))

    def phi(self, z: Tensor) -> Tensor:
        return z.clamp(self.lower, self.upper)

    def primitive(self, z: Tensor) -> Tensor:
        inner = self.phi(z)
        return inner**2 / 2 + inner * (z - inner)

    def conjugate(self, x: Tensor) -> Tensor:
        x, outside = self._within(x)
        return infinite(outside, x**2 / 2)

    def gap(self, x: Tensor, z: Tensor) -> Tensor:
        # Two terms >= 0, as for ReLU.
        x, outside = self._within(x)
        inner = self.phi(z)
        return infinite(outside, (x - inner) ** 2 / 2 + (inner - x) * (z - inner))


@final
@dataclass(frozen=True)
class Softshrink(Activation):
    r"""``z`` moved towards 0 by ``lambd``, and 0 where that would pass it.

    The proximal operator of :math:`\lambda |x|`, so :math:`\Phi^*(x) = x^2 / 2 + \lambda |x|`.
    """

    lambd: float = 0.5

    name = "softshrink"
    formula = "z moved towards 0 by lambd, at most to 0"
    lipschitz = 1.0
    lower = -math.inf
    upper = math.inf

    def __post_init__(self) -> None:
        positive(self.lambd, "lambd of softshrink")

    @property
    def kinks(self) -> tuple[float, ...]:
        return (-self.lambd, self.lambd)

    def phi(self, z: Tensor) -> Tensor:
        return F.softshrink(z, self.lambd)

    def primitive(self, z: Tensor) -> Tensor:
        return self.phi(z) ** 2 / 2

    def conjugate(self, x: Tensor) -> Tensor:
        return x**2 / 2 + self.lambd * x.abs()

    def gap(self, x: Tensor, z: Tensor) -> Tensor:
        # Two terms >= 0: what is cut off lies between -lambd and lambd.
        inner, cut = self.phi(z), z.clamp(-self.lambd, self.lambd)
        return (x - inner) ** 2 / 2 + (self.lambd * x.abs() - x * cut)

    def to_module(self) -> nn.Module:
        return nn.Softshrink(self.lambd)


@final
@dataclass(frozen=True)
class Threshold(Activation):
    r"""``z`` above ``threshold``, else the smaller ``value``: a jump up to a line of slope 1.

    With a width :math:`w`, at most twice the height of the jump, a ramp between
    :math:`b = t - w/2` and :math:`e = t + w/2` leads from the value :math:`v` to the line. Its
    height is :math:`h = e - v`, and with :math:`y = \min(x - v, h)`, :math:`q = (x - e)_+`

    .. math:: \Phi^*(x) = b y + w y^2 / (2 h) + e q + q^2 / 2.
    """

    threshold: float
    value: float
    width: float = 0.0

    name = "threshold"
    formula = "z if z > threshold, else value"
    upper = math.inf

    def __post_init__(self) -> None:
        if not -math.inf < self.value < self.threshold < math.inf:
            raise ValueError(
                f"threshold needs value < threshold, got value={self.value!r} and "
                f"threshold={self.threshold!r}: a larger value would make a step down, and an "
                "equal one is 'clamp'."
            )
        check_width(self.width, self.name, most=2 * (self.threshold - self.value))

    @property
    def lipschitz(self) -> float:
        return self._height / self.width if self.width > 0 else math.inf

    @property
    def lower(self) -> float:
        return self.value

    @property
    def kinks(self) -> tuple[float, ...]:
        return tuple(sorted({self.threshold - self.width / 2, self._end}))

    @property
    def _end(self) -> float:
        return self.threshold + self.width / 2

    @property
    def _height(self) -> float:
        return self._end - self.value

    def smoothed(self, width: float) -> Threshold:
        """A ramp of this width, cut to twice the height of the jump."""
        return replace(self, width=min(width, 2 * (self.threshold - self.value)))

    def phi(self, z: Tensor) -> Tensor:
        if self.width == 0:
            return F.threshold(z, self.threshold, self.value)
        return torch.where(z > self._end, z, self.value + self._height * self._fill(z))

    def primitive(self, z: Tensor) -> Tensor:
        beyond = (z - self._end).relu()
        ramp = self.width / 2 * self._height * self._fill(z) ** 2
        return self.value * z + ramp + self._height * beyond + beyond**2 / 2

    def conjugate(self, x: Tensor) -> Tensor:
        x, outside = self._within(x)
        on_ramp, beyond = self._parts(x)
        ramp = (self.threshold - self.width / 2) * on_ramp
        ramp = ramp + self.width / (2 * self._height) * on_ramp**2
        return infinite(outside, ramp + self._end * beyond + beyond**2 / 2)

    def gap(self, x: Tensor, z: Tensor) -> Tensor:
        # The ramp and the line beyond it, each with a gap of its own.
        x, outside = self._within(x)
        on_ramp, beyond = self._parts(x)
        half, v = self.width / 2, z - self.threshold
        error = on_ramp / self._height - self._fill(z)
        ramp = self._height * (half * error**2 + error * (v.clamp(-half, half) - v))
        return infinite(outside, ramp + ReLU().gap(beyond, z - self._end))

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """How far ``x`` climbs the ramp, and how far it goes beyond."""
        return (x - self.value).clamp(max=self._height), (x - self._end).relu()

    def _fill(self, z: Tensor) -> Tensor:
        """How much of the ramp lies below ``z``, between 0 and 1."""
        v = z - self.threshold
        return (v / self.width + 0.5).clamp(0, 1) if self.width > 0 else (v > 0).to(z.dtype)


@final
@dataclass(frozen=True)
class Hardshrink(Activation):
    r"""0 between ``-lambd`` and ``lambd``, ``z`` outside; with a width, two ramps.

    With :math:`\tau` the `Threshold` at ``lambd`` with value 0, it is
    :math:`\tau(z) - \tau(-z)`; one of the two is always 0. The width is at most ``2 * lambd``,
    which makes the identity.
    """

    lambd: float = 0.5
    width: float = 0.0

    name = "hardshrink"
    formula = "z if |z| > lambd, else 0"
    lower = -math.inf
    upper = math.inf

    def __post_init__(self) -> None:
        positive(self.lambd, "lambd of hardshrink")
        check_width(self.width, self.name, most=2 * self.lambd)

    @property
    def _side(self) -> Threshold:
        return Threshold(self.lambd, 0.0, self.width)

    @property
    def lipschitz(self) -> float:
        return self._side.lipschitz

    @property
    def kinks(self) -> tuple[float, ...]:
        ends = self._side.kinks
        return tuple(sorted({*ends, *(-end for end in ends)}))

    def smoothed(self, width: float) -> Hardshrink:
        """Ramps of this width, cut to ``2 * lambd``."""
        return replace(self, width=min(width, 2 * self.lambd))

    def phi(self, z: Tensor) -> Tensor:
        if self.width == 0:
            return F.hardshrink(z, self.lambd)
        return self._side.phi(z) - self._side.phi(-z)

    def primitive(self, z: Tensor) -> Tensor:
        return self._side.primitive(z) + self._side.primitive(-z)

    def conjugate(self, x: Tensor) -> Tensor:
        return self._side.conjugate(x.abs())

    def gap(self, x: Tensor, z: Tensor) -> Tensor:
        side = self._side
        right = side.gap(x.clamp(min=0), z) + side.primitive(-z)
        left = side.gap((-x).clamp(min=0), -z) + side.primitive(z)
        return torch.where(x >= 0, right, left)

    def to_module(self) -> nn.Module:
        return nn.Hardshrink(self.lambd) if self.width == 0 else super().to_module()
