"""The state of methods that give gradients to an optimiser."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from lpom.graph import Graph
from lpom.losses import Loss
from lpom.methods.base import Batch, Method, Problem, State
from lpom.methods.jumps import Spreads
from lpom.objectives import Objective, total
from lpom.weights.adaptive import (
    SCHEDULES,
    Factory,
    Schedule,
    check_schedule,
    make_optimizer,
)
from lpom.weights.penalised import Penalised

#: Settings of an optimiser, beside its rate, that some of torch's schedulers move.
SCHEDULED = ("betas", "momentum")


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Add to a gradient; it lies in memory as its weight does, since optimisers go through both."""
    if parameter.grad is not None:
        parameter.grad = parameter.grad + gradient
    elif gradient.stride() == parameter.stride():
        parameter.grad = gradient
    else:
        parameter.grad = torch.empty_like(parameter).copy_(gradient)


@dataclass
class OptimizerState(State):
    """A state whose memory is that of its optimiser.

    Its rates follow the named ``schedule``, at the trainer's hand, or torch's scheduler.
    ``weight_decay`` is that of :func:`lpom.fit`.
    """

    optimizer: torch.optim.Optimizer | None = None
    schedule: str = field(default="constant", metadata={"from_settings": True})
    scheduler: LRScheduler | None = field(default=None, metadata={"from_settings": True})
    weight_decay: float = field(default=0.0, metadata={"from_settings": True})

    def make(
        self,
        problem: Graph | Problem,
        optimizer: str | Factory,
        learning_rate: float,
        schedule: Schedule,
    ) -> None:
        """Make the optimiser, and torch's scheduler where the schedule is one of torch's."""
        check_schedule(schedule)
        self.optimizer = make_optimizer(optimizer, problem.parameters, learning_rate)
        if callable(schedule):
            self.scheduler = schedule(self.optimizer)
        else:
            self.schedule = schedule

    def add_decay(self) -> None:
        r"""Add :math:`c W`, c the weight decay, to the gradient of every matrix and kernel W.

        That is the gradient of :math:`\frac{c}{2} \|W\|^2`.
        """
        assert self.optimizer is not None  # init made it
        groups = self.optimizer.param_groups
        weights = [W for group in groups for W in group["params"] if W.ndim > 1]
        weights = [W for W in weights if W.grad is not None]
        values = [W.detach() for W in weights]
        if weights:
            torch._foreach_add_([W.grad for W in weights], values, alpha=self.weight_decay)

    def clear_gradients(self) -> None:
        """Weights that a step does not reach have no gradient, and do not move."""
        assert self.optimizer is not None  # init made it
        self.optimizer.zero_grad(set_to_none=True)

    def move(self) -> None:
        """Let the optimiser move the weights by their gradients and the weight decay."""
        assert self.optimizer is not None  # init made it
        if self.weight_decay:
            self.add_decay()
        self._step(self.optimizer)

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def end_epoch(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()

    def _moved(self, new: dict[str, Any], old: dict[str, Any]) -> list[str]:
        """What a schedule had made of the settings of a group, if it began as this one does."""
        if new["initial_lr"] != old["initial_lr"]:
            return []
        return ["lr", *(name for name in SCHEDULED if self.scheduler is not None and name in new)]

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        """What decides of which kind an optimiser's memory is: all that no schedule moves."""
        others = ("lr", "initial_lr", *(SCHEDULED if self.scheduler is not None else ()))
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in group.items()
            if name not in others
        }

    def _place(self) -> dict[str, Any] | None:
        """Where torch's scheduler is, of which the settings make all that is no plain value."""
        if self.scheduler is None:
            return None
        return {name: v for name, v in self.scheduler.state_dict().items() if _is_plain(v)}

    def state_dict(self) -> dict[str, Any]:
        made, written = self.optimizer, None
        if made is not None:
            whole = made.state_dict()
            written = {
                "kind": f"{type(made).__module__}.{type(made).__qualname__}",
                "shapes": [list(p.shape) for group in made.param_groups for p in group["params"]],
                "groups": whole["param_groups"],
                "memory": {str(i): memory for i, memory in whole["state"].items()},
                "scheduler": self._place(),
            }
        return super().state_dict() | {"optimizer": written}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """The optimiser's memory is taken up by one of the same kind and options; the learning
        rate may be another. Any other optimiser starts with no memory.
        """
        super().load_state_dict(saved | {"optimizer": self.optimizer})
        written, own = saved.get("optimizer"), OptimizerState.state_dict(self)["optimizer"]
        if written is None or own is None or written["kind"] != own["kind"]:
            return
        if written["shapes"] != own["shapes"]:
            raise ValueError(
                f"the state belongs to a network with weights of shapes {written['shapes']}, this "
                f"one has {own['shapes']}. Leave it out to start again."
            )
        groups = list(zip(own["groups"], written["groups"], strict=False))
        if len(own["groups"]) != len(written["groups"]) or any(
            self._options(new) != self._options(old) for new, old in groups
        ):
            return
        assert self.optimizer is not None  # own was made of it
        self.optimizer.load_state_dict(
            {  # which casts to the dtype and device of the parameters
                "state": {int(i): dict(memory) for i, memory in written["memory"].items()},
                "param_groups": [
                    new | {name: _as(new[name], old[name]) for name in self._moved(new, old)}
                    for new, old in groups
                ],
            }
        )
        if self.scheduler is not None and written.get("scheduler"):
            self.scheduler.load_state_dict(written["scheduler"])


