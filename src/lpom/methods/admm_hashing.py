"""ADMM after Zhang, Chen and Saligrama (2016): two multipliers per layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from lpom.checks import check_number
from lpom.methods.base import Batch, Method, Problem
from lpom.methods.blocks import estimated_norm, half_square, slope
from lpom.methods.chains import Chain, Layer, Regression, SampleState, of_samples
from lpom.objectives import Objective, total

_HALVINGS = 10  # of the weights' step before a layer keeps the weights it has


@dataclass
class HashingState(SampleState):
    """Variables of the samples they belong to; other samples start them anew.

    ``X[i]`` are states, the inputs first and the outputs last; ``U[i]`` stands for ``X[i]`` where
    layer i takes it in; ``A[i]`` and ``B[i]`` are the multipliers divided by mu.
    """

    U: list[Tensor] = of_samples(list)
    A: list[Tensor] = of_samples(list)
    B: list[Tensor] = of_samples(list)


@final
@dataclass(frozen=True)
class ADMMHashing(Method[HashingState]):
    r"""Augmented Lagrangian of a splitting with the activation inside a constraint (eq. 8).

    .. math:: \mathrm{loss}(X_L, T) + \frac{\mu}{2} \sum_i (\|U_i - X_i + A_i\|_F^2
              + \|X_{i+1} - \phi_i(Z_i) + B_i\|_F^2), \qquad Z_i = A_i(U_i)

    X has closed forms. W and U sit inside :math:`\phi`: both move by a few gradient steps, those of
    W in the metric of U, with backtracking, so no block raises the objective; the steps of the
    multipliers, along :math:`U - X` and :math:`X - \phi(Z)`, may. They
    need the derivative of :math:`\phi`. Multipliers belong to the samples: full batch.

    Parameters
    ----------
    mu : float
        Weight of all penalties.
    dual_step : float
        Share of a full step that the multipliers take. With nonlinear constraints full steps (1)
        let the multipliers grow faster than the weights can follow.
    steps : int
        Gradient steps of each W and U block.
    ridge : float
        Ridge of the metric of the W steps, relative to the size of U.
    """

    mu: float = 0.1
    dual_step: float = 0.01
    steps: int = 3
    ridge: float = 1e-3

    name: ClassVar[str] = "admm-hashing"
    steadier: ClassVar[tuple[str, ...]] = ("a smaller dual_step", "a larger mu", "a larger ridge")
    equation: ClassVar[str] = (
        "loss(X_L, T) + mu/2 sum_i (|U_i - X_i + A_i|^2 + |X_i+1 - phi(Z_i) + B_i|^2)   (eq. 8)"
    )
    costs: ClassVar[str] = "X in closed form; W and U by gradient steps, four products per step"
    full_batch: ClassVar[bool] = True

    def init(self, problem: Problem) -> HashingState:
        check_number("mu", self.mu)
        check_number("dual_step", self.dual_step)
        check_number("steps", self.steps, whole=True)
        check_number("ridge", self.ridge, strict=False)
        for layer in problem.chain:
            if layer.activation.jumps:
                raise ValueError(
                    "admm-hashing moves W and U by the derivative of every activation, and that "
                    f"of {layer.activation.name} is zero wherever it exists. Use method='lpom' or "
                    "'admm', which need none."
                )
        return HashingState()

    @torch.no_grad()
    def step(self, problem: Problem, batch: Batch, state: HashingState) -> None:
        """From the output down: W, U and then X of each layer; multipliers last."""
        network = problem.chain
        self._start(network, batch, state)
        X, U, A, B = state.X, state.U, state.A, state.B

        outputs = _apply(network[-1], U[-1])
        X[-1] = problem.loss.prox(outputs - B[-1], batch.target, self.mu)
        for i in range(len(network) - 1, -1, -1):
            goal = X[i + 1] + B[i]
            self._move_weights(network[i], U[i], goal, batch.weight)
            U[i] = self._move_inputs(network[i], U[i], X[i] - A[i], goal)
            if i > 0:
                X[i] = (U[i] + A[i] + _apply(network[i - 1], U[i - 1]) - B[i - 1]) / 2
        for i, layer in enumerate(network):
            A[i] = A[i] + self.dual_step * (U[i] - X[i])
            B[i] = B[i] + self.dual_step * (X[i + 1] - _apply(layer, U[i]))

    @torch.no_grad()
    def objective(self, problem: Problem, batch: Batch, state: HashingState) -> Objective:
        network, weight = problem.chain, batch.weight
        self._start(network, batch, state)
        X, U, A, B = state.X, state.U, state.A, state.B
        gaps = []
        for i, layer in enumerate(network):
            copied = half_square(U[i] - X[i] + A[i])
            mapped = half_square(X[i + 1] - _apply(layer, U[i]) + B[i])
            gaps.append(total(copied, weight) + total(mapped, weight))
        loss = total(problem.loss.value(X[-1], batch.target), weight)
        return Objective(loss, tuple(gaps), (self.mu,) * len(gaps))

    def _move_weights(self, layer: Layer, U: Tensor, goal: Tensor, weight: Tensor | None) -> None:
        r"""Steps on :math:`\|\phi(A(U; W)) - goal\|_F^2` along :math:`-(U^T U)^{-1}` gradient."""
        if not layer.map.free:
            return
        phi = layer.activation.phi
        regression = Regression(layer.map, U, ridge=self.ridge, weight=weight)
        Z = layer.map.apply(U)
        value = total(half_square(phi(Z) - goal), weight)
        for _ in range(self.steps):
            change = regression.solve((goal - phi(Z)) * slope(layer.activation, Z))
            old, length = layer.map.matrix(), 1.0
            for _ in range(_HALVINGS):
                layer.map.set_matrix(old + length * change.T)
                Z_new = layer.map.apply(U)
                new = total(half_square(phi(Z_new) - goal), weight)
                if new < value:
                    Z, value = Z_new, new
                    break
                length /= 2
            else:
                layer.map.set_matrix(old)
                return

    def _move_inputs(self, layer: Layer, U: Tensor, near: Tensor, goal: Tensor) -> Tensor:
        r"""Steps on :math:`\|U - near\|_F^2 + \|\phi(A(U)) - goal\|_F^2`, each sample its own."""
        norm = layer.activation.lipschitz * estimated_norm(layer.map)
        lengths = U.new_ones(len(U), 1) / (1 + norm**2)
        phi, Z = layer.activation.phi, layer.map.apply(U)
        value = (U - near).square().sum(1) + (phi(Z) - goal).square().sum(1)
        for _ in range(self.steps):
            pull = (phi(Z) - goal) * slope(layer.activation, Z)
            U_new = U - lengths * (U - near + layer.map.adjoint(pull))
            Z_new = layer.map.apply(U_new)
            new = (U_new - near).square().sum(1) + (phi(Z_new) - goal).square().sum(1)
            lower = (new < value)[:, None]
            U, Z = torch.where(lower, U_new, U), torch.where(lower, Z_new, Z)
            value = torch.minimum(new, value)
            lengths = torch.where(lower, lengths, lengths / 2)
        return U

    def _start(self, network: Chain, batch: Batch, state: HashingState) -> None:
        """Feed-forward variables and no multipliers, unless these samples have theirs already."""
        if state.belongs_to(batch):
            return
        state.start(batch, network.feed_forward(batch.inputs)[1])
        state.U = state.X[:-1]
        state.A = [torch.zeros_like(x) for x in state.X[:-1]]
        state.B = [torch.zeros_like(x) for x in state.X[1:]]


def _apply(layer: Layer, U: Tensor) -> Tensor:
    return layer.activation.phi(layer.map.apply(U))
