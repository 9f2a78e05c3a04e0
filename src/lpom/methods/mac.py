"""The method of auxiliary coordinates after Carreira-Perpinan and Wang: a quadratic penalty."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from lpom.checks import check_choice, check_number
from lpom.methods.base import Batch, Method, Problem
from lpom.methods.blocks import half_square, ridge_states, slope
from lpom.methods.optimizers import (
    Factory,
    OptimizerState,
    add_gradient,
    make_optimizer,
    set_progress,
)
from lpom.methods.regression import Regression
from lpom.methods.samples import SampleState, least_squares
from lpom.network import Layer, Lifted
from lpom.objective import Objective, total

_HALVINGS = 16  # of a Gauss-Newton step before a sample (or a unit) stays where it is


@dataclass
class MACState(SampleState, OptimizerState):
    """States ``X`` of a whole data set (the inputs first), the penalty and the epochs done."""

    mu: float = 1.0
    epochs: int = 0


@final
@dataclass(repr=False, eq=False)
class MAC(Method[MACState]):
    r"""Minimise the quadratic penalty over states, then weights, while the penalty grows (eq. 3).

    .. math:: \mathrm{loss}(X_L, T) + \frac{\mu}{2} \sum_i \|X_{i+1} - \phi_i(Z_i)\|_F^2

    The output state is a proximal step of the loss. The others, from the top down, and the weights
    take Gauss-Newton steps. The curvature of a step is bounded by that of :math:`\phi' = \gamma`,
    the Lipschitz constant, so that all samples (or all units of a layer) share one Cholesky factor:
    with :math:`G = Z + \phi'(Z) (X_{next} - \phi(Z)) / \gamma^2` the step goes to

    .. math:: \arg\min_X \|X - \phi(Z_{below})\|^2 + \gamma^2 \|G - A(X)\|^2
              \quad\text{or}\quad \arg\min_W \|G - A(X; W)\|^2 .

    It is halved, for each sample or unit by itself, as long as it would raise the objective.

    When a batch is the whole data set, its states are kept from epoch to epoch. Otherwise they
    start feed-forward, and the weights, which must not fit one batch alone, follow the gradient of
    their least-squares problem by an optimiser.

    Parameters
    ----------
    mu, mu_factor, mu_max : float
        First value of the penalty, what it is multiplied by after each epoch, and its limit.
    sweeps, iterations : int
        Gauss-Newton steps of every state, and of the weights, in each step.
    weights : {"auto", "gauss-newton", "adaptive"}
        How weights move; auto is Gauss-Newton on whole data sets and adaptive on batches.
    ridge : float
        Proximal ridge of Gauss-Newton steps of the weights, relative to the size of the states.
    optimizer, learning_rate, schedule
        For adaptive weights, as for LPOM.
    """

    mu: float = 1.0
    mu_factor: float = 1.2
    mu_max: float = 100.0
    sweeps: int = 1
    iterations: int = 1
    weights: str = "auto"
    ridge: float = 1e-3
    optimizer: str | Factory = "adam"
    learning_rate: float = 2e-3
    schedule: str = "linear"

    name: ClassVar[str] = "mac"
    equation: ClassVar[str] = "loss(X_L, T) + mu/2 sum_i |X_i+1 - phi(Z_i)|^2   (eq. 3)"
    costs: ClassVar[str] = "per layer and sweep four products and a Cholesky factor of W W^T"

    @property
    def steadier(self) -> tuple[str, ...]:
        slower, held = "a smaller learning_rate", "a larger ridge"
        return {"adaptive": (slower,), "gauss-newton": (held,)}.get(
            self.weights, (f"{slower} (on batches)", f"{held} (on all rows at once)")
        )

    def init(self, problem: Problem) -> MACState:
        check_number("mu", self.mu)
        check_number("mu_factor", self.mu_factor, low=1.0, strict=False)
        check_number("mu_max", self.mu_max, low=self.mu, strict=False)
        check_number("sweeps", self.sweeps, whole=True)
        check_number("iterations", self.iterations, whole=True)
        check_number("ridge", self.ridge, strict=False)
        check_choice("weights", self.weights, ("auto", "gauss-newton", "adaptive"))
        for layer in problem.network:
            if layer.activation.jumps:
                raise ValueError(
                    f"mac needs the derivative of every activation, and that of "
                    f"{layer.activation.name} is zero wherever it exists. Use method='lpom', which "
                    "trains activations with jumps."
                )
        state = MACState(mu=self.mu)
        if self.weights != "gauss-newton":
            state.optimizer = make_optimizer(
                self.optimizer, problem.network.parameters, self.learning_rate, self.schedule
            )
        return state

    @torch.no_grad()
    def step(self, problem: Problem, batch: Batch, state: MACState) -> Tensor | None:
        """States from the output down, then the weights of every layer by themselves."""
        network = problem.network
        state.mu = min(self.mu * self.mu_factor**state.epochs, self.mu_max)
        X, outputs = self._start(network, batch, state)
        self._move_states(problem, batch, X, state.mu)
        adaptive = self.weights == "adaptive" or (self.weights == "auto" and not batch.whole)
        if adaptive:
            self._follow_gradient(network, batch, X, state)
        else:
            for i, layer in enumerate(network):  # independent of each other
                regression = least_squares(layer.map, X[i], batch, ridge=self.ridge)
                for _ in range(self.iterations):
                    gauss_newton_weights(layer, regression, X[i], X[i + 1], batch.weight)
        return outputs

    @torch.no_grad()
    def settle(self, problem: Problem, batch: Batch, state: MACState) -> list[Tensor]:
        """The states that a step finds from a feed-forward start; the weights are not touched."""
        _, X = problem.network.feed_forward(batch.inputs)
        self._move_states(problem, batch, X, state.mu)
        return X

    @torch.no_grad()
    def objective(self, problem: Problem, batch: Batch, state: MACState) -> Objective:
        network, weight = problem.network, batch.weight
        kept = batch.whole and state.belongs_to(batch)
        X = state.X if kept else self.settle(problem, batch, state)
        gaps = [
            total(half_square(X[i + 1] - layer.activation.phi(layer.map.apply(X[i]))), weight)
            for i, layer in enumerate(network)
        ]
        loss = total(problem.loss.value(X[-1], batch.target), weight)
        return Objective(loss, tuple(gaps), (state.mu,) * len(network))

    def end_epoch(self, problem: Problem, batch: Batch, state: MACState) -> None:
        state.epochs += 1

    def _start(
        self, network: Lifted, batch: Batch, state: MACState
    ) -> tuple[list[Tensor], Tensor | None]:
        """States of this batch: kept, or feed-forward, and then the network's outputs too."""
        if batch.whole and state.belongs_to(batch):
            return state.X, None
        _, X = network.feed_forward(batch.inputs)
        if not batch.whole:
            return X, X[-1]
        state.start(batch, X)
        return state.X, X[-1]

    def _move_states(self, problem: Problem, batch: Batch, X: list[Tensor], mu: float) -> None:
        """Sweeps from the output down, in place."""
        network, last = problem.network, len(problem.network) - 1
        for _ in range(self.sweeps):
            below = network[last].activation.phi(network[last].map.apply(X[last]))
            X[-1] = problem.loss.prox(below, batch.target, mu)
            for i in range(last, 0, -1):
                below = network[i - 1].activation.phi(network[i - 1].map.apply(X[i - 1]))
                X[i] = gauss_newton_states(network[i], below, X[i], X[i + 1])

    def _follow_gradient(
        self, network: Lifted, batch: Batch, X: list[Tensor], state: MACState
    ) -> None:
        optimizer = state.optimizer
        assert optimizer is not None  # init made it
        set_progress(optimizer, self.schedule, state.progress)
        for i, layer in enumerate(network):
            Z = layer.map.apply(X[i])
            residual = layer.activation.phi(Z) - X[i + 1]
            pull = residual * slope(layer.activation, Z)
            add_gradient(layer, X[i], pull, state.mu, batch.weight, batch.total_weight)
        optimizer.step()


