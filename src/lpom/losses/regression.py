"""Losses for numbers; with targets 0 and 1 they do for classes as well."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from torch import Tensor

from lpom.losses.base import Loss


@final
@dataclass(frozen=True)
class Squared(Loss):
    r"""Half the squared distance, :math:`\|x - t\|^2 / 2`.

    `probabilities` are the outputs clipped to [0, 1], and not calibrated.
    """

    name = "squared"
    lipschitz = 1.0
    threshold = 0.5

    def value(self, x: Tensor, target: Tensor) -> Tensor:
        return ((x - target) ** 2).sum(-1) / 2

    def gradient(self, x: Tensor, target: Tensor) -> Tensor:
        return x - target

    def prox(self, v: Tensor, target: Tensor, strength: float, lower: float = -math.inf) -> Tensor:
        return ((target + strength * v) / (1 + strength)).clamp(min=lower)

    def probabilities(self, x: Tensor) -> Tensor:
        return x.clamp(0, 1)


@final
@dataclass(frozen=True)
class Huber(Loss):
    r"""Squared error up to a distance ``delta``, linear beyond, for targets with outliers.

    `probabilities` are the outputs clipped to [0, 1], and not calibrated.
    """

    delta: float = 1.0

    name = "huber"
    lipschitz = 1.0
    threshold = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.delta < math.inf:
            raise ValueError(f"delta of huber must be a finite number above 0, got {self.delta!r}.")

    def value(self, x: Tensor, target: Tensor) -> Tensor:
        distance = (x - target).abs()
        near = distance.clamp(max=self.delta)
        return (near**2 / 2 + self.delta * (distance - near)).sum(-1)

    def gradient(self, x: Tensor, target: Tensor) -> Tensor:
        return (x - target).clamp(-self.delta, self.delta)

    def probabilities(self, x: Tensor) -> Tensor:
        return x.clamp(0, 1)
