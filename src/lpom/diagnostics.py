"""diagnose(): what the theory says of a network on data, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lpom.activations import Activation
from lpom.losses import Loss
from lpom.methods import LPOM, Problem
from lpom.network import Lifted
from lpom.objective import evaluate, kkt_residuals, per_layer, rho, spectral_rates
from lpom.training.sources import Arrays
from lpom.training.tasks import Task


@dataclass(frozen=True)
class LayerDiagnosis:
    """One layer: its map, its activation, and the state above it.

    Attributes
    ----------
    norm : spectral norm of the map
    rho : Theorem 2's rate for the hidden state ``X[i + 1]``; Theorem 3's tau for the output
    rate : the sharper rate with spectral norms; below 1 the plain iteration converges
    gap : mean gap per sample after the sweeps
    state_residual, weight_residual : root mean square of what eqs. 17 (27) and 20 leave
    dead : share of units that say the same for every sample
    saturated : share of values within 1 % of a finite end of the activation's range
    """

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
            "than one sweep use step_rule='safe'."
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
        table = Table(title=f"F = {self.objective:.6g} per sample, loss = {self.loss:.6g}")
        heads = "layer", "norm", "rho / tau", "rate", "gap", "KKT state", "KKT weight"
        for head in (*heads, "dead", "saturated"):
            table.add_column(head, justify="right")
        for i, a in enumerate(self.layers):
            numbers = a.norm, a.rho, a.rate, a.gap, a.state_residual, a.weight_residual
            shares = f"{a.dead:.1%}", f"{a.saturated:.1%}"
            table.add_row(str(i + 1), *(f"{number:.3g}" for number in numbers), *shares)
        console = Console(width=100)
        with console.capture() as capture:
            console.print(table)
            for sentence in self.advice():
                console.print(f"- {sentence}", highlight=False)
        return capture.get()


@torch.no_grad()
def diagnose(
    model: nn.Module,
    X: Any,
    y: Any,
    *,
    method: LPOM | None = None,
    loss: str | Loss = "auto",
    sample_weight: Any = None,
) -> Diagnosis:
    """Measure a network on data: norms, rates, gaps, optimality, dead and saturated units.

    States are those that ``method`` (by default ``LPOM()``) leaves after its sweeps over all of X
    at once; the weights are not touched.
    """
    method = method or LPOM()
    network = Lifted.from_module(model)
    task = Task.infer(y, network.n_outputs, loss, network[-1].activation)
    rows = Arrays(X, y, task, network, weight=sample_weight)
    (batch,) = rows.epoch()
    mu = per_layer(method.mu, len(network), method.mu_output)
    states = method.settle(Problem(network, task.loss), batch)
    _, forward = network.feed_forward(batch.inputs)
    network = method.as_trained(network, progress=1.0)

    value = evaluate(network, task.loss, states, batch.target, mu, batch.weight)
    norms, rates = spectral_rates(network, task.loss, mu, iterations=50)
    of_states, of_weights = kkt_residuals(network, task.loss, states, batch.target, mu)
    tau = rates[-1]
    size = float(batch.total_weight)
    constant = [bool(c) for c in _constant(forward[-1])]
    layers = [
        LayerDiagnosis(
            norm=norms[i],
            rho=bound,
            rate=rates[i],
            gap=value.gaps[i] / size,
            state_residual=of_states[i],
            weight_residual=of_weights[i],
            dead=float(_constant(forward[i + 1]).double().mean()),
            saturated=_saturated(layer.activation, forward[i + 1]),
        )
        for i, (layer, bound) in enumerate(zip(network, [*rho(network, mu), tau], strict=True))
    ]
    dead = tuple(k for k, c in enumerate(constant) if c) if task.kind != "numbers" else ()
    return Diagnosis(tuple(layers), value.total / size, value.loss / size, tau, dead)


def _constant(states: Tensor) -> Tensor:
    """Units with one and the same value in every row, if there is more than one row."""
    if len(states) < 2:
        return torch.zeros(states.shape[1], dtype=torch.bool, device=states.device)
    return states.amax(0) == states.amin(0)


def _saturated(activation: Activation, states: Tensor) -> float:
    low, high = activation.lower, activation.upper
    width = high - low
    margin = 0.01 * width if width < float("inf") else 0.0
    return float(((states <= low + margin) | (states >= high - margin)).double().mean())
