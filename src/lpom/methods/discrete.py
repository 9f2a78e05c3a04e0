"""Rivals of LPOM where activations jump: back-propagation with ramps in place of the jumps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from lpom.activations import Activation
from lpom.checks import check_choice, check_pair
from lpom.graph import Graph
from lpom.methods.base import Batch, Method, Problem
from lpom.methods.optimizers import OptimizerState, descend
from lpom.objective import Objective, total
from lpom.settings import geometric
from lpom.weights.adaptive import Schedule


@dataclass(frozen=True)
class _BackpropOnGraph(Method[OptimizerState]):
    """Adam on gradients that autograd carries through the graph, as a subclass evaluates it."""

    learning_rate: float = 2e-3
    schedule: Schedule = "linear"

    costs: ClassVar[str] = "three products per layer: forward, back, weights"

    @property
    def steadier(self) -> tuple[str, ...]:
        return ("a smaller learning_rate",)

    def init(self, problem: Problem) -> OptimizerState:
        state = OptimizerState()
        state.make(problem.graph, "adam", self.learning_rate, self.schedule)
        return state

    def end_epoch(self, problem: Problem, batch: Batch, state: OptimizerState) -> None:
        state.end_epoch()

    @torch.no_grad()
    def objective(self, problem: Problem, batch: Batch, state: OptimizerState) -> Objective:
        outputs = problem.model(batch.inputs)
        return Objective(total(problem.loss.value(outputs, batch.target), batch.weight), (), ())


@final
@dataclass(frozen=True)
class StraightThrough(_BackpropOnGraph):
    r"""Back-propagation that takes the jump forward and the derivative of a ramp backward.

    With :math:`\phi_w` the jump :math:`\phi` made a ramp of width w, a gradient g of the state
    :math:`\phi(z)` goes down as :math:`\phi_w'(z) g` (clipped), or as :math:`\gamma g` with the
    ramp's slope :math:`\gamma` everywhere (identity). It is no gradient of the loss, which has
    none. Activations without jumps are differentiated as they are.

    Parameters
    ----------
    width : float
        Of the ramp, in units of the pre-activation; cut as `Activation.smoothed` cuts it.
    ramp : {"clipped", "identity"}
    learning_rate, schedule
        Of Adam, as in the other back-propagation methods.
    """

    width: float = 2.0
    ramp: str = "clipped"

    name: ClassVar[str] = "straight-through"
    equation: ClassVar[str] = "loss(phi(W_L-1 ... phi(W_0 X_0)), T)   (eq. 1)"

    def __post_init__(self) -> None:
        check_choice("ramp", self.ramp, ("clipped", "identity"))
        check_pair("width", (self.width, self.width))

    def step(self, problem: Problem, batch: Batch, state: OptimizerState) -> Tensor:
        state.set_rates(self.schedule)
        soft = problem.graph.smoothed(self.width)
        slopes = self.ramp == "identity"

        def states(index: int, Z: Tensor) -> Tensor:
            activation = problem.graph[index].activation
            if not activation.jumps:
                return activation.phi(Z)
            ramp = soft[index].activation
            X: Tensor = _Jump.apply(Z, activation, ramp.lipschitz if slopes else ramp)
            return X

        return descend(state, _outputs(problem.graph, batch.inputs, states), problem.loss, batch)


@final
@dataclass(frozen=True)
class Ramps(_BackpropOnGraph):
    """Back-propagation on a network whose jumps are ramps, ever narrower over the run.

    The network with the jumps themselves is what is measured, and what is left at the end.

    Parameters
    ----------
    first, last : float
        Width of the ramps at the start and at the end; between them it shrinks geometrically, as
        in LPOM's `Continuation`.
    learning_rate, schedule
        Of Adam, as in the other back-propagation methods.
    """

    first: float = 1.0
    last: float = 0.1

    name: ClassVar[str] = "ramps"
    equation: ClassVar[str] = "loss(phi_w(W_L-1 ... phi_w(W_0 X_0)), T), width w to 0   (eq. 1)"

    def __post_init__(self) -> None:
        check_pair("width", (self.first, self.last))

    def step(self, problem: Problem, batch: Batch, state: OptimizerState) -> Tensor | None:
        state.set_rates(self.schedule)
        graph = problem.graph
        if graph.jumps:
            graph = graph.smoothed(geometric((self.first, self.last), state.progress))
        outputs = _outputs(graph, batch.inputs, lambda index, Z: graph[index].activation.phi(Z))
        descend(state, outputs, problem.loss, batch)
        return outputs.detach() if graph is problem.graph else None


def _outputs(graph: Graph, inputs: Tensor, states: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The output of a graph under autograd, ``states`` making X of a node's index and Z."""
    X = [inputs]
    with torch.enable_grad():
        for node in graph:
            X.append(states(node.index, node.edge([X[s] for s in node.sources])))
    return X[graph.output]


class _Jump(torch.autograd.Function):
    """A jump forward; backward the derivative of its ramp, or one slope for all."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, activation: Activation, ramp: Activation | float) -> Tensor:
        ctx.save_for_backward(z)
        ctx.ramp = ramp
        return activation.phi(z)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        if isinstance(ctx.ramp, float):
            return ctx.ramp * gradient, None, None
        with torch.enable_grad():
            z = ctx.saved_tensors[0].detach().requires_grad_()
            ramp = ctx.ramp.phi(z)
        return torch.autograd.grad(ramp, z, gradient)[0], None, None
