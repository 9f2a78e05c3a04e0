"""``lpom train``: train a network and keep the run in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from lpom import datasets, methods, runs
from lpom.commands.show import results_table
from lpom.preparation import TEST_FRACTION, Prepared, prepare
from lpom.runs import Run, Settings, configure, run_folder


def train(
    data: Annotated[
        str, typer.Argument(help=f"A CSV, Parquet or NPZ file, or {', '.join(datasets.names())}.")
    ] = "digits",
    target: Annotated[str | None, typer.Option(help="Column of a file to predict.")] = None,
    task: Annotated[
        str | None, typer.Option(help="classification or regression; else the target tells.")
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="Column of a file to leave out; may be repeated.")
    ] = None,
    test_fraction: Annotated[
        float | None, typer.Option(help=f"Share of a file held back as a test ({TEST_FRACTION}).")
    ] = None,
    hidden: Annotated[str, typer.Option(help="Widths of hidden layers, or none.")] = "300,100",
    activation: Annotated[str, typer.Option(help="See lpom activations.")] = "relu",
    output_activation: Annotated[str, typer.Option(help="Of the last layer.")] = "identity",
    method: Annotated[str, typer.Option(help="See lpom methods.")] = "lpom",
    mu: Annotated[
        str | None, typer.Option(help="Weight of the gaps: a number, or one per layer, 20,20,5.")
    ] = None,
    order: Annotated[str | None, typer.Option(help="Order in which states move.")] = None,
    sweeps: Annotated[int | None, typer.Option(help="Sweeps over the states of a batch.")] = None,
    weights: Annotated[str | None, typer.Option(help="adaptive or exact.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Of the optimiser.")] = None,
    loss: Annotated[str, typer.Option(help="By default as the target needs it.")] = "auto",
    epochs: Annotated[int | None, typer.Option(help="By default as the data need it.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="By default as the data need it.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights, batches and splits.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, ..., or auto.")] = "auto",
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with the files of a data set (else LPOM_DATA).")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the run (else the next free runs/DATA-n).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over the run in --out.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the folder and no more.")] = False,
) -> None:
    """Train a network on a data set or a file, and keep the run in a folder."""
    settings = Settings(
        hidden=() if hidden == "none" else numbers("--hidden", hidden, int),
        activation=activation,
        output_activation=output_activation,
        method=configure(
            method,
            mu=None if mu is None else _one_or_many(numbers("--mu", mu, float)),
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
    console = Console(quiet=quiet, highlight=False)
    with run_folder(out, Path(data).stem, force=force) as folder:
        prepared = prepare(
            data,
            target=target,
            task=task,
            ignore=tuple(ignore or ()),
            test_fraction=test_fraction,
            data_dir=data_dir,
            seed=seed,
        )
        console.print(escape(_header(prepared, settings)))
        run = runs.train(prepared, settings, progress=False if quiet else None)
        run.write(folder)
    _report(console, run)
    typer.echo(str(folder) if quiet else f"run: {folder}")
    if run.config["status"] == "interrupted":
        raise typer.Exit(130)


def numbers(option: str, text: str, kind: type) -> tuple[Any, ...]:
    """The numbers in a text like "300,100"."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        whole = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"{option} takes {whole} with commas between, got {text!r}.") from None


def _one_or_many(values: tuple[float, ...]) -> float | list[float]:
    return values[0] if len(values) == 1 else list(values)


def _header(data: Prepared, settings: Settings) -> str:
    method = methods.get(settings.method)
    rows = ", ".join(f"{len(X):,} {part}" for part, (X, _) in data.parts().items())
    sizes = [data.features.n_inputs, *settings.hidden, data.target.n_outputs]
    batch, epochs = settings.planned(len(data.train[0]))
    changed = {
        name: value
        for name, value in method.get_params(deep=False).items()
        if value != type(method)().get_params(deep=False)[name]
    }
    tuned = ", ".join(f"{name}={value}" for name, value in changed.items()) or "as it comes"
    pace = "all rows at once" if batch is None else f"batches of {batch}"
    return (
        f"data     {data.name}: {data.target.task}, rows {rows}\n"
        f"network  {'-'.join(map(str, sizes))}, {settings.activation}, "
        f"{settings.output_activation} output\n"
        f"method   {method.name} ({tuned}), {epochs} epochs, {pace}"
    )


def _report(console: Console, run: Run) -> None:
    config = run.config
    if config["status"] == "interrupted":
        console.print(f"interrupted after {len(run.history)} epochs; what was learnt is kept")
    console.print(results_table(config))
