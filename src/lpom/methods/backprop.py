"""Back-propagation through ``torch.optim``: the baseline of every comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from lpom.methods.base import Batch, Method, Problem
from lpom.methods.optimizers import OptimizerState, make_optimizer, set_progress
from lpom.objective import Objective, total


@dataclass(repr=False, eq=False)
class Backprop(Method[OptimizerState]):
    r"""Stochastic gradient steps on the mean loss of the network's own outputs (eq. 1).

    .. math:: \min_W \sum \mathrm{loss}(\phi_{L-1}(A_{L-1}(\cdots \phi_0(A_0(X_0)))), T)

    The gradient comes from autograd. An activation with jumps has derivative zero and lets none
    through: its layer and those below keep their initial weights, and a remark says so.

    Parameters
    ----------
    learning_rate : float
        What ``torch.optim`` takes; the gradient is that of the mean over the batch.
    schedule : {"linear", "cosine", "constant"}
        How the learning rate falls over the run.
    """

    learning_rate: float = 1e-3
    schedule: str = "linear"

    equation: ClassVar[str] = "loss(phi(W_L-1 ... phi(W_0 X_0)), T)   (eq. 1)"
    costs: ClassVar[str] = "three products per layer: forward, back, weights"

    @property
    def steadier(self) -> tuple[str, ...]:
        return ("a smaller learning_rate",)

    def init(self, problem: Problem) -> OptimizerState:
        network = problem.network
        state = OptimizerState(
            optimizer=make_optimizer(
                self.name, network.parameters, self.learning_rate, self.schedule
            )
        )
        jumping = [i for i, layer in enumerate(network) if layer.activation.jumps]
        if jumping:
            top, n = jumping[-1], len(network)
            learning = f"only layers {top + 2} to {n} learn"
            if top == n - 1:
                learning = "no layer learns at all"
            elif top == n - 2:
                learning = "only the last layer learns"
            state.remark(
                "no gradient",
                f"the derivative of {network[top].activation.name} is zero wherever it exists, so "
                f"back-propagation sends nothing through it: {learning}. method='lpom' trains all.",
            )
        return state

    def step(self, problem: Problem, batch: Batch, state: OptimizerState) -> Tensor | None:
        optimizer = state.optimizer
        assert optimizer is not None  # init made it
        set_progress(optimizer, self.schedule, state.progress)
        optimizer.zero_grad(set_to_none=True)
        with torch.enable_grad():
            X = batch.inputs
            for layer in problem.network:
                X = layer.activation.phi(layer.map.forward(X))
        outputs = X.detach()
        pull = problem.loss.gradient(outputs, batch.target) / batch.total_weight
        if batch.weight is not None:
            pull = pull * batch.weight[:, None]
        X.backward(pull)  # type: ignore[no-untyped-call]
        optimizer.step()
        return outputs

    def objective(self, problem: Problem, batch: Batch, state: OptimizerState) -> Objective:
        _, X = problem.network.feed_forward(batch.inputs)
        return Objective(total(problem.loss.value(X[-1], batch.target), batch.weight), (), ())


@final
@dataclass(repr=False, eq=False)
class SGD(Backprop):
    """Plain stochastic gradient descent."""

    learning_rate: float = 0.05
    name: ClassVar[str] = "sgd"


@final
@dataclass(repr=False, eq=False)
class Nesterov(Backprop):
    """Gradient descent with Nesterov's momentum of 0.9."""

    learning_rate: float = 0.01
    name: ClassVar[str] = "nesterov"


@final
@dataclass(repr=False, eq=False)
class Adagrad(Backprop):
    """Step sizes per weight from the sum of all its squared gradients."""

    learning_rate: float = 0.01
    name: ClassVar[str] = "adagrad"


@final
@dataclass(repr=False, eq=False)
class RMSprop(Backprop):
    """Step sizes per weight from a running mean of its squared gradients."""

    name: ClassVar[str] = "rmsprop"


@final
@dataclass(repr=False, eq=False)
class Adam(Backprop):
    """Running means of gradients and their squares, corrected for their start at zero."""

    learning_rate: float = 2e-3  # LPOM's, so that the two compare as they come
    name: ClassVar[str] = "adam"
