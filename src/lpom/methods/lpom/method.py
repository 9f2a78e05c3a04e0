"""Lifted Proximal Operator Machines: the method."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from lpom.checks import check_choice, check_number
from lpom.methods.base import Batch, Method, Problem, from_settings
from lpom.methods.lpom.states import ORDERS, BatchStates, Visit, relative_change, sweep
from lpom.methods.lpom.weights import exact_step
from lpom.methods.optimizers import (
    Factory,
    OptimizerState,
    add_gradient,
    make_optimizer,
    set_progress,
)
from lpom.network import Lifted
from lpom.objective import Objective, evaluate, per_layer, spectral_rates

#: Power iteration sees the norm from below; the safe step takes this much more than it saw.
NORM_MARGIN = 1.1


@dataclass
class LPOMState(OptimizerState):
    """Optimiser, and norm vectors of the safe step."""

    mu: list[float] = from_settings(list)
    vectors: list[Tensor] = field(default_factory=list)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if len(saved.get("vectors", [])) != len(self.vectors):  # of the other step rule
            saved = saved | {"vectors": self.vectors}
        super().load_state_dict(saved)


@final
@dataclass(repr=False, eq=False)
class LPOM(Method[LPOMState]):
    r"""Train by block coordinate descent on the lifted objective, without back-propagation.

    .. math:: \mathrm{loss}(X_L, T) + \sum_i \mu_i \sum D_i(X_{i+1}, A_i(X_i))

    Parameters
    ----------
    mu : float or one per layer
        Weight of each layer's gap.
    mu_output : float, optional
        Weight of the last layer's gap, if it is to differ from ``mu``.
    order : {"interleaved", "top-down", "paper", "parallel"}
        Interleaved shares one residual between a layer's weights and the state below it, and
        costs what back-propagation costs. Top-down moves all states, then all weights. Paper:
        states from the bottom up, the output last (a feed-forward start then sends no signal
        below the last layer in the first sweep). Parallel: every state from the same old ones.
    step_rule : {"auto", "plain", "safe"}
        The paper's iteration, or the damped one that cannot raise the objective. Auto is plain
        for a single interleaved sweep, else safe.
    sweeps : int
        Most sweeps over the states of a batch.
    tolerance : float
        Stop sweeping when no layer's pre-activations change by more than this, relative to
        their norm.
    weights : {"adaptive", "exact"}
        Give the gradient of each layer's convex problem to an optimiser, or solve that problem by
        Algorithm 2.
    optimizer, learning_rate, schedule : for adaptive weights
        A name ("adam", "sgd", ...), a class of ``torch.optim``, or a function of the parameters
        that returns an optimiser with a learning rate of its own. The schedule ("linear",
        "cosine", "constant") scales either rate over the run.
    iterations, ridge : for exact weights
        Iterations of Algorithm 2, and its ridge relative to the size of the states. Of a pair
        the ridge grows over the run, geometrically from the first to the second number: it holds
        the weights to the old ones, so the last steps average over many batches.
    continuation : bool or (float, float)
        Activations with jumps are trained as ramps whose width shrinks over the run, geometrically
        from the first to the second number (True: 1 to 0.1). False trains on the jumps themselves.
    """

    mu: float | Sequence[float] = 20.0
    mu_output: float | None = None
    order: str = "interleaved"
    step_rule: str = "auto"
    sweeps: int = 1
    tolerance: float = 0.0
    weights: str = "adaptive"
    optimizer: str | Factory = "adam"
    learning_rate: float = 2e-3
    schedule: str = "linear"
    iterations: int = 1
    ridge: float | tuple[float, float] = 0.1
    continuation: bool | tuple[float, float] = True

    name: ClassVar[str] = "lpom"
    equation: ClassVar[str] = "loss(X_L, T) + sum_i mu_i D_i(X_i+1, Z_i)   (eq. 18)"
    costs: ClassVar[str] = "the products of back-propagation; each further sweep two per layer"

    @property
    def steadier(self) -> tuple[str, ...]:
        weights = "a smaller learning_rate" if self.weights == "adaptive" else "a larger ridge"
        return (weights, "a larger mu", *(() if self.safe else ("step_rule='safe'",)))

    def init(self, problem: Problem) -> LPOMState:
        network, loss = problem.network, problem.loss
        check_choice("order", self.order, ORDERS)
        check_choice("step_rule", self.step_rule, ("auto", "plain", "safe"))
        check_choice("weights", self.weights, ("adaptive", "exact"))
        check_number("sweeps", self.sweeps, whole=True)
        check_number("iterations", self.iterations, whole=True)
        check_number("tolerance", self.tolerance, strict=False)
        self._ridge(0.0)
        state = LPOMState(mu=per_layer(self.mu, len(network), self.mu_output))
        widths = self._widths()
        if network.jumps and widths is None and (self.safe or self.weights == "exact"):
            raise ValueError(
                "the safe step and the exact weight step need a Lipschitz constant, which an "
                "activation with jumps does not have: leave continuation on, or use "
                "step_rule='plain' and weights='adaptive'."
            )
        if self.safe and math.isinf(loss.lipschitz):
            raise ValueError(
                f"the safe step needs a loss with a Lipschitz gradient, which {loss!r} does not "
                "have: give it some smoothing, or use step_rule='plain'."
            )
        if self.weights == "adaptive":
            state.optimizer = make_optimizer(
                self.optimizer, network.parameters, self.learning_rate, self.schedule
            )
        if self.safe:
            state.vectors = [layer.map.start_vector() for layer in network]
            for i, layer in enumerate(network):
                _, state.vectors[i] = layer.map.norm(state.vectors[i], iterations=20)
        return state

    @property
    def safe(self) -> bool:
        """Whether states move by the safe step."""
        if self.step_rule == "auto":
            return self.order != "interleaved" or self.sweeps > 1
        return self.step_rule == "safe"

    @torch.no_grad()
    def step(self, problem: Problem, batch: Batch, state: LPOMState) -> Tensor | None:
        """States by sweeps, weights of all layers beside (interleaved) or after them."""
        if state.optimizer is not None:
            set_progress(state.optimizer, self.schedule, state.progress)
        states = self._feed_forward(problem, batch, state)
        outputs = states.X[-1]

        def visit(i: int, residual: Tensor) -> None:
            self._update_weights(states, i, residual, batch, state)

        def optimize() -> None:
            if state.optimizer is not None:
                state.optimizer.step()

        if self.order == "interleaved":
            self._sweep(states, visit, optimize)
        else:
            self._sweep(states)
            for i in range(len(states.network)):  # independent of each other
                visit(i, states.residual(i))
            optimize()
        return outputs if states.network is problem.network else None

    @torch.no_grad()
    def settle(
        self, problem: Problem, batch: Batch, state: LPOMState | None = None
    ) -> list[Tensor]:
        """The states of a batch after the sweeps of a step, by default those at the end of a run.

        Neither weights nor state are touched.
        """
        if state is None:
            state = self.init(problem)
            state.progress = 1.0
        states = self._feed_forward(problem, batch, replace(state, vectors=list(state.vectors)))
        self._sweep(states)
        return states.X

    def objective(self, problem: Problem, batch: Batch, state: LPOMState) -> Objective:
        network = self.as_trained(problem.network, state.progress)
        X = self.settle(problem, batch, state)
        return evaluate(network, problem.loss, X, batch.target, state.mu, batch.weight)

    def rates(self, problem: Problem, state: LPOMState) -> list[float]:
        network = self.as_trained(problem.network, state.progress)
        return spectral_rates(network, problem.loss, state.mu)[1]

    def _feed_forward(self, problem: Problem, batch: Batch, state: LPOMState) -> BatchStates:
        network = self.as_trained(problem.network, state.progress)
        alpha = self._alpha(network, problem, state) if self.safe else None
        return BatchStates(network, problem.loss, batch.target, batch.inputs, state.mu, alpha)

    def _sweep(
        self,
        states: BatchStates,
        visit: Visit | None = None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Sweep as often as allowed, or until the states hardly change."""
        for s in range(self.sweeps):
            if s > 0 and visit is not None:
                states.refresh_all(weights_moved=True)
            before = list(states.P) if self.tolerance > 0 else None
            sweep(states, self.order, visit)
            after()
            if before is not None and bool(relative_change(before, states.P) < self.tolerance):
                break

    @torch.no_grad()
    def end_epoch(self, problem: Problem, batch: Batch, state: LPOMState) -> None:
        """Sweep a batch once more with the weights standing still, and see whether F falls."""
        if self.sweeps == 1:
            return

        def F() -> float:
            loss, target = problem.loss, batch.target
            return evaluate(states.network, loss, states.X, target, state.mu, batch.weight).total

        states = self._feed_forward(problem, batch, replace(state, vectors=list(state.vectors)))
        before = F()
        self._sweep(states)
        after = F()
        # each gap is known to a few units in the last place; NaN counts as a rise
        size = sum(
            mu * (X.numel() + float(X.square().sum()))
            for mu, X in zip(state.mu, states.X[1:], strict=True)
        )
        if not after <= before + 10 * torch.finfo(batch.inputs.dtype).eps * size:
            state.remark(
                "diverging sweep",
                f"the sweeps over the states diverge: they raise the objective of a batch from "
                f"{before:.3g} to {after:.3g}. Use step_rule='safe', or a mu that falls towards "
                "the output.",
            )

    def _update_weights(
        self, states: BatchStates, i: int, residual: Tensor, batch: Batch, state: LPOMState
    ) -> None:
        layer = states.network[i]
        if state.optimizer is not None:
            total = batch.total_weight
            add_gradient(layer, states.X[i], residual, state.mu[i], batch.weight, total)
        elif layer.map.free:
            deficient = exact_step(
                layer,
                states.X[i],
                states.X[i + 1],
                Z=states.Z[i],
                iterations=self.iterations,
                ridge=self._ridge(state.progress),
                weight=batch.weight,
            )
            if deficient:
                state.remark(
                    "rank-deficient",
                    f"the exact weight step of layer {i + 1} met states that are rank-deficient "
                    f"(batch of {len(batch)}); their pseudo-inverse was taken. Set ridge above 0 "
                    "(0.1 works for most networks).",
                )

    def _alpha(self, network: Lifted, problem: Problem, state: LPOMState) -> list[float | Tensor]:
        """The share of the way that each state goes, from two more power iterations per map."""
        gamma = [layer.activation.lipschitz for layer in network]
        last = len(network) - 1
        alpha: list[float | Tensor] = []
        for i in range(last):
            above = network[i + 1].map
            norm, state.vectors[i + 1] = above.norm(state.vectors[i + 1], iterations=2)
            ratio = state.mu[i + 1] / state.mu[i]
            alpha.append(1 / (1 + NORM_MARGIN * ratio * gamma[i] * gamma[i + 1] * norm**2))
        return [*alpha, 1 / (1 + gamma[last] * problem.loss.lipschitz / state.mu[last])]

    def as_trained(self, network: Lifted, progress: float) -> Lifted:
        """The network at this share of the run: jumps as ramps that get narrower."""
        widths = self._widths()
        if widths is None or not network.jumps:
            return network
        return network.smoothed(geometric(widths, progress))

    def _widths(self) -> tuple[float, float] | None:
        if isinstance(self.continuation, bool):
            return (1.0, 0.1) if self.continuation else None
        return check_pair("continuation", self.continuation)

    def _ridge(self, progress: float) -> float:
        if isinstance(self.ridge, Sequence):
            return geometric(check_pair("ridge", self.ridge), progress)
        check_number("ridge", self.ridge, strict=False)
        return self.ridge


def check_pair(name: str, pair: Sequence[float]) -> tuple[float, float]:
    """Two positive numbers: what a setting is at the start of a run, and at its end."""
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise ValueError(f"{name} should be a pair of numbers, (first, last), got {pair!r}.")
    first, last = pair
    check_number(f"{name}'s first number", first)
    check_number(f"{name}'s last number", last)
    return first, last


def geometric(ends: tuple[float, float], progress: float) -> float:
    """Between the two ends, at this share of the run, by equal factors."""
    first, last = ends
    return first * math.pow(last / first, progress)
