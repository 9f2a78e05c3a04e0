"""SIGTERM and Ctrl-C while a run is kept on disk: finish the step, write, and stop."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
