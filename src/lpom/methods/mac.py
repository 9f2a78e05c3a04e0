"""The method of auxiliary coordinates after Carreira-Perpinan and Wang: a quadratic penalty."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from lpom.checks import check_choice, check_number
from lpom.graph import Graph, Switches
from lpom.methods.base import Batch, Method, Problem
from lpom.methods.blocks import half_square, ridge_states, slope
from lpom.methods.chains import Layer, Regression, SampleState, least_squares
from lpom.methods.optimizers import OptimizerState, add_gradient
from lpom.objectives import Objective, adjoint, total, value
from lpom.weights.adaptive import Factory, Schedule

_HALVINGS = 16  # of a Gauss-Newton step before a sample (or a unit) stays where it is


@dataclass
class MACState(SampleState, OptimizerState):
    """States ``X`` of a whole data set (the inputs first), the penalty and the epochs done."""

    mu: float = 1.0
    epochs: int = 0


@final
@dataclass(frozen=True)
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
    schedule: Schedule = "linear"

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
        check_number("mu_max", self.mu_max)
        if self.mu_max < self.mu:
            raise ValueError(
                f"mu grows up to mu_max, so MAC needs a mu_max of at least mu={self.mu:g}, got "
                f"{self.mu_max:g}: set both."
            )
        check_number("sweeps", self.sweeps, whole=True)
        check_number("iterations", self.iterations, whole=True)
        check_number("ridge", self.ridge, strict=False)
        check_choice("weights", self.weights, ("auto", "gauss-newton", "adaptive"))
        for node in problem.graph:
            if node.activation.jumps:
                raise ValueError(
                    f"mac needs the derivative of every activation, and that of "
                    f"{node.activation.name} is zero wherever it exists. Use method='lpom', which "
                    "trains activations with jumps."
                )
        if self.weights == "gauss-newton":
            problem.chain  # noqa: B018  (raises where there is none)
        state = MACState(mu=self.mu)
        if self.weights != "gauss-newton":
            state.make(problem, self.optimizer, self.learning_rate, self.schedule)
        return state

    @torch.no_grad()
    def step(self, problem: Problem, batch: Batch, state: MACState) -> Tensor | None:
        """States from the output down, then the weights of every layer by themselves."""
        state.mu = min(self.mu * self.mu_factor**state.epochs, self.mu_max)
        X, outputs, switches = self._start(problem, batch, state)
        self._move_states(problem, batch, X, state.mu, switches)
        solves = problem.is_chain and (self.weights != "adaptive" and batch.whole)
        if self.weights == "gauss-newton" or solves:
            for i, layer in enumerate(problem.chain):  # independent of each other
                regression = least_squares(layer.map, X[i], batch, ridge=self.ridge)
                for _ in range(self.iterations):
                    gauss_newton_weights(layer, regression, X[i], X[i + 1], batch.weight)
        else:
            self._follow_gradient(problem, batch, X, state, switches)
        return outputs

    @torch.no_grad()
    def settle(self, problem: Problem, batch: Batch, state: MACState) -> list[Tensor]:
        """The states that a step finds from a feed-forward start; the weights are not touched."""
        switches: Switches = {}
        _, X = problem.graph.feed_forward(batch.inputs, switches)
        self._move_states(problem, batch, X, state.mu, switches)
        return X

    @torch.no_grad()
    def objective(self, problem: Problem, batch: Batch, state: MACState) -> Objective:
        graph, weight = problem.graph, batch.weight
        kept = batch.whole and state.belongs_to(batch)
        X = state.X if kept else self.settle(problem, batch, state)
        gaps = [
            total(half_square(X[node.index] - node.activation.phi(value(node, X))), weight)
            for node in graph
        ]
        loss = total(problem.loss.value(X[graph.output], batch.target), weight)
        return Objective(loss, tuple(gaps), (state.mu,) * len(graph))

    def end_epoch(self, problem: Problem, batch: Batch, state: MACState) -> None:
        state.epochs += 1
        OptimizerState.end_epoch(state)

    def _start(
        self, problem: Problem, batch: Batch, state: MACState
    ) -> tuple[list[Tensor], Tensor | None, Switches]:
        """States of this batch: kept, or feed-forward, and then the network's outputs too."""
        switches: Switches = {}
        if batch.whole and state.belongs_to(batch):
            return state.X, None, switches
        _, X = problem.graph.feed_forward(batch.inputs, switches)
        outputs = X[problem.graph.output]
        if not batch.whole:
            return X, outputs, switches
        state.start(batch, X)
        return state.X, outputs, switches

    def _move_states(
        self, problem: Problem, batch: Batch, X: list[Tensor], mu: float, switches: Switches
    ) -> None:
        """Sweeps from the output down, in place: Gauss-Newton steps on a chain, else gradient's."""
        graph = problem.graph
        for _ in range(self.sweeps):
            for node in reversed(graph.nodes):
                v = node.index
                below = node.activation.phi(value(node, X, switches))
                if v == graph.output:
                    X[v] = problem.loss.prox(below, batch.target, mu)
                elif problem.is_chain:
                    X[v] = gauss_newton_states(problem.chain[v], below, X[v], X[v + 1])
                else:
                    X[v] = gradient_states(graph, v, below, X, switches)

    def _follow_gradient(
        self,
        problem: Problem,
        batch: Batch,
        X: list[Tensor],
        state: MACState,
        switches: Switches,
    ) -> None:
        r"""The gradient of :math:`\mu \|\phi(Z) - X\|^2 / 2` in the weights, as a mean."""
        state.clear_gradients()
        for node in problem.graph:
            Z = value(node, X, switches)
            pull = (node.activation.phi(Z) - X[node.index]) * slope(node.activation, Z)
            pull = pull * (state.mu / batch.total_weight)
            if batch.weight is not None:
                pull = pull * batch.weight.view(-1, *[1] * (pull.ndim - 1))
            gradients = adjoint(node, X, pull, "weights", switches)
            for parameter, gradient in zip(node.edge.parameters, gradients, strict=True):
                if parameter.requires_grad:
                    add_gradient(parameter, gradient)
        state.move()


def gradient_states(
    graph: Graph, v: int, below: Tensor, X: list[Tensor], switches: Switches
) -> Tensor:
    r"""One gradient step on :math:`\|X_v - below\|^2 + \sum_c \|X_c - \phi(A_c(X))\|^2`, halved.

    ``c`` are the nodes that read the state; each sample by itself goes as far as lowers its cost.
    """
    move = below - X[v]
    for above in graph.consumers[v]:
        Z = value(above, X, switches)
        pull = (above.activation.phi(Z) - X[above.index]) * slope(above.activation, Z)
        move = move - adjoint(above, X, pull, "states", switches)[above.sources.index(v)]

    def cost(share: Tensor) -> Tensor:
        moved = X[v] + share * move
        states = [*X[:v], moved, *X[v + 1 :]]
        own = (moved - below).square().flatten(1).sum(1)
        for above in graph.consumers[v]:
            left = X[above.index] - above.activation.phi(value(above, states, switches))
            own = own + left.square().flatten(1).sum(1)
        return own.view(share.shape)

    return X[v] + halved(cost, X[v].new_ones(len(X[v]), *[1] * (X[v].ndim - 1))) * move


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
