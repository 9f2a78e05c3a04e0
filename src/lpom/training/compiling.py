"""Steps through torch's compiler: what stands between the products becomes a few loops.

The forward pass of the model, or of the lifted model, is compiled, and autograd's way back with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from lpom.exceptions import warn
from lpom.methods import LPOM, Batch, Method, Problem, State
from lpom.methods.backprop import Backprop
from lpom.methods.lpom import LPOMState
from lpom.methods.optimizers import OptimizerState

Step = Callable[[Batch], Tensor | None]

#: Numbers drawn in a step (dropout) come from torch's generator, as without the compiler.
_OPTIONS: dict[str, Any] = {"fallback_random": True}


def compiled(
    step: Step, method: Method[Any], problem: Problem, state: State, shape: torch.Size
) -> Step:
    """The step on batches of inputs of this shape, compiled at the first of them.

    Others, as the last of an epoch may be, are taken as they were. Where the compiler can't be
    had that is said, and all are.
    """
    obstacle = f"method='lpom' and back-propagation, and this is {method.name!r}"
    if isinstance(method, Backprop) and isinstance(state, OptimizerState):
        return _Compiled(step, partial(_forward, method, problem, state), problem.model, shape)
    if isinstance(method, LPOM) and isinstance(state, LPOMState):
        obstacle = f"steps that hold the displacement, mu=None, and this is {method!r}"
        if method.runs_model:
            make = partial(_lifted, step, method, problem, state)
            return _Compiled(step, make, problem.model, shape)
    warn(f"compile=True is for {obstacle}. Steps are made without.", UserWarning)
    return step


class _Compiled:
    """Compiles at the first batch of the shape; goes back to the plain step where that fails."""

    def __init__(
        self, step: Step, make: Callable[[Batch], Step], model: nn.Module, shape: torch.Size
    ) -> None:
        self.plain, self.make, self.model, self.shape = step, make, model, shape
        self.run: Step | None = None

    def __call__(self, batch: Batch) -> Tensor | None:
        if batch.inputs.shape != self.shape:
            return self.plain(batch)
        if self.run is None:
            try:
                with warnings.catch_warnings(), _untouched(self.model):
                    warnings.simplefilter("ignore")
                    self.run = self.make(batch)
            except Exception as error:  # the compiler's own, and whatever it could not follow
                reason = str(error).strip().split("\n")[0] or type(error).__name__
                warn(
                    f"the step could not be compiled ({reason[:300]}), and is made without. "
                    "torch.compile needs a compiler for C++, and a model whose Python does not ask "
                    "for numbers; leave compile out.",
                    UserWarning,
                )
                self.run = self.plain
        return self.run(batch)


def _forward(method: Backprop, problem: Problem, state: OptimizerState, batch: Batch) -> Step:
    """Back-propagation through a forward pass that is compiled."""
    model = torch.compile(problem.model, dynamic=False, options=_OPTIONS)
    with torch.enable_grad():
        model(batch.inputs).sum().backward()  # so that what fails does so now
    fast = replace(problem, model=cast(nn.Module, model))
    return lambda batch: method.step(fast, batch, state)


def _lifted(step: Step, method: LPOM, problem: Problem, state: LPOMState, batch: Batch) -> Step:
    """The plain step, on what torch's compiler makes of the lifted model."""
    model = torch.compile(method.lifted(problem), dynamic=False, options=_OPTIONS)
    with torch.enable_grad():
        problem.outputs(batch.inputs, model).sum().backward()  # so that what fails does so now
    state.stack, state.run = None, model
    return step


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Buffers, gradients and random numbers are afterwards what they were."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
