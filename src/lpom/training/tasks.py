"""What the targets are: classes, labels or numbers; how they are coded and scored."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lpom import losses
from lpom.activations import Activation
from lpom.exceptions import warn
from lpom.losses import Loss
from lpom.losses.base import LEFT_OUT


@dataclass(frozen=True)
class Task:
    """``classes`` (indices), ``labels`` (a 0/1 matrix), ``numbers``, or ``coded``, with the loss.

    Coded targets are those of a loss for classes in the form it works with: probabilities for
    the entropies, -1 and +1 for hinge. With ``n_steps`` there is a prediction at every step of a
    sequence, and a class of -100 leaves a step out: after its end, say.
    """

    kind: str
    loss: Loss
    n_outputs: int
    n_steps: int = 0

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
        given = losses.get(default if loss == "auto" else loss)
        if output is not None and not _fits(given, output):
            if loss == "auto":
                return cls(kind, losses.get("squared"), n_outputs, n_steps)
            raise ValueError(
                f"{given.name} needs outputs of either sign"
                f"{' and any size' if given.logits else ''}, but the output activation "
                f"{output.name} gives values from {output.lower:g} to {output.upper:g}. Leave the "
                "output activation out, or use loss='squared'."
            )
        if kind == "numbers" and given.classifies:
            kind = "coded"
        return cls(kind, given, n_outputs, n_steps)

    @property
    def n_classes(self) -> int:
        return max(self.n_outputs, 2)

    @property
    def metric(self) -> str:
        return "r2" if self.kind == "numbers" else "accuracy"

    def target(self, y: Any, there: Tensor | None = None) -> Tensor:
        """Targets as the loss wants them, (m, n_outputs); says what is wrong with bad ones.

        With steps (m, n_steps, n_outputs); those that are not ``there``, (m, steps), are left out.
        """
        y = as_targets(y, self.n_steps)
        if not self.n_steps:
            return self._target(y)
        if there is not None:
            y = _as_long_as(y, there)
        elif y.shape[1] != self.n_steps:
            raise ValueError(
                f"y needs a target for each of the {self.n_steps} steps that the model predicts, "
                f"(n_samples, {self.n_steps}); got shape {tuple(y.shape)}."
            )
        outside = y.new_zeros(y.shape[:2], dtype=torch.bool) if there is None else ~there
        if self.kind == "classes" and y.ndim == 2:
            outside = outside | (y == LEFT_OUT)
            y = y.masked_fill(outside, 0)
        target = self._target(y.flatten(0, 1))
        if bool(outside.any()):
            target = self.loss.left_out(target, outside.flatten())
        return torch.unflatten(target, 0, outside.shape)

    def check_range(self, target: Tensor, output: Activation) -> None:
        """Warn of numbers that no output can ever reach."""
        if self.kind != "numbers":
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


def _fits(loss: Loss, output: Activation) -> bool:
    """Whether the outputs can say yes and no, and give logits where the loss takes them."""
    if loss.logits and max(-output.lower, output.upper) < math.inf:
        return False
    if loss.exclusive or not loss.classifies:  # the largest of numbers of one sign will do
        return True
    return output.lower < loss.threshold < output.upper


def as_targets(y: Any, n_steps: int = 0) -> Tensor:
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
    if y.ndim not in ((2, 3) if n_steps else (1, 2)):
        dimensions = "two or three" if n_steps else "one or two"
        raise ValueError(f"y needs {dimensions} dimensions, got shape {tuple(y.shape)}.")
    targets: Tensor = y if y.is_floating_point() else y.long()
    return targets


def _as_long_as(y: Tensor, there: Tensor) -> Tensor:
    """Targets of every step (m, steps, ...): at those that are not ``there`` that of the first."""
    longest = int(there.sum(1).max())
    if y.shape[1] < longest or len(y) != len(there):
        raise ValueError(
            f"y needs a target for each of the {longest} steps of the longest sequence, "
            f"({len(there)}, {longest}); got shape {tuple(y.shape)}."
        )
    places = torch.arange(there.shape[1], device=y.device) * there.to(y.device)
    return y[torch.arange(len(y), device=y.device)[:, None], places]


def as_array(values: Any, name: str, advice: str = "") -> np.ndarray[Any, Any]:
    """An array of real numbers in a form that torch can read; copied only if it is not."""
    check_unmasked(values, name)
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{name} must hold numbers, got {array.dtype}.{advice}")
    if array.dtype.itemsize > 8:
        return array.astype(np.float64)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def check_unmasked(values: Any, name: str) -> None:
    """Raise if the mask of an array, which nothing here reads, hides some of its values."""
    if np.ma.isMaskedArray(values) and np.ma.is_masked(values):
        raise ValueError(f"{name} has masked values. Fill or remove them first.")


def plain_tensor(X: Tensor, name: str) -> Tensor:
    """The tensor without its graph, if it is one of real numbers that are all there."""
    odd = "complex" if X.is_complex() else "quantised" if X.is_quantized else ""
    odd = odd or ("meta" if X.is_meta else "sparse" if X.layout != torch.strided else "")
    if odd:
        raise TypeError(f"{name} must be a dense tensor of real numbers, got a {odd} one.")
    return X.detach()


def as_tensor(array: np.ndarray[Any, Any]) -> Tensor:
    """A tensor that shares the array's memory where it can; nobody here writes to it.

    Arrays that are read-only (memory maps, columns of a data frame) are as good as others, so
    torch's warning about them is kept from the user; reversed ones, and columns of records, are
    copied.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        if any(stride < 0 or stride % array.itemsize for stride in array.strides):
            array = array.copy()
        return torch.as_tensor(np.asarray(array))
