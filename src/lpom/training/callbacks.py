"""What watches a run and may end it: callbacks, early stopping, signals; and its progress bar."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from types import FrameType
from typing import Any

from lpom.checks import check_choice, check_number
from lpom.training.history import Epoch

#: Called after each epoch. It stops the run by returning ``True`` itself, and by nothing else.
Callback = Callable[[Epoch], Any]


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
        check_number("patience", self.patience, whole=True)
        check_number("min_delta", self.min_delta, strict=False)

    def gain(self, epoch: Epoch) -> float:
        """What should rise: the validation score, or a loss with its sign turned."""
        if epoch.validation_loss is None or epoch.validation_score is None:
            return -epoch.loss
        return epoch.validation_score if self.watch == "score" else -epoch.validation_loss


@dataclass
class Watch:
    """What early stopping has seen of a run.

    ``best`` is the highest value so far, ``reached`` the one that must be beaten by
    ``min_delta``, ``waited`` the epochs since.
    """

    rule: EarlyStopping
    best: float | None = None
    reached: float | None = None
    waited: int = 0

    def see(self, epoch: Epoch) -> bool:
        """Take note of an epoch, and say whether it is the best one so far."""
        value = self.rule.gain(epoch)
        if self.reached is None or value > self.reached + self.rule.min_delta:
            self.reached, self.waited = value, 0
        else:
            self.waited += 1
        better = self.best is None or value > self.best
        if better:
            self.best = value
        return better

    @property
    def stops(self) -> bool:
        return self.waited >= self.rule.patience

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "reached": self.reached, "waited": self.waited}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        vars(self).update(saved)


class Stopped(Exception):
    """The run stops between two steps because a signal asked for it."""


class Signals:
    """A context manager that notes the first SIGINT or SIGTERM in ``received``.

    A second one does what it would have done without this. Only a program's main thread hears
    signals; in others nothing is changed.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.heeded = False  # whether the run was stopped for it
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._put_back()
        if self.received == signal.SIGTERM:
            self._terminate(self.received, None)
        elif self.received is not None and not self.heeded and kind is None:
            signal.raise_signal(self.received)  # it came after the last step

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
        elif number == signal.SIGTERM:
            self._terminate(number, frame)
        else:
            self._put_back()
            signal.raise_signal(number)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        """The handler of the program, or the exit that shells expect."""
        handler = self._before[number]
        if callable(handler):
            handler(number, frame)
        elif handler != signal.SIG_IGN:
            raise SystemExit(128 + number)

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


class Bar:
    """One bar over all steps, by rich; ``show=None`` shows it on a terminal that has rich."""

    def __init__(self, total: int | None, show: bool | None = None) -> None:
        self._total = total
        self._progress: Any = None  # a rich.progress.Progress, where one is shown
        self._task: Any = None
        self._drawn = 0.0
        if (sys.stderr.isatty() if show is None else show) and find_spec("rich") is not None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[text]}"),
                console=Console(stderr=True),
                transient=True,
            )
        self.shown = self._progress is not None

    def __enter__(self) -> Bar:
        if self._progress is not None:
            self._progress.start()
            self._task = self._progress.add_task("training", total=self._total, text="")
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    @property
    def due(self) -> bool:
        """Whether it is time to draw again: reading a metric off a device is not free."""
        return self.shown and time.monotonic() - self._drawn > 0.2

    def draw(self, done: int, description: str, text: str) -> None:
        if self._progress is not None:
            self._drawn = time.monotonic()
            self._progress.update(self._task, completed=done, description=description, text=text)


def epoch_lines(every: float = 10.0) -> Callable[[Epoch], None]:
    """A callback for where no bar is drawn: an epoch as a line, if the last was long ago."""
    said = time.monotonic()

    def line(epoch: Epoch) -> None:
        nonlocal said
        if time.monotonic() - said >= every:
            said = time.monotonic()
            text = f"epoch {epoch.epoch}: loss {epoch.loss:.4g}, score {epoch.score:.4f}"
            if epoch.validation_score is not None:
                text += f", validation score {epoch.validation_score:.4f}"
            print(text, file=sys.stderr, flush=True)

    return line
