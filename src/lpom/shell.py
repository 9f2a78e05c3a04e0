"""The command ``lpom`` while libraries are being loaded, which takes seconds: Ctrl-C is a line."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def main() -> None:
    """Load the command and run it."""
    try:
        with loading():
            from lpom.cli import main as run
        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


@contextmanager
def loading() -> Iterator[None]:
    """While nothing has begun Ctrl-C ends at once: an exception could be lost where it is raised.

    Libraries that are being loaded catch some, and go on.
    """
    before = signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(*_: Any) -> None:
    os.write(sys.stderr.fileno(), b"interrupted\n")
    os._exit(130)