def gauss_newton_states(layer: Layer, below: Tensor, X: Tensor, above: Tensor) -> Tensor:
    r"""One Gauss-Newton step on :math:`\|X - below\|^2 + \|above - \phi(A(X))\|^2`, per sample."""
    gamma, phi = layer.activation.lipschitz, layer.activation.phi
    Z = layer.map.apply(X)
    missing = above - phi(Z)
    goal = Z + slope(layer.activation, Z) * missing / gamma**2
    move = ridge_states(layer.map, below, goal, gamma**2) - X
    Z_move = layer.map.linear(move)

    def cost(t: Tensor) -> Tensor:
        own = (X + t * move - below).square().sum(1, keepdim=True)
        return own + (above - phi(Z + t * Z_move)).square().sum(1, keepdim=True)

    return X + halved(cost, X.new_ones(len(X), 1)) * move


def gauss_newton_weights(
    layer: Layer, regression: Regression, X: Tensor, above: Tensor, weight: Tensor | None
) -> None:
    r"""One Gauss-Newton step of the weights on :math:`\|above - \phi(A(X; W))\|^2`, per unit."""
    if not layer.map.free:
        return
    gamma, phi = layer.activation.lipschitz, layer.activation.phi
    Z = layer.map.apply(X)
    derivative = slope(layer.activation, Z)
    move = regression.solve(derivative * (above - phi(Z)) / gamma**2)  # (columns, units)
    Z_move = regression.apply(move)
    per_row = torch.ones_like(Z[:, :1]) if weight is None else weight[:, None]
    per_row = per_row / per_row.sum()
    # units that are flat on most samples have less curvature than the bound by about this factor
    longer = gamma**2 / (per_row * derivative.square()).sum(0, keepdim=True)

    def cost(t: Tensor) -> Tensor:
        return (per_row * (above - phi(Z + t * Z_move)).square()).sum(0, keepdim=True)

    share = halved(cost, longer.clamp(max=2.0 ** (_HALVINGS / 2)))
    layer.map.add_matrix((share * move).T)


def halved(cost: Callable[[Tensor], Tensor], share: Tensor) -> Tensor:
    """The shares of a step, each halved until its cost is not above that of no step, or zero."""
    start = cost(torch.zeros_like(share))
    for _ in range(_HALVINGS):
        fits = cost(share) <= start
        if bool(fits.all()):
            return share
        share = torch.where(fits, share, share / 2)
    return torch.where(cost(share) <= start, share, 0)
