"""Block coordinate descent after Zeng et al.: three-splitting, every block by its minimiser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar, final

import torch
from torch import Tensor

from lpom.checks import check_number
from lpom.methods.base import Batch, Method, Problem, from_settings
from lpom.methods.blocks import half_square, preactivation, ridge_states
from lpom.methods.chains import Chain, SampleState, least_squares, of_samples
from lpom.objectives import Objective, per_layer, total


@dataclass
class BCDState(SampleState):
    """Variables of the samples they belong to; other samples start them anew.

    ``X[i]`` are states, the inputs first and the outputs last, and ``U[i]`` stands for ``Z[i]``.
    """

    mu: list[float] = from_settings(list)
    U: list[Tensor] = of_samples(list)


@final
@dataclass(frozen=True)
class BCD(Method[BCDState]):
    r"""Minimise over states, pre-activations and weights in turn, from the output down (eq. 5).

    .. math:: \mathrm{loss}(X_L, T)
              + \sum_i \frac{\mu_i}{2} (\|U_i - Z_i\|_F^2 + \|X_{i+1} - \phi_i(U_i)\|_F^2)

    Each block adds :math:`\frac{\alpha}{2} \|\cdot - old\|_F^2` and is then solved exactly, so the
    objective never rises: states and weights by a Cholesky factor of the smaller side, U by the
    global minimum of a scalar problem. Neither needs a derivative. Variables start feed-forward
    and belong to the samples, so it runs full batch.

    Parameters
    ----------
    mu : float or one per layer
        Weight of the two penalties of each layer.
    mu_output : float, optional
        Weight of the last layer's penalties where ``mu`` is one number. Larger than ``mu``, it
        makes hidden states carry more of the error down.
    alpha : float
        Weight of the proximal terms of states and pre-activations, relative to ``mu``.
    ridge : float
        Weight of the proximal term of the weights, relative to the size of the states below:
        :math:`\alpha = ridge \, \mu \|X\|_F^2 / n` for layers of n inputs.
    sweeps : int
        Rounds over all blocks in one step.
    """

    mu: float | Sequence[float] = 0.01
    mu_output: float | None = 0.1
    alpha: float = 0.01
    ridge: float = 1e-2
    sweeps: int = 4

    name: ClassVar[str] = "bcd"
    steadier: ClassVar[tuple[str, ...]] = ("a larger alpha", "a larger ridge")
    equation: ClassVar[str] = (
        "loss(X_L, T) + sum_i mu_i/2 (|U_i - Z_i|^2 + |X_i+1 - phi(U_i)|^2)   (eq. 5)"
    )
    costs: ClassVar[str] = (
        "per layer and sweep five products and two Cholesky factors; U in closed form"
    )
    full_batch: ClassVar[bool] = True

    def init(self, problem: Problem) -> BCDState:
        check_number("alpha", self.alpha, strict=False)
        check_number("ridge", self.ridge, strict=False)
        check_number("sweeps", self.sweeps, whole=True)
        output = self.mu_output if isinstance(self.mu, Real) else None
        return BCDState(mu=per_layer(self.mu, len(problem.chain), output))

    @torch.no_grad()
    def step(self, problem: Problem, batch: Batch, state: BCDState) -> None:
        """X, U and W of each layer, the last layer first."""
        network, mu = problem.chain, state.mu
        self._start(network, batch, state)
        X, U = state.X, state.U
        for i in list(range(len(network) - 1, -1, -1)) * self.sweeps:
            layer, strength = network[i], mu[i] * (1 + self.alpha)
            near = self._between(layer.activation.phi(U[i]), X[i + 1])
            if i == len(network) - 1:
                X[i + 1] = problem.loss.prox(near, batch.target, strength)
            else:
                X[i + 1] = ridge_states(network[i + 1].map, near, U[i + 1], mu[i + 1] / strength)
            Z = layer.map.apply(X[i])
            near = self._between(Z, U[i])
            U[i] = preactivation(layer.activation, X[i + 1], near, U[i], ratio=1 / (1 + self.alpha))
            least = least_squares(layer.map, X[i], batch, ridge=self.ridge)
            least.step(layer.map, U[i] - Z)

    @torch.no_grad()
    def objective(self, problem: Problem, batch: Batch, state: BCDState) -> Objective:
        network, weight = problem.chain, batch.weight
        self._start(network, batch, state)
        X, U = state.X, state.U
        gaps = [
            total(half_square(U[i] - layer.map.apply(X[i])), weight)
            + total(half_square(X[i + 1] - layer.activation.phi(U[i])), weight)
            for i, layer in enumerate(network)
        ]
        loss = total(problem.loss.value(X[-1], batch.target), weight)
        return Objective(loss, tuple(gaps), tuple(state.mu))

    def _between(self, goal: Tensor, old: Tensor) -> Tensor:
        """What a penalty and the proximal term pull to together."""
        return torch.lerp(goal, old, self.alpha / (1 + self.alpha))

    def _start(self, network: Chain, batch: Batch, state: BCDState) -> None:
        """Feed-forward variables, unless these samples have theirs already."""
        if not state.belongs_to(batch):
            state.U, X = network.feed_forward(batch.inputs)
            state.start(batch, X)
