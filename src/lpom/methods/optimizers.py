"""Optimisers by name and learning-rate schedules, for all methods that have gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

from lpom.methods.base import check_choice, check_number

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
    """A torch optimiser over ``parameters`` from a name, or from a function of the parameters."""
    check_choice("schedule", schedule, tuple(SCHEDULES))
    check_number("learning_rate", learning_rate)
    if callable(optimizer):
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
