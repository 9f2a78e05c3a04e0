"""The penalty ``alpha`` on the size of the weights, for every method that has an optimiser."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lpom.training.history import Epoch


class L2Penalty:
    r"""While open, adds ``alpha / rows * W`` to the gradient of every weight before it is used.

    That is the gradient of :math:`\frac{alpha}{2 rows} \|W\|^2`, scikit-learn's penalty, with the
    rows of a batch (the sum of their weights, if they have any); biases are left alone. torch
    calls the hook before the step of any optimiser, and it looks for the weights of this network
    only. ``alpha=None`` is DEFAULT where there is such a step, and nothing where there is none.
    """

    DEFAULT = 0.1

    def __init__(self, network: nn.Module, alpha: float | None, rows: float, method: str) -> None:
        self.strength = (self.DEFAULT if alpha is None else alpha) / rows
        self.required = bool(alpha)
        self.method = method
        layers = [module for module in network.modules() if isinstance(module, nn.Linear)]
        self._weights = {id(layer.weight) for layer in layers}
        self._seen = False

    def __enter__(self) -> L2Penalty:
        self._hook = register_optimizer_step_pre_hook(self._add) if self.strength else None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._hook is not None:
            self._hook.remove()

    def check(self, epoch: Epoch) -> None:
        """Raise after an epoch in which no optimiser took a step."""
        if self.required and not self._seen:
            raise ValueError(
                f"method {self.method!r} with these settings solves for its weights and takes no "
                "gradient that alpha could be added to; leave alpha=None."
            )

    @torch.no_grad()
    def _add(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in self._weights and parameter.grad is not None:
                    parameter.grad = parameter.grad.add(parameter, alpha=self.strength)
                    self._seen = True
