"""How the column to predict becomes targets, and the outputs of a network become answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
import pandas as pd
import torch
from pandas.api import types
from torch import Tensor

from lpom.checks import check_choice
from lpom.exceptions import DataError
from lpom.losses import Loss
from lpom.tables.columns import FEW, Array, codes, distinct, kind, matrix
from lpom.training.tasks import Task

TASKS = ("auto", "classification", "regression")


class Target(ABC):
    """The column to predict; ``task`` is classification or regression."""

    task: ClassVar[str]
    name: str

    @property
    @abstractmethod
    def n_outputs(self) -> int: ...

    @abstractmethod
    def encode(self, values: pd.Series) -> Array:
        """Targets as :func:`lpom.fit` takes them."""

    @abstractmethod
    def answers(self, outputs: Tensor, loss: Loss, probabilities: bool = False) -> pd.DataFrame:
        """A column ``prediction``, and one per class with its probability if asked for."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]: ...


@final
@dataclass(frozen=True)
class Classes(Target):
    """One output per class; answers are names of classes."""

    name: str
    classes: tuple[str, ...]

    task = "classification"

    @classmethod
    def fit(cls, values: pd.Series) -> Classes:
        classes = distinct(values)
        if len(classes) == 1:
            raise DataError(
                f"the target {values.name!r} has one class only, {classes[0]!r}; at least two are "
                "needed to tell apart."
            )
        if len(classes) > max(FEW, len(values) / 2):
            raise DataError(
                f"the target {values.name!r} has {len(classes)} different values in {len(values)} "
                "rows, too many to be classes. Name another column, or ask for --task regression "
                "if they are quantities."
            )
        return cls(str(values.name), tuple(classes))

    @property
    def n_outputs(self) -> int:
        return len(self.classes)

    def encode(self, values: pd.Series) -> Array:
        return codes(values, self.classes, f"the target {self.name!r}")

    def answers(self, outputs: Tensor, loss: Loss, probabilities: bool = False) -> pd.DataFrame:
        chosen = Task("classes", loss, self.n_outputs).decide(outputs)
        frame = pd.DataFrame({"prediction": np.array(self.classes, dtype=object)[chosen.numpy()]})
        if probabilities:
            share = loss.probabilities(outputs.double())
            # where a loss leaves nothing to any class, the one chosen takes it all
            share[torch.arange(len(share)), chosen] += torch.finfo(share.dtype).tiny
            share = share / share.sum(1, keepdim=True)
            for k, name in enumerate(self.classes):
                frame[f"probability_{name}"] = share[:, k].numpy()
        return frame

    def to_json(self) -> dict[str, Any]:
        return {"task": self.task, "name": self.name, "classes": list(self.classes)}


@final
@dataclass(frozen=True)
class Quantity(Target):
    """A number, standardised for training; answers are in its own unit."""

    name: str
    mean: float
    scale: float

    task = "regression"

    @classmethod
    def fit(cls, values: pd.Series, rows: Any = slice(None)) -> Quantity:
        numbers = matrix(values.to_frame())[rows].astype(np.float64)
        if not numbers.min() < numbers.max():
            raise DataError(
                f"the target {values.name!r} is {numbers.flat[0]:g} in every row to train on; "
                "there is nothing to learn."
            )
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            mean, scale = float(numbers.mean()), float(numbers.std())
        if not (0 < scale < np.inf and np.isfinite(1 / scale)):
            raise DataError(
                f"the target {values.name!r} goes from {numbers.min():g} to {numbers.max():g}, "
                "which can't be computed with. Give it in another unit."
            )
        return cls(str(values.name), mean, scale)

    @property
    def n_outputs(self) -> int:
        return 1

    def encode(self, values: pd.Series) -> Array:
        numbers = matrix(values.to_frame())[:, 0].astype(np.float64)
        return ((numbers - self.mean) / self.scale).astype(np.float32)

    def answers(self, outputs: Tensor, loss: Loss, probabilities: bool = False) -> pd.DataFrame:
        if probabilities:
            raise ValueError("probabilities belong to classes; this model predicts a number.")
        numbers = outputs[:, 0].double().numpy() * self.scale + self.mean
        return pd.DataFrame({"prediction": numbers})

    def to_json(self) -> dict[str, Any]:
        return {"task": self.task, "name": self.name, "mean": self.mean, "scale": self.scale}


def fit_target(values: pd.Series, task: str = "auto", rows: Any = slice(None)) -> Target:
    """What a column is: texts, flags and few integers are classes, the rest quantities.

    ``rows`` are those to train on: mean and standard deviation of a quantity are theirs.
    """
    check_choice("task", task, TASKS)
    if bool(values.isna().any()):
        row = int(np.flatnonzero(values.isna())[0]) + 1
        raise DataError(f"the target {values.name!r} has no value in row {row}; drop such rows.")
    if task == "auto":
        n_values = values.nunique()
        few = types.is_integer_dtype(values.dtype) and n_values <= min(FEW, len(values) / 2)
        task = "classification" if kind(values) != "number" or few else "regression"
    return Classes.fit(values) if task == "classification" else Quantity.fit(values, rows)


def target_from_json(state: dict[str, Any]) -> Target:
    """The target whose ``to_json`` this is."""
    if state["task"] == Classes.task:
        return Classes(state["name"], tuple(state["classes"]))
    return Quantity(state["name"], float(state["mean"]), float(state["scale"]))
