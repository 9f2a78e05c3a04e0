"""Rivals of LPOM where activations jump: back-propagation with ramps in place of the jumps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from lpom.activations import Activation
from lpom.checks import check_choice, check_pair
from lpom.graph import Graph
from lpom.methods.base import Batch, Problem
from lpom.methods.jumps import MEASURE_EVERY
from lpom.methods.optimizers import GradientMethod, OptimizerState, PenalisedState, descend
from lpom.objectives import Objective
from lpom.penalties import Penalty, by_pattern
from lpom.settings import geometric
from lpom.weights.penalised import Penalised


@final
@dataclass(frozen=True)
class StraightThrough(GradientMethod):
    r"""Back-propagation that takes the jump forward and the derivative of a ramp backward.

    With :math:`\phi_w` the jump :math:`\phi` made a ramp of width w, a gradient g of the state
    :math:`\phi(z)` goes down as :math:`\phi_w'(z) g` (clipped), or as :math:`\gamma g` with the
    ramp's slope :math:`\gamma` everywhere (identity). It is no gradient of the loss, which has
    none. Activations without jumps are differentiated as they are.

    Parameters
    ----------
    width : float
        Of the ramp, in running standard deviations of each node's pre-activations; cut as
        `Activation.smoothed` cuts it.
    relative : bool
        False: the width is in units of the pre-activations themselves.
    ramp : {"clipped", "identity"}
    penalties
        As LPOM's: with a lazy `lpom.penalties.Binary` weights are trained straight through too.
    learning_rate, schedule
        Of Adam, as in the other back-propagation methods.
    """

    width: float = 1.0
    relative: bool = True
    ramp: str = "clipped"
    penalties: Penalty | Mapping[str, Penalty] | None = None

    name: ClassVar[str] = "straight-through"
    equation: ClassVar[str] = "loss(phi(W_L-1 ... phi(W_0 X_0)), T)   (eq. 1)"

    def __post_init__(self) -> None:
        check_choice("ramp", self.ramp, ("clipped", "identity"))
        check_pair("width", (self.width, self.width))
        object.__setattr__(self, "penalties", by_pattern(self.penalties))

    def init(self, problem: Problem) -> PenalisedState:
        state = PenalisedState(penalised=Penalised(self.penalties, problem.parameter_names))
        state.make(problem, "adam", self.learning_rate, self.schedule)
        return state

    def objective(self, problem: Problem, batch: Batch, state: OptimizerState) -> Objective:
        assert isinstance(state, PenalisedState)  # init made it
        plain = super().objective(problem, batch, state)
        return replace(plain, penalty=state.penalised.value())

    def step(self, problem: Problem, batch: Batch, state: OptimizerState) -> Tensor:
        assert isinstance(state, PenalisedState)  # init made it
        state.penalised.advance(state.progress)
        graph = problem.graph
        jumping: dict[int, Tensor] = {}
        soft = graph

        def slope(index: int) -> Activation | float:
            ramp = soft[index].activation
            return ramp if self.ramp == "clipped" else ramp.lipschitz

        def states(index: int, Z: Tensor) -> Tensor:
            activation = graph[index].activation
            if not activation.jumps:
                return activation.phi(Z)
            jumping[index] = Z
            X: Tensor = _Jump.apply(Z, activation, partial(slope, index))  # type: ignore[no-untyped-call]
            return X

        outputs = _outputs(graph, batch.inputs, states)
        if not self.relative:
            soft = graph.smoothed(self.width)
        elif jumping:
            if state.steps % MEASURE_EVERY == 0:
                state.spreads.measure(graph, lambda node: jumping[node.index])
            soft = state.spreads.ramps(graph, self.width)
        state.steps += 1
        return descend(state, outputs, problem.loss, batch)


@final
@dataclass(frozen=True)
class Ramps(GradientMethod):
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
    """A jump forward; backward the derivative of its ramp, or one slope for all.

    Which ramp, ``slope`` says when it is needed.
    """

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, activation: Activation, slope: Callable[[], Activation | float]
    ) -> Tensor:
        ctx.save_for_backward(z)
        ctx.slope = slope
        return activation.phi(z)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,), ramp = gradients, ctx.slope()
        if isinstance(ramp, float):
            return ramp * gradient, None, None
        with torch.enable_grad():
            z = ctx.saved_tensors[0].detach().requires_grad_()
            value = ramp.phi(z)
        return torch.autograd.grad(value, z, gradient)[0], None, None
