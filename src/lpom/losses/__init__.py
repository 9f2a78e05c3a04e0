"""Convex losses on the outputs of a network: values, gradients, codings of labels.

>>> get("huber", delta=0.5)
Huber(delta=0.5)
"""

from __future__ import annotations

from typing import Any

from lpom.losses.base import Loss
from lpom.losses.classification import BinaryCrossEntropy, CrossEntropy, Hinge
from lpom.losses.regression import Huber, Squared
from lpom.registry import build

__all__ = [
    "BinaryCrossEntropy",
    "CrossEntropy",
    "Hinge",
    "Huber",
    "Loss",
    "Squared",
    "get",
    "names",
]

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
    return build("loss", Loss, _CLASSES, loss, params, aliases=_ALIASES)
