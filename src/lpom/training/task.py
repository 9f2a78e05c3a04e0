"""What the targets are: classes, labels or numbers; how they are coded and scored."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lpom import losses
from lpom.activations import Activation
from lpom.checks import as_array, as_tensor, plain_tensor
from lpom.exceptions import warn
from lpom.losses import Loss
from lpom.losses.base import LEFT_OUT
from lpom.training.interface import Interface

#: A loss as users give it: a name, an instance, or a function of outputs and targets.
LossLike: TypeAlias = str | Loss | Callable[[Tensor, Tensor], Tensor]


class FunctionLoss(Loss):
    """A function ``loss(outputs, target)``: one mean over the batch, or a value for each row."""

    threshold = 0.0

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)

    def __repr__(self) -> str:
        return self.name

    @property
    def lipschitz(self) -> float:
        return math.inf

    def value(self, x: Tensor, target: Tensor) -> Tensor:
        values = self.function(x, target)
        if values.ndim and len(values) == len(target):
            return values.flatten(1).mean(1) if values.ndim > 1 else values
        if values.numel() != 1:
            raise ValueError(
                f"the loss {self.name} must return one number for the batch or one for each of its "
                f"{len(target)} rows; got shape {tuple(values.shape)}."
            )
        return values.reshape(1).expand(len(target))

    def gradient(self, x: Tensor, target: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.value(x, target).sum(), x)
        return gradient

    def probabilities(self, x: Tensor) -> Tensor:
        raise ValueError(f"the loss {self.name} is a function, which has no probabilities.")

    def check_weighable(self, x: Tensor, target: Tensor) -> None:
        """Raise unless it tells the rows apart, as weights of samples need."""
        if self.function(x, target).ndim == 0:
            raise ValueError(
                f"sample_weight needs a loss with a value for each row, and {self.name} gives one "
                "number for the batch. Return the values of the rows (reduction='none'), or leave "
                "the weights out."
            )


class ModelLoss(FunctionLoss):
    """The loss that the model itself has computed, which stands for its outputs."""

    def __init__(self) -> None:
        super().__init__(lambda x, target: x.reshape(()))
        self.name = "model"


@dataclass(frozen=True)
class Task:
    """``classes`` (indices), ``labels`` (a 0/1 matrix), ``numbers``, or ``coded``, with the loss.

    Coded targets are those of a loss for classes in the form it works with: probabilities for
    the entropies, -1 and +1 for hinge. With ``n_steps`` there is a prediction at every step of a
    sequence, and a class of -100 leaves a step out. A loss that is a function has the targets as
    they came; where neither accuracy nor R2 can be told of them, ``other``, the score is the loss
    with its sign turned.
    """

    kind: str
    loss: Loss
    n_outputs: int
    n_steps: int = 0

    @classmethod
    def of(cls, interface: Interface, y: Any, loss: LossLike) -> Task:
        """What is asked of a model: by the targets, its outputs and the loss."""
        if interface.own_loss:
            return cls("other", ModelLoss(), 1)
        if y is None:
            raise TypeError("y is missing; give the targets, or a DataLoader in place of X and y.")
        outputs = interface.outputs
        if callable(loss) and not isinstance(loss, Loss):
            return cls(_kind(as_targets(y, any_shape=True), outputs), FunctionLoss(loss), 0)
        if outputs.ndim not in (2, 3) or len(outputs) != 2:
            raise ValueError(
                "the model must give one row of outputs per sample, (n_samples, n_outputs), or per "
                "step of one, (n_samples, n_steps, n_outputs); it gives shape "
                f"{tuple(outputs.shape)} for 2 samples. For outputs of other shapes give the loss "
                "as a function, loss=torch.nn.functional.cross_entropy."
            )
        n_steps = interface.n_steps
        if n_steps and as_targets(y, n_steps).shape[1] != n_steps:
            raise ValueError(
                f"y needs a target for each of the {n_steps} steps that the model predicts, "
                f"(n_samples, {n_steps}); got shape {tuple(as_targets(y, n_steps).shape)}."
            )
        return cls.infer(y, interface.n_outputs, loss, interface.output_activation, n_steps)

    @classmethod
    def infer(
        cls,
        y: Any,
        n_outputs: int,
        loss: str | Loss = "auto",
        output: Activation | None = None,
        n_steps: int = 0,
    ) -> Task:
        """Integers in a vector are classes, integers in a matrix labels, floats are numbers.

        With steps there is one dimension more.

        The loss follows unless it is given: cross-entropy for classes (binary cross-entropy when
        the network has one output), binary cross-entropy for labels, squared for numbers, and
        for an ``output`` activation that can't give logits. Floats for a loss that is given and
        for classes are its coded targets.
        """
        y = as_targets(y, n_steps)
        if y.is_floating_point():
            kind, default = "numbers", "squared"
        elif y.ndim == 2 + bool(n_steps):
            kind, default = "labels", "binary-cross-entropy"
        else:
            kind = "classes"
            default = "cross-entropy" if n_outputs > 1 else "binary-cross-entropy"
        chosen = losses.get(default if loss == "auto" else loss)
        if output is not None and not _fits(chosen, output):
            if loss == "auto":
                return cls(kind, losses.get("squared"), n_outputs, n_steps)
            raise ValueError(
                f"{chosen.name} needs outputs of either sign"
                f"{' and any size' if chosen.logits else ''}, but the output activation "
                f"{output.name} gives values from {output.lower:g} to {output.upper:g}. Leave the "
                "output activation out, or use loss='squared'."
            )
        if kind == "numbers" and chosen.classifies:
            kind = "coded"
        return cls(kind, chosen, n_outputs, n_steps)

    @property
    def n_classes(self) -> int:
        return max(self.n_outputs, 2)

    @property
    def metric(self) -> str:
        return {"numbers": "r2", "other": "-loss"}.get(self.kind, "accuracy")

    @property
    def by_function(self) -> bool:
        """Whether the loss is a function, so that targets stay as they came."""
        return isinstance(self.loss, FunctionLoss)

    def target(self, y: Any) -> Tensor:
        """Targets as the loss wants them, (m, n_outputs); says what is wrong with bad ones.

        With steps (m, n_steps, n_outputs).
        """
        if self.by_function:
            return as_targets(y, any_shape=True)
        y = as_targets(y, self.n_steps)
        if not self.n_steps:
            return self._target(y)
        outside = y.new_zeros(y.shape[:2], dtype=torch.bool)
        if self.kind == "classes" and y.ndim == 2:
            outside = y == LEFT_OUT
            y = y.masked_fill(outside, 0)
        target = self._target(y.flatten(0, 1))
        if bool(outside.any()):
            target = self.loss.left_out(target, outside.flatten())
        return torch.unflatten(target, 0, outside.shape)

    def place(self, target: Tensor, like: Tensor) -> Tensor:
        """Targets on the model's device, in its dtype where they are not whole numbers as given."""
        if self.by_function and not target.is_floating_point():
            return target.to(like.device)
        return target.to(like)

    def check_range(self, target: Tensor, output: Activation) -> None:
        """Warn of numbers that no output can ever reach."""
        if self.kind != "numbers" or self.by_function:
            return
        outside = (target < output.lower) | (target > output.upper)
        if bool(outside.any()):
            warn(
                f"y holds numbers such as {float(target[outside][0]):.3g}, and the output "
                f"activation {output.name} gives values from {output.lower:g} to "
                f"{output.upper:g}: they can't be learnt. Scale y, or leave the output activation "
                "out.",
                UserWarning,
            )

    def counts(self, target: Tensor) -> Tensor | None:
        """How many predictions of each sample count; None if there is one for each."""
        return self.loss.counted(target).sum(1) if self.n_steps else None

    def _target(self, y: Tensor) -> Tensor:
        if self.kind == "classes":
            if y.ndim != 1 or y.is_floating_point():
                raise ValueError(
                    f"expected one class index per sample, got {y.dtype} of shape {tuple(y.shape)}."
                )
            if len(y) and not 0 <= int(y.min()) <= int(y.max()) < self.n_classes:
                raise ValueError(
                    f"class indices must lie in 0..{self.n_classes - 1} for a network with "
                    f"{self.n_outputs} output{'' if self.n_outputs == 1 else 's'}, got "
                    f"{int(y.min())}..{int(y.max())}. Change the last layer's width, or number the "
                    "classes from 0; for a regression give floats."
                )
            return self.loss.encode(y, self.n_classes, self.n_outputs)
        matrix: Tensor = y[:, None] if y.ndim == 1 else y
        if matrix.ndim != 2 or matrix.shape[1] != self.n_outputs:
            raise ValueError(
                f"y needs one column per output: the network has {self.n_outputs}, "
                f"got shape {tuple(y.shape)}."
            )
        if self.kind in ("numbers", "coded"):
            self.loss.check_target(matrix)
            return matrix
        if not bool(((matrix == 0) | (matrix == 1)).all()):
            raise ValueError("a matrix of integers is taken as labels, which must be 0 or 1.")
        return self.loss.encode_indicator(matrix)

    def right(self, outputs: Tensor, target: Tensor) -> Tensor:
        """For each row whether all of it is decided as it should be; of a function's the share."""
        if self.by_function:
            decided = outputs.argmax(_class_dimension(target.shape, outputs.shape))
            counted = target != LEFT_OUT
            right = (decided == target) & counted
            shape = (len(target), -1)
            return right.reshape(shape).sum(1) / counted.reshape(shape).sum(1).clamp_min(1)
        right = self.decide(outputs) == self.truth(target)
        return right.reshape(len(outputs), -1).all(1) if right.ndim > 1 else right

    def decide(self, outputs: Tensor) -> Tensor:
        """Class indices, 0/1 labels, or the numbers themselves, from the network's outputs."""
        return self._decide(outputs, self.loss.threshold)

    def truth(self, target: Tensor) -> Tensor:
        """What :meth:`decide` should say, from coded targets."""
        return self._decide(target, self.loss.middle)

    def _decide(self, values: Tensor, threshold: float) -> Tensor:
        if self.kind == "numbers":
            return values
        if self.kind == "labels" or (self.kind == "coded" and not self.loss.exclusive):
            return (values > threshold).long()
        if self.n_outputs == 1:
            return (values[:, 0] > threshold).long()
        return values.argmax(1)


