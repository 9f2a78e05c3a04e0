"""The shell command ``lpom``: a thin skin over the library.

A new sub-command is a function decorated with ``@app.command()``, or registered from a module of
its own with ``app.command()(function)``. Mistakes of the user that it raises are printed as one
line.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

import lpom
from lpom import activations, datasets, methods, runs
from lpom.exceptions import LPOMError
from lpom.files import write_atomically
from lpom.preparation import Prepared, prepare

USER_ERRORS = (ValueError, TypeError, OSError, ImportError, LPOMError)


class _Group(TyperGroup):
    """Runs a sub-command; what the user did wrong becomes a line on stderr and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                return super().invoke(ctx)
            except BrokenPipeError:
                raise  # whoever read our output has seen enough
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


def main() -> None:
    """Entry point of the command."""
    app(prog_name="lpom")


def _sentence(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}."
    return " ".join(str(error).split())


def _show_warning(message: Warning | str, *_: Any) -> None:
    typer.echo(f"warning: {_sentence(Warning(message))}", err=True)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    if version:
        typer.echo(f"lpom {lpom.__version__}")
        raise typer.Exit


@app.command()
def train(
    data: Annotated[
        str, typer.Argument(help=f"A file (CSV, Parquet, NPZ), or {', '.join(datasets.names())}.")
    ] = "digits",
    target: Annotated[str | None, typer.Option(help="Column of a file to predict.")] = None,
    task: Annotated[
        str | None, typer.Option(help="classification, regression or auto (from the target).")
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="Column of a file to leave out; may be repeated.")
    ] = None,
    test_fraction: Annotated[
        float | None, typer.Option(help="Share of a file's rows held back as a test. [0.2]")
    ] = None,
    hidden: Annotated[str, typer.Option(help="Widths of the hidden layers, or none.")] = "300,100",
    activation: Annotated[str, typer.Option(help="See `lpom activations`.")] = "relu",
    output_activation: Annotated[str, typer.Option(help="Of the last layer.")] = "identity",
    method: Annotated[str, typer.Option(help="See `lpom methods`.")] = "lpom",
    mu: Annotated[
        str | None, typer.Option(help="Weight of the gaps: a number, or one per layer: 20,20,5.")
    ] = None,
    order: Annotated[str | None, typer.Option(help="Order of the state updates.")] = None,
    sweeps: Annotated[int | None, typer.Option(help="Sweeps over the states of a batch.")] = None,
    weights: Annotated[str | None, typer.Option(help="adaptive or exact weight steps.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Of the method's optimiser.")] = None,
    loss: Annotated[str, typer.Option(help="By default as the target asks for.")] = "auto",
    epochs: Annotated[int | None, typer.Option(help="By default enough for 2000 steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="By default 32, or 100 of many.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights, batches and splits.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, ..., or auto.")] = "auto",
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of the data set's files. [LPOM_DATA]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the run. [the next free runs/DATA-n]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over the run in --out.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the folder alone.")] = False,
) -> None:
    """Train a network and keep the run in a folder."""
    settings = runs.Settings(
        hidden=_numbers("hidden", hidden, int),
        activation=activation,
        output_activation=output_activation,
        method=methods.configure(
            method,
            mu=None if mu is None else _one_or_many(_numbers("mu", mu, float)),
            order=order,
            sweeps=sweeps,
            weights=weights,
            learning_rate=learning_rate,
        ),
        loss=loss,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        device=device,
    )
