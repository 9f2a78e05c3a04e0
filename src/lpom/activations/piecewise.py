"""Identity, ReLU and leaky ReLU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpom.activations.base import Activation, infinite


@final
@dataclass(frozen=True)
class Identity(Activation):
    """No activation at all."""

    name = "identity"
    formula = "z"
    kinks = ()
    lipschitz = 1.0
    lower = -math.inf
    upper = math.inf

    def phi(self, z: Tensor) -> Tensor:
        return z

    def response(
        self,
        z: Tensor,
        pull: Tensor,
        out: Tensor | None = None,
        said: Tensor | None = None,
        spare: Tensor | None = None,
    ) -> Tensor:
        return pull if out is None else out.copy_(pull)

    def primitive(self, z: Tensor) -> Tensor:
        return z**2 / 2

    def conjugate(self, x: Tensor) -> Tensor:
        return x**2 / 2

    def gap(self, x: Tensor, z: Tensor) -> Tensor:
        return (x - z) ** 2 / 2

    def to_module(self) -> nn.Module:
        return nn.Identity()


@final
@dataclass(frozen=True)
class ReLU(Activation):
    r"""Rectifier :math:`\max(z, 0)`."""

    name = "relu"
    formula = "max(z, 0)"
    kinks = (0.0,)
    lipschitz = 1.0
    lower = 0.0
    upper = math.inf

    def phi(self, z: Tensor) -> Tensor:
        return torch.relu(z)

    def response(
        self,
        z: Tensor,
        pull: Tensor,
        out: Tensor | None = None,
        said: Tensor | None = None,
        spare: Tensor | None = None,
    ) -> Tensor:
        # min(pull, z) above zero, pull - z below it where that is negative, else zero
        least = torch.minimum(z, pull, out=spare)
        below = z.clamp_(max=0) if out is z else z.clamp(max=0)
        return torch.sub(least, below, out=out)

    def answer(self, z: Tensor, g: Tensor, strength: float, said: Tensor | None = None) -> Tensor:
        z = z * strength  # phi(a z) = a phi(z)
        return self.response(z, g, out=z)

    def primitive(self, z: Tensor) -> Tensor:
        return torch.relu(z) ** 2 / 2

    def conjugate(self, x: Tensor) -> Tensor:
        return infinite(x < 0, x**2 / 2)

    def gap(self, x: Tensor, z: Tensor) -> Tensor:
        # A sum of two terms >= 0: gaps far below the squares survive in float32.
        right = z.clamp(min=0)
        return infinite(x < 0, (x - right) ** 2 / 2 + x.clamp(min=0) * (right - z))

    def to_module(self) -> nn.Module:
        return nn.ReLU()


@final
@dataclass(frozen=True)
class LeakyReLU(Activation):
    r""":math:`z` for :math:`z \ge 0`, else :math:`s z` with a slope :math:`0 < s \le 1`."""

    negative_slope: float = 0.01

    name = "leaky_relu"
    formula = "z if z > 0, else slope z"
    kinks = (0.0,)
    lipschitz = 1.0
    lower = -math.inf
    upper = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.negative_slope <= 1:
            raise ValueError(
                "negative_slope of leaky_relu must lie in (0, 1], "
                f"got {self.negative_slope!r}; for 0 use 'relu'."
            )

    def phi(self, z: Tensor) -> Tensor:
        return F.leaky_relu(z, self.negative_slope)

    def primitive(self, z: Tensor) -> Tensor:
        return torch.where(z >= 0, z**2 / 2, self.negative_slope / 2 * z**2)

    def conjugate(self, x: Tensor) -> Tensor:
        return torch.where(x >= 0, x**2 / 2, x**2 / (2 * self.negative_slope))

    def gap(self, x: Tensor, z: Tensor) -> Tensor:
        # As for ReLU: each branch is a sum of terms >= 0.
        s, right, up = self.negative_slope, z.clamp(min=0), x.clamp(min=0)
        left, down = z - right, x - up
        above = (up - right) ** 2 / 2 + s / 2 * left**2 - up * left
        below = (down - s * left) ** 2 / (2 * s) + right**2 / 2 - down * right
        return torch.where(x >= 0, above, below)

    def to_module(self) -> nn.Module:
        return nn.LeakyReLU(self.negative_slope)
