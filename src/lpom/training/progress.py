"""A progress bar for long work: speed, time left, the running metric. Quiet off a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from types import TracebackType
from typing import Any

from lpom.training.history import Epoch


class Bar:
    """One bar over all steps of a run, where rich is installed; ``None`` shows it on a terminal."""

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
