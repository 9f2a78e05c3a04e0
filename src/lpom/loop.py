"""The only training loop: epochs, clocks, stopping, safety; methods do the steps."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lpom.checks import check_choice
from lpom.data import Batch, Source
from lpom.exceptions import ConvergenceWarning, DivergenceError
from lpom.history import Epoch, History
from lpom.methods import Method, Problem, State
from lpom.progress import Bar
from lpom.tasks import Score, Task

Callback = Callable[[Epoch], bool | None]

_CHECK_EVERY = 200  # steps between two looks for NaN in the weights

#: Settings that keep weights from growing without bound, for the methods that have them.
_STEADIER = {
    "learning_rate": "a smaller learning_rate",
    "mu": "a larger mu",
    "step_rule": "step_rule='safe'",
    "ridge": "a larger ridge",
}


@dataclass(frozen=True)
class EarlyStopping:
    """Stop when nothing got better by ``min_delta`` for ``patience`` epochs.

    Watches the validation data if there is any, else the training loss; the weights of the epoch
    that did best on the validation data are put back. ``watch``: its "score", or its "loss", which
    also hears of answers that are right and hardly sure.
    """

    patience: int = 10
    min_delta: float = 1e-4
    watch: str = "score"

    def __post_init__(self) -> None:
        check_choice("watch", self.watch, ("score", "loss"))

    def gain(self, epoch: Epoch) -> float:
        """What should rise: the validation score, or a loss with its sign turned."""
        if epoch.validation_loss is None or epoch.validation_score is None:
            return -epoch.loss
        return epoch.validation_score if self.watch == "score" else -epoch.validation_loss


@dataclass
class Result:
    """What a run leaves beside the trained module.

    ``status`` is finished, stopped-early, stopped (by a callback) or interrupted; ``seconds`` is
    split into ``training_seconds`` and the rest, which went into measuring. Give ``state`` back
    to :func:`fit` to go on where this run ended.
    """

    history: History
    status: str
    seconds: float
    training_seconds: float
    task: Task
    state: State = field(repr=False)


@dataclass
class TrainingRun:
    """One run over the epochs: what it is given, and what changes on the way.

    ``good`` are the weights after the last whole epoch, ``best`` those of the best one so far.
    ``reached`` is the value that must be beaten by ``min_delta``, ``waited`` the epochs since.
    """

    model: nn.Module
    problem: Problem
    task: Task
    method: Method[Any]
    state: State
    train: Source
    validation: Source | None
    stopper: EarlyStopping | None
    callbacks: tuple[Callback, ...]
    history: History = field(init=False)
    training_seconds: float = 0.0
    good: list[Tensor] = field(init=False)
    best: list[Tensor] = field(init=False)
    best_value: float = -math.inf
    reached: float = -math.inf
    waited: int = 0

    def __post_init__(self) -> None:
        self.history = History(self.task.metric)
        self.good = self.best = self._copy_weights()

    def go(self, epochs: int, span: tuple[float, float], show: bool | None) -> Result:
        """Train; ``span`` is the share of the whole plan, ``show`` whether there is a bar."""
        started = time.perf_counter()
        status = "finished"
        was_training = self.model.training
        self.model.eval()
        total = None if self.train.steps is None else self.train.steps * epochs
        try:
            with Bar(total, show) as bar:
                for epoch in range(epochs):
                    self._epoch(epoch, epochs, span, bar)
                    self._pass_on_remarks()
                    asked = any([callback(self.history[-1]) for callback in self.callbacks])
                    if self._stops_early():
                        status = "stopped-early"
                        break
                    if asked:
                        status = "stopped"
                        break
        except KeyboardInterrupt:
            status = "interrupted"
            if not self._finite():
                self._put_back(self.good)
            warnings.warn("training was interrupted; the weights stay as they were.", stacklevel=3)
        finally:
            self.model.train(was_training)
            for parameter in self.problem.network.parameters:
                parameter.grad = None  # as large as the weights, and no one's any more
        if self.stopper is not None and self.validation is not None and status != "interrupted":
            self._put_back(self.best)
        seconds = time.perf_counter() - started
        return Result(self.history, status, seconds, self.training_seconds, self.task, self.state)

    def _epoch(self, epoch: int, epochs: int, span: tuple[float, float], bar: Bar) -> None:
        measured = Score(self.task)
        seen, batch = 0, None
        clock = time.perf_counter()
        for k, batch in enumerate(self.train.epoch()):
            within = 0.0 if self.train.steps is None else k / self.train.steps
            done = (epoch + within) / epochs
            self.state.progress = span[0] + done * (span[1] - span[0])
            outputs = self.method.step(self.problem, batch, self.state)
            seen += len(batch)
            if outputs is not None:
                measured.add(outputs, batch.target, batch.weight)
            if k % _CHECK_EVERY == _CHECK_EVERY - 1 and not self._finite():
                self._diverged(epoch)
            if bar.due:
                speed = seen / (time.perf_counter() - clock)
                text = f"{speed:,.0f} samples/s"
                if measured:
                    text += f"  {self.task.metric} {measured.score:.4f}"
                bar.draw(epoch * (self.train.steps or 0) + k, f"epoch {epoch + 1}/{epochs}", text)
        seconds = time.perf_counter() - clock
        if batch is None:
            raise ValueError("the DataLoader gave no batch; at least one is needed.")
        if not self._finite():
            self._diverged(epoch)
        self.training_seconds += seconds
        self.good = self._copy_weights()
        if not measured:
            measured = measure(self.model, self.train, self.task)
        if not measured:
            raise ValueError(
                f"method {self.method.name!r} needs a second pass over the data to measure the "
                "epoch, but the DataLoader gave nothing when read again. Use a data set that can "
                "be read more than once."
            )
        self._record(batch, measured, seconds, seen)

    def _record(self, batch: Batch, measured: Score, seconds: float, seen: int) -> None:
        self.method.end_epoch(self.problem, batch, self.state)
        objective = self.method.objective(self.problem, batch, self.state)
        size = float(batch.total_weight)
        checked = None
        if self.validation is not None:
            checked = measure(self.model, self.validation, self.task)
            if not checked:
                raise ValueError("validation_data gave no batch; at least one is needed.")
        self.history.epochs.append(
            Epoch(
                epoch=len(self.history) + 1,
                seconds=seconds,
                samples_per_second=seen / seconds,
                objective=objective.total / size,
                loss=measured.loss,
                score=measured.score,
                validation_loss=None if checked is None else checked.loss,
                validation_score=None if checked is None else checked.score,
                gaps=tuple(gap / size for gap in objective.gaps),
                rates=tuple(self.method.rates(self.problem, self.state)),
            )
        )
        if not math.isfinite(measured.loss):
            self.state.remark(
                "infinite loss",
                f"the loss is {measured.loss} although all weights are finite: the data is too "
                "large in size. Standardise X, and y if it holds numbers.",
            )
        dead = measured.constant_outputs()
        if dead and self.task.kind != "numbers":
            self.state.remark(
                "dead class",
                f"output {dead[0]} gave the same value for every sample of an epoch: that class is "
                "dead. Use an identity or leaky output activation, or a small positive bias on the "
                "last layer.",
            )

    def _pass_on_remarks(self) -> None:
        for sentence in self.state.new_remarks():
            warnings.warn(sentence, ConvergenceWarning, stacklevel=4)

    def _stops_early(self) -> bool:
        if self.stopper is None:
            return False
        value = self.stopper.gain(self.history[-1])
        self.waited = 0 if value > self.reached + self.stopper.min_delta else self.waited + 1
        if self.waited == 0:
            self.reached = value
        if value > self.best_value:
            self.best_value, self.best = value, self.good
        return self.waited >= self.stopper.patience

    def _finite(self) -> bool:
        return all(bool(torch.isfinite(p).all()) for p in self.problem.network.parameters)

    def _diverged(self, epoch: int) -> None:
        self._put_back(self.good)
        restored = f"those of the end of epoch {epoch}" if epoch else "the initial ones"
        known = self.method.get_params(deep=False)
        advice = [text for name, text in _STEADIER.items() if name in known]
        hint = f" Try {', or '.join(advice)}." if advice else ""
        raise DivergenceError(
            f"weights became NaN or infinite in epoch {epoch + 1}; {restored} were restored.{hint}"
        )

    def _copy_weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.problem.network.parameters]

    def _put_back(self, weights: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, kept in zip(self.problem.network.parameters, weights, strict=True):
                parameter.copy_(kept)


@torch.no_grad()
def measure(model: nn.Module, source: Source, task: Task) -> Score:
    """Loss and score of a plain forward pass over one epoch."""
    measured = Score(task)
    for batch in source.epoch():
        measured.add(model(batch.inputs), batch.target, batch.weight)
    return measured
