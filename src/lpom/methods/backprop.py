"""Back-propagation through ``torch.optim``: the baseline of every comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from lpom.activations import Elementwise
from lpom.methods.base import Batch, Problem
from lpom.methods.optimizers import GradientMethod, OptimizerState, descend


@dataclass(frozen=True)
class Backprop(GradientMethod):
    r"""Stochastic gradient steps on the mean loss of the network's own outputs (eq. 1).

    .. math:: \min_W \sum \mathrm{loss}(\phi_{L-1}(A_{L-1}(\cdots \phi_0(A_0(X_0)))), T)

    The gradient comes from autograd. An activation with jumps has derivative zero and lets none
    through: its layer and those below keep their initial weights, and a remark says so.

    Parameters
    ----------
    learning_rate : float
        What ``torch.optim`` takes; the gradient is that of the mean over the batch.
    schedule : "linear", "cosine", "constant", or a function that makes one of torch's schedulers
        How the learning rate falls over the run.
    """

    learning_rate: float = 1e-3

    equation: ClassVar[str] = "loss(phi(W_L-1 ... phi(W_0 X_0)), T)   (eq. 1)"

    @property
    def runs_model(self) -> bool:
        return True

    def init(self, problem: Problem) -> OptimizerState:
        state = OptimizerState()
        state.make(problem, self.name, self.learning_rate, self.schedule)
        modules = list(problem.model.modules())
        jumping = [m for m in modules if isinstance(m, Elementwise) and m.activation.jumps]
        if jumping:
            after = modules[modules.index(jumping[-1]) :]
            above = sum(next(m.parameters(recurse=False), None) is not None for m in after)
            learning = {0: "no layer learns at all", 1: "only the last layer learns"}.get(
                above, f"only the last {above} layers learn"
            )
            state.remark(
                "no gradient",
                f"the derivative of {jumping[-1].activation.name} is zero wherever it exists, so "
                f"back-propagation sends nothing through it: {learning}. method='lpom' and "
                "'straight-through' train all.",
            )
        return state

    def step(self, problem: Problem, batch: Batch, state: OptimizerState) -> Tensor | None:
        with torch.enable_grad():
            outputs = problem.outputs(batch.inputs, problem.plain)
        return descend(state, outputs, problem.loss, batch)


@final
@dataclass(frozen=True)
class SGD(Backprop):
    """Plain stochastic gradient descent."""

    learning_rate: float = 0.05
    name: ClassVar[str] = "sgd"


@final
@dataclass(frozen=True)
class Nesterov(Backprop):
    """Gradient descent with Nesterov's momentum of 0.9."""

    learning_rate: float = 0.01
    name: ClassVar[str] = "nesterov"


@final
@dataclass(frozen=True)
class Adagrad(Backprop):
    """Step sizes per weight from the sum of all its squared gradients."""

    learning_rate: float = 0.01
    name: ClassVar[str] = "adagrad"


@final
@dataclass(frozen=True)
class RMSprop(Backprop):
    """Step sizes per weight from a running mean of its squared gradients."""

    name: ClassVar[str] = "rmsprop"


@final
@dataclass(frozen=True)
class Adam(Backprop):
    """Running means of gradients and their squares, corrected for their start at zero."""

    learning_rate: float = 2e-3  # LPOM's, so that the two compare as they come
    name: ClassVar[str] = "adam"
