"""Train neural networks without back-propagation, by Lifted Proximal Operator Machines."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lpom import activations, losses, methods, penalties
from lpom.compact import compact
from lpom.diagnostics import Diagnosis, diagnose, objective
from lpom.exceptions import (
    CheckpointError,
    ConvergenceWarning,
    DivergenceError,
    LostRankError,
    LPOMError,
    UntrainableError,
)
from lpom.lift import Lifted, lift, unlift
from lpom.methods import LPOM
from lpom.methods.lpom import Adaptive, Continuation, Exact, Straight, Sweeps
from lpom.networks.mlp import mlp
from lpom.parallel import Parallel
from lpom.training import Checkpoint, EarlyStopping, Epoch, History, Result, evaluate, fit

if TYPE_CHECKING:
    from lpom import datasets, export, networks, saving
    from lpom.estimators import MLPClassifier, MLPRegressor
    from lpom.runs import load

__version__ = "0.1.0"

__all__ = [
    "LPOM",
    "Adaptive",
    "Checkpoint",
    "CheckpointError",
    "Continuation",
    "ConvergenceWarning",
    "Diagnosis",
    "DivergenceError",
    "EarlyStopping",
    "Epoch",
    "Exact",
    "History",
    "LPOMError",
    "Lifted",
    "LostRankError",
    "MLPClassifier",
    "MLPRegressor",
    "Parallel",
    "Result",
    "Straight",
    "Sweeps",
    "UntrainableError",
    "activations",
    "compact",
    "datasets",
    "diagnose",
    "evaluate",
    "export",
    "fit",
    "lift",
    "load",
    "losses",
    "methods",
    "mlp",
    "networks",
    "objective",
    "penalties",
    "saving",
    "unlift",
]

#: Loaded when asked for: they need more than torch.
_LATER = {
    "MLPClassifier": "lpom.estimators",
    "MLPRegressor": "lpom.estimators",
    "load": "lpom.runs",
}
_ROOMS = ("datasets", "export", "networks", "saving")


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    if name in _ROOMS:
        return import_module(f"lpom.{name}")
    raise AttributeError(f"module 'lpom' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
