"""Train feed-forward networks without back-propagation, by Lifted Proximal Operator Machines."""

from lpom import activations, datasets, losses, methods, networks, saving
from lpom.diagnostics import Diagnosis, diagnose
from lpom.estimators import MLPClassifier, MLPRegressor
from lpom.exceptions import CheckpointError, ConvergenceWarning, DivergenceError, LPOMError
from lpom.methods import LPOM
from lpom.network import mlp
from lpom.objective import objective
from lpom.training import Checkpoint, EarlyStopping, Epoch, History, Result, evaluate, fit

__version__ = "0.1.0"

__all__ = [
    "LPOM",
    "Checkpoint",
    "CheckpointError",
    "ConvergenceWarning",
    "Diagnosis",
    "DivergenceError",
    "EarlyStopping",
    "Epoch",
    "History",
    "LPOMError",
    "MLPClassifier",
    "MLPRegressor",
    "Result",
    "activations",
    "datasets",
    "diagnose",
    "evaluate",
    "fit",
    "losses",
    "methods",
    "mlp",
    "networks",
    "objective",
    "saving",
]
