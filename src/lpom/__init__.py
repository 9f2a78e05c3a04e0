"""Train feed-forward networks without back-propagation, by Lifted Proximal Operator Machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lpom import activations, datasets, losses, methods, saving
from lpom.diagnostics import Diagnosis, diagnose
from lpom.estimators import MLPClassifier, MLPRegressor
from lpom.exceptions import ConvergenceWarning, DivergenceError, LPOMError
from lpom.history import Epoch, History
from lpom.loop import EarlyStopping, Result
from lpom.methods import LPOM
from lpom.network import mlp
from lpom.objective import objective
from lpom.training import evaluate, fit

if TYPE_CHECKING:
    from os import PathLike

    from lpom.predictor import Predictor

__version__ = "0.1.0"


def load(run: str | PathLike[str]) -> Predictor:
    """What ``lpom train`` left in a folder (or a model file): predicts data frames.

    ``predict``, ``predict_proba`` and ``score`` take the columns of the training table;
    ``estimator`` is the :class:`MLPClassifier` or :class:`MLPRegressor` in it.
    """
    from lpom.runs import read_predictor

    return read_predictor(run)


__all__ = [
    "LPOM",
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
    "load",
    "losses",
    "methods",
    "mlp",
    "objective",
    "saving",
]
