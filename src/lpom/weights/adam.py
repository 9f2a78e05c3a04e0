"""Adam as one call for all weights, with little around it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

#: Numbers of a matrix whose gradient is not held as a whole, and of the part of it that is.
LARGE = 1 << 19


def _eager(name: str) -> Any:
    """A method of torch's optimisers that does not load torch's compiler first, for 0.7 s."""
    method = getattr(torch.optim.Optimizer, name)
    return getattr(method, "__wrapped__", method)


class Adam(torch.optim.Adam):
    r"""torch's fused Adam without what surrounds it: a fifth of a small network's step.

    .. math:: M \leftarrow \beta_1 M + (1 - \beta_1) G, \quad V \leftarrow \beta_2 V +
        (1 - \beta_2) G^2, \quad W \leftarrow W - \eta\, \hat M / (\sqrt{\hat V} + \epsilon)

    For weights of one dtype on one device. Its memory is that of torch's class; hooks around
    steps are not called, and torch's profiler sees the kernel alone. Matrices with more than
    ``above`` numbers can be moved by `descend`, as soon as their residuals are there.
    """

    @property
    def above(self) -> int:
        return LARGE

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-3) -> None:
        super().__init__(params, lr=lr, fused=True)

    add_param_group, zero_grad = _eager("add_param_group"), _eager("zero_grad")
    state_dict, load_state_dict = _eager("state_dict"), _eager("load_state_dict")

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            for group in self.param_groups:
                weights = [p for p in group["params"] if p.grad is not None]
                if weights:
                    self._move_all(group, weights)

    # torch wraps every other step in a note for its profiler, which takes as long as the step
    step.hooked = True  # type: ignore[attr-defined]

    def descend(
        self, weight: nn.Parameter, R: Tensor, X: Tensor, share: float | Tensor, decay: float
    ) -> None:
        """The step of one matrix, whose gradient is ``share * R.T @ X + decay * weight``.

        Some rows of it at a time: the gradient is never there as a whole.
        """
        if isinstance(share, Tensor):
            R, share = R * share, 1.0
        group = next(g for g in self.param_groups if any(p is weight for p in g["params"]))
        memory = self.state[weight] or self._begun(weight)
        memory["step"] += 1
        rows = max(1, LARGE // weight.shape[1])
        room = torch.empty_like(weight[:rows])
        whole = weight, memory["exp_avg"], memory["exp_avg_sq"], R.T
        for W, M, V, part in zip(*(torch.split(t, rows) for t in whole), strict=True):
            gradient = room[: len(W)]
            torch.addmm(W, part, X, beta=decay, alpha=share, out=gradient)
            _kernel(group, [W], [gradient], [M], [V], [memory["step"]])

    def _move_all(self, group: dict[str, Any], weights: list[nn.Parameter]) -> None:
        memory = [self.state[p] or self._begun(p) for p in weights]
        steps = [of["step"] for of in memory]
        torch._foreach_add_(steps, [_one(steps[0].device)] * len(steps))  # a number would be copied
        gradients = [p.grad for p in weights]
        firsts, seconds = [of["exp_avg"] for of in memory], [of["exp_avg_sq"] for of in memory]
        _kernel(group, weights, gradients, firsts, seconds, steps)

    def _begun(self, weight: nn.Parameter) -> dict[str, Tensor]:
        memory: dict[str, Tensor] = self.state[weight]  # others may hold it already
        memory["step"] = torch.zeros((), device=weight.device)
        memory["exp_avg"] = torch.zeros_like(weight)
        memory["exp_avg_sq"] = torch.zeros_like(weight)
        return memory


@cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


def _kernel(
    group: dict[str, Any], weights: Any, gradients: Any, firsts: Any, seconds: Any, steps: Any
) -> None:
    """torch's own, of lists of tensors: ``firsts`` are M, ``seconds`` V."""
    torch._fused_adam_(
        weights,
        gradients,
        firsts,
        seconds,
        [],
        steps,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=0.0,
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


def adam(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """The short way where all weights are alike, else torch's."""
    weights = list(parameters)
    if len({(p.dtype, p.device) for p in weights}) == 1:
        return Adam(weights, lr)
    return torch.optim.Adam(weights, lr=lr, fused=True)
