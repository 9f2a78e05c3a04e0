"""``lpom train``: train a network and keep the run in a folder."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from lpom import methods, runs
from lpom.commands import options
from lpom.commands.show import results_table
from lpom.folders import TENSORBOARD, forget_events, run_folder
from lpom.preparation import Prepared, prepare
from lpom.runs import Run, Settings
from lpom.tensorboard import TensorBoard
from lpom.training import Callback
from lpom.training.progress import epoch_lines


def train(
    data: options.Data = "digits",
    target: options.TargetColumn = None,
    task: options.TaskName = None,
    ignore: options.Ignored = None,
    test_fraction: options.TestFraction = None,
    hidden: options.Hidden = "300,100",
    activation: options.ActivationName = "relu",
    output_activation: options.OutputActivation = "identity",
    method: Annotated[str, typer.Option(help="See lpom methods.")] = "lpom",
    mu: Annotated[
        str | None, typer.Option(help="Weight of the gaps: a number, or one per layer, 20,20,5.")
    ] = None,
    order: Annotated[str | None, typer.Option(help="Order in which states move.")] = None,
    sweeps: Annotated[int | None, typer.Option(help="Sweeps over the states of a batch.")] = None,
    weights: Annotated[str | None, typer.Option(help="adaptive or exact.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Of the optimiser.")] = None,
    loss: Annotated[str, typer.Option(help="By default as the target needs it.")] = "auto",
    epochs: options.AsNeeded = None,
    batch_size: options.AsNeeded = None,
    seed: Annotated[int, typer.Option(help="Of weights, batches and splits.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, ..., or auto.")] = "auto",
    data_dir: options.DataDir = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the run (else the next free runs/DATA-n).")
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Log to the folder tensorboard of the run too.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the run in --out.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print only the folder of the run.")
    ] = False,
) -> None:
    """Train a network on a data set or a file, and keep the run in a folder."""
    given = {
        "mu": None if mu is None else _one_or_many(options.numbers("--mu", mu, float)),
        "order": order,
        "sweeps": sweeps,
        "weights": weights,
        "learning_rate": learning_rate,
    }
    settings = Settings(
        hidden=options.widths(hidden),
        activation=activation,
        output_activation=output_activation,
        method=methods.get(
            method, **{name: value for name, value in given.items() if value is not None}
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
        with ExitStack() as logs:
            log: list[Callback] = [] if quiet or sys.stderr.isatty() else [epoch_lines()]
            if tensorboard:
                forget_events(folder)
                log.append(logs.enter_context(TensorBoard(folder / TENSORBOARD)))
            run = runs.train(prepared, settings, progress=False if quiet else None, callbacks=log)
        if not tensorboard:
            forget_events(folder)
        run.write(folder)
    _report(console, run)
    typer.echo(str(folder) if quiet else f"run: {folder}")
    if run.config["status"] == "interrupted":
        raise typer.Exit(130)


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
        console.print(f"interrupted after {len(run.history)} epochs; the run is kept")
    console.print(results_table(config))
