"""fit(): the only training loop. Batches, clocks, stopping, safety; methods do the steps."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lpom import methods
from lpom.data import Arrays, Loader, Source
from lpom.exceptions import ConvergenceWarning, DivergenceError
from lpom.history import Epoch, History
from lpom.losses import Loss
from lpom.methods import Batch, Method, Problem, State
from lpom.network import Lifted
from lpom.progress import Bar
from lpom.tasks import Score, Task

Callback = Callable[[Epoch], bool | None]

_CHECK_EVERY = 200  # steps between two looks for NaN in the weights


@dataclass(frozen=True)
class EarlyStopping:
    """Stop when nothing got better by ``min_delta`` for ``patience`` epochs.

    Watches the validation score if there is validation data, else the training loss. The weights
    of the epoch with the best validation score are put back.
    """

    patience: int = 10
    min_delta: float = 1e-4


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
    state: Any = field(repr=False)


def fit(
    model: nn.Module,
    X: Any,
    y: Any = None,
    *,
    method: str | Method[Any] = "lpom",
    loss: str | Loss = "auto",
    epochs: int = 10,
    batch_size: int | None = None,
    validation_data: Any = None,
    sample_weight: Any = None,
    seed: int | None = None,
    device: str | torch.device | None = None,
    callbacks: Iterable[Callback] = (),
    early_stopping: EarlyStopping | bool = False,
    progress: bool | None = None,
    state: State | None = None,
    span: tuple[float, float] = (0.0, 1.0),
) -> Result:
    """Train ``model`` in place.

    Parameters
    ----------
    model : torch.nn.Sequential of Linear layers, each followed by at most one activation
    X, y : tensors or arrays; or a ``DataLoader`` as X alone
        Whole numbers in a vector are classes, in a 0/1 matrix labels, floats are numbers.
    method : name or Method
    loss : name or Loss; "auto" follows y
    batch_size : rows per step, by default 100 or all if there are fewer; full-batch methods take
        all in any case
    validation_data : ``(X, y)``, ``(X, y, weight)`` or a ``DataLoader``, measured after each epoch
    seed : fixes the order of the batches
    device : where to move the model; by default it stays where it is
    callbacks : called with each :class:`~lpom.history.Epoch`; a true answer stops the run
    state, span : the state to go on from, and the share of the whole plan this call covers, e.g.
        (0.5, 1.0) for the second half: learning-rate schedules follow it

    Returns
    -------
    Result
    """
    method = methods.get(method)
    if not isinstance(epochs, Integral) or epochs < 1:
        raise ValueError(f"epochs must be a whole number of at least 1, got {epochs!r}.")
    if device is not None:
        model.to(device)
    network = Lifted.from_module(model)
    targets, begun = _first_targets(X, y)
    task = Task.infer(targets, network.n_outputs, loss)
    problem = Problem(network, task.loss)
    generator = torch.Generator()
    generator.manual_seed(seed) if seed is not None else generator.seed()
    like = network.parameters[0].detach()

    def source(X: Any, y: Any, **options: Any) -> Source:
        n_features = network.n_inputs
        if isinstance(X, DataLoader):
            return Loader(X, task, like, n_features, **options)
        return Arrays(X, y, task, like, n_features=n_features, **options)

    if isinstance(X, DataLoader):
        if method.full_batch:
            raise ValueError(
                f"method {method.name!r} keeps variables for every sample and needs all rows at "
                "once; give X and y as arrays in place of the DataLoader."
            )
        if batch_size is not None or sample_weight is not None:
            raise TypeError(
                "a DataLoader brings its own batches, of (X, y) or (X, y, weight); leave "
                "batch_size and sample_weight out."
            )
        train = source(X, y, begun=begun)
    elif method.full_batch:
        train = source(X, y, weight=sample_weight)
    else:
        if batch_size is None:
            batch_size = min(100, len_of(X)) or None
        train = source(X, y, weight=sample_weight, batch_size=batch_size, generator=generator)
    validation = _validation_source(validation_data, source)
    state = method.init(problem) if state is None else _bound(state, method, problem)
    stopper = EarlyStopping() if early_stopping is True else early_stopping or None
    run = _Run(model, problem, task, method, state, train, validation, stopper, tuple(callbacks))
    return run.go(epochs, span, progress)


def evaluate(
    model: nn.Module, X: Any, y: Any = None, *, loss: str | Loss = "auto"
) -> tuple[float, float]:
    """Mean loss, and accuracy or R2, of a plain forward pass."""
    network = Lifted.from_module(model)
    targets, begun = _first_targets(X, y)
    task = Task.infer(targets, network.n_outputs, loss)
    like = network.parameters[0].detach()
    if isinstance(X, DataLoader):
        measured = _measure(model, Loader(X, task, like, network.n_inputs, begun=begun), task)
    else:
        source = Arrays(
            X, y, task, like, n_features=network.n_inputs, batch_size=min(4096, len_of(X))
        )
        measured = _measure(model, source, task)
    return measured.loss, measured.score


@dataclass
class _Run:
    """One call of fit: all that changes while it goes on."""

    model: nn.Module
    problem: Problem
    task: Task
    method: Method[Any]
    state: State
    train: Source
    validation: Source | None
    stopper: EarlyStopping | None
    callbacks: tuple[Callback, ...]

    def go(self, epochs: int, span: tuple[float, float], show: bool | None) -> Result:
        started = time.perf_counter()
        self.history = History(self.task.metric)
        self.training_seconds = 0.0
        self.good = self.best = self._copy_weights()
        self.best_value, self.waited = -math.inf, 0
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
            warnings.warn("training was interrupted; the model is as it then was.", stacklevel=3)
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
            measured = _measure(self.model, self.train, self.task)
        if not measured:
            raise ValueError(
                f"method {self.method.name!r} needs a second pass over the data to measure the "
                "epoch, but the DataLoader gave nothing when read again. Use a data set that can "
                "be read more than once."
            )
        self._record(batch, measured, seconds, seen)

    def _record(self, batch: Batch, measured: Score, seconds: float, seen: int) -> None:
        self.method.end_epoch(self.problem, self.state)
        objective = self.method.objective(self.problem, batch, self.state)
        size = float(batch.total_weight)
        checked = None
        if self.validation is not None:
            checked = _measure(self.model, self.validation, self.task)
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
        last = self.history[-1]
        value = -last.loss if last.validation_score is None else last.validation_score
        if value > self.best_value + self.stopper.min_delta:
            self.best_value, self.waited = value, 0
            self.best = self.good
        else:
            self.waited += 1
        return self.waited >= self.stopper.patience

    def _finite(self) -> bool:
        return all(bool(torch.isfinite(p).all()) for p in self.problem.network.parameters)

    def _diverged(self, epoch: int) -> None:
        self._put_back(self.good)
        raise DivergenceError(
            f"weights became NaN or infinite in epoch {epoch + 1}; those of the end of epoch "
            f"{epoch} were put back. Take a smaller learning rate, a larger mu, "
            "step_rule='safe', or a larger ridge."
        )

    def _copy_weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.problem.network.parameters]

    def _put_back(self, weights: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, kept in zip(self.problem.network.parameters, weights, strict=True):
                parameter.copy_(kept)


@torch.no_grad()
def _measure(model: nn.Module, source: Source, task: Task) -> Score:
    measured = Score(task)
    for batch in source.epoch():
        measured.add(model(batch.inputs), batch.target, batch.weight)
    return measured


def _validation_source(data: Any, source: Callable[..., Source]) -> Source | None:
    if data is None:
        return None
    if isinstance(data, DataLoader):
        return source(data, None)
    if not isinstance(data, tuple | list) or len(data) not in (2, 3):
        raise TypeError("validation_data must be (X, y), (X, y, weight) or a DataLoader.")
    X, y, *weight = data
    size = min(4096, len_of(X)) or None
    return source(X, y, batch_size=size, weight=weight[0] if weight else None)


def _first_targets(X: Any, y: Any) -> tuple[Any, Iterator[Any] | None]:
    """The targets, or those of a loader's first batch: enough to tell what the task is.

    With them the loader's iterator, at its start again: not every data set can be read twice.
    """
    if isinstance(X, DataLoader):
        if y is not None:
            raise TypeError("a DataLoader brings its own targets; leave y out.")
        begun = iter(X)
        for item in begun:
            return item[1], chain([item], begun)
        raise ValueError("the DataLoader gave no batch; at least one is needed.")
    if y is None:
        raise TypeError("y is missing; give the targets, or a DataLoader in place of X and y.")
    return y, None


def _bound(state: State, method: Method[Any], problem: Problem) -> State:
    """The state, or the same for this network if its optimiser moves that of another model."""
    fresh = method.init(problem)
    if type(state) is not type(fresh):
        raise TypeError(
            f"state should come from a run of method {method.name!r} ({type(fresh).__name__}), "
            f"got {type(state).__name__}. Leave it out to start anew."
        )
    if state.serves(problem):
        return state
    tensors = state.tensors()
    if tensors is None:
        raise ValueError(
            "the state belongs to another model and can't be carried over; train that model, or "
            "leave the state out."
        )
    fresh.load_tensors({name: tensor.clone() for name, tensor in tensors.items()})
    fresh.remarks, fresh.said = dict(state.remarks), set(state.said)
    return fresh


def len_of(X: Any) -> int:
    return int(X.shape[0]) if hasattr(X, "shape") else len(X)
