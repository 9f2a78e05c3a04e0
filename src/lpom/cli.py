"""The shell command ``lpom``: a thin skin over the library.

Sub-commands are functions in ``lpom.commands``, one module each, named in ``_COMMANDS`` below.
They raise what the library raises; here it becomes one line and an exit code.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

import lpom
from lpom.commands import bench
from lpom.commands.compare import compare
from lpom.commands.info import info
from lpom.commands.lists import list_activations, list_methods
from lpom.commands.predict import predict
from lpom.commands.report import report
from lpom.commands.reproduce import reproduce
from lpom.commands.train import train
from lpom.exceptions import LPOMError

USER_ERRORS = (ValueError, TypeError, OSError, ImportError, LPOMError)

_COMMANDS: dict[str, Callable[..., None]] = {
    "train": train,
    "predict": predict,
    "info": info,
    "report": report,
    "compare": compare,
    "reproduce": reproduce,
    "methods": list_methods,
    "activations": list_activations,
}


class _Group(TyperGroup):
    """Runs a sub-command; a mistake of the user becomes a line on stderr and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                return super().invoke(ctx)
            except BrokenPipeError:
                raise  # whoever reads our output has seen enough
            except USER_ERRORS as error:
                if os.environ.get("LPOM_DEBUG"):
                    raise
                typer.echo(f"error: {_sentence(error)}", err=True)
                raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Group,
    help="Train feed-forward networks without back-propagation.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _name, _function in _COMMANDS.items():
    app.command(_name)(_function)
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Entry point of the command."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary files are removed
    app(prog_name="lpom")


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"lpom {lpom.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_say_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Train feed-forward networks without back-propagation."""


def _sentence(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}."
    return " ".join(str(error).split())


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    typer.echo(f"warning: {' '.join(str(message).split())}", err=True)


if __name__ == "__main__":
    main()
