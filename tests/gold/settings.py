"""The one place where these tests name the library's settings and calls."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import lpom
from lpom import LPOM, Adaptive, Continuation, Exact, StraightThrough, Sweeps
from lpom.methods import Batch, Problem
from lpom.penalties import L1, Box

from . import networks

#: Plain descent by one unit: weights after a step show the gradient.
SGD = Adaptive(optimizer="sgd", learning_rate=1.0)
BY_NODE = {"output": 7.0, "first*": 12.0, "relu": 30.0, "tanh": 16.0, "*": 25.0}


def lpom_with(**settings: Any) -> LPOM:
    return LPOM(**{"mu": 20.0, "weights": SGD} | settings)


SETTINGS = {
    "mu": lpom_with(),
    "small mu": lpom_with(mu=1.5),
    "mu by node": lpom_with(mu=BY_NODE),
    "sample weights": lpom_with(),
    "top-down": lpom_with(states=Sweeps("top-down", max_sweeps=2)),
    "top-down, plain": lpom_with(states=Sweeps("top-down", rule="plain"), mu=BY_NODE),
    "paper": lpom_with(states=Sweeps("paper", max_sweeps=3, rule="plain")),
    "parallel": lpom_with(states=Sweeps("parallel", max_sweeps=3, rule="plain")),
    "safe": lpom_with(states=Sweeps(max_sweeps=2, rule="safe"), mu=2.0),
    "until settled": lpom_with(
        states=Sweeps("top-down", max_sweeps=20, rule="safe", tolerance=1e-2)
    ),
    "exact": lpom_with(weights=Exact(iterations=2, ridge=0.1)),
    "exact, weighted": lpom_with(
        weights=Exact(iterations=1, ridge=0.1), states=Sweeps("top-down", max_sweeps=2), mu=2.0
    ),
    "penalties": lpom_with(penalties={"first*": L1(0.02), "*": Box(-0.4, 0.4)}),
    "penalties, exact": lpom_with(
        penalties={"first*": L1(0.02)}, weights=Exact(iterations=2, ridge=0.1)
    ),
    "straight, width 0.8": lpom_with(jumps=StraightThrough(0.8, relative=False)),
    "straight, one spread": lpom_with(jumps=StraightThrough()),
    "straight, top-down": lpom_with(
        jumps=StraightThrough(0.8, relative=False), states=Sweeps("top-down", max_sweeps=2)
    ),
    "straight, exact": lpom_with(
        jumps=StraightThrough(0.8, relative=False), weights=Exact(iterations=2, ridge=0.1)
    ),
    "continuation": lpom_with(jumps=Continuation(0.9, 0.3)),
    "continuation, top-down": lpom_with(
        jumps=Continuation(0.9, 0.3), states=Sweeps("top-down", max_sweeps=2)
    ),
}
WEIGHTED = {"sample weights", "exact, weighted"}
#: Settings for networks with jumps, and the networks that have them.
OF_JUMPS = {name for name in SETTINGS if name.startswith(("straight", "continuation"))}
JUMPING = {"step", "sign"}
#: One interleaved sweep of plain mu: `lpom.lift` gives the same gradient.
LIFTED = {"mu": 20.0, "small mu": 1.5}
#: How far ramps have shrunk.
PROGRESS = 0.5


def cases() -> list[tuple[str, str]]:
    """Networks and settings that belong together; some of them the library may refuse."""
    return [
        (network, setting)
        for network in networks.NETWORKS
        for setting in SETTINGS
        if (setting in OF_JUMPS) == (network in JUMPING)
    ]


def measure(network: str, setting: str) -> dict[str, Tensor]:
    """Everything that is held: by name, in float64."""
    method, example = SETTINGS[setting], networks.example(network)
    loss = lpom.losses.get(networks.NETWORKS[network].loss)
    weight = example.weight if setting in WEIGHTED else None
    batch = Batch(example.inputs, example.target, weight)
    model = networks.model(network)

    def begun(model: nn.Module) -> tuple[Problem, Any]:
        problem = Problem(model, loss, example.inputs)
        state = method.init(problem)
        state.progress = PROGRESS
        return problem, state

    measured: dict[str, Tensor] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        problem, state = begun(copy.deepcopy(model))
        with torch.no_grad():
            measured["outputs"] = copy.deepcopy(model)(example.inputs)
        objective = method.objective(problem, batch, state)
        measured["objective"] = torch.tensor(
            [objective.loss, objective.penalty, *objective.gaps], dtype=torch.float64
        )
        measured["rates"] = torch.tensor(method.rates(problem, batch, state), dtype=torch.float64)
        problem, state = begun(model)
        method.step(problem, batch, state)
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                measured[f"after/{name}"] = value.detach().clone()
        diagnosis = lpom.diagnose(
            networks.model(network),
            example.inputs,
            example.labels,
            method=method,
            loss=loss,
            sample_weight=weight,
        )
    for key in ("norm", "rate", "gap", "state_residual", "weight_residual", "rho"):
        values = [getattr(layer, key) for layer in diagnosis.layers]
        if not all(map(math.isnan, values)):
            measured[f"diagnosis/{key}"] = torch.tensor(values, dtype=torch.float64)
    return measured


def lifted_gradients(network: str, setting: str) -> dict[str, Tensor]:
    """The gradient of the mean loss by `lpom.lift`, by the names of the weights."""
    model, example = networks.model(network), networks.example(network)
    outputs = lpom.lift(model, mu=LIFTED[setting])(example.inputs)
    loss = lpom.losses.get(networks.NETWORKS[network].loss)
    outputs.backward(loss.gradient(outputs.detach(), example.target) / len(outputs))
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