@dataclass(frozen=True)
class GradientMethod(Method[OptimizerState]):
    """Gradients of the mean loss, found as a subclass does, for an optimiser."""

    learning_rate: float = 2e-3
    schedule: Schedule = "linear"

    costs: ClassVar[str] = "three products per layer: forward, back, weights"
    steadier: ClassVar[tuple[str, ...]] = ("a smaller learning_rate",)

    def init(self, problem: Problem) -> OptimizerState:
        state = OptimizerState()
        state.make(problem, "adam", self.learning_rate, self.schedule)
        return state

    def end_epoch(self, problem: Problem, batch: Batch, state: OptimizerState) -> None:
        state.end_epoch()

    @torch.no_grad()
    def objective(self, problem: Problem, batch: Batch, state: OptimizerState) -> Objective:
        outputs = problem.outputs(batch.inputs)
        return Objective(total(problem.loss.value(outputs, batch.target), batch.weight), (), ())


@dataclass
class PenalisedState(OptimizerState):
    """A state of methods for networks with jumps and with penalties.

    What acts on the weights beside the loss, and how far pre-activations under jumps are spread.
    """

    penalised: Penalised = field(default_factory=Penalised)
    spreads: Spreads = field(default_factory=Spreads)
    steps: int = 0

    @property
    def settles(self) -> float:
        return self.penalised.settles

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.penalised.terms:
            self.penalised.step(optimizer)
        else:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        own = {"penalised": self.penalised.state_dict(), "spreads": self.spreads.values}
        return super().state_dict() | own

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        own = {"penalised": self.penalised, "spreads": self.spreads}
        super().load_state_dict(saved | own)
        self.penalised.load_state_dict(saved["penalised"])
        self.spreads.values = list(saved["spreads"])


def advance(state: State, progress: float) -> None:
    """Tell a method how much of the run is done; rates follow the schedule that its state names."""
    state.progress = progress
    if isinstance(state, OptimizerState) and state.optimizer is not None:
        if state.scheduler is None:
            factor = SCHEDULES[state.schedule](progress)
            for group in state.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor


def descend(state: OptimizerState, outputs: Tensor, loss: Loss, batch: Batch) -> Tensor:
    """Give the optimiser the gradient of the mean loss over a batch, by autograd from ``outputs``.

    Returns the outputs without autograd's graph.
    """
    state.clear_gradients()
    detached = outputs.detach()
    pull = loss.gradient(detached, batch.target) / batch.total
    if batch.weight is not None:
        pull = pull * batch.weight.view(-1, *[1] * (pull.ndim - 1))
    outputs.backward(pull)
    state.move()
    return detached


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_plain(v) for name, v in value.items())
    return value is None or isinstance(value, bool | int | float | str)


def _as(new: Any, old: Any) -> Any:
    """What was written, as the kind of value that it was: files have lists for tuples."""
    return tuple(old) if isinstance(new, tuple) else old
