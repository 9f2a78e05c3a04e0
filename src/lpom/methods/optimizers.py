"""Optimisers by name and learning-rate schedules, for all methods that have gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

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

    def tensors(self) -> dict[str, Tensor] | None:
        if self.optimizer is None:
            return {}
        return {
            f"{i}.{key}": torch.as_tensor(value)
            for i, parameter in enumerate(_parameters(self.optimizer))
            for key, value in self.optimizer.state[parameter].items()
            if value is not None
        }

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        if self.optimizer is None:
            return
        whole = self.optimizer.state_dict()
        for name, value in tensors.items():
            i, key = name.split(".", 1)
            whole["state"].setdefault(int(i), {})[key] = value
        self.optimizer.load_state_dict(whole)  # casts to the dtype and device of the parameters


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


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
