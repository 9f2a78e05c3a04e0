"""The only training loop: epochs, clock, random numbers, stopping, safety; methods do the steps."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lpom.exceptions import ConvergenceWarning, DivergenceError, warn
from lpom.methods import Batch, Method, Problem, State
from lpom.methods.backprop import Backprop
from lpom.methods.optimizers import advance
from lpom.modes import evaluating, keeping_modes, training
from lpom.objectives import total
from lpom.parallel import Pipeline, Team
from lpom.training.callbacks import Bar, Callback, EarlyStopping, Stopped, Watch
from lpom.training.checkpoint import RunFolder
from lpom.training.data import Source
from lpom.training.history import Epoch, History, Result
from lpom.training.randomness import Generators
from lpom.training.resuming import averaged, put_back, state_dict, weights_of
from lpom.training.score import Score, measure
from lpom.training.task import Task

_CHECK_EVERY = 200  # steps between two looks for NaN in the weights
_WORSE = 1.5  # times the loss before training, or of zeros, is said to be nothing learnt


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
        self.team: Team = team or Team()
        self.probe = train.probe()
        self.step = method.step if team is None else team.step
        self.precision, self.compile = precision, compile
        self.train, self.validation = train, validation
        self.epochs, self.seed, self.endless = epochs, seed, endless
        self.callbacks, self.folder = callbacks, folder
        self.watch = None if early_stopping is None else Watch(early_stopping)
        self.history = History(task.metric)
        self.averaging = averaging
        cheap = problem.is_traced or isinstance(method, Backprop)
        self.diagnostics = cheap if diagnostics is None else diagnostics
        self.average = averaged(model, averaging) if averaging else None
        self._to_training = training(model)
        self.status = "running"
        self.seconds = self.training_seconds = 0.0
        self.good = weights_of(model)
        self.best = self.good if self._chooses else None
        self.generators = generators
        self._untrained = math.inf  # loss of the network as it was given; unknown if a run goes on
        self._clock: float | None = None
        self.begin_epoch(generators.start)

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
                times = (self.elapsed(), self.training_seconds)
                self.seconds, self.training_seconds = self.team.of_first(times)
                self._clock = None
            except (KeyboardInterrupt, Stopped) as reason:
                self.status = "interrupted"
                if self.team.size > 1 or not self._finite_here():
                    put_back(self.model, self.good)
                text = "training was interrupted; the weights stay as they were."
                warn(f"{text} {reason}".strip(), UserWarning)
            except DivergenceError as error:
                self.status, self.seconds, self._clock = "diverged", self.elapsed(), None
                error.result = self._result() if len(self.history) else None
                raise
            finally:
                for parameter in self.model.parameters():
                    parameter.grad = None  # as large as the weights, and no one's any more
                self.state.release()
                self.seconds, self._clock = self.elapsed(), None
        return self._result()

    def _result(self) -> Result:
        times = self.seconds, self.training_seconds
        return Result(self.history, self.status, *times, self.task, self.state)

    def _run_epochs(self, bar: Bar) -> None:
        if not self.history and not self.steps_done:
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
                self.begin_epoch(self.generators.states())
                self._keep(epoch_ended=True)
        if self.best is not None or self.average is not None:
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

    def begin_epoch(self, drawn_from: list[Tensor]) -> None:
        """Nothing done and nothing measured; the order of batches is drawn from these states."""
        self.drawn_from = drawn_from
        self.batches: Iterator[Batch] | None = None
        self.steps_done = self.rows_seen = 0
        self.epoch_seconds = 0.0
        self.measured = Score(self.task)

    def _train_epoch(self, bar: Bar) -> None:
        """The steps that are left of the epoch."""
        epoch = len(self.history)
        batches, self.batches = self.batches or self.train.epoch(), None
        self._to_training()
        if self.compile and bar.shown and not epoch and not self.steps_done:
            bar.draw(0, "compiling the step", "")
        clock = time.perf_counter() - self.epoch_seconds
        for batch in self.team.ahead(batches):
            within = self.steps_done / self.train.steps if self.train.steps else 0.0
            advance(self.state, 0.0 if self.endless else (epoch + within) / self.epochs)
            try:
                outputs = self.step(self.problem, batch, self.state)
            except ValueError as error:
                if len(batch) > 1 or "more than 1 value per channel" not in str(error):
                    raise
                raise ValueError(
                    "batch norm has no variance in a batch of a single row, as the last one of "
                    "this epoch is. Take another batch_size, or drop_last=True in a DataLoader."
                ) from error
            if self.average is not None:
                self.average.update_parameters(self.model)
            self.steps_done += 1
            self.rows_seen += len(batch) if batch.share is None else batch.share.rows
            if outputs is not None:
                self.measured.add(outputs, batch.target, batch.weight)
            if self.steps_done % _CHECK_EVERY == 0 and not self._finite():
                self._diverged()
            self.epoch_seconds = time.perf_counter() - clock
            if bar.shown and bar.due:
                text = f"{self.rows_seen / self.epoch_seconds:,.0f} samples/s"
                if self.measured:
                    text += f"  {self.task.metric} {self.measured.score:.4f}"
                done = epoch * (self.train.steps or 0) + self.steps_done
                bar.draw(done, f"epoch {epoch + 1}/{self.epochs}", text)
            if self.folder is not None and self.team.size == 1:
                self._keep()
                clock = time.perf_counter() - self.epoch_seconds
        self.team.drain()
        self.epoch_seconds = time.perf_counter() - clock
        if self.steps_done == 0:
            raise ValueError("the DataLoader gave no batch; at least one is needed.")
        if not self._finite():
            self._diverged()

    def _end_epoch(self) -> None:
        """Measure, on the side, what the epoch has brought, and write it down."""
        self.training_seconds += self.epoch_seconds
        model = self.model if self.average is None else self.average.module
        self.good = weights_of(model)
        measured = self.of_all(self.measured)
        measured = measured or self.of_all(measure(self.problem, self.train, self.task, model))
        if not measured:
            raise ValueError(
                f"method {self.method.name!r} needs a second pass over the data to measure the "
                "epoch, but the DataLoader gave nothing when read again. Use a data set that can "
                "be read more than once."
            )
        checked = None
        if self.validation is not None:
            checked = self.of_all(measure(self.problem, self.validation, self.task, model))
            if not checked:
                raise ValueError("validation_data gave no batch; at least one is needed.")
        with evaluating(self.model), self.generators.untouched():
            self._record(measured, checked)
        self._comment(measured)
        better = self.watch is not None and self._settled and self.watch.see(self.history[-1])
        if self._chooses and (better or not self._settled):
            self.best = self.good

    def of_all(self, score: Score) -> Score:
        """What all processes have counted together."""
        score.settle()
        if self.team.size == 1:
            return score
        return score.joined(self.team.gather(score.state_dict()))

    def _write(self) -> bool:
        """Write a checkpoint, if the run is kept; whether that went well."""
        if not self.team.of_first(self.folder is not None):
            return False
        run = state_dict(self)
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
        self.method.end_epoch(self.problem, self.probe, self.state)
        epoch = None
        if self.team.first:
            epoch = Epoch(
                epoch=len(self.history) + 1,
                seconds=self.epoch_seconds,
                samples_per_second=self.rows_seen / self.epoch_seconds,
                objective=None,
                loss=measured.loss,
                score=measured.score,
                validation_loss=None if checked is None else checked.loss,
                validation_score=None if checked is None else checked.score,
            )
            if self.diagnostics:
                objective = self.method.objective(self.problem, self.probe, self.state)
                size = float(self.probe.total_weight)
                epoch = replace(
                    epoch,
                    objective=objective.total / size,
                    gaps=tuple(gap / size for gap in objective.gaps),
                    rates=tuple(self.method.rates(self.problem, self.probe, self.state)),
                )
        epoch = self.team.of_first(epoch)
        assert epoch is not None  # the first made it
        self.history.epochs.append(epoch)

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
        batch = self.probe
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
            zeros = self._probe_loss(torch.zeros_like(self.probe.target))
        if not end <= _WORSE * max(start, zeros):
            advice = ", or ".join(("standardised data", *self.method.steadier))
            beside = "" if zeros == -math.inf else f", and outputs of zero have {zeros:.3g}"
            warn(
                f"the network ends with a loss of {end:.3g}; before it was trained it had "
                f"{start:.3g}{beside}: it has learnt nothing. Try {advice}.",
                ConvergenceWarning,
            )

    def elapsed(self) -> float:
        return self.seconds if self._clock is None else time.perf_counter() - self._clock

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


def _says_stop(answer: Any) -> bool:
    """True itself, numpy's or torch's; another value that counts as true may mean anything."""
    single = isinstance(answer, np.bool_) or (
        isinstance(answer, Tensor) and answer.dtype == torch.bool and answer.numel() == 1
    )
    return answer is True or (single and bool(answer))
