"""Muon in the precision of the weights; torch's own multiplies in bfloat16, which not every
processor can."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

#: Jordan's quintic: takes singular values from (0, 1] to about one in five steps.
_A, _B, _C = 3.4445, -4.7750, 2.0315


class Muon(torch.optim.Optimizer):
    r"""Momentum of the gradient, made orthogonal, for weights that are matrices.

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
