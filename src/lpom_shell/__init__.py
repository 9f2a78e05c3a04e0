"""The command ``lpom`` while the library is being loaded, which takes seconds.

It stands outside of the package ``lpom``, so that nothing of that is loaded before it: a Ctrl-C
in that time ends with a line too.
"""

import os
import signal
import sys
from typing import Any


def main() -> None:
    """Load the command and run it."""
    try:
        before = signal.signal(signal.SIGINT, _leave)
        from lpom.cli import main as run

        signal.signal(signal.SIGINT, before)
        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def _leave(*_: Any) -> None:
    """End at once: nothing has begun, and an exception could be lost in a library's loading."""
    os.write(sys.stderr.fileno(), b"interrupted\n")
    os._exit(130)
