"""Gradients of the weights, put together while a sweep goes from node to node."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import final

import torch
from torch import Tensor, nn

from lpom.graph.adjoints import is_narrow, product


@final
class Gradients:
    """Where a sweep puts the gradients of these weights: in ``.grad``, where optimisers look.

    The first of a sweep is written over that of the last one: new memory would cost the time to
    get its pages. Those of further uses of a weight are added. They have the layout of their weight
    in memory, which convolutions do not give them: fused optimisers go through both side by side.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._known: set[int] = set()  # ids of the weights whose gradient is of this sweep

    def begin(self) -> None:
        """What there is belongs to the last sweep."""
        self._known.clear()

    def drop_old(self) -> None:
        """Weights that this sweep did not reach keep no gradient: the optimiser would move them."""
        if len(self._known) < len(self._parameters):
            for parameter in self._parameters:
                if id(parameter) not in self._known:
                    parameter.grad = None

    def add(self, parameter: nn.Parameter, gradient: Tensor, share: float | Tensor) -> None:
        """``share * gradient``."""
        if not parameter.requires_grad:
            return
        old, kept = self._begun(parameter)
        if kept:
            old.add_(gradient * share)
        else:
            torch.mul(gradient, share, out=old)

    def add_product(
        self, parameter: nn.Parameter, R: Tensor, X: Tensor, share: float | Tensor
    ) -> None:
        """``share * R.T @ X`` for a matrix."""
        if len(X) >= 16 * X.shape[1] and is_narrow(R, X):
            self.add(parameter, product(R, X), share)
            return
        if isinstance(share, Tensor):
            R, share = R * share, 1.0
        if parameter.requires_grad:
            old, kept = self._begun(parameter)
            torch.addmm(old, R.T, X, beta=kept, alpha=share, out=old)

    def add_sum(self, parameter: nn.Parameter, R: Tensor, share: float | Tensor) -> None:
        """``share`` times the sum of the rows of R for a vector."""
        if isinstance(share, Tensor):
            R, share = R * share, 1.0
        if parameter.requires_grad:
            old, kept = self._begun(parameter)
            each = ones(R.shape[0], R.dtype, R.device)
            # a product takes less time than a sum and its multiple
            torch.addmv(old, R.T, each, beta=kept, alpha=share, out=old)

    def _begun(self, parameter: nn.Parameter) -> tuple[Tensor, int]:
        """Memory of a gradient, and whether what is there counts."""
        kept = int(id(parameter) in self._known)
        self._known.add(id(parameter))
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        return parameter.grad, kept


@final
class Apart:
    """Gradients of a sweep as values of their own, written over nothing: by their weight."""

    def __init__(self) -> None:
        self.found: dict[nn.Parameter, Tensor] = {}

    def add(self, parameter: nn.Parameter, gradient: Tensor, share: float | Tensor) -> None:
        """``share * gradient``."""
        if parameter.requires_grad:
            made, old = gradient * share, self.found.get(parameter)
            self.found[parameter] = made if old is None else old + made

    def add_product(
        self, parameter: nn.Parameter, R: Tensor, X: Tensor, share: float | Tensor
    ) -> None:
        """``share * R.T @ X`` for a matrix."""
        if parameter.requires_grad:
            self.add(parameter, R.T @ X, share)

    def add_sum(self, parameter: nn.Parameter, R: Tensor, share: float | Tensor) -> None:
        """``share`` times the sum of the rows of R for a vector."""
        self.add(parameter, R.sum(0), share)


@lru_cache(maxsize=8)
def ones(rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same every time: nobody writes there."""
    return torch.ones(rows, dtype=dtype, device=device)
