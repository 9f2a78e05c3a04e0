"""ELU, CELU and SELU: a line to the right of 0, an exponential to the left."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.special import xlog1py

from lpom.activations.base import Activation, infinite, positive


@dataclass(frozen=True)
class _Exponential(Activation):
    r""":math:`s z` for :math:`z \ge 0`, else :math:`a (e^{z / c} - 1)`, all three above 0.

    To the left :math:`\Phi(z) = a (c (e^{z / c} - 1) - z)`, and with :math:`r = x / a`

    .. math:: \Phi^*(x) = a c (1 + r) \log(1 + r) - c x.
    """

    upper = math.inf

    @property
    @abstractmethod
    def _shape(self) -> tuple[float, float, float]:
        """Slope s, depth a, decay c."""

    @property
    def lipschitz(self) -> float:
        s, a, c = self._shape
        return max(s, a / c)

    @property
    def lower(self) -> float:
        return -self._shape[1]

    def primitive(self, z: Tensor) -> Tensor:
        s = self._shape[0]
        return s / 2 * z.relu() ** 2 + self._left_primitive(z.clamp(max=0))

    def conjugate(self, x: Tensor) -> Tensor:
        s = self._shape[0]
        x, outside = self._within(x)
        return infinite(outside, x.relu() ** 2 / (2 * s) + self._left_conjugate(x.clamp(max=0)))

    def gap(self, x: Tensor, z: Tensor) -> Tensor:
        # Split by sign, so that no two large terms cancel in float32.
        s, a, c = self._shape
        x, outside = self._within(x)
        right, up = z.clamp(min=0), x.clamp(min=0)
        left, down = z - right, x - up
        above = (up - s * right) ** 2 / (2 * s) - up * left + self._left_primitive(left)
        below = s / 2 * right**2 - down * right + self._left_conjugate(down)
        below = below + a * c * torch.expm1(left / c) - (a + down) * left
        return infinite(outside, torch.where(x >= 0, above, below))

    def _left_primitive(self, z: Tensor) -> Tensor:
        _, a, c = self._shape
        return a * (c * torch.expm1(z / c) - z)

    def _left_conjugate(self, x: Tensor) -> Tensor:
        _, a, c = self._shape
        ratio = (x / a).clamp(min=-1)
        entropy: Tensor = xlog1py(1 + ratio, ratio)
        return c * (a * entropy - x)


@final
@dataclass(frozen=True)
class ELU(_Exponential):
    r"""Exponential linear unit: :math:`z` for :math:`z \ge 0`, else :math:`\alpha (e^z - 1)`."""

    alpha: float = 1.0

    name = "elu"
    formula = "z if z > 0, else alpha (exp(z) - 1)"

    def __post_init__(self) -> None:
        positive(self.alpha, "alpha of elu")

    @property
    def _shape(self) -> tuple[float, float, float]:
        return 1.0, self.alpha, 1.0

    def phi(self, z: Tensor) -> Tensor:
        return F.elu(z, self.alpha)

    def to_module(self) -> nn.Module:
        return nn.ELU(self.alpha)


@final
@dataclass(frozen=True)
class CELU(_Exponential):
    r"""ELU with slope 1 on both sides of 0: :math:`\alpha (e^{z / \alpha} - 1)` to the left."""

    alpha: float = 1.0

    name = "celu"
    formula = "z if z > 0, else alpha (exp(z / alpha) - 1)"

    def __post_init__(self) -> None:
        positive(self.alpha, "alpha of celu")

    @property
    def _shape(self) -> tuple[float, float, float]:
        return 1.0, self.alpha, self.alpha

    def phi(self, z: Tensor) -> Tensor:
        return F.celu(z, self.alpha)

    def to_module(self) -> nn.Module:
        return nn.CELU(self.alpha)


@final
@dataclass(frozen=True)
class SELU(_Exponential):
    """ELU scaled by the two constants of self-normalising networks, as in ``nn.SELU``."""

    name = "selu"
    formula = "1.0507 z if z > 0, else 1.7581 (exp(z) - 1)"

    alpha = 1.6732632423543772848170429916717
    scale = 1.0507009873554804934193349852946
    _shape = (scale, scale * alpha, 1.0)

    def phi(self, z: Tensor) -> Tensor:
        return F.selu(z)

    def to_module(self) -> nn.Module:
        return nn.SELU()
