"""Convex losses on the outputs of a network: values, gradients, codings of labels.

>>> get("huber", delta=0.5)
Huber(delta=0.5)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from lpom.exceptions import DataError, unknown_name


class Loss(ABC):
    r"""A loss, convex in the outputs, with a Lipschitz gradient.

    Outputs and target are dense, ``(m, k)``; a sample's value sums over its ``k`` outputs and
    nothing is averaged over samples.

    Attributes
    ----------
    name : str
        The name that `get` knows it by.
    lipschitz : float
        Lipschitz constant of the gradient of one sample: a bound on the spectral norm of the
        Hessian and on its largest absolute row sum.
    threshold : float
        An output above it says "yes", with one output for two classes or one per label.
    """

    name: str
    threshold: float

    @property
    @abstractmethod
    def lipschitz(self) -> float: ...

    @abstractmethod
    def value(self, x: Tensor, target: Tensor) -> Tensor:
        """Loss of each sample, ``(m,)``."""

    @abstractmethod
    def gradient(self, x: Tensor, target: Tensor) -> Tensor:
        """Derivative of each sample's loss in its outputs, ``(m, k)``."""

    @abstractmethod
    def probabilities(self, x: Tensor) -> Tensor:
        """Outputs as numbers in [0, 1], one per class or label."""

    def prox(self, v: Tensor, target: Tensor, strength: float, lower: float = -math.inf) -> Tensor:
        r""":math:`\arg\min_x \mathrm{loss}(x, t) + \frac{strength}{2} \|x - v\|^2`, x >= lower.

        Projected gradient steps from v, each of which brings it closer by the factor
        :math:`\eta / (\eta + strength)`, as many as rounding lets matter.
        """
        rate = self.lipschitz / (self.lipschitz + strength)
        if not rate < 1:
            raise ValueError(f"the proximal step of {self.name} needs a Lipschitz gradient.")
        x = v.clamp(min=lower)
        for _ in range(math.ceil(math.log(torch.finfo(v.dtype).eps) / math.log(rate))):
            pull = self.gradient(x, target) + strength * (x - v)
            x_old, x = x, (x - pull / (self.lipschitz + strength)).clamp(min=lower)
            if torch.equal(x, x_old):
                break
        return x

    def encode(
        self, labels: Tensor, n_classes: int, n_outputs: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Target for class indices ``(m,)``: one-hot, or one column for two classes."""
        if labels.ndim != 1 or labels.is_floating_point() or labels.is_complex():
            raise DataError(
                "class labels must be integers of shape (m,), "
                f"got {labels.dtype} of shape {tuple(labels.shape)}."
            )
        if labels.numel() and bool(((labels < 0) | (labels >= n_classes)).any()):
            raise DataError(
                f"class labels must lie in 0 .. {n_classes - 1}, "
                f"got {int(labels.min())} .. {int(labels.max())}."
            )
        if n_classes == 2 and n_outputs == 1:
            return self._coded(labels[:, None], dtype)
        if n_outputs != n_classes:
            also = " (or 1)" if n_classes == 2 else ""
            raise DataError(f"{n_classes} classes need {n_classes}{also} outputs, got {n_outputs}.")
        return self._coded(F.one_hot(labels.long(), n_classes), dtype)

    def encode_indicator(self, Y: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Target for a multi-label indicator ``(m, k)`` of zeros and ones."""
        if Y.ndim != 2 or bool(((Y != 0) & (Y != 1)).any()):
            raise DataError("a multi-label target must be a matrix (m, k) of zeros and ones.")
        return self._coded(Y, dtype)

    def check_target(self, target: Tensor) -> None:
        """Raise if a target ``(m, k)`` given as numbers is not one for this loss."""
        return None

    def params(self) -> dict[str, float]:
        """The parameters, such that ``get(loss.name, **loss.params()) == loss``."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    def _coded(self, indicator: Tensor, dtype: torch.dtype | None) -> Tensor:
        return indicator.to(dtype or torch.get_default_dtype())


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
        return ((x - target) ** 2).sum(1) / 2

    def gradient(self, x: Tensor, target: Tensor) -> Tensor:
        return x - target

    def prox(self, v: Tensor, target: Tensor, strength: float, lower: float = -math.inf) -> Tensor:
        return ((target + strength * v) / (1 + strength)).clamp(min=lower)

    def probabilities(self, x: Tensor) -> Tensor:
        return x.clamp(0, 1)


@final
@dataclass(frozen=True)
class CrossEntropy(Loss):
    r"""Cross-entropy between the target and the softmax of the outputs.

    A target row sums to one: one-hot, or soft. The Hessian
    :math:`\mathrm{diag}(p) - p p^T` has absolute row sums :math:`2 p_i (1 - p_i) \le 1/2`.
    """

    name = "cross-entropy"
    lipschitz = 0.5
    threshold = 0.0

    def value(self, x: Tensor, target: Tensor) -> Tensor:
        return -(target * torch.log_softmax(x, 1)).sum(1)

    def gradient(self, x: Tensor, target: Tensor) -> Tensor:
        return torch.softmax(x, 1) - target

    def probabilities(self, x: Tensor) -> Tensor:
        return torch.softmax(x, 1)

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

    def value(self, x: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(x, target, reduction="none").sum(1)

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
            return u.sum(1)
        corner = u.clamp(max=s)
        return (corner**2 / (2 * s) + (u - corner)).sum(1)

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
        return (near**2 / 2 + self.delta * (distance - near)).sum(1)

    def gradient(self, x: Tensor, target: Tensor) -> Tensor:
        return (x - target).clamp(-self.delta, self.delta)

    def probabilities(self, x: Tensor) -> Tensor:
        return x.clamp(0, 1)


_CLASSES: dict[str, type[Loss]] = {
    "squared": Squared,
    "cross-entropy": CrossEntropy,
    "binary-cross-entropy": BinaryCrossEntropy,
    "hinge": Hinge,
    "huber": Huber,
}
_ALIASES = {
    "mse": "squared",
    "squared-error": "squared",
    "log-loss": "cross-entropy",
    "bce": "binary-cross-entropy",
}


def names() -> list[str]:
    """Names that `get` knows."""
    return list(_CLASSES)


def get(loss: str | Loss, **params: Any) -> Loss:
    """The loss of this name, with parameters; a `Loss` is returned as it is."""
    if isinstance(loss, Loss):
        if params:
            raise TypeError(f"parameters go with a name, but {loss!r} already has its own.")
        return loss
    if not isinstance(loss, str):
        raise TypeError(f"a loss is a name or a Loss, got {type(loss).__name__}.")
    name = loss.lower().replace("_", "-")
    name = _ALIASES.get(name, name)
    if name not in _CLASSES:
        raise ValueError(unknown_name("loss", loss, _CLASSES))
    made = _CLASSES[name]
    known = [field.name for field in fields(made)]  # type: ignore[arg-type]
    if extra := sorted(set(params) - set(known)):
        raise TypeError(
            f"loss {name!r} has no parameter {', '.join(map(repr, extra))}; "
            f"it takes {', '.join(known) or 'none'}."
        )
    return made(**params)
