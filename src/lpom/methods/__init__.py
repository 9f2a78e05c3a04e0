"""Training methods, by name."""

from __future__ import annotations

from typing import Any

from lpom.methods.admm import ADMM
from lpom.methods.admm_hashing import ADMMHashing
from lpom.methods.backprop import SGD, Adagrad, Adam, Nesterov, RMSprop
from lpom.methods.base import Batch, Method, Problem, State
from lpom.methods.bcd import BCD
from lpom.methods.discrete import Ramps, StraightThrough
from lpom.methods.lifted import LiftedNetworks
from lpom.methods.lpom import LPOM
from lpom.methods.mac import MAC
from lpom.methods.tikhonov import Tikhonov
from lpom.registry import build, outside

#: Every method by its name: the one list to join.
METHODS: dict[str, type[Method[Any]]] = {
    method.name: method
    for method in (
        LPOM,
        SGD,
        Nesterov,
        Adagrad,
        RMSprop,
        Adam,
        StraightThrough,
        Ramps,
        MAC,
        BCD,
        ADMM,
        ADMMHashing,
        Tikhonov,
        LiftedNetworks,
    )
}


def get(method: str | Method[Any], **settings: Any) -> Method[Any]:
    """A method by its name, with hyperparameters; a `Method` is returned as it is.

    ``"package.module:Class"`` names one written elsewhere; packages offer theirs by name as entry
    points of the group ``lpom.methods``.
    """
    return build("method", Method, METHODS, method, settings, group="lpom.methods")


def names() -> list[str]:
    """Names that `get` knows."""
    return [*METHODS, *outside("lpom.methods")]


__all__ = [
    "ADMM",
    "BCD",
    "LPOM",
    "MAC",
    "METHODS",
    "SGD",
    "ADMMHashing",
    "Adagrad",
    "Adam",
    "Batch",
    "LiftedNetworks",
    "Method",
    "Nesterov",
    "Problem",
    "RMSprop",
    "Ramps",
    "State",
    "StraightThrough",
    "Tikhonov",
    "get",
    "names",
]
