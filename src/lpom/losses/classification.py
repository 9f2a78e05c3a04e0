"""Losses for classes and labels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from lpom.exceptions import DataError
from lpom.losses.base import Loss

#: Classes below which torch's softmax takes up to eight times as long along rows as along columns.
_FEW = 16


def _along_classes(function: Callable[[Tensor, int], Tensor], x: Tensor) -> Tensor:
    """``function(x, -1)``, in the layout that is fast."""
    if x.ndim == 2 and x.shape[1] < _FEW:
        return function(x.T, 0).T
    return function(x, -1)


@final
@dataclass(frozen=True)
class CrossEntropy(Loss):
    r"""Cross-entropy between the target and the softmax of the outputs.

    A target row sums to one: one-hot, or soft; at a step of a sequence that does not count it is
    zero, and so are value and gradient. The Hessian
    :math:`\mathrm{diag}(p) - p p^T` has absolute row sums :math:`2 p_i (1 - p_i) \le 1/2`.

    Of ``label_smoothing`` that share of a target is spread evenly over all classes, as torch's
    cross-entropy does it: outputs then need not grow without end.
    """

    label_smoothing: float = 0.0

    name = "cross-entropy"
    lipschitz = 0.5
    threshold = 0.0
    logits = classifies = exclusive = True
    link = "softmax"

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(
                "label_smoothing of cross-entropy must be a share from 0 to below 1, got "
                f"{self.label_smoothing!r}."
            )

    def value(self, x: Tensor, target: Tensor) -> Tensor:
        return -(self._smoothed(target) * _along_classes(torch.log_softmax, x)).sum(-1)

    def gradient(self, x: Tensor, target: Tensor) -> Tensor:
        if x.ndim > 2:
            share = target.sum(-1, keepdim=True)
            return torch.softmax(x, -1) * share - self._smoothed(target)
        return _along_classes(torch.softmax, x) - self._smoothed(target)

    def _smoothed(self, target: Tensor) -> Tensor:
        if not self.label_smoothing:
            return target
        return torch.lerp(target, target.mean(-1, keepdim=True), self.label_smoothing)

    def left_out(self, target: Tensor, where: Tensor) -> Tensor:
        return target.masked_fill(where[..., None], 0.0)

    def counted(self, target: Tensor) -> Tensor:
        return target.sum(-1)

    def probabilities(self, x: Tensor) -> Tensor:
        return torch.softmax(x, -1)

    def check_target(self, target: Tensor) -> None:
        sums = target.sum(1)
        if bool((target < 0).any()) or not torch.allclose(sums, torch.ones_like(sums), atol=1e-4):
            raise DataError(
                "cross-entropy takes class indices, or rows of probabilities that sum to one; got "
                "other numbers. For a regression use 'squared' or 'huber'."
            )
        if target.shape[1] == 1:
            raise DataError("cross-entropy needs one output per class, got a single one.")

    def encode(
        self, labels: Tensor, n_classes: int, n_outputs: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        if n_outputs == 1:
            raise DataError(
                "cross-entropy needs one output per class, since a softmax over a single output "
                "is constant; use 'binary-cross-entropy' or two outputs."
            )
        return super().encode(labels, n_classes, n_outputs, dtype)

    def encode_indicator(self, Y: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        raise DataError(
            "cross-entropy is for classes that exclude each other; for a multi-label target "
            "use 'binary-cross-entropy'."
        )


@final
@dataclass(frozen=True)
class BinaryCrossEntropy(Loss):
    r"""Cross-entropy of each output by itself, :math:`\log(1 + e^x) - t x` with t in [0, 1].

    With more than two exclusive classes this is one-vs-rest.
    """

    name = "binary-cross-entropy"
    lipschitz = 0.25
    threshold = 0.0
    logits = classifies = True
    link = "logistic"

    def value(self, x: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(x, target, reduction="none").sum(-1)

    def gradient(self, x: Tensor, target: Tensor) -> Tensor:
        return torch.sigmoid(x) - target

    def check_target(self, target: Tensor) -> None:
        if bool(((target < 0) | (target > 1)).any()):
            raise DataError(
                "binary-cross-entropy takes labels or probabilities between 0 and 1; got other "
                "numbers. For a regression use 'squared' or 'huber'."
            )

    def probabilities(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)


@final
@dataclass(frozen=True)
class Hinge(Loss):
    r"""Hinge loss :math:`\max(0, 1 - t x)` with targets -1 and +1, rounded off at its corner.

    With :math:`u = 1 - t x` and smoothing :math:`s`, it is 0 for :math:`u \le 0`,
    :math:`u^2 / (2 s)` up to :math:`u = s`, and :math:`u - s / 2` beyond, so its gradient is
    1/s-Lipschitz. ``smoothing=0`` is the textbook hinge, with a subgradient.
    `probabilities` are :math:`(x + 1) / 2` clipped to [0, 1], and not calibrated.
    """

    smoothing: float = 0.5

    name = "hinge"
    threshold = 0.0
    middle = 0.0
    classifies = True

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < math.inf:
            raise ValueError(
                f"smoothing of hinge must be a finite number >= 0, got {self.smoothing!r}."
            )

    @property
    def lipschitz(self) -> float:
        return 1 / self.smoothing if self.smoothing > 0 else math.inf

    def value(self, x: Tensor, target: Tensor) -> Tensor:
        s, u = self.smoothing, (1 - target * x).clamp(min=0)
        if s == 0:
            return u.sum(-1)
        corner = u.clamp(max=s)
        return (corner**2 / (2 * s) + (u - corner)).sum(-1)

    def gradient(self, x: Tensor, target: Tensor) -> Tensor:
        u = 1 - target * x
        if self.smoothing == 0:
            return -target * (u > 0).to(x.dtype)
        return -target * (u / self.smoothing).clamp(0, 1)

    def prox(self, v: Tensor, target: Tensor, strength: float, lower: float = -math.inf) -> Tensor:
        # in closed form, with and without smoothing: only outputs below the margin move
        move = ((1 - target * v) / (1 + self.smoothing * strength)).clamp(0, 1 / strength)
        return (v + target * move).clamp(min=lower)

    def check_target(self, target: Tensor) -> None:
        if bool((target.abs() != 1).any()):
            raise DataError("hinge takes classes, labels, or targets -1 and +1; got other numbers.")

    def probabilities(self, x: Tensor) -> Tensor:
        return ((x + 1) / 2).clamp(0, 1)

    def _coded(self, indicator: Tensor, dtype: torch.dtype | None) -> Tensor:
        return 2 * super()._coded(indicator, dtype) - 1
