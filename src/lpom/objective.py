r"""The lifted objective, its optimality conditions, and the rates of Theorems 2 and 3.

.. math:: F(W, X) = \mathrm{loss}(X_L, T) + \sum_i \mu_i \sum D_i(X_{i+1}, Z_i),
          \qquad Z_i = A_i(X_i)

with the gap D of each layer's activation (eq. 18 of the paper, up to a constant). F equals the
plain loss when every state is feed-forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from lpom.losses import Loss
from lpom.network import Lifted


@dataclass(frozen=True)
class Objective:
    """Values summed over samples: the loss, and each layer's gap before it is weighted by mu."""

    loss: float
    gaps: tuple[float, ...]
    mu: tuple[float, ...]

    @property
    def layers(self) -> tuple[float, ...]:
        """What each layer adds to the total: ``mu[i] * gaps[i]``."""
        return tuple(mu * gap for mu, gap in zip(self.mu, self.gaps, strict=True))

    @property
    def total(self) -> float:
        return self.loss + sum(self.layers)


def per_layer(
    mu: float | Sequence[float], n_layers: int, output: float | None = None
) -> list[float]:
    """One positive penalty weight per layer from one number, a list, or a number and the last's.

    >>> per_layer(20.0, 3, output=5.0)
    [20.0, 20.0, 5.0]
    """
    if isinstance(mu, str):
        raise TypeError(f"mu must be a number or one number per layer, got the string {mu!r}.")
    if isinstance(mu, float | Real):
        values = [float(mu)] * n_layers
    else:
        values = [float(value) for value in mu]
        if len(values) != n_layers:
            raise ValueError(
                f"mu needs one value per weight layer: this network has {n_layers}, "
                f"got {len(values)}. Give {n_layers} values or a single one."
            )
    if output is not None:
        values[-1] = float(output)
    bad = [value for value in values if not 0 < value < float("inf")]
    if bad:
        raise ValueError(f"mu must be positive and finite in every layer, got {bad[0]}.")
    return values


@torch.no_grad()
def evaluate(
    network: Lifted,
    loss: Loss,
    X: Sequence[Tensor],
    target: Tensor,
    mu: Sequence[float],
    weight: Tensor | None = None,
) -> Objective:
    """F at the states ``X``, one per layer and the inputs; ``weight`` per sample multiplies it."""
    gaps = [
        total(layer.activation.gap(X[i + 1], layer.map.apply(X[i])), weight)
        for i, layer in enumerate(network)
    ]
    return Objective(total(loss.value(X[-1], target), weight), tuple(gaps), tuple(mu))


def total(values: Tensor, weight: Tensor | None = None) -> float:
    """The sum of all values, samples (rows) weighted; in double precision over samples."""
    per_sample = values.reshape(len(values), -1).sum(1).double()
    return float(per_sample.sum() if weight is None else per_sample @ weight.double())


def objective(
    model: nn.Module,
    X: Any,
    y: Any,
    *,
    states: Sequence[Tensor] | None = None,
    loss: str | Loss = "auto",
    mu: float | Sequence[float] = 20.0,
) -> Objective:
    """F of a model on data, in total and per layer.

    ``states`` are the activations of every layer, the output's last; without them the
    feed-forward ones are taken, and F is the loss.
    """
    from lpom.training.sources import Arrays  # which stands on the methods, and they on this
    from lpom.training.tasks import Task

    network = Lifted.from_module(model)
    task = Task.infer(y, network.n_outputs, loss, network[-1].activation)
    (batch,) = Arrays(X, y, task, network).epoch()
    _, X_all = network.feed_forward(batch.inputs)
    if states is not None:
        expected = [tuple(x.shape) for x in X_all[1:]]
        given = [tuple(x.shape) for x in states]
        if given != expected:
            raise ValueError(
                "states needs one tensor per layer, the output's last, of shapes "
                f"{expected}; got {given}."
            )
        X_all = [batch.inputs, *(x.to(batch.inputs) for x in states)]
    return evaluate(network, task.loss, X_all, batch.target, per_layer(mu, len(network)))


@torch.no_grad()
def kkt_residuals(
    network: Lifted, loss: Loss, X: Sequence[Tensor], target: Tensor, mu: Sequence[float]
) -> tuple[list[float], list[float]]:
    r"""How far states and weights are from the optimality conditions, root mean square.

    States (eqs. 17 and 27), as distance from the fixed point, zero exactly where they hold:
    :math:`X_i - \phi(Z_{i-1} - r (\phi(Z_i) - X_{i+1}) W_i)`. Weights (eq. 20), per sample:
    :math:`(\phi(Z_i) - X_{i+1})^T X_i / m`. Returns one number per layer for each: states
    ``X[1] .. X[L]``, weights ``W[0] .. W[L-1]``.
    """
    Z = [layer.map.apply(X[i]) for i, layer in enumerate(network)]
    states, weights = [], []
    for i, layer in enumerate(network):
        if i == len(network) - 1:
            pull = loss.gradient(X[-1], target) / mu[i]
        else:
            above = network[i + 1]
            residual = above.activation.phi(Z[i + 1]) - X[i + 2]
            pull = mu[i + 1] / mu[i] * above.map.adjoint(residual)
        states.append(_rms(X[i + 1] - layer.activation.phi(Z[i] - pull)))
        gradients = layer.map.weight_gradient(layer.activation.phi(Z[i]) - X[i + 1], X[i])
        weights.append(_rms(torch.cat([g.flatten() for g in gradients]) / len(X[0])))
    return states, weights


@torch.no_grad()
def spectral_rates(
    network: Lifted, loss: Loss, mu: Sequence[float], iterations: int = 20
) -> tuple[list[float], list[float]]:
    r"""Spectral norms of all maps, and the factor by which each plain state step contracts.

    For ``X[i + 1]`` that factor is :math:`r \gamma_i \gamma_{i+1} \|W_{i+1}\|_2^2`, for the
    output :math:`\tau = \gamma \eta / \mu` (Theorem 3). The spectral norm makes it sharper than
    Theorem 2's rho, see :func:`rho`; below one the iteration converges.
    """
    norms = []
    for layer in network:
        norm, _ = layer.map.norm(layer.map.start_vector(), iterations)
        norms.append(float(norm))
    gamma = [layer.activation.lipschitz for layer in network]
    last = len(network) - 1
    rates = [mu[i + 1] / mu[i] * gamma[i] * gamma[i + 1] * norms[i + 1] ** 2 for i in range(last)]
    return norms, [*rates, gamma[last] * loss.lipschitz / mu[last]]


@torch.no_grad()
def rho(network: Lifted, mu: Sequence[float]) -> list[float]:
    r"""The rate of Theorem 2 for every hidden state:
    :math:`r \gamma^2 \sqrt{\||W^T||W|\|_1 \||W^T||W|\|_\infty}`.
    """
    return [
        mu[i + 1]
        / mu[i]
        * below.activation.lipschitz
        * above.activation.lipschitz
        * float(above.map.absolute_bound())
        for i, (below, above) in enumerate(zip(network.layers, network.layers[1:], strict=False))
    ]


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
