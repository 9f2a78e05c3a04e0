"""Adaptive weights: the gradient of each convex weight problem, given to a torch optimiser."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from lpom.checks import check_choice, check_number
from lpom.settings import Settings
from lpom.weights.adam import adam
from lpom.weights.factored import Factored

Factory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Schedule = str | Callable[[torch.optim.Optimizer], LRScheduler]

#: Jordan's quintic: takes singular values from (0, 1] to about one in five steps.
_A, _B, _C = 3.4445, -4.7750, 2.0315


@final
@dataclass(frozen=True)
class Adaptive(Settings):
    """Give the gradient of each weight's convex problem to an optimiser.

    Parameters
    ----------
    optimizer : a name ("adam", "factored", "muon", "sgd", ...), a class of ``torch.optim``, or a
        function of the parameters that returns an optimiser with a learning rate of its own
    learning_rate : float
    schedule : "linear", "cosine" or "constant" over the run; or a function of the optimiser that
        returns one of torch's schedulers, which then takes a step after every epoch
    """

    optimizer: str | Factory = "adam"
    learning_rate: float = 2e-3
    schedule: Schedule = "linear"


class Muon(torch.optim.Optimizer):
    r"""Momentum of the gradient, made orthogonal, for weights that are matrices.

    In their precision: torch's own multiplies in bfloat16, which not every processor can.

    With :math:`M \leftarrow \beta M + G` and :math:`\hat G = G + \beta M` a step is
    :math:`W \leftarrow W - 0.2\, \eta \sqrt{\max(n, m)}\, U V^T`, :math:`U V^T` the polar factor of
    :math:`\hat G`, by Newton-Schulz steps. The factor gives entries the size of an Adam step, so
    learning rates carry over.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float = 2e-3, momentum: float = 0.95
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                memory = self.state[weight]
                if not memory:
                    memory["momentum_buffer"] = torch.zeros_like(weight)
                buffer = memory["momentum_buffer"]
                buffer.mul_(group["momentum"]).add_(weight.grad)
                ahead = weight.grad + group["momentum"] * buffer
                size = 0.2 * max(weight.shape) ** 0.5
                weight.add_(orthogonal(ahead), alpha=-group["lr"] * size)


def orthogonal(G: Tensor, steps: int = 5) -> Tensor:
    """About the nearest matrix with orthonormal rows or columns, by products alone."""
    X = G / (torch.linalg.matrix_norm(G) + torch.finfo(G.dtype).tiny)
    wide = G.shape[0] > G.shape[1]
    X = X.T if wide else X
    for _ in range(steps):
        S = X @ X.T
        X = _A * X + (_B * S + _C * S @ S) @ X
    made: Tensor = X.T if wide else X
    return made


def _muon(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Muon for matrices, Adam for the rest, at the rates that suit each."""
    everything = list(parameters)
    matrices = [p for p in everything if p.ndim == 2]
    others = [p for p in everything if p.ndim != 2]
    made: list[torch.optim.Optimizer] = []
    if matrices:
        made.append(Muon(matrices, lr=lr))
    if others:
        made.append(adam(others, lr))
    return made[0] if len(made) == 1 else Together(made)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "nesterov": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    # one pass over the weights instead of a dozen: about half the time of a step's update
    "adam": adam,
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True),
    "muon": _muon,
    "factored": Factored,
}

#: What the learning rate is multiplied with at a share of the run, from 0 to 1.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": partial(operator.sub, 1.0),
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


class Together(torch.optim.Optimizer):
    """Several optimisers, each with weights of its own, as one: groups and memory are shared."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Each part works on its groups of this optimiser, and on one memory."""
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state


def make_optimizer(
    optimizer: str | Factory, parameters: list[nn.Parameter], learning_rate: float
) -> torch.optim.Optimizer:
    """A torch optimiser over ``parameters`` from a name, a class, or a function of the parameters.

    A function sets the learning rate itself.
    """
    check_number("learning_rate", learning_rate)
    if isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be a name, a class or a function of the parameters, got an instance "
            f"of {type(optimizer).__name__}; give the class itself."
        )
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        _check_kind(optimizer)
        make = cast(Callable[..., torch.optim.Optimizer], optimizer)
        made = make(parameters, lr=learning_rate)
    elif callable(optimizer):
        made = cast(Factory, optimizer)(parameters)
    else:
        check_choice("optimizer", optimizer, tuple(OPTIMIZERS))
        made = OPTIMIZERS[optimizer](parameters, lr=learning_rate)
    _check_kind(type(made))
    for group in made.param_groups:
        group["initial_lr"] = group["lr"]
    return made


def _check_kind(kind: type) -> None:
    if issubclass(kind, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS evaluates the loss several times in a step, and here a step has one gradient "
            "per weight and no such function. Use 'adam', 'muon' or another optimiser that takes "
            "one gradient."
        )


def check_schedule(schedule: Schedule) -> None:
    if not callable(schedule):
        check_choice("schedule", schedule, tuple(SCHEDULES))


def step_sizes(
    optimizer: torch.optim.Optimizer,
) -> dict[nn.Parameter, Callable[[], float | Tensor]]:
    r"""The metric of an optimiser's last step, as functions by parameter: for proximal steps.

    Adam and its kin move each weight by its own size, :math:`\eta / (\sqrt{\hat v} + \epsilon)`
    times the gradient; so do RMSprop and Adagrad. Momentum :math:`\beta` lengthens a step to
    :math:`\eta / (1 - \beta)`. Any other optimiser is taken to have one size for all, its rate.
    """
    return {
        parameter: partial(_step_size, group, optimizer.state[parameter])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def _step_size(group: dict[str, Any], memory: dict[str, Any]) -> float | Tensor:
    rate: float = group["lr"]
    if "exp_avg_sq" in memory:
        corrected = memory["exp_avg_sq"] / (1 - group["betas"][1] ** memory["step"].double())
        size: Tensor = rate / (corrected.sqrt() + group["eps"])
        return size
    for squares in ("square_avg", "sum"):
        if squares in memory:
            size = rate / (memory[squares].sqrt() + group["eps"])
            return size
    momentum: float = group.get("momentum", 0.0)
    return rate / (1 - momentum)
