"""Variables that belong to the samples: kept from step to step, for methods that run full batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from lpom.graph import Dense
from lpom.methods.base import Batch, State
from lpom.methods.regression import Regression


def of_samples(default_factory: Any) -> Any:
    """A field of a :class:`SampleState` that has a row for every sample."""
    return field(default_factory=default_factory, metadata={"of_samples": default_factory})


@dataclass
class SampleState(State):
    """A state with variables of all samples: ``X[i]`` are states, the inputs first.

    ``samples`` tells to which rows they belong, by the fingerprint of their batch. The inputs
    are there from the first step of a run to its end; neither copies made afterwards nor what is
    written down have them.
    """

    X: list[Tensor] = of_samples(list)
    samples: str = ""

    def belongs_to(self, batch: Batch) -> bool:
        """Whether the variables are those of these rows, whose inputs are then put in place."""
        if self.samples != batch.fingerprint:
            return False
        if self.X[0] is not batch.inputs:
            self.X[0] = batch.inputs
        return True

    def start(self, batch: Batch, X: Sequence[Tensor]) -> None:
        """Begin anew, with these states for the rows of ``batch``."""
        self.X, self.samples = list(X), batch.fingerprint

    def without_samples(self) -> State:
        own = [f for f in fields(self) if "of_samples" in f.metadata]
        return replace(self, samples="", **{f.name: f.metadata["of_samples"]() for f in own})

    def release(self) -> None:
        if self.X:
            self.X[0] = self.X[0].new_empty(0)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"X": self.X[1:]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        inputs = [torch.empty(0)] if saved.get("X") else []
        super().load_state_dict(saved | {"X": inputs + list(saved.get("X", []))})


def least_squares(
    map_: Dense, X: Tensor, batch: Batch, *, ridge: float, chunk: int = 8192
) -> Regression:
    """The regression of a layer's weights on the states X; the one on the inputs is made once."""
    kept: Regression | None = batch.cache.get("regression") if X is batch.inputs else None
    if kept is not None and kept.map is map_ and kept.ridge == ridge:
        return kept
    made = Regression(map_, X, ridge=ridge, weight=batch.weight, chunk=chunk)
    if X is batch.inputs:
        batch.cache["regression"] = made
    return made
