"""Block coordinate descent after Zhang and Brand (2017): a ReLU written as a constraint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch

from lpom.checks import check_number
from lpom.methods.base import Batch, Method, Problem, from_settings
from lpom.methods.blocks import estimated_norm, half_square, nonnegative_states, require_relu
from lpom.methods.chains import Chain, SampleState, least_squares
from lpom.objectives import Objective, per_layer, total


@dataclass
class TikhonovState(SampleState):
    """States of the samples they belong to, the inputs first; other samples start them anew."""

    mu: list[float] = from_settings(list)


@final
@dataclass(frozen=True)
class Tikhonov(Method[TikhonovState]):
    r"""Minimise over states and weights in turn (eq. 10); ReLU only.

    .. math:: \min_{W, X} \mathrm{loss}(X_L, T) + \sum_i \frac{\mu_i}{2} \|X_{i+1} - Z_i\|_F^2
              \quad \text{s.t. } X_{i+1} \ge 0,

    since :math:`\max(z, 0)` is the point of :math:`x \ge 0` nearest to z. An output without
    activation has no constraint. Every block is convex and none raises the objective: states by
    non-negative least squares, weights by a ridge that pulls to the old ones. States start
    feed-forward and belong to the samples, so it runs full batch.

    Parameters
    ----------
    mu : float or one per layer
        Weight of each layer's penalty.
    iterations : int
        Accelerated projected gradient steps for each state.
    ridge : float
        Proximal ridge of the weights, relative to the size of the states.
    """

    mu: float | Sequence[float] = 0.1
    iterations: int = 10
    ridge: float = 1e-2

    name: ClassVar[str] = "tikhonov"
    steadier: ClassVar[tuple[str, ...]] = ("a larger mu", "a larger ridge")
    equation: ClassVar[str] = "loss(X_L, T) + sum_i mu_i/2 |X_i+1 - Z_i|^2, X >= 0   (eq. 10)"
    costs: ClassVar[str] = "X by non-negative least squares, two products an iteration; W by ridge"
    full_batch: ClassVar[bool] = True

    def init(self, problem: Problem) -> TikhonovState:
        require_relu(problem.chain, self.name)
        check_number("iterations", self.iterations, whole=True)
        check_number("ridge", self.ridge, strict=False)
        return TikhonovState(mu=per_layer(self.mu, len(problem.chain)))

    @torch.no_grad()
    def step(self, problem: Problem, batch: Batch, state: TikhonovState) -> None:
        """From the output down: the state above a layer, then its weights."""
        network, mu = problem.chain, state.mu
        self._start(network, batch, state)
        X, last = state.X, len(network) - 1
        Z = network[last].map.apply(X[last])
        X[-1] = problem.loss.prox(Z, batch.target, mu[last], network[last].activation.lower)
        for i in range(last, -1, -1):
            layer = network[i]
            least = least_squares(layer.map, X[i], batch, ridge=self.ridge)
            least.step(layer.map, X[i + 1] - Z)
            if i > 0:
                Z = network[i - 1].map.apply(X[i - 1])
                ratio = mu[i] / mu[i - 1]
                X[i] = nonnegative_states(
                    layer.map,
                    X[i],
                    Z,
                    X[i + 1],
                    ratio,
                    norm=estimated_norm(layer.map),
                    iterations=self.iterations,
                )

    @torch.no_grad()
    def objective(self, problem: Problem, batch: Batch, state: TikhonovState) -> Objective:
        network, weight = problem.chain, batch.weight
        self._start(network, batch, state)
        X = state.X
        gaps = [
            total(half_square(X[i + 1] - layer.map.apply(X[i])), weight)
            for i, layer in enumerate(network)
        ]
        loss = total(problem.loss.value(X[-1], batch.target), weight)
        return Objective(loss, tuple(gaps), tuple(state.mu))

    def _start(self, network: Chain, batch: Batch, state: TikhonovState) -> None:
        if not state.belongs_to(batch):
            state.start(batch, network.feed_forward(batch.inputs)[1])
