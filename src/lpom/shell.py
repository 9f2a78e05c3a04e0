"""The command ``lpom`` while libraries are being loaded, which takes seconds: Ctrl-C is a line."""

import os
import signal
import sys
from typing import Any


def main() -> None:
    """Load the command and run it."""
    signal.signal(signal.SIGINT, _leave)
    from lpom.cli import main as run

    run()


def loaded() -> None:
    """From now on Ctrl-C is an exception, as usual.

    Before, it ends the process at once: nothing has begun, and a library that is being loaded may
    catch an exception and go on.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(*_: Any) -> None:
    os.write(sys.stderr.fileno(), b"interrupted\n")
    os._exit(130)
