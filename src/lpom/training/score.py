"""Loss and score, summed up batch by batch, and a forward pass over all rows to get them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lpom.graph.tracing import unwrapped
from lpom.methods import Problem
from lpom.methods.base import main_output
from lpom.modes import evaluating
from lpom.training.compile import Compiled, Rounded
from lpom.training.data import Loader, Source, to_measure
from lpom.training.interface import Interface, n_rows, own_loss, target_of
from lpom.training.randomness import Generators
from lpom.training.task import LossLike, Task

#: Numbers of outputs that wait to be counted together.
_WAITING = 2**16


class Score:
    """Mean loss and accuracy (whole rows right) or R2, summed up batch by batch.

    Batches wait until they are many enough to be counted in one go; :meth:`settle` counts the
    last ones. Sums stay on the device until read.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self._by_function = task.by_function
        self._waiting: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self._numbers = 0  # of outputs in there
        self._sums: dict[str, Tensor] = {}
        self._rows = 0
        self._low, self._high = torch.tensor(math.inf), torch.tensor(-math.inf)

    def add(self, outputs: Tensor, target: Tensor, weight: Tensor | None = None) -> None:
        self._waiting.append((outputs, target, weight))
        self._numbers += outputs.numel()
        if self._by_function or self._numbers >= _WAITING:  # a function wants batches as they stand
            self.settle()

    def settle(self) -> None:
        """Count all that waits."""
        batches = [self._weighted(*batch) for batch in self._waiting if len(batch[0])]
        self._waiting, self._numbers = [], 0
        if not batches:  # none, or all rows are other processes'
            return
        outputs, target, weight = map(torch.cat, zip(*batches, strict=True))
        self._rows += len(target)
        self._count("weight", torch.ones_like(weight), weight)
        if self._by_function:
            losses = self.task.loss.value(outputs, target)
        else:  # column by column in memory, these take least time
            columns = outputs.T.contiguous().T
            losses = self.task.loss.value(columns, target.T.contiguous().T)
            self._low = torch.minimum(self._low, columns.amin(0))
            self._high = torch.maximum(self._high, columns.amax(0))
        self._count("loss", losses, weight)
        if self.task.kind == "numbers":  # whose squares may be large
            outputs, target = (v.reshape(len(target), -1).double() for v in (outputs, target))
            self._count("error", (outputs - target).square(), weight)
            self._count("first", target, weight)
            self._count("second", target.square(), weight)
        elif self.task.kind != "other":
            self._count("right", self.task.right(outputs, target), weight)

    def _weighted(
        self, outputs: Tensor, target: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A batch with weights; of sequences the steps that count, one below the other."""
        if weight is None:
            weight = torch.ones(len(target), device=outputs.device)
        if not self.task.n_steps:
            return outputs, target, weight
        weight = self.task.loss.counted(target) * weight[:, None]
        counts = self.task.loss.counted(target) > 0
        return outputs[counts], target[counts], weight[counts]

    def _count(self, key: str, values: Tensor, weight: Tensor) -> None:
        values = values.double()
        total = (values * weight.view(-1, *[1] * (values.ndim - 1))).sum(0)
        self._sums[key] = self._sums[key] + total if key in self._sums else total

    def state_dict(self) -> dict[str, Any]:
        sums = {"sums": self._sums, "rows": self._rows, "low": self._low, "high": self._high}
        return sums | {"waiting": self._waiting}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._sums, self._rows = dict(saved["sums"]), saved["rows"]
        self._low, self._high = saved["low"], saved["high"]
        self._waiting, self._numbers = [], 0
        for batch in saved["waiting"]:
            self.add(*batch)

    def joined(self, parts: Sequence[dict[str, Any]]) -> Score:
        """The score of all that was counted, given what each of several processes counted."""
        whole = Score(self.task)
        for part in parts:
            for key, total in part["sums"].items():
                whole._sums[key] = whole._sums[key] + total if key in whole._sums else total
            whole._rows += part["rows"]
            whole._low = torch.minimum(whole._low, part["low"])
            whole._high = torch.maximum(whole._high, part["high"])
        return whole

    def __bool__(self) -> bool:
        """Whether anything was counted."""
        return bool(self._sums)

    def constant_outputs(self) -> list[int]:
        """Outputs that gave one and the same value for every sample (of two or more)."""
        if self._rows < 2:
            return []
        return [int(i) for i in (self._high == self._low).nonzero()]

    @property
    def loss(self) -> float:
        return float(self._sums["loss"] / self._sums["weight"])

    @property
    def score(self) -> float:
        """Accuracy, or R2 averaged over outputs (1 for a constant output met exactly).

        Of a task that has neither, the loss with its sign turned.
        """
        if self.task.kind == "other":
            return -self.loss
        sums, n = self._sums, self._sums["weight"]
        if "right" in sums:
            return float(sums["right"] / n)
        spread = sums["second"] - sums["first"].square() / n
        exact = (sums["error"] <= 0).double()
        r2 = torch.where(spread > 0, 1 - sums["error"] / spread.clamp_min(1e-300), exact)
        return float(r2.mean())


@torch.no_grad()
def measure(problem: Problem, source: Source, task: Task, model: nn.Module | None = None) -> Score:
    """Loss and score of a plain forward pass over all rows, of another model if one is given."""
    measured, model = Score(task), problem.model if model is None else model
    generators = Generators(next(model.parameters()).device, source.generators)
    with evaluating(model), generators.untouched():
        for batch in source.in_order():
            outputs = problem.outputs(batch.inputs, model)
            measured.add(outputs, batch.target, batch.weight)
    measured.settle()
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
    runner = Compiled if compile else Rounded if precision else None
    return Problem(interface.model, task.loss, interface.example, read, runner)


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
