"""The shell command ``lpom``: a thin skin over the library.

Sub-commands are functions of this package, named in ``_COMMANDS`` below; a module is loaded when
its command runs. They raise what the library raises; here it becomes one line and an exit code.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
import warnings
from importlib import import_module
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

import lpom
from lpom.cli import loaded
from lpom.exceptions import LPOMError

USER_ERRORS = (ValueError, TypeError, OSError, ImportError, LPOMError)

#: Where a command is, "module:function", and the first line of its help.
_COMMANDS: dict[str, tuple[str, str]] = {
    "train": (
        "train:train",
        "Train a network on a table, and keep the run in a folder.",
    ),
    "predict": (
        "predict:predict",
        "Predict the rows of a file, as CSV with a column prediction.",
    ),
    "report": (
        "show:report",
        "Write one HTML page about runs: curves, predictions, mistakes, settings.",
    ),
    "info": (
        "show:info",
        "Show the network, data, method, settings and results of a run.",
    ),
    "compare": (
        "compare:compare",
        "Train by several methods, from the same weights and on the same batches.",
    ),
    "tune": (
        "tune:tune",
        "Find settings for a table by successive halving, on its training rows alone.",
    ),
    "export": (
        "show:export",
        "Write the network of a run for other programs: ONNX or NIR.",
    ),
    "methods": (
        "show:list_methods",
        "List the training methods: what each is good for, minimises and costs.",
    ),
    "activations": (
        "show:list_activations",
        "List the activations: formula, range, Lipschitz constant, and whether they jump.",
    ),
}


class _Flags:
    """Help that shows no type beside a flag, which takes no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class _Command(_Flags, TyperCommand):
    pass


class _Group(_Flags, TyperGroup):
    """Loads and runs a sub-command; a mistake of the user becomes a line and exit code 2."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        assert name is not None  # an unknown one has been refused
        command = _loaded(name)
        loaded()
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                return super().invoke(ctx)
            except BrokenPipeError:
                raise  # whoever reads our output has seen enough
            except KeyboardInterrupt:
                typer.echo("interrupted", err=True)
                raise typer.Exit(130) from None
            except USER_ERRORS as error:
                if os.environ.get("LPOM_DEBUG"):
                    raise
                typer.echo(f"error: {_sentence(error)}", err=True)
                raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Group,
    help="Train neural networks without back-propagation.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _loaded(name: str) -> Any:
    """The command itself: its options, and what it does."""
    module, _, attribute = _COMMANDS[name][0].partition(":")
    command = getattr(import_module(f"lpom.cli.{module}"), attribute)
    alone = typer.Typer(add_completion=False)
    alone.command(name, cls=_Command, help=_paragraphs(command))(command)
    return typer.main.get_command(alone)


def _paragraphs(command: Any) -> str:
    """The text of a command's help, whose lines are broken where the terminal ends.

    Those of examples, which are indented, stay lines.
    """
    parts = str(inspect.getdoc(command)).split("\n\n")
    whole = (part if part.startswith(" ") else " ".join(part.split()) for part in parts)
    return "\n\n".join(whole)


def _not_loaded() -> None:
    """Stands in the list of commands for one that is loaded when it runs."""


for _name, (_, _help) in _COMMANDS.items():
    app.command(_name, help=_help)(_not_loaded)


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
    """Train neural networks without back-propagation."""


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
