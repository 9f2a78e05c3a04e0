"""Adam as one call for all weights, with little around it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Adam(torch.optim.Adam):
    r"""torch's fused Adam without what surrounds it: a fifth of a small network's step.

    .. math:: M \leftarrow \beta_1 M + (1 - \beta_1) G, \quad V \leftarrow \beta_2 V +
        (1 - \beta_2) G^2, \quad W \leftarrow W - \eta\, \hat M / (\sqrt{\hat V} + \epsilon)

    For weights of one dtype on one device. Its memory is that of torch's class; hooks around
    steps are not called, and torch's profiler sees the kernel alone.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-3) -> None:
        super().__init__(params, lr=lr, fused=True)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                self._move(group)

    # torch wraps every other step in a note for its profiler, which takes as long as the step
    step.hooked = True  # type: ignore[attr-defined]

    def _move(self, group: dict[str, Any]) -> None:
        weights = [p for p in group["params"] if p.grad is not None]
        if not weights:
            return
        memory = [self.state[p] or self._begun(p) for p in weights]
        steps = [of["step"] for of in memory]
        torch._foreach_add_(steps, 1)
        torch._fused_adam_(
            weights,
            [p.grad for p in weights],
            [of["exp_avg"] for of in memory],
            [of["exp_avg_sq"] for of in memory],
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

    def _begun(self, weight: nn.Parameter) -> dict[str, Tensor]:
        memory: dict[str, Tensor] = self.state[weight]  # others may hold it already
        memory["step"] = torch.zeros((), device=weight.device)
        memory["exp_avg"] = torch.zeros_like(weight)
        memory["exp_avg_sq"] = torch.zeros_like(weight)
        return memory


def adam(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """The short way where all weights are alike, else torch's."""
    weights = list(parameters)
    if len({(p.dtype, p.device) for p in weights}) == 1:
        return Adam(weights, lr)
    return torch.optim.Adam(weights, lr=lr, fused=True)
