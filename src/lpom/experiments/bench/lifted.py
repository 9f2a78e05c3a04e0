"""Adam on a lifted module: what a loop of one's own does with `lpom.lift`, as a method to time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from lpom.lifting import lift
from lpom.methods.backprop import Backprop
from lpom.methods.base import Batch, Problem
from lpom.methods.optimizers import OptimizerState, descend


@lru_cache(maxsize=1)  # a loop of one's own lifts its model once
def _lifted(model: nn.Module, batch_dims: int) -> nn.Module:
    return lift(model, batch_dims=batch_dims)


@final
@dataclass(frozen=True)
class LiftedLoop(Backprop):
    """Back-propagation in which every activation answers by LPOM's rule."""

    learning_rate: float = 2e-3
    name: ClassVar[str] = "lift"

    def init(self, problem: Problem) -> OptimizerState:
        state = OptimizerState()
        state.make(problem.graph, "adam", self.learning_rate, self.schedule)
        return state

    def step(self, problem: Problem, batch: Batch, state: OptimizerState) -> Tensor | None:
        model = _lifted(problem.model, batch.target.ndim - 1)
        with torch.enable_grad():
            outputs = model(batch.inputs)
        return descend(state, outputs, problem.loss, batch)
