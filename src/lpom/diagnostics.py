"""diagnose(): what the theory says of a network on data, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lpom import methods
from lpom.activations import Activation
from lpom.graph.tracing import unwrapped
from lpom.losses import Loss
from lpom.methods import LPOM, Batch, Problem
from lpom.modes import evaluating
from lpom.objectives import (
    Mu,
    Objective,
    evaluate,
    kkt_residuals,
    per_node,
    rho,
    spectral_rates,
)
from lpom.training.data import Arrays
from lpom.training.interface import Interface
from lpom.training.task import Task


@dataclass(frozen=True)
class LayerDiagnosis:
    """One layer: its map, its activation, and the state above it.

    Attributes
    ----------
    name : of the node
    norm : spectral norm of its edge
    rho : Theorem 2's rate for the hidden state ``X[i + 1]``; Theorem 3's tau for the output
    rate : the sharper rate with spectral norms; below 1 the plain iteration converges
    gap : mean gap per sample after the sweeps
    state_residual, weight_residual : root mean square of what eqs. 17 (27) and 20 leave
    dead : share of units that say the same for every sample
    saturated : share of values within 1 % of a finite end of the activation's range
    """

    name: str
    norm: float
    rho: float
    rate: float
    gap: float
    state_residual: float
    weight_residual: float
    dead: float
    saturated: float


@dataclass(frozen=True)
class Diagnosis:
    """All layers, the output's last; ``tau`` of Theorem 3; outputs that never change."""

    layers: tuple[LayerDiagnosis, ...]
    objective: float
    loss: float
    tau: float
    dead_classes: tuple[int, ...]

    def advice(self) -> list[str]:
        """What to look at, in words; empty when all is well."""
        dark = [i for i, layer in enumerate(self.layers[:-1]) if layer.dead == 1]
        if dark:
            return [
                f"every unit of layer {dark[0] + 1} is dead, so nothing gets through: start again "
                "with other weights, a leaky activation, or a smaller learning rate."
            ]
        sentences = [
            f"output {k} is dead: use an identity or leaky output activation, or a small positive "
            "bias on the last layer."
            for k in self.dead_classes
        ]
        sentences += [
            f"the state above layer {i + 1} may not contract (rate {layer.rate:.2f}): with more "
            "than one sweep use Sweeps(rule='safe')."
            for i, layer in enumerate(self.layers)
            if layer.rate >= 1
        ]
        sentences += [
            f"{layer.dead:.0%} of the units of layer {i + 1} are dead."
            for i, layer in enumerate(self.layers[:-1])
            if layer.dead > 0.5
        ]
        return sentences

    def __str__(self) -> str:
        heads = "layer", "norm", "rho / tau", "rate", "gap", "KKT state", "KKT weight"
        rows: list[tuple[str, ...]] = [(*heads, "dead", "saturated")]
        for i, a in enumerate(self.layers):
            numbers = a.norm, a.rho, a.rate, a.gap, a.state_residual, a.weight_residual
            shares = f"{a.dead:.1%}", f"{a.saturated:.1%}"
            rows.append((str(i + 1), *(f"{number:.3g}" for number in numbers), *shares))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"F = {self.objective:.6g} per sample, loss = {self.loss:.6g}"]
        for row in rows:
            lines.append(
                "  ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True))
            )
        return "\n".join([*lines, *(f"- {sentence}" for sentence in self.advice())])


