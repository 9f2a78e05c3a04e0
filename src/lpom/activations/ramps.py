"""Everything made of ramps or jumps: hardtanh and its kin, step, sign and staircase."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpom.activations.base import Activation, check_width, infinite, positive


@dataclass(frozen=True)
class _Ramps(Activation):
    r"""A staircase of ``levels`` ramps, each of height :math:`a` and width :math:`w` in z.

    Ramp :math:`k` is centred at :math:`c + k h`, and :math:`w \le h`, so they never overlap. At
    :math:`w = 0` they are jumps, and at a jump the upper value is taken. A value
    :math:`x = d + a (k + t)`, :math:`0 \le t \le 1`, lies on ramp :math:`k`; integrating the
    inverse of :math:`\phi` up to it gives

    .. math:: \Phi^*(x) = c x + a [h (k (k - 1) / 2 + k t) + w t (t - 1) / 2].
    """

    @property
    @abstractmethod
    def _shape(self) -> tuple[int, float, float, float, float, float]:
        """Levels, height a, width w, first centre c, spacing h, lower value d."""

    @property
    def kinks(self) -> tuple[float, ...]:
        levels, _, w, c, h, _ = self._shape
        ends = {c + k * h + side * w / 2 for k in range(levels) for side in (-1, 1)}
        return tuple(sorted(ends))

    @property
    def lipschitz(self) -> float:
        _, a, w, *_ = self._shape
        return a / w if w > 0 else math.inf

    @property
    def lower(self) -> float:
        return self._shape[-1]

    @property
    def upper(self) -> float:
        levels, a, *_, d = self._shape
        return d + a * levels

    def phi(self, z: Tensor) -> Tensor:
        levels, a, w, c, h, d = self._shape
        v = (z - c) / h
        if w == 0:
            filled = (torch.floor(v) + 1).clamp(0, levels)
        else:
            k = torch.floor(v + 0.5).clamp(0, levels - 1)
            filled = k + self._fill(k, z)
        return (d + a * filled).clamp(max=self.upper)  # rounding must not leave the range

    def primitive(self, z: Tensor) -> Tensor:
        c = self._shape[3]
        x = self.phi(z)
        return x * (z - c) - self._inverse_area(x)  # Fenchel's equality

    def conjugate(self, x: Tensor) -> Tensor:
        c = self._shape[3]
        x, outside = self._within(x)
        return infinite(outside, c * x + self._inverse_area(x))

    def gap(self, x: Tensor, z: Tensor) -> Tensor:
        # The gap is the sum over all ramps, each term >= 0: the ramp of x, the ramp of z, and
        # the full heights between the two. Nothing cancels.
        levels, a, w, c, h, d = self._shape
        x, outside = self._within(x)
        from_x = torch.floor((x - d) / a).clamp(0, levels - 1)
        from_z = torch.floor((z - c) / h + 0.5).clamp(0, levels - 1)
        between = ((from_x - from_z).abs() - 1).clamp(min=0)
        middle = c + h * (from_x + from_z) / 2
        # x is past or before the ramp of z: only its own ramp moves with it.
        others = self._gap_on(from_z, x.detach(), z) + a * between * (z - middle).abs()
        total = self._gap_on(from_x, x, z) + torch.where(from_x == from_z, 0, others)
        return infinite(outside, total)

    def _gap_on(self, k: Tensor, x: Tensor, z: Tensor) -> Tensor:
        """The gap of ramp ``k`` alone."""
        _, a, w, c, h, d = self._shape
        error = ((x - d) / a - k).clamp(0, 1) - self._fill(k, z)
        v = z - (c + k * h)
        on_ramp = v.clamp(-w / 2, w / 2) if w > 0 else torch.zeros_like(v)
        return a * (w / 2 * error**2 + error * (on_ramp - v))

    def _fill(self, k: Tensor, z: Tensor) -> Tensor:
        """How much of ramp ``k`` lies below ``z``, between 0 and 1."""
        _, _, w, c, h, _ = self._shape
        v = z - (c + k * h)
        return (v / w + 0.5).clamp(0, 1) if w > 0 else (v >= 0).to(z.dtype)

    def _inverse_area(self, x: Tensor) -> Tensor:
        levels, a, w, _, h, d = self._shape
        u = (x - d) / a
        k = torch.floor(u).clamp(0, levels - 1)
        t = u - k
        return a * (h * (k * (k - 1) / 2 + k * t) + w / 2 * t * (t - 1))


@final
@dataclass(frozen=True)
class Hardtanh(_Ramps):
    """``z`` clipped to ``[min_val, max_val]``."""

    min_val: float = -1.0
    max_val: float = 1.0

    name = "hardtanh"
    formula = "z clipped to its range"
    lipschitz = 1.0

    def __post_init__(self) -> None:
        if not -math.inf < self.min_val < self.max_val < math.inf:
            raise ValueError(
                "hardtanh needs finite min_val < max_val, "
                f"got min_val={self.min_val!r} and max_val={self.max_val!r}."
            )

    @property
    def _shape(self) -> tuple[int, float, float, float, float, float]:
        height = self.max_val - self.min_val
        return 1, height, height, (self.min_val + self.max_val) / 2, height, self.min_val

    @property
    def upper(self) -> float:
        return self.max_val

    def phi(self, z: Tensor) -> Tensor:
        return F.hardtanh(z, self.min_val, self.max_val)

    def to_module(self) -> nn.Module:
        return nn.Hardtanh(self.min_val, self.max_val)


@final
@dataclass(frozen=True)
class Hardsigmoid(_Ramps):
    """``z / 6 + 1 / 2`` clipped to ``[0, 1]``."""

    name = "hardsigmoid"
    formula = "z / 6 + 1 / 2 clipped to its range"
    _shape = (1, 1.0, 6.0, 0.0, 6.0, 0.0)

    def phi(self, z: Tensor) -> Tensor:
        return F.hardsigmoid(z)

    def to_module(self) -> nn.Module:
        return nn.Hardsigmoid()


@final
@dataclass(frozen=True)
class ReLU6(_Ramps):
    """``z`` clipped to ``[0, 6]``."""

    name = "relu6"
    formula = "z clipped to its range"
    _shape = (1, 6.0, 6.0, 3.0, 6.0, 0.0)

    def phi(self, z: Tensor) -> Tensor:
        return F.relu6(z)

    def to_module(self) -> nn.Module:
        return nn.ReLU6()


@final
@dataclass(frozen=True)
class Step(_Ramps):
    """0 for ``z < 0``, 1 for ``z >= 0``; with a width, a ramp centred at 0."""

    width: float = 0.0

    name = "step"
    formula = "1 if z >= 0, else 0"

    def __post_init__(self) -> None:
        check_width(self.width, self.name)

    @property
    def _shape(self) -> tuple[int, float, float, float, float, float]:
        return 1, 1.0, self.width, 0.0, 1.0, 0.0

    def smoothed(self, width: float) -> Step:
        return replace(self, width=width)


@final
@dataclass(frozen=True)
class Sign(_Ramps):
    """-1 for ``z < 0``, +1 for ``z >= 0``; with a width, a ramp centred at 0."""

    width: float = 0.0

    name = "sign"
    formula = "1 if z >= 0, else -1"

    def __post_init__(self) -> None:
        check_width(self.width, self.name)

    @property
    def _shape(self) -> tuple[int, float, float, float, float, float]:
        return 1, 2.0, self.width, 0.0, 1.0, -1.0

    def smoothed(self, width: float) -> Sign:
        return replace(self, width=width)


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

    name = "staircase"
    formula = "z rounded to one of its levels"

    def __post_init__(self) -> None:
        if self.levels != int(self.levels) or self.levels < 1:
            raise ValueError(f"levels of staircase must be an integer >= 1, got {self.levels!r}.")
        positive(self.step, "step of staircase")
        check_width(self.width, self.name, most=self.step)

    @property
    def _shape(self) -> tuple[int, float, float, float, float, float]:
        return self.levels, self.step, self.width, self.step / 2, self.step, 0.0

    def smoothed(self, width: float) -> Staircase:
        """Ramps of this width; widths above ``step`` are cut to ``step``."""
        return replace(self, width=min(width, self.step))
