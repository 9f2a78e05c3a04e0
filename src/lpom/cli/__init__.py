"""The command ``lpom`` while libraries are being loaded, which takes seconds: Ctrl-C is a line."""

import gc
import os
import signal
import sys
from importlib.util import find_spec
from typing import Any

_NEEDED = ("typer", "rich", "pandas")


def main() -> None:
    """Load the command and run it."""
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        sys.exit(_how_to_install(missing))
    signal.signal(signal.SIGINT, _leave)
    gc.disable()  # else a sixth of the loading goes to looking for garbage in it
    from lpom.cli.app import main as run

    run()


def _how_to_install(missing: list[str]) -> int:
    print(
        f"error: the command lpom needs {', '.join(missing)}: pip install 'lpom[cli]' brings all "
        "that it needs. In Python lpom works without.",
        file=sys.stderr,
    )
    return 2


def loaded() -> None:
    """From now on Ctrl-C is an exception and garbage is collected, as usual.

    Before, it ends the process at once: nothing has begun, and a library that is being loaded may
    catch an exception and go on.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def _leave(*_: Any) -> None:
    os.write(sys.stderr.fileno(), b"interrupted\n")
    os._exit(130)
