"""``lpom train``: train a network and keep the run in a folder."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from lpom import datasets, runs
from lpom.commands import options
from lpom.commands.options import RUN, TRAINING
from lpom.commands.show import advice, plan_table, results_table, scores_table
from lpom.datasets.files import STDIN
from lpom.folders import TENSORBOARD, forget_events, run_folder
from lpom.preparation import Prepared, Reading, prepare
from lpom.runs import Run, Settings
from lpom.tensorboard import TensorBoard
from lpom.training import Callback
from lpom.training.progress import epoch_lines


def train(
    data: options.Data = "digits",
    target: options.TargetColumn = None,
    task: options.TaskName = None,
    ignore: options.Ignored = None,
    kinds: options.Kinds = None,
    encoding: options.Encoding = None,
    separator: options.Separator = None,
    decimal: options.Decimal = None,
    thousands: options.Thousands = None,
    date_order: options.DateOrder = None,
    test_fraction: options.TestFraction = None,
    hidden: options.HiddenAsNeeded = None,
    activation: options.ActivationName = "relu",
    output_activation: options.OutputActivation = "identity",
    method: Annotated[
        str, typer.Option(metavar="NAME", help="See lpom methods.", rich_help_panel=TRAINING)
    ] = "lpom",
    mu: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS",
            help="Weight of the gaps: one number, or one per layer, 20,20,5.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(metavar="NUMBER", help="Of the optimiser.", rich_help_panel=TRAINING),
    ] = None,
    method_settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SETTING=VALUE",
            help="Any other of the method, e.g. states.most=3; may be repeated.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    loss: Annotated[
        str,
        typer.Option(metavar="NAME", help="Else as the target asks for.", rich_help_panel=TRAINING),
    ] = "auto",
    alpha: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER",
            help="Strength of the L2 penalty on weights (0.1).",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    class_weight: Annotated[
        str | None,
        typer.Option(
            metavar="WEIGHTS",
            help="balanced, or one per class: yes=3,no=1.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    epochs: options.AsNeeded = None,
    batch_size: options.AsNeeded = None,
    early_stopping: Annotated[
        bool,
        typer.Option(
            "--early-stopping/--to-the-end",
            help="Hold out a tenth of the training rows, stop when the loss on it stands still, "
            "and keep the weights for which it was lowest.",
            rich_help_panel=TRAINING,
        ),
    ] = True,
    seed: Annotated[
        int,
        typer.Option(metavar="N", help="Of weights, batches and splits.", rich_help_panel=TRAINING),
    ] = 0,
    device: Annotated[
        str,
        typer.Option(metavar="NAME", help="cpu, cuda, ..., or auto.", rich_help_panel=TRAINING),
    ] = "auto",
    data_dir: options.DataDir = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Where the run goes (else the next free runs/DATA-n).",
            rich_help_panel=RUN,
        ),
    ] = None,
    tensorboard: Annotated[
        bool,
        typer.Option(
            "--tensorboard",
            help="Log to the folder tensorboard of the run too.",
            rich_help_panel=RUN,
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite the run in --out.", rich_help_panel=RUN)
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", help="Print only the folder of the run.", rich_help_panel=RUN),
    ] = False,
) -> None:
    """Train a network on a data set or a table, and keep the run in a folder.

    Numbers, dates, yes/no and categories are told from the values; what is done with each column
    is printed before training, and --as or --ignore change it.
    """
    given = options.pairs("--set", "states.most=3", method_settings)
    tuned: dict[str, Any] = {
        name.replace(".", "__"): options.value(text) for name, text in given.items()
    }
    if mu is not None:
        tuned["mu"] = _one_or_many(options.numbers("--mu", mu, float))
    settings = Settings(
        hidden=None if hidden is None else options.widths(hidden),
        activation=activation,
        output_activation=output_activation,
        method=method,
        method_settings=tuned,
        learning_rate=learning_rate,
        loss=loss,
        alpha=alpha,
        class_weight=_class_weight(class_weight),
        epochs=epochs,
        batch_size=batch_size,
        early_stopping=early_stopping,
        seed=seed,
        device=device,
    )
    console = Console(quiet=quiet, highlight=False)
    name = "table" if data == STDIN else Path(data).name.partition(".")[0]
    with run_folder(out, name, force=force) as folder:
        prepared = prepare(
            data,
            target=target,
            task=task,
            ignore=tuple(ignore or ()),
            kinds=options.pairs("--as", "zip=category", kinds),
            reading=Reading(encoding, separator, decimal, thousands, date_order),
            test_fraction=test_fraction,
            data_dir=data_dir,
            seed=seed,
        )
        runs.rehearse(prepared, settings)
        if data not in datasets.names():
            console.print(plan_table(prepared.features.plan))
        console.print(escape(_header(prepared, settings)), soft_wrap=True)
        with ExitStack() as logs:
            log: list[Callback] = [] if quiet or sys.stderr.isatty() else [epoch_lines()]
            if tensorboard:
                forget_events(folder)
                log.append(logs.enter_context(TensorBoard(folder / TENSORBOARD)))
            run = runs.train(prepared, settings, progress=False if quiet else None, callbacks=log)
        if not tensorboard:
            forget_events(folder)
        run.write(folder)
    _report(console, run, folder)
    typer.echo(str(folder) if quiet else f"run: {folder}")
    if run.config["status"] == "interrupted":
        raise typer.Exit(130)


def _one_or_many(values: tuple[float, ...]) -> float | list[float]:
    return values[0] if len(values) == 1 else list(values)


def _class_weight(text: str | None) -> str | dict[str, float] | None:
    if text is None or "=" not in text:
        return text
    found = options.pairs("--class-weight", "yes=3,no=1", text.split(","))
    return {name: options.numbers("--class-weight", part, float)[0] for name, part in found.items()}


def _header(data: Prepared, settings: Settings) -> str:
    n = len(data.train[0])
    estimator = settings.estimator(data.target, n)
    as_default = runs.method_settings(type(estimator)(method=settings.method))
    changed = {
        name: value
        for name, value in runs.method_settings(estimator).items()
        if value != as_default.get(name)
    }
    if settings.learning_rate is not None:
        changed["learning_rate"] = settings.learning_rate
    tuned = ", ".join(f"{name}={value}" for name, value in changed.items()) or "default settings"
    rows = ", ".join(f"{len(X):,} {part}" for part, (X, _) in data.parts().items())
    sizes = [data.features.n_inputs, *settings.widths(n), data.n_outputs]
    batch, epochs = settings.planned(n)
    pace = "all rows at once" if batch is None else f"batches of {batch}"
    most = "at most " if estimator.early_stopping else ""
    left_out = data.notes.removeprefix(f"{data.name}; ")
    return (
        f"data     {data.name}: {data.target.task} of {data.target.name}, rows {rows}\n"
        f"         {left_out}\n"
        f"network  {'-'.join(map(str, sizes))}, {settings.activation}, "
        f"{settings.output_activation} output\n"
        f"method   {settings.method} ({tuned}), {most}{epochs} epochs, {pace}"
    )


def _report(console: Console, run: Run, folder: Path) -> None:
    config = run.config
    if config["status"] == "interrupted":
        console.print(f"interrupted after {len(run.history)} epochs; the run is kept")
    console.print(results_table(config))
    console.print(scores_table(config))
    for line in advice(run, folder):
        console.print(escape(line), soft_wrap=True)
