"""Loss and score, summed up batch by batch, and a forward pass over all rows to get them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lpom.graph.tracing import unwrapped
from lpom.methods import Problem
from lpom.methods.base import main_output
from lpom.modes import evaluating
from lpom.training.compile import runner
from lpom.training.data import Loader, Source, to_measure
from lpom.training.interface import Interface, n_rows, own_loss, target_of
from lpom.training.randomness import Generators
from lpom.training.task import LossLike, Task

#: A multiple of the numbers that any processor works on at once.
_LANES = 64
#: Numbers of outputs that wait to be scored together.
_WAITING = 2**16


class Score:
    """Mean loss and accuracy (whole rows right) or R2, summed up batch by batch."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._waiting: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self._numbers = 0  # of outputs in there
        self._sums: dict[str, Tensor] = {}
        self._rows = 0
        self._low: Tensor | None = None
        self._high: Tensor | None = None

    def add(self, outputs: Tensor, target: Tensor, weight: Tensor | None = None) -> None:
        """Count a batch: with those before it once they are many, or when somebody asks."""
        if not len(outputs):  # all rows of this batch are other processes'
            return
        if self.task.by_function:
            self._add_by_function(outputs, target, weight)
            return
        self._waiting.append((outputs, target, weight))
        self._numbers += outputs.numel()
        if self._numbers >= _WAITING:
            self._settle()

    def _settle(self) -> None:
        """Count all that waits; sums stay on the device until read."""
        if not self._waiting:
            return
        waiting, self._waiting, self._numbers = self._waiting, [], 0
        outputs, targets, weights = zip(*waiting, strict=True)
        if self.task.n_steps or len({given is None for given in weights}) > 1:
            for batch in waiting:
                self._add(*batch, [len(batch[0])])
            return
        weight = None if weights[0] is None else torch.cat(weights)
        self._add(torch.cat(outputs), torch.cat(targets), weight, [len(rows) for rows in outputs])

    def _add(
        self, outputs: Tensor, target: Tensor, weight: Tensor | None, parts: list[int]
    ) -> None:
        """Count batches one below the other, of so many rows each.

        They are summed up one after the other, so that not even rounding tells how many came at
        once.
        """
        if self.task.n_steps:
            counted = self.task.loss.counted(target)
            weight = counted if weight is None else counted * weight[:, None]
            counts = counted.flatten() > 0
            weight, outputs, target = (
                values.flatten(0, 1)[counts] for values in (weight, outputs, target)
            )
            parts = [len(outputs)]
        rows = len(outputs)
        self._rows += rows
        if weight is None:
            self._count("weight", torch.tensor([float(rows)]).to(outputs.device), None, [1])
        else:
            self._count("weight", weight, None, parts)
        filled = _filled_up(outputs)
        losses = self.task.loss.value(filled, _filled_up(target))
        low, high = filled[:rows].amin(0), filled[:rows].amax(0)
        self._low = torch.minimum(self._low, low) if self._low is not None else low
        self._high = torch.maximum(self._high, high) if self._high is not None else high
        self._count("loss", losses[:rows], weight, parts)
        if self.task.kind == "numbers":
            # squares of large numbers
            self._add_squares(outputs.double(), target.double(), weight, parts)
        else:
            # whole numbers add up to the same in any order
            right = self.task.right(outputs, target)
            self._count("right", right, weight, parts if weight is not None else [rows])

    def _add_by_function(self, outputs: Tensor, target: Tensor, weight: Tensor | None) -> None:
        """Count a batch whose loss is a function of the batch as it stands."""
        rows = len(target)
        self._rows += rows
        self._count("weight", outputs.new_ones(rows) if weight is None else weight, None, [rows])
        self._count("loss", self.task.loss.value(outputs, target), weight, [rows])
        if self.task.kind == "numbers":
            flat = outputs.reshape(rows, -1).double()
            self._add_squares(flat, target.reshape(rows, -1).double(), weight, [rows])
        elif self.task.kind == "classes":
            self._count("right", self.task.right(outputs, target), weight, [rows])

    def _add_squares(
        self, outputs: Tensor, target: Tensor, weight: Tensor | None, parts: list[int]
    ) -> None:
        self._count("error", (outputs - target).square(), weight, parts)
        self._count("first", target, weight, parts)
        self._count("second", target.square(), weight, parts)

    def state_dict(self) -> dict[str, Any]:
        self._settle()
        return {"sums": self._sums, "rows": self._rows, "low": self._low, "high": self._high}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._sums, self._rows = dict(saved["sums"]), saved["rows"]
        self._low, self._high = saved["low"], saved["high"]

    def joined(self, parts: Sequence[dict[str, Any]]) -> Score:
        """The score of all that was counted, given what each of several processes counted."""
        whole = Score(self.task)
        for part in parts:
            for key, total in part["sums"].items():
                known = whole._sums.get(key)
                whole._sums[key] = total if known is None else known + total
            whole._rows += part["rows"]
        lows = [part["low"] for part in parts if part["low"] is not None]
        highs = [part["high"] for part in parts if part["high"] is not None]
        if lows:
            whole._low, whole._high = torch.stack(lows).amin(0), torch.stack(highs).amax(0)
        return whole

    def __bool__(self) -> bool:
        """Whether anything was counted."""
        self._settle()
        return bool(self._sums)

    def constant_outputs(self) -> list[int]:
        """Outputs that gave one and the same value for every sample (of two or more)."""
        self._settle()
        if self._low is None or self._high is None or self._rows < 2:
            return []
        return [int(i) for i in (self._high == self._low).nonzero()]

    def _count(self, key: str, values: Tensor, weight: Tensor | None, sizes: Sequence[int]) -> None:
        if weight is not None:
            values = values * weight.view(-1, *[1] * (values.ndim - 1))
        values, at = values.double(), 0
        if len(sizes) == 1:
            sum_ = values.sum(0)
            self._sums[key] = self._sums[key] + sum_ if key in self._sums else sum_
            return
        sums = [self._sums[key][None]] if key in self._sums else []
        for size, same in itertools.groupby(sizes):
            count = len(list(same))
            part = values[at : at + count * size]
            sums.append(part.view(count, size, *values.shape[1:]).sum(1))
            at += count * size
        self._sums[key] = torch.cat(sums).cumsum(0)[-1]

    @property
    def loss(self) -> float:
        self._settle()
        return float(self._sums["loss"] / self._sums["weight"])

    @property
    def score(self) -> float:
        """Accuracy, or R2 averaged over outputs (1 for a constant output met exactly).

        Of a task that has neither, the loss with its sign turned.
        """
        self._settle()
        if self.task.kind == "other":
            return -self.loss
        sums, n = self._sums, self._sums["weight"]
        if "right" in sums:
            return float(sums["right"] / n)
        spread = sums["second"] - sums["first"].square() / n
        exact = (sums["error"] <= 0).double()
        r2 = torch.where(spread > 0, 1 - sums["error"] / spread.clamp_min(1e-300), exact)
        return float(r2.mean())