def _kind(y: Tensor, outputs: Tensor) -> str:
    """What a function's targets are, as far as a score needs to know."""
    if y.is_floating_point():
        return "numbers" if y.shape[1:] == outputs.shape[1:] else "other"
    return "classes" if _class_dimension(y.shape, outputs.shape) else "other"


def _class_dimension(y: torch.Size, outputs: torch.Size) -> int:
    """The dimension of the outputs that stands for the classes; 0 if there is none."""
    for dimension in (1, len(outputs) - 1):
        if dimension and outputs[1:dimension] + outputs[dimension + 1 :] == y[1:]:
            return dimension
    return 0


def _fits(loss: Loss, output: Activation) -> bool:
    """Whether the outputs can say yes and no, and give logits where the loss takes them."""
    if loss.logits and max(-output.lower, output.upper) < math.inf:
        return False
    if loss.exclusive or not loss.classifies:  # the largest of numbers of one sign will do
        return True
    return output.lower < loss.threshold < output.upper


def as_targets(y: Any, n_steps: int = 0, *, any_shape: bool = False) -> Tensor:
    """A tensor of int64 or floats, or a sentence about what else came."""
    if not isinstance(y, Tensor):
        y = as_tensor(
            as_array(
                y,
                "y",
                " Number the classes from 0, or use lpom.MLPClassifier, which takes labels of any "
                "kind.",
            )
        )
    y = plain_tensor(y, "y")
    if not any_shape and y.ndim not in ((2, 3) if n_steps else (1, 2)):
        dimensions = "two or three" if n_steps else "one or two"
        raise ValueError(f"y needs {dimensions} dimensions, got shape {tuple(y.shape)}.")
    targets: Tensor = y if y.is_floating_point() else y.long()
    return targets
