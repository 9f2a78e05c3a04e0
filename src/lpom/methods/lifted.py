"""Lifted networks after Askari et al. (2018), in both of their formulations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from lpom.checks import check_choice, check_number
from lpom.methods.base import Batch, Method, Problem, State, from_settings
from lpom.methods.blocks import estimated_norm, half_square, nonnegative_states, require_relu
from lpom.methods.chains import Layer, Regression
from lpom.objectives import Objective, per_layer, total


@dataclass
class LiftedState(State):
    """The weights are all that the next batch needs."""

    mu: list[float] = from_settings(list)


@final
@dataclass(frozen=True)
class LiftedNetworks(Method[LiftedState]):
    r"""Block coordinate descent on batches, with penalties that lack LPOM's g; ReLU only.

    .. math:: \min_{W, X \ge 0} \mathrm{loss}(X_L, T) + \sum_i \mu_i E(X_{i+1}, Z_i)
              + \rho \sum_i \|W_i\|_F^2

    ``quadratic`` is what they trained with: :math:`E = \|X - Z\|^2 / 2`, eq. 10 with a ridge.
    ``divergence`` is their form for general activations,
    :math:`E = \Phi^*(X) - \langle X, Z \rangle`, here :math:`\|X\|^2 / 2 - \langle X, Z \rangle`.
    As a function of X alone either has its minimum at :math:`\max(Z, 0)`, but as a function of Z
    it is not lowest there. So a hidden state has the optimality condition

    .. math:: 0 \in \mu_{i-1} (\phi^{-1}(X_i) - Z_{i-1}) + \mu_i R_i W_i,
              \qquad R_i = Z_i - X_{i+1} \text{ or } -X_{i+1},

    which feed-forward states do not fulfil, and those of the weights, :math:`R_i^T X_i + \rho ...`,
    neither. LPOM has :math:`\phi(Z_i) - X_{i+1}` in place of :math:`R_i`. With ``divergence`` W is
    bounded by :math:`\rho` alone; it is here to be looked at.

    States start feed-forward with each batch. No block raises the batch's objective. An output
    without activation has no constraint. Biases count as weights.

    Parameters
    ----------
    mu : float or one per layer
        Weight of each layer's penalty.
    rho : float
        Ridge on the weights, beside the penalties of one batch.
    formulation : {"quadratic", "divergence"}
    sweeps : int
        Rounds over the states of a batch.
    iterations : int
        Accelerated projected gradient steps for each state (quadratic).
    ridge : float
        Proximal ridge of the weights, relative to the size of the states: the larger, the less
        one batch moves them.
    """

    mu: float | Sequence[float] = 1.0
    rho: float = 1e-3
    formulation: str = "quadratic"
    sweeps: int = 1
    iterations: int = 10
    ridge: float = 30.0

    name: ClassVar[str] = "lifted"
    steadier: ClassVar[tuple[str, ...]] = ("a larger ridge", "a larger rho")
    equation: ClassVar[str] = (
        "loss(X_L, T) + sum_i (mu_i/2 |X_i+1 - Z_i|^2 + rho |W_i|^2), X >= 0   (eq. 10, ridge)"
    )
    costs: ClassVar[str] = "X by non-negative least squares, two products an iteration; W by ridge"

    def init(self, problem: Problem) -> LiftedState:
        require_relu(problem.chain, self.name)
        check_choice("formulation", self.formulation, ("quadratic", "divergence"))
        check_number("rho", self.rho, strict=self.formulation == "divergence", low=0.0)
        check_number("sweeps", self.sweeps, whole=True)
        check_number("iterations", self.iterations, whole=True)
        check_number("ridge", self.ridge)
        return LiftedState(mu=per_layer(self.mu, len(problem.chain)))

    @torch.no_grad()
    def step(self, problem: Problem, batch: Batch, state: LiftedState) -> Tensor | None:
        """All states from the output down, then all weights."""
        network = problem.chain
        _, X = network.feed_forward(batch.inputs)
        outputs = X[-1]
        self._move_states(problem, batch, X, state.mu)
        for i, layer in enumerate(network):
            if layer.map.free:
                self._move_weights(layer, X[i], X[i + 1], state.mu[i], batch.weight)
        return outputs

    @torch.no_grad()
    def settle(self, problem: Problem, batch: Batch, state: LiftedState) -> list[Tensor]:
        """The states that a step would find, the inputs first; the weights are not touched."""
        _, X = problem.chain.feed_forward(batch.inputs)
        self._move_states(problem, batch, X, state.mu)
        return X

    def _move_states(
        self, problem: Problem, batch: Batch, X: list[Tensor], mu: list[float]
    ) -> None:
        """All states from the output down, in place of the feed-forward ones."""
        network, last = problem.chain, len(problem.chain) - 1
        norms = [estimated_norm(layer.map) for layer in network.layers[1:]]
        for _ in range(self.sweeps):
            Z = [layer.map.apply(x) for layer, x in zip(network, X[:-1], strict=True)]
            X[-1] = problem.loss.prox(
                Z[last], batch.target, mu[last], network[last].activation.lower
            )
            for i in range(last, 0, -1):
                ratio = mu[i] / mu[i - 1]
                if self.formulation == "divergence":
                    X[i] = (Z[i - 1] + ratio * network[i].map.adjoint(X[i + 1])).clamp(min=0)
                else:
                    X[i] = nonnegative_states(
                        network[i].map,
                        X[i],
                        Z[i - 1],
                        X[i + 1],
                        ratio,
                        norm=norms[i - 1],
                        iterations=self.iterations,
                    )

    @torch.no_grad()
    def objective(self, problem: Problem, batch: Batch, state: LiftedState) -> Objective:
        r"""A layer's gap is its penalty and :math:`\rho / \mu_i \|W_i\|_F^2`."""
        network, weight = problem.chain, batch.weight
        X = self.settle(problem, batch, state)
        gaps = []
        for i, layer in enumerate(network):
            Z = layer.map.apply(X[i])
            if self.formulation == "quadratic":
                penalty = half_square(X[i + 1] - Z)
            else:
                penalty = half_square(X[i + 1]) - X[i + 1] * Z
            square = float(layer.map.matrix().double().square().sum())
            gaps.append(total(penalty, weight) + self.rho / state.mu[i] * square)
        loss = total(problem.loss.value(X[-1], batch.target), weight)
        return Objective(loss, tuple(gaps), tuple(state.mu))

    def _move_weights(
        self, layer: Layer, X: Tensor, X_next: Tensor, mu: float, weight: Tensor | None
    ) -> None:
        r"""Minimise the layer's terms and :math:`\frac{\mu \lambda}{2} \|W - W_{old}\|_F^2` over W.

        The two ridges together pull towards :math:`s W_{old}`, :math:`s = \lambda / (\lambda +
        2 \rho / \mu)`: from there it is least squares (quadratic) or one product (divergence).
        """
        design = layer.map.design(X)
        if weight is not None:
            design = weight.sqrt()[:, None] * design
        size = design.square().sum() / design.shape[1]
        size = size.clamp_min(torch.finfo(size.dtype).eps)  # dead states, no bias
        pull, shrink = self.ridge * size, 2 * self.rho / mu
        start = pull / (pull + shrink) * layer.map.matrix()
        layer.map.set_matrix(start)
        if self.formulation == "divergence":
            rows = X_next if weight is None else weight.sqrt()[:, None] * X_next
            layer.map.set_matrix(start + rows.T @ design / (pull + shrink))
        else:
            ridge = float((pull + shrink) / size)
            regression = Regression(layer.map, X, ridge=ridge, weight=weight)
            regression.step(layer.map, X_next - layer.map.apply(X))
