"""Variables that belong to the samples: kept from step to step, for methods that run full batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from lpom.data import Batch
from lpom.maps import LinearMap
from lpom.methods.base import State
from lpom.methods.regression import Regression


@dataclass
class SampleState(State):
    """A state whose variables are those of the samples of ``batch``.

    ``X[i]`` are states, the inputs first. ``variables`` names the lists of tensors to write down;
    only those of a whole data set can be of use again. ``first``, the regression on the inputs,
    never changes.
    """

    variables: ClassVar[tuple[str, ...]] = ("X",)
    transient = ("batch", "first", *variables)

    batch: Batch | None = None
    X: list[Tensor] = field(default_factory=list)
    first: Regression | None = None

    def regression(self, map_: LinearMap, i: int, *, ridge: float, chunk: int = 8192) -> Regression:
        """Least squares of a layer's weights on ``X[i]``; the one on the inputs is made once."""
        if i == 0 and self.first is not None and self.first.ridge == ridge:
            return self.first
        assert self.batch is not None  # X are its states
        weight = self.batch.weight
        made = Regression(map_, self.X[i], ridge=ridge, weight=weight, chunk=chunk)
        if i == 0:
            self.first = made
        return made

    def tensors(self) -> dict[str, Tensor] | None:
        if self.batch is None or not self.batch.whole:
            return {}
        kept = {
            f"{name}.{i}": tensor
            for name in self.variables
            for i, tensor in enumerate(getattr(self, name))
        }
        weight = {} if self.batch.weight is None else {"weight": self.batch.weight}
        return kept | weight | {"target": self.batch.target}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        if "target" not in tensors:
            return
        for name in self.variables:
            count = sum(key.startswith(f"{name}.") for key in tensors)
            setattr(self, name, [tensors[f"{name}.{i}"] for i in range(count)])
        self.batch = Batch(self.X[0], tensors["target"], tensors.get("weight"), whole=True)


def same_data(batch: Batch, kept: Batch | None) -> bool:
    """Whether variables that belong to the samples of ``kept`` go on with those of ``batch``."""

    def same(a: Tensor | None, b: Tensor | None) -> bool:
        if a is None or b is None:
            return a is b
        if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
            return False
        return a.data_ptr() == b.data_ptr() or torch.equal(a, b)

    return (
        kept is not None
        and same(batch.inputs, kept.inputs)
        and same(batch.target, kept.target)
        and same(batch.weight, kept.weight)
    )