@torch.no_grad()
def diagnose(
    model: nn.Module,
    X: Any,
    y: Any,
    *,
    method: str | LPOM = "lpom",
    loss: str | Loss = "auto",
    sample_weight: Any = None,
) -> Diagnosis:
    """Measure a network on data: norms, rates, gaps, optimality, dead and saturated units.

    States are those that ``method`` leaves after its sweeps over all of X at once; the weights are
    not touched.
    """
    chosen = methods.get(method)
    if not isinstance(chosen, LPOM):
        raise ValueError(
            f"diagnose looks at the objective of LPOM, not at that of {chosen.name!r}; leave "
            "method out, or give an LPOM with other settings."
        )
    with evaluating(model):
        task, problem, batch = _read(model, X, y, loss, sample_weight)
        state = chosen.init(problem)
        state.progress = 1.0
        state.penalised.at_end()
        states = chosen.settle(problem, batch, state)
        graph, mu, X_all = states.graph, states.mu, [x.detach() for x in states.X]
        _, forward = problem.graph.feed_forward(batch.inputs)

        penalty = state.penalised.value()
        value = evaluate(graph, task.loss, X_all, batch.target, mu, batch.weight, penalty=penalty)
        norms, rates = spectral_rates(graph, task.loss, mu, X_all, iterations=50)
        of_states, of_weights = kkt_residuals(
            graph, task.loss, X_all, batch.target, mu, prox=state.penalised.prox
        )
        residual = dict(zip(graph.parameters, of_weights, strict=True))
        bounds = rho(graph, mu, X_all)
    size, output = float(batch.total_weight), graph.output
    tau = rates[output - 1]
    bounds.insert(output - 1, tau)
    layers = [
        LayerDiagnosis(
            name=node.name,
            norm=norms[node.index - 1],
            rho=bounds[node.index - 1],
            rate=rates[node.index - 1],
            gap=value.gaps[node.index - 1] / size,
            state_residual=of_states[node.index - 1],
            weight_residual=_together([residual[p] for p in node.edge.parameters]),
            dead=float(_constant(forward[node.index]).double().mean()),
            saturated=_saturated(node.activation, forward[node.index]),
        )
        for node in graph
    ]
    constant = _constant(forward[output]).tolist()
    dead = tuple(k for k, c in enumerate(constant) if c) if task.kind != "numbers" else ()
    return Diagnosis(tuple(layers), value.total / size, value.loss / size, tau, dead)


def objective(
    model: nn.Module,
    X: Any,
    y: Any,
    *,
    states: Sequence[Tensor] | None = None,
    loss: str | Loss = "auto",
    mu: Mu = 20.0,
) -> Objective:
    """F of a model on data, in total and per node.

    ``states`` are the activations of every node in the order of the graph; without them the
    feed-forward ones are taken, and F is the loss.
    """
    with evaluating(model):
        task, problem, batch = _read(model, X, y, loss)
        _, X_all = problem.graph.feed_forward(batch.inputs)
        if states is not None:
            expected = [tuple(x.shape) for x in X_all[1:]]
            given = [tuple(x.shape) for x in states]
            if given != expected:
                raise ValueError(
                    "states needs one tensor per layer, the output's last, of shapes "
                    f"{expected}; got {given}."
                )
            X_all = [batch.inputs, *(x.to(batch.inputs) for x in states)]
        by_node = per_node(mu, problem.graph)
        return evaluate(problem.graph, task.loss, X_all, batch.target, by_node)


def _read(
    model: nn.Module, X: Any, y: Any, loss: str | Loss, weight: Any = None
) -> tuple[Task, Problem, Batch]:
    """What is asked of a model, the problem of it, and all rows as one batch."""
    interface = Interface.of(unwrapped(model), X, loss)
    task = Task.of(interface, y, loss)
    (batch,) = Arrays(X, y, task, interface, weight=weight).epoch()
    return task, Problem(interface.model, task.loss, interface.example), batch


def _together(values: list[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values)) if values else 0.0


def _constant(states: Tensor) -> Tensor:
    """Units with one and the same value in every row, if there is more than one row."""
    states = states.reshape(len(states), -1)
    if len(states) < 2:
        return torch.zeros(states.shape[1], dtype=torch.bool, device=states.device)
    return states.amax(0) == states.amin(0)


def _saturated(activation: Activation, states: Tensor) -> float:
    low, high = activation.lower, activation.upper
    width = high - low
    margin = 0.01 * width if width < float("inf") else 0.0
    return float(((states <= low + margin) | (states >= high - margin)).double().mean())
