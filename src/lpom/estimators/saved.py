"""A fitted estimator as a network and plain data, and back: no pickle."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from lpom import losses
from lpom.estimators.classifier import MLPClassifier
from lpom.estimators.fitted import Design
from lpom.estimators.regressor import MLPRegressor
from lpom.graph import chain, trace
from lpom.methods import State
from lpom.training import Result
from lpom.training.history import History
from lpom.training.tasks import Task


def describe(estimator: MLPClassifier | MLPRegressor) -> dict[str, Any]:
    """What beside the network makes predictions, as JSON can hold it."""
    task = estimator.result_.task
    made: dict[str, Any] = {
        "task": task.kind,
        "loss": {"name": task.loss.name, "parameters": task.loss.params()},
    }
    if isinstance(estimator, MLPClassifier):
        return made | {"classes": estimator.classes_.tolist()}
    return made | {"offset": estimator._offset.tolist(), "scale": estimator._scale.tolist()}


def restore(
    model: nn.Module, state: dict[str, Any], history: History | None = None
) -> MLPClassifier | MLPRegressor:
    """The estimator that :func:`describe` told of, with its network; it predicts, and may go on.

    Going on starts the method's own memory (of an optimiser, say) anew.
    """
    if not isinstance(model, nn.Sequential):
        raise ValueError(f"a sequence of layers was expected, got {type(model).__name__}.")
    layers = chain(trace(model))
    loss = losses.get(state["loss"]["name"], **state["loss"]["parameters"])
    sizes = (layers[0].map.n_inputs, *(layer.map.n_outputs for layer in layers))
    design = Design(sizes, layers[0].activation, layers[-1].activation)
    shape: dict[str, Any] = {
        "hidden_layer_sizes": sizes[1:-1],
        "activation": design.activation,
        "output_activation": design.output,
        "loss": loss,
    }
    made: MLPClassifier | MLPRegressor
    if "classes" in state:
        made = MLPClassifier(**shape)
        made.classes_ = np.array(state["classes"])
    else:
        made = MLPRegressor(**shape)
        made._offset, made._scale = np.array(state["offset"]), np.array(state["scale"])
    task = Task(state["task"], loss, sizes[-1])
    made.history_ = History(task.metric) if history is None else history
    made.result_ = Result(made.history_, "loaded", 0.0, 0.0, task, State())
    made._model, made._design, made._trained_by = model, design, None
    made._column_units = None  # the weights take the columns as they are
    made._random, made.t_ = np.random.RandomState(), 0
    made.n_features_in_ = sizes[0]
    return made
