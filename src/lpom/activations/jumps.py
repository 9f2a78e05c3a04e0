"""Functions that jump: step, sign, staircase, threshold, hardshrink; each with ramps of a width."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpom.activations.base import Ramped, infinite


class _Ramps(Ramped):
    r"""A staircase of ``levels`` ramps, each of height :math:`a` and width :math:`w` in z.

    Ramp :math:`k` is centred at :math:`c + k h`, and :math:`w \le h` where there are several, so
    they never overlap. At :math:`w = 0` they are jumps, and at a jump the upper value is taken. A
    value :math:`x = d + a (k + t)`, :math:`0 \le t \le 1`, lies on ramp :math:`k`; integrating the
    inverse of :math:`\phi` up to it gives

    .. math:: \Phi^*(x) = c x + a [h (k (k - 1) / 2 + k t) + w t (t - 1) / 2].
    """

    levels: int = 1
    step: float = 1.0
    centre: float = 0.0
    lower = 0.0
    rise = 1.0  # of one ramp, in steps

    @property
    def height(self) -> float:
        return self.rise * self.step

    @property
    def kinks(self) -> tuple[float, ...]:
        centres = [self.centre + k * self.step for k in range(self.levels)]
        return tuple(sorted({c + side * self.width / 2 for c in centres for side in (-1, 1)}))

    @property
    def lipschitz(self) -> float:
        return self.height / self.width if self.width > 0 else math.inf

    @property
    def upper(self) -> float:
        return self.lower + self.height * self.levels

    def phi(self, z: Tensor) -> Tensor:
        c, h, w = self.centre, self.step, self.width
        v = (z - c) / h
        if w == 0:
            filled = (torch.floor(v) + 1).clamp(0, self.levels)
        else:
            k = torch.floor(v + 0.5).clamp(0, self.levels - 1)
            filled = k + ((z - (c + k * h)) / w + 0.5).clamp(0, 1)
        return (self.lower + self.height * filled).clamp(
            max=self.upper
        )  # rounding must not leave the range

    def conjugate(self, x: Tensor) -> Tensor:
        h = self.step
        x, outside = self._within(x)
        u = (x - self.lower) / self.height
        k = torch.floor(u).clamp(0, self.levels - 1)
        t = u - k
        area = self.height * (h * (k * (k - 1) / 2 + k * t) + self.width / 2 * t * (t - 1))
        return infinite(outside, self.centre * x + area)


@final
@dataclass(frozen=True)
class Step(_Ramps):
    """0 for ``z < 0``, 1 for ``z >= 0``; with a width, a ramp centred at 0."""

    width: float = 0.0

    name, formula = "step", "1 if z >= 0, else 0"


@final
@dataclass(frozen=True)
class Sign(_Ramps):
    """-1 for ``z < 0``, +1 for ``z >= 0``; with a width, a ramp centred at 0."""

    width: float = 0.0

    name, formula = "sign", "1 if z >= 0, else -1"
    rise, lower = 2.0, -1.0


@final
@dataclass(frozen=True)
class Staircase(_Ramps):
    """A quantised ReLU: ``z`` rounded to the nearest of ``0, step, ..., levels * step``.

    It jumps at ``(k - 1/2) * step`` for ``k = 1 .. levels``, and takes the upper value there.
    With a width, at most ``step``, each jump is a ramp of that width.
    """

    levels: int = 4
    step: float = 1.0
    width: float = 0.0

    name, formula = "staircase", "z rounded to one of its levels"

    @property
    def centre(self) -> float:  # type: ignore[override]
        return self.step / 2

    @property
    def widest(self) -> float:  # type: ignore[override]
        return self.step


@final
@dataclass(frozen=True)
class Threshold(Ramped):
    r"""``z`` above ``threshold``, else the smaller ``value``: a jump up to a line of slope 1.

    With a width :math:`w`, at most twice the height of the jump, a ramp between
    :math:`b = t - w/2` and :math:`e = t + w/2` leads from the value :math:`v` to the line. Its
    height is :math:`h = e - v`, and with :math:`y = \min(x - v, h)`, :math:`q = (x - e)_+`

    .. math:: \Phi^*(x) = b y + w y^2 / (2 h) + e q + q^2 / 2.
    """

    threshold: float
    value: float
    width: float = 0.0

    name, formula = "threshold", "z if z > threshold, else value"
    upper = math.inf

    def __post_init__(self) -> None:
        if not -math.inf < self.value < self.threshold < math.inf:
            raise ValueError(
                f"threshold needs value < threshold, got value={self.value!r} and "
                f"threshold={self.threshold!r}: a larger value would make a step down, and an "
                "equal one is 'clamp'."
            )
        super().__post_init__()

    @property
    def widest(self) -> float:  # type: ignore[override]
        return 2 * (self.threshold - self.value)

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

    def phi(self, z: Tensor) -> Tensor:
        if self.width == 0:
            return F.threshold(z, self.threshold, self.value)
        fill = ((z - self.threshold) / self.width + 0.5).clamp(0, 1)
        return torch.where(z > self._end, z, self.value + self._height * fill)

    def conjugate(self, x: Tensor) -> Tensor:
        x, outside = self._within(x)
        on_ramp, beyond = (x - self.value).clamp(max=self._height), (x - self._end).relu()
        ramp = (self.threshold - self.width / 2) * on_ramp
        ramp = ramp + self.width / (2 * self._height) * on_ramp**2
        return infinite(outside, ramp + self._end * beyond + beyond**2 / 2)


@final
@dataclass(frozen=True)
class Hardshrink(Ramped):
    r"""0 between ``-lambd`` and ``lambd``, ``z`` outside; with a width, two ramps.

    With :math:`\tau` the `Threshold` at ``lambd`` with value 0, it is
    :math:`\tau(z) - \tau(-z)`; one of the two is always 0. The width is at most ``2 * lambd``,
    which makes the identity.
    """

    lambd: float = 0.5
    width: float = 0.0

    name, formula = "hardshrink", "z if |z| > lambd, else 0"
    lower, upper = -math.inf, math.inf

    @property
    def widest(self) -> float:  # type: ignore[override]
        return 2 * self.lambd

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

    def phi(self, z: Tensor) -> Tensor:
        if self.width == 0:
            return F.hardshrink(z, self.lambd)
        return self._side.phi(z) - self._side.phi(-z)

    def conjugate(self, x: Tensor) -> Tensor:
        return self._side.conjugate(x.abs())

    def to_module(self) -> nn.Module:
        return nn.Hardshrink(self.lambd) if self.width == 0 else super().to_module()