def _filled_up(rows: Tensor) -> Tensor:
    """With rows of zeros, so that all of them go through the same lanes of a processor's vectors.

    Numbers that are left over may be rounded in another way there. Column by column in memory,
    which is how losses and extremes of a few outputs take least time.
    """
    return F.pad(rows.movedim(0, -1), (0, -len(rows) % _LANES)).movedim(-1, 0)


@torch.no_grad()
def measure(problem: Problem, source: Source, task: Task, model: nn.Module | None = None) -> Score:
    """Loss and score of a plain forward pass over all rows, of another model if one is given."""
    measured, model = Score(task), problem.model if model is None else model
    generators = Generators(next(model.parameters()).device, source.generators)
    with evaluating(model), generators.untouched():
        for batch in source.in_order():
            outputs = problem.outputs(batch.inputs, model)
            measured.add(outputs, batch.target, batch.weight)
    return measured


def evaluate(
    model: nn.Module, X: Any, y: Any = None, *, loss: LossLike = "auto"
) -> tuple[float, float]:
    """Mean loss, and accuracy or R2, of a plain forward pass; nothing is drawn for good."""
    device = place_of(model, training=False)
    model = unwrapped(model)
    if isinstance(X, DataLoader):
        check_no_targets(y)
        loader = Loader(X)
        with Generators(device, loader.generators).untouched():
            interface, task = from_first_batch(model, loader, loss)
            measured = measure(problem_of(interface, task), loader, task)
    else:
        X, y, interface = interface_of(model, X, y, loss)
        task = Task.of(interface, y, loss)
        source = to_measure(X, y, task, interface)
        with Generators(device, []).untouched():
            measured = measure(problem_of(interface, task), source, task)
    return measured.loss, measured.score


def interface_of(model: nn.Module, X: Any, y: Any, loss: LossLike) -> tuple[Any, Any, Interface]:
    """X and y, which may be an entry of X, and what the model takes."""
    batch = X if y is None else None
    interface = Interface.of(model, X, loss, batch)
    name = target_of(X)
    if y is None and name is not None:
        y = X[name]
        if not interface.own_loss:
            X = {key: value for key, value in X.items() if key != name}
    elif y is None and interface.own_loss:
        y = torch.zeros(n_rows(X))
    return X, y, interface


def from_first_batch(model: nn.Module, loader: Loader, loss: LossLike) -> tuple[Interface, Task]:
    X, y, batch = loader.first()
    interface = Interface.of(model, X, loss, batch)
    task = Task.of(interface, y, loss)
    loader.of(interface, task)
    return interface, task


def problem_of(
    interface: Interface, task: Task, compile: bool = False, precision: str | None = None
) -> Problem:
    read = own_loss if interface.own_loss else main_output
    if precision is not None:  # losses are taken in the precision of the weights
        rounded, like = read, interface.like
        read = lambda outputs: rounded(outputs).to(like.dtype)  # noqa: E731
    compiled = runner(compile, precision)
    return Problem(interface.model, task.loss, interface.example, read, compiled)


def place_of(model: nn.Module, *, training: bool = True) -> torch.device:
    """The device of a model that has weights, and some that may move if it is to be trained."""
    parameters = list(model.parameters())
    if not parameters:
        raise ValueError(
            "the model has no weights to train; expected a torch module with layers such as "
            f"Linear or Conv2d, got {type(model).__name__}."
        )
    if any(parameter.is_meta for parameter in parameters):
        raise ValueError(
            "the weights of the model are on the meta device, where tensors have no values; use "
            "model.to_empty(device='cpu') and initialise them."
        )
    if training and not any(parameter.requires_grad for parameter in parameters):
        raise ValueError(
            "every layer of the model is frozen, so there is nothing to train; set "
            "requires_grad=True on the weights that should move."
        )
    return parameters[0].device


def check_no_targets(y: Any) -> None:
    if y is not None:
        raise TypeError("a DataLoader brings its own targets; leave y out.")
