"""Optimisers by name and learning-rate schedules, for all methods that have gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lpom.checks import check_choice, check_number
from lpom.methods.base import State
from lpom.network import Layer

Factory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "nesterov": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    # one pass over the weights instead of a dozen: about half the time of a step's update
    "adam": lambda p, lr: torch.optim.Adam(p, lr=lr, fused=True),
}

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def make_optimizer(
    optimizer: str | Factory, parameters: list[nn.Parameter], learning_rate: float, schedule: str
) -> torch.optim.Optimizer:
    """A torch optimiser over ``parameters`` from a name, a class, or a function of the parameters.

    A function sets the learning rate itself.
    """
    check_choice("schedule", schedule, tuple(SCHEDULES))
    check_number("learning_rate", learning_rate)
    if isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be a name, a class or a function of the parameters, got an instance "
            f"of {type(optimizer).__name__}; give the class itself."
        )
    if isinstance(optimizer, type):
        made: torch.optim.Optimizer = optimizer(parameters, lr=learning_rate)
    elif callable(optimizer):
        made = optimizer(parameters)
    else:
        check_choice("optimizer", optimizer, tuple(OPTIMIZERS))
        made = OPTIMIZERS[optimizer](parameters, lr=learning_rate)
    for group in made.param_groups:
        group["initial_lr"] = group["lr"]
    return made


def set_progress(optimizer: torch.optim.Optimizer, schedule: str, progress: float) -> None:
    """Scale every learning rate to what the schedule gives at this share of the run."""
    factor = SCHEDULES[schedule](min(max(progress, 0.0), 1.0))
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


@dataclass
class OptimizerState(State):
    """A state whose memory is that of its optimiser."""

    optimizer: torch.optim.Optimizer | None = None

    def state_dict(self) -> dict[str, Any]:
        made, written = self.optimizer, None
        if made is not None:
            whole = made.state_dict()
            written = {
                "kind": f"{type(made).__module__}.{type(made).__qualname__}",
                "shapes": [list(p.shape) for group in made.param_groups for p in group["params"]],
                "groups": whole["param_groups"],
                "memory": {str(i): memory for i, memory in whole["state"].items()},
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
            _options(new) != _options(old) for new, old in groups
        ):
            return
        assert self.optimizer is not None  # own was made of it
        self.optimizer.load_state_dict(
            {  # which casts to the dtype and device of the parameters
                "state": {int(i): dict(memory) for i, memory in written["memory"].items()},
                "param_groups": [
                    new | ({"lr": old["lr"]} if new["initial_lr"] == old["initial_lr"] else {})
                    for new, old in groups
                ],
            }
        )


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """What decides of which kind an optimiser's memory is: everything but the rates."""
    rates = ("lr", "initial_lr")
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in group.items()
        if name not in rates
    }


@torch.no_grad()
def add_gradient(
    layer: Layer, X: Tensor, residual: Tensor, mu: float, weight: Tensor | None, total: Tensor
) -> None:
    r"""Put ``mu * residual^T X``, averaged over the batch, where optimisers look.

    For LPOM the residual is :math:`\phi(Z) - X_{next}`: no derivative of the activation.
    """
    scaled = residual * (mu / total)
    if weight is not None:
        scaled = scaled * weight[:, None]
    parameters = layer.map.parameters()
    old = [parameter.grad if parameter.requires_grad else None for parameter in parameters]
    for parameter, gradient in zip(
        parameters, layer.map.weight_gradient(scaled, X, out=old), strict=True
    ):
        # the optimiser moves all that has a gradient, so a frozen one may keep none
        parameter.grad = gradient if parameter.requires_grad else None
