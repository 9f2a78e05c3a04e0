"""Train neural networks without back-propagation, by Lifted Proximal Operator Machines."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lpom import (
        activations,
        export,
        losses,
        methods,
        penalties,
        saving,
    )
    from lpom.compacting import compact
    from lpom.comparison import compare
    from lpom.diagnostics import Diagnosis, diagnose, objective
    from lpom.estimators import MLPClassifier, MLPRegressor
    from lpom.exceptions import (
        CheckpointError,
        ConvergenceWarning,
        DivergenceError,
        LostRankError,
        LPOMError,
        UntrainableError,
    )
    from lpom.inversion import invert
    from lpom.lifting import Lifted, lift, unlift
    from lpom.methods import LPOM
    from lpom.methods.jumps import Continuation, StraightThrough
    from lpom.networks import mlp
    from lpom.parallel import Parallel
    from lpom.saving import load, save
    from lpom.spiking import spike
    from lpom.states import Sweeps
    from lpom.training import Checkpoint, EarlyStopping, Epoch, History, Result, evaluate
    from lpom.training.fit import fit
    from lpom.weights.adaptive import Adaptive
    from lpom.weights.exact import Exact

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
    "StraightThrough",
    "Sweeps",
    "UntrainableError",
    "activations",
    "compact",
    "compare",
    "diagnose",
    "evaluate",
    "export",
    "fit",
    "inversion",
    "invert",
    "lift",
    "load",
    "losses",
    "methods",
    "mlp",
    "objective",
    "penalties",
    "save",
    "saving",
    "spike",
    "unlift",
]

#: Where names come from, loaded when they are asked for; a name that is not here is a room.
_ROOMS = {
    "compacting": ("compact",),
    "comparison": ("compare",),
    "diagnostics": ("Diagnosis", "diagnose", "objective"),
    "estimators": ("MLPClassifier", "MLPRegressor"),
    "exceptions": (
        "CheckpointError",
        "ConvergenceWarning",
        "DivergenceError",
        "LostRankError",
        "LPOMError",
        "UntrainableError",
    ),
    "inversion": ("invert",),
    "lifting": ("Lifted", "lift", "unlift"),
    "methods": ("LPOM",),
    "methods.jumps": ("Continuation", "StraightThrough"),
    "networks": ("mlp",),
    "parallel": ("Parallel",),
    "saving": ("load", "save"),
    "spiking": ("spike",),
    "states": ("Sweeps",),
    "training": ("Checkpoint", "EarlyStopping", "Epoch", "History", "Result", "evaluate"),
    "training.fit": ("fit",),
    "weights.adaptive": ("Adaptive",),
    "weights.exact": ("Exact",),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'lpom' has no attribute {name!r}")
    if name in _ROOM_OF:
        found = getattr(import_module(f"lpom.{_ROOM_OF[name]}"), name)
    else:
        found = import_module(f"lpom.{name}")
    globals()[name] = found  # asked for once
    return found


def __dir__() -> list[str]:
    return __all__
