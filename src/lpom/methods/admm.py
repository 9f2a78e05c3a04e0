"""ADMM after Taylor et al. (2016): closed forms only, one multiplier on the output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from lpom.activations import Identity
from lpom.checks import check_number
from lpom.methods.base import Batch, Method, Problem, from_settings
from lpom.methods.blocks import half_square, preactivation, ridge_states
from lpom.methods.chains import Chain, SampleState, least_squares, of_samples
from lpom.objectives import Objective, per_layer, total


@dataclass
class ADMMState(SampleState):
    """Variables of the batch they belong to; another batch starts them anew.

    ``X[i]`` are states (the inputs first), ``U[i]`` stands for ``Z[i]``, ``M`` is the multiplier
    of the output divided by beta.
    """

    U: list[Tensor] = of_samples(list)
    M: Tensor = of_samples(lambda: torch.zeros(0))
    mu: list[float] = from_settings(list)
    steps: int = 0


@final
@dataclass(frozen=True)
class ADMM(Method[ADMMState]):
    r"""Alternate between weights, states and pre-activations, each solved exactly.

    .. math:: \mathrm{loss}(U_{L-1}, T) + \frac{\beta}{2} \|U_{L-1} - Z_{L-1} + M\|_F^2
              + \sum_{i<L-1} \frac{\mu_i}{2} (\|U_i - Z_i\|_F^2 + \|X_{i+1} - \phi_i(U_i)\|_F^2)

    The output has no activation (eq. 6). A step goes from the output down: U, W, X of each layer,
    then :math:`M \leftarrow M + U_{L-1} - Z_{L-1}`. Without the multiplier step it never raises
    the objective. Variables start feed-forward and belong to the samples, so it runs full batch.
    Whatever the activation, no derivative is used.

    Parameters
    ----------
    mu : float or one per hidden layer
        Weight of the two penalties of each hidden layer. Well below ``beta`` hidden states follow
        the targets and the first layers learn; near or above it the states drift from those
        of the network, whose accuracy falls again, or (far above) hardly move at all.
    beta : float
        Weight of the output's penalty.
    warm_start : int
        Steps before the multiplier moves for the first time.
    ridge : float
        Proximal ridge of the weights, relative to the size of the states.
    """

    mu: float | Sequence[float] = 1e-3
    beta: float = 0.1
    warm_start: int = 10
    ridge: float = 1e-5

    name: ClassVar[str] = "admm"
    steadier: ClassVar[tuple[str, ...]] = ("a smaller mu", "a larger ridge")
    equation: ClassVar[str] = (
        "loss(U_L, T) + beta/2 |U_L - Z_L + M|^2 "
        "+ sum_i mu_i/2 (|U_i - Z_i|^2 + |X_i+1 - phi(U_i)|^2)   (eq. 6)"
    )
    costs: ClassVar[str] = "per layer four products and two Cholesky factors; U in closed form"
    full_batch: ClassVar[bool] = True

    def init(self, problem: Problem) -> ADMMState:
        network = problem.chain
        check_number("beta", self.beta)
        check_number("warm_start", self.warm_start, strict=False, whole=True)
        check_number("ridge", self.ridge, strict=False)
        output = network[-1].activation
        if output != Identity():
            raise ValueError(
                f"admm has no activation on the output (eq. 6), this network has {output.name}: "
                "drop it, or use method='bcd' or 'lpom'."
            )
        hidden = per_layer(self.mu, len(network) - 1) if len(network) > 1 else []
        return ADMMState(mu=[*hidden, self.beta])

    @torch.no_grad()
    def step(self, problem: Problem, batch: Batch, state: ADMMState) -> None:
        """From the output down, each block by its minimiser; the multiplier last."""
        network, last = problem.chain, len(problem.chain) - 1
        self._start(network, batch, state)
        X, U, mu = state.X, state.U, state.mu
        Z = [layer.map.apply(x) for layer, x in zip(network, X, strict=True)]

        U[last] = problem.loss.prox(Z[last] - state.M, batch.target, self.beta)
        goal = U[last] + state.M
        for i in range(last, -1, -1):
            layer = network[i]
            least = least_squares(layer.map, X[i], batch, ridge=self.ridge)
            least.step(layer.map, goal - Z[i])
            if i > 0:
                below = network[i - 1].activation
                X[i] = ridge_states(layer.map, below.phi(U[i - 1]), goal, mu[i] / mu[i - 1])
                goal = U[i - 1] = preactivation(below, X[i], Z[i - 1], U[i - 1])
        state.steps += 1
        if state.steps > self.warm_start:
            state.M = state.M + U[last] - network[last].map.apply(X[last])

    @torch.no_grad()
    def objective(self, problem: Problem, batch: Batch, state: ADMMState) -> Objective:
        network, weight = problem.chain, batch.weight
        self._start(network, batch, state)
        X, U = state.X, state.U
        gaps = []
        for i, layer in enumerate(network):
            distance = U[i] - layer.map.apply(X[i])
            if i == len(network) - 1:
                gaps.append(total(half_square(distance + state.M), weight))
            else:
                missed = X[i + 1] - layer.activation.phi(U[i])
                gaps.append(
                    total(half_square(distance), weight) + total(half_square(missed), weight)
                )
        loss = total(problem.loss.value(U[-1], batch.target), weight)
        return Objective(loss, tuple(gaps), tuple(state.mu))

    def _start(self, network: Chain, batch: Batch, state: ADMMState) -> None:
        """Feed-forward variables and no multiplier, unless these samples have theirs already."""
        if state.belongs_to(batch):
            return
        state.U, X = network.feed_forward(batch.inputs)
        state.start(batch, X[:-1])
        state.M, state.steps = torch.zeros_like(X[-1]), 0
