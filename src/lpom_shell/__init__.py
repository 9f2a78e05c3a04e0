"""The command ``lpom`` while the library is being loaded, which takes seconds.

It stands outside of the package ``lpom``, which loads torch before anything in it can run: a Ctrl-C
in that time ends with a line here too.
"""

import sys


def main() -> None:
    """Load the command and run it."""
    try:
        from lpom.cli import main as run

        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
