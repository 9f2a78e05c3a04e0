"""The only training loop: epochs, clock, random numbers, stopping, safety; methods do the steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lpom.exceptions import ConvergenceWarning, DivergenceError, warn
from lpom.methods import Batch, Method, Problem, State
from lpom.methods.backprop import Backprop
from lpom.methods.base import fingerprint
from lpom.methods.optimizers import advance
from lpom.modes import evaluating, keeping_modes, training
from lpom.objectives import total
from lpom.parallel import Alone, Pipeline, Team
from lpom.training.callbacks import Bar, Callback, EarlyStopping, Stopped, Watch
from lpom.training.checkpoint import (
    RunFolder,
    check_agreement,
    copied,
    named_tensors,
    optimizer_of,
    put_back,
    same,
    settings_of,
    weights_of,
)
from lpom.training.data import Source
from lpom.training.history import Epoch, History
from lpom.training.randomness import Generators
from lpom.training.score import Score, measure
from lpom.training.task import Task

_CHECK_EVERY = 200  # steps between two looks for NaN in the weights
_AVERAGED = 10  # steps count with this over their number until the decay says less
_WORSE = 1.5  # times the loss before training, or of zeros, is said to be nothing learnt


def averaged(model: nn.Module, decay: float) -> AveragedModel:
    r"""A copy of ``model`` whose ``update_parameters(model)`` after step t makes it the mean

    .. math:: M_t = M_{t-1} + w_t (W_t - M_{t-1}), \quad w_t = \max(1 - d, 10 / (9 + t)),

    of weights and buffers, d the ``decay``: over about the last tenth of the steps, and over
    :math:`1 / (1 - d)` of them once that is less, so that short runs don't end with their start.
    """

    @torch.no_grad()
    def move(means: Any, now: Any, before: Tensor | int) -> None:
        if means[0].is_floating_point():
            weight = max(1 - decay, _AVERAGED / (_AVERAGED + int(before)))
            torch._foreach_lerp_(means, now, weight)
        else:  # counters
            torch._foreach_copy_(means, now)

    return AveragedModel(model, multi_avg_fn=move, use_buffers=True)


@dataclass(repr=False)
class Result:
    """What a run leaves beside the trained module.

    ``status`` is finished, stopped-early, stopped (by a callback) or interrupted; ``seconds`` is
    split into ``training_seconds`` and the rest, which went into measuring. Give ``state`` back
    to :func:`fit` for another run that begins with it.
    """

    history: History
    status: str
    seconds: float
    training_seconds: float
    task: Task
    state: State

    def __repr__(self) -> str:
        return f"<Result: {self.status} after {self.seconds:.3g} s, {self.history!r}>"


class Trainer:
    """One run over the epochs: what it is given, and in ``state_dict()`` all that changes.

    It owns the clock, the random numbers, the place inside the epoch, the history, early
    stopping, and copies of weights: ``good`` after the last whole epoch, ``best`` of the best
    one so far. From the making of ``generators`` to the end of the run nobody else may draw from
    torch's global ones (:func:`~.randomness.seeded`).

    Parameters
    ----------
    problem, task, method
        What is trained, how, and what on.
    state : State
        Made by ``method.init``.
    train, validation : Source
    epochs : int
        How many are planned; schedules follow the share that is done, unless ``endless``.
    folder : RunFolder, optional
        Where the run is kept.
    seed, generators
        What the generators were seeded with; they were noted before a batch was read.
    precision, compile
        How a step runs the model, to be written down.
    averaging : float
        Decay of a running mean of the weights, which is measured and kept in their place; 0 for
        none.
    diagnostics : bool, optional
        Whether the history has objective, gaps and rates; by default where the method works on the
        graph of the model.
    team : Pipeline, optional
        Who makes the steps. Of several processes each has a trainer; the first one measures the
        epoch, calls back, and has the ``folder``, and all of them come to the same end.
    """

    def __init__(
        self,
        problem: Problem,
        task: Task,
        method: Method[Any],
        state: State,
        train: Source,
        validation: Source | None = None,
        *,
        epochs: int,
        seed: int,
        generators: Generators,
        early_stopping: EarlyStopping | None = None,
        callbacks: tuple[Callback, ...] = (),
        endless: bool = False,
        folder: RunFolder | None = None,
        team: Pipeline | None = None,
        precision: str | None = None,
        compile: bool = False,
        averaging: float = 0.0,
        diagnostics: bool | None = None,
    ) -> None:
        model = problem.model
        self.model, self.problem, self.task = model, problem, task
        self.method, self.state = method, state
        self.team: Team = team or Alone()
        self._probe = train.probe()
        step: Callable[[Batch], Tensor | None] = self._step_alone if team is None else team.step
        self._step, self.precision, self.compile = step, precision, compile
        self.train, self.validation = train, validation
        self.epochs, self.seed, self.endless = epochs, seed, endless
        self.callbacks, self.folder = callbacks, folder
        self.watch = None if early_stopping is None else Watch(early_stopping)
        self.history = History(task.metric)
        self.averaging = averaging
        cheap = problem.is_traced or isinstance(method, Backprop)
        self.diagnostics = cheap if diagnostics is None else diagnostics
        self._average = averaged(model, averaging) if averaging else None
        self._to_training = training(model)
        self.status = "running"
        self.seconds = self.training_seconds = 0.0
        self.good = weights_of(model)
        self.best = self.good if self._chooses else None
        self.generators = generators
        self._untrained = math.inf  # loss of the network as it was given; unknown if a run goes on
        self._clock: float | None = None
        self._begin_epoch(generators.start)

    # One run

    def run(self, show: bool | None = None) -> Result:
        """Train from where the run stands to its end; ``show`` whether there is a bar."""
        if self.status == "running":
            self._clock = time.perf_counter() - self.seconds
            total = None if self.train.steps is None else self.train.steps * self.epochs
            try:
                bar = Bar(total, show if self.team.first else False)
                with keeping_modes(self.model), bar:
                    self._run_epochs(bar)
                times = (self._elapsed(), self.training_seconds)
                self.seconds, self.training_seconds = self.team.of_first(times)
                self._clock = None
            except (KeyboardInterrupt, Stopped) as reason:
                self.status = "interrupted"
                if self.team.size > 1 or not self._finite_here():
                    put_back(self.model, self.good)
                text = "training was interrupted; the weights stay as they were."
                warn(f"{text} {reason}".strip(), UserWarning)
            except DivergenceError as error:
                self.status, self.seconds, self._clock = "diverged", self._elapsed(), None
                error.result = self._result() if len(self.history) else None
                raise
            finally:
                for parameter in self.model.parameters():
                    parameter.grad = None  # as large as the weights, and no one's any more
                self.state.release()
                self.seconds, self._clock = self._elapsed(), None
        return self._result()

    def _result(self) -> Result:
        return Result(
            self.history,
            self.status,
            self.seconds,
            self.training_seconds,
            self.task,
            self.state,
        )

    def _run_epochs(self, bar: Bar) -> None:
        if not self.history and not self._done:
            self._untrained = self._probe_loss()
        while self.status == "running":
            self._train_epoch(bar)
            self._end_epoch()
            for sentence in self.state.new_remarks():
                warn(sentence, ConvergenceWarning)
            answers: list[Any] = []
            if self.team.first:
                answers = [callback(self.history[-1]) for callback in self.callbacks]
            asked = self.team.of_first(any(map(_says_stop, answers)))
            if self.watch is not None and self.watch.stops:
                self.status = "stopped-early"
            elif asked:
                self.status = "stopped"
            elif len(self.history) == self.epochs:
                self.status = "finished"
            else:
                self._begin_epoch(self.generators.states())
                self._keep(epoch_ended=True)
        if self.best is not None or self._average is not None:
            put_back(self.model, self.best or self.good)
        if self.status != "stopped":  # whoever stops a run may know why
            self._compare_with_start()
        if self.state.settles and not self._settled:
            warn(
                f"penalties hold once {self.state.settles:.0%} of a run are done, and this one "
                "ended before: the weights are not yet sparse, or on their levels. Let it run to "
                "its end, in one call of fit.",
                ConvergenceWarning,
            )
        self._write()

    def _begin_epoch(self, drawn_from: list[Tensor]) -> None:
        """Nothing done and nothing measured; the order of batches is drawn from these states."""
        self._drawn_from = drawn_from
        self._batches: Iterator[Batch] | None = None
        self._done = self._seen = 0
        self._epoch_seconds = 0.0
        self._measured = Score(self.task)

    def _train_epoch(self, bar: Bar) -> None:
        """The steps that are left of the epoch."""
        epoch = len(self.history)
        batches, self._batches = self._batches or self.train.epoch(), None
        self._to_training()
        if self.compile and bar.shown and not epoch and not self._done:
            bar.draw(0, "compiling the step", "")
        clock = time.perf_counter() - self._epoch_seconds
        for batch in self.team.ahead(batches):
            advance(self.state, 0.0 if self.endless else self._share_done())
            outputs = self._step(batch)
            if self._average is not None:
                self._average.update_parameters(self.model)
            self._done += 1
            self._seen += len(batch) if batch.share is None else batch.share.rows
            if outputs is not None:
                self._measured.add(outputs, batch.target, batch.weight)
            if self._done % _CHECK_EVERY == 0 and not self._finite():
                self._diverged()
            self._epoch_seconds = time.perf_counter() - clock
            if bar.shown and bar.due:
                text = f"{self._seen / self._epoch_seconds:,.0f} samples/s"
                if self._measured:
                    text += f"  {self.task.metric} {self._measured.score:.4f}"
                done = epoch * (self.train.steps or 0) + self._done
                bar.draw(done, f"epoch {epoch + 1}/{self.epochs}", text)
            if self.folder is not None and self.team.size == 1:
                self._keep()
                clock = time.perf_counter() - self._epoch_seconds
        self.team.drain()
        self._epoch_seconds = time.perf_counter() - clock
        if self._done == 0:
            raise ValueError("the DataLoader gave no batch; at least one is needed.")
        if not self._finite():
            self._diverged()

    def _step_alone(self, batch: Batch) -> Tensor | None:
        try:
            return self.method.step(self.problem, batch, self.state)
        except ValueError as error:
            if len(batch) > 1 or "more than 1 value per channel" not in str(error):
                raise
            raise ValueError(
                "batch norm has no variance in a batch of a single row, as the last one of this "
                "epoch is. Take another batch_size, or drop_last=True in a DataLoader."
            ) from error

    def _end_epoch(self) -> None:
        """Measure, on the side, what the epoch has brought, and write it down."""
        self.training_seconds += self._epoch_seconds
        model = self.model if self._average is None else self._average.module
        self.good = weights_of(model)
        measured = self._of_all(self._measured)
        measured = measured or self._of_all(measure(self.problem, self.train, self.task, model))
        if not measured:
            raise ValueError(
                f"method {self.method.name!r} needs a second pass over the data to measure the "
                "epoch, but the DataLoader gave nothing when read again. Use a data set that can "
                "be read more than once."
            )
        checked = None
        if self.validation is not None:
            checked = self._of_all(measure(self.problem, self.validation, self.task, model))
            if not checked:
                raise ValueError("validation_data gave no batch; at least one is needed.")
        with evaluating(self.model), self.generators.untouched():
            self._record(measured, checked)
        self._comment(measured)
        better = self.watch is not None and self._settled and self.watch.see(self.history[-1])
        if self._chooses and (better or not self._settled):
            self.best = self.good

    def _of_all(self, score: Score) -> Score:
        """What all processes have counted together."""
        if self.team.size == 1:
            return score
        return score.joined(self.team.gather(score.state_dict()))

    def _write(self) -> bool:
        """Write a checkpoint, if the run is kept; whether that went well."""
        if not self.team.of_first(self.folder is not None):
            return False
        run = self.state_dict()
        return self.team.of_first(self.folder is not None and self.folder.write(run))

    def _keep(self, *, epoch_ended: bool = False) -> None:
        """Between two steps: write a checkpoint if it is due, stop if a signal asked for it.

        Several processes do so between two epochs only, when nothing is under way.
        """
        folder, asked, due = self.folder, False, False
        if folder is not None:
            asked = folder.signals.received is not None
            due = asked or folder.due(len(self.history), epoch_ended)
        asked, due = self.team.of_first((asked, due))
        kept = self._write() if due else False
        if asked:
            where = ""
            if folder is not None:
                folder.signals.heeded = True
                where = f" with checkpoint={str(folder.folder)!r}"
            raise Stopped(f"Call fit again{where} to go on from there." if kept else "")

    def _record(self, measured: Score, checked: Score | None) -> None:
        self.method.end_epoch(self.problem, self._probe, self.state)
        epoch = self._epoch(measured, checked) if self.team.first else None
        epoch = self.team.of_first(epoch)
        assert epoch is not None  # the first made it
        self.history.epochs.append(epoch)

    def _epoch(self, measured: Score, checked: Score | None) -> Epoch:
        epoch = Epoch(
            epoch=len(self.history) + 1,
            seconds=self._epoch_seconds,
            samples_per_second=self._seen / self._epoch_seconds,
            objective=None,
            loss=measured.loss,
            score=measured.score,
            validation_loss=None if checked is None else checked.loss,
            validation_score=None if checked is None else checked.score,
        )
        if not self.diagnostics:
            return epoch
        objective = self.method.objective(self.problem, self._probe, self.state)
        size = float(self._probe.total_weight)
        return replace(
            epoch,
            objective=objective.total / size,
            gaps=tuple(gap / size for gap in objective.gaps),
            rates=tuple(self.method.rates(self.problem, self._probe, self.state)),
        )

    def _comment(self, measured: Score) -> None:
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

    def _probe_loss(self, outputs: Tensor | None = None) -> float:
        """Mean loss on the fixed batch, of the network as it stands if no outputs are given."""
        batch = self._probe
        if outputs is None:
            with torch.no_grad(), evaluating(self.model), self.generators.untouched():
                outputs = self.problem.outputs(batch.inputs)
        values = self.task.loss.value(outputs, batch.target)
        return total(values, batch.weight) / float(batch.total_weight)

    def _compare_with_start(self) -> None:
        """A run that made things much worse does not end without a word."""
        end, start = self._probe_loss(), self._untrained
        zeros = -math.inf
        if not self.task.by_function:
            zeros = self._probe_loss(torch.zeros_like(self._probe.target))
        if not end <= _WORSE * max(start, zeros):
            advice = ", or ".join(("standardised data", *self.method.steadier))
            beside = "" if zeros == -math.inf else f", and outputs of zero have {zeros:.3g}"
            warn(
                f"the network ends with a loss of {end:.3g}; before it was trained it had "
                f"{start:.3g}{beside}: it has learnt nothing. Try {advice}.",
                ConvergenceWarning,
            )

    def _elapsed(self) -> float:
        return self.seconds if self._clock is None else time.perf_counter() - self._clock

    def _share_done(self) -> float:
        within = 0.0 if self.train.steps is None else self._done / self.train.steps
        return (len(self.history.epochs) + within) / self.epochs

    @property
    def _settled(self) -> bool:
        """Whether weights are what penalties want them to be: those before are not to be chosen."""
        return self.state.progress >= self.state.settles

    @property
    def _chooses(self) -> bool:
        """Whether the weights of the best epoch are the ones to end with."""
        return self.watch is not None and self.validation is not None

    def _finite(self) -> bool:
        return all(self.team.gather(self._finite_here()))

    def _finite_here(self) -> bool:
        ends = (p.detach().aminmax() for p in self.problem.parameters if p.numel())
        return all(math.isfinite(low) and math.isfinite(high) for low, high in ends)

    def _diverged(self) -> None:
        put_back(self.model, self.good if self.best is None else self.best)
        epoch = len(self.history)
        restored = f"those of the end of epoch {epoch}" if epoch else "the initial ones"
        if epoch and self.best is not None:
            restored = "the best ones so far"
        advice = ", or ".join(self.method.steadier)
        raise DivergenceError(
            f"weights became NaN or infinite in epoch {epoch + 1}; {restored} were restored."
            + (f" Try {advice}." if advice else "")
        )

    # All of it as tensors and plain values

    def describe(self) -> dict[str, Any]:
        """What must be the same for a run to go on, in plain values."""
        watch = self.watch
        return {
            "method": settings_of(self.method),
            "optimizer": optimizer_of(self.state),
            "loss": repr(self.task.loss),
            "weight decay": getattr(self.state, "weight_decay", 0.0),
            "task": self.task.kind,
            "precision": self.precision,
            "compile": self.compile or None,
            "averaging": self.averaging or None,
            "epochs": self.epochs,
            "seed": self.seed,
            "endless": self.endless,
            "early stopping": None if watch is None else repr(watch.rule),
            "data": self.train.describe(),
            "validation data": None if self.validation is None else self.validation.describe(),
            "model": {
                name: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
                for name, tensor in named_tensors(self.model)
            },
        }

    def state_dict(self) -> dict[str, Any]:
        """The whole run between two steps; tensors are not copied."""
        return {
            "run": self.describe(),
            "status": self.status,
            "model": dict(named_tensors(self.model)),
            "method": self.team.memory(self.state.state_dict()),
            "generators": {
                "start": self.generators.start,
                "epoch": self._drawn_from,
                "now": self.generators.states(),
            },
            "batches done": self._done,
            "samples seen": self._seen,
            "first targets": self._first_targets(),
            "measured": self._of_all(self._measured).state_dict(),
            "history": [asdict(epoch) for epoch in self.history],
            "early stopping": None if self.watch is None else self.watch.state_dict(),
            "good": self.good,
            "best": self.best,
            "average": None if self._average is None else self._average.state_dict(),
            "seconds": [self._elapsed(), self.training_seconds, self._epoch_seconds],
        }

    def _first_targets(self) -> str | None:
        """Of a loader, which tells nothing of its rows; None where each process has its own."""
        return fingerprint(self._probe.target) if self.team.size == 1 else None

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave, bit for bit; nothing of it is kept but copied.

        The data must be the same, and a ``DataLoader`` give the same batches from the same
        states of its generator and of torch's.
        """
        check_agreement(saved["run"], self.describe())
        saved = copied(saved, self.problem.parameters[0].device)
        drawn = saved["generators"]
        self.history = History(self.task.metric, [Epoch.of(epoch) for epoch in saved["history"]])
        if not same(drawn["start"], self.generators.start):
            self.generators.restore(drawn["start"])
            self.generators.start = drawn["start"]
            self.train.rewind()
            self._probe = self.train.probe()
        if saved["first targets"] not in (None, self._first_targets()):
            warn(
                "the DataLoader begins with other targets than when this run was begun. If its "
                "rows are others, stop, and start again in another folder: the run goes on from "
                "the old ones. (A sampler that draws from elsewhere than torch gives another "
                "order, and this warning.)",
                UserWarning,
            )
        self._begin_epoch(drawn["epoch"])
        self.status = saved["status"]
        if self.history:
            self.train.rewind(len(self.history))
        if self.status == "running" and saved["batches done"]:  # else the order is still to draw
            if self.history:
                self.generators.restore(drawn["epoch"])
            self._batches = self.train.epoch(skip=saved["batches done"])
        self.generators.restore(drawn["now"])
        put_back(self.model, saved["model"])
        self.state.load_state_dict(saved["method"])
        self._done, self._seen = saved["batches done"], saved["samples seen"]
        self._measured.load_state_dict(saved["measured"])
        if self.watch is not None:
            self.watch.load_state_dict(saved["early stopping"])
        self.good, self.best = saved["good"], saved["best"]
        if self._average is not None:
            self._average.load_state_dict(saved["average"])
        self.seconds, self.training_seconds, self._epoch_seconds = saved["seconds"]


def _says_stop(answer: Any) -> bool:
    """True itself, numpy's or torch's; another value that counts as true may mean anything."""
    single = isinstance(answer, np.bool_) or (
        isinstance(answer, Tensor) and answer.dtype == torch.bool and answer.numel() == 1
    )
    return answer is True or (single and bool(answer))
