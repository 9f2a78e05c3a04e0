"""What every loss provides."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import fields

import torch
import torch.nn.functional as F
from torch import Tensor

from lpom.exceptions import DataError

#: The class index of a prediction that does not count, as in torch.
LEFT_OUT = -100


class Loss(ABC):
    r"""A loss, convex in the outputs, with a Lipschitz gradient.

    Outputs and target are dense, ``(m, k)``, or ``(m, steps, k)`` with a prediction at every step;
    a value sums over the ``k`` outputs and nothing is averaged over samples or steps.

    Attributes
    ----------
    name : str
        The name that `get` knows it by.
    lipschitz : float
        Lipschitz constant of the gradient of one sample: a bound on the spectral norm of the
        Hessian and on its largest absolute row sum.
    threshold : float
        An output above it says "yes", with one output for two classes or one per label.
    middle : float
        A target above it means "yes".
    logits : bool
        Whether outputs are logits, which an activation that is bounded could not give.
    classifies : bool
        Whether it is for classes and labels alone.
    exclusive : bool
        Whether its outputs stand for classes that exclude each other: the largest one decides,
        and two classes need two outputs.
    link : str or None
        What makes probabilities of outputs, by the name that scikit-learn gives it.
    """

    name: str
    threshold: float
    middle: float = 0.5
    logits: bool = False
    classifies: bool = False
    exclusive: bool = False
    link: str | None = None

    @property
    @abstractmethod
    def lipschitz(self) -> float: ...

    @abstractmethod
    def value(self, x: Tensor, target: Tensor) -> Tensor:
        """Loss of each prediction: the shape of ``x`` without its last dimension."""

    @abstractmethod
    def gradient(self, x: Tensor, target: Tensor) -> Tensor:
        """Derivative of each prediction's loss in its outputs, of the shape of ``x``."""

    @abstractmethod
    def probabilities(self, x: Tensor) -> Tensor:
        """Outputs as numbers in [0, 1], one per class or label."""

    def prox(self, v: Tensor, target: Tensor, strength: float, lower: float = -math.inf) -> Tensor:
        r""":math:`\arg\min_x \mathrm{loss}(x, t) + \frac{strength}{2} \|x - v\|^2`, x >= lower.

        Projected gradient steps from v with Nesterov's momentum, each of which brings it closer by
        the factor :math:`1 - \sqrt{q}`, :math:`q = strength / (\eta + strength)`: as many as
        rounding lets matter.
        """
        if not math.isfinite(self.lipschitz):
            raise ValueError(f"the proximal step of {self.name} needs a Lipschitz gradient.")
        steepest = self.lipschitz + strength
        closer = math.sqrt(strength / steepest)
        x = ahead = v.clamp(min=lower)
        for _ in range(math.ceil(math.log(torch.finfo(v.dtype).eps) / math.log1p(-closer))):
            pull = self.gradient(ahead, target) + strength * (ahead - v)
            x_old, x = x, (ahead - pull / steepest).clamp(min=lower)
            if torch.equal(x, x_old):
                break
            ahead = x + (1 - closer) / (1 + closer) * (x - x_old)
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

    def left_out(self, target: Tensor, where: Tensor) -> Tensor:
        """A coded target in which the predictions at some places count for nothing."""
        raise DataError(
            f"{self.name} can't leave predictions out (targets of {LEFT_OUT}, steps after the end "
            "of a sequence); use 'cross-entropy'."
        )

    def counted(self, target: Tensor) -> Tensor:
        """Which predictions count: one for each of them, zero where one is left out."""
        return torch.ones_like(target[..., 0])

    def check_target(self, target: Tensor) -> None:
        """Raise if a target ``(m, k)`` given as numbers is not one for this loss."""
        return None

    def params(self) -> dict[str, float]:
        """The parameters, such that ``get(loss.name, **loss.params()) == loss``."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    def _coded(self, indicator: Tensor, dtype: torch.dtype | None) -> Tensor:
        return indicator.to(dtype or torch.get_default_dtype())
