"""``lpom train``: train a network and keep the run in a folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from lpom import methods
from lpom.cli import options
from lpom.cli import run as runs
from lpom.cli.data import BUNDLED, Data
from lpom.cli.folder import (
    CHECKPOINT,
    as_written,
    begin,
    begun,
    begun_folder,
    forget_checkpoint,
    resumable,
    run_folder,
)
from lpom.cli.options import RUN, TRAINING, option
from lpom.cli.run import Run
from lpom.cli.settings import Settings, method_settings
from lpom.cli.tables import advice, plan_table, results_table, scores_table, training_line
from lpom.tables.reading import STDIN
from lpom.training.callbacks import epoch_lines


def train(
    context: typer.Context,
    data: options.Table = "digits",
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
    method: options.MethodName = "lpom",
    mu: Annotated[
        str | None,
        option(TRAINING, "NUMBERS", "Weight of the gaps: one number, or one per layer, 20,20,5."),
    ] = None,
    learning_rate: Annotated[
        float | None,
        option(TRAINING, "NUMBER", "Of the optimiser."),
    ] = None,
    method_settings: Annotated[
        list[str] | None,
        option(
            TRAINING,
            "SETTING=VALUE",
            "Any other of the method, e.g. states.max_sweeps=3; may be repeated.",
            "--set",
        ),
    ] = None,
    loss: options.LossName = "auto",
    alpha: Annotated[
        float | None,
        option(
            TRAINING,
            "NUMBER",
            "Strength of the L2 penalty on weights (else 0.1, and 1 below 500 rows).",
        ),
    ] = None,
    class_weight: options.ClassWeight = None,
    epochs: options.AsNeeded = None,
    batch_size: options.AsNeeded = None,
    early_stopping: Annotated[
        bool | None,
        option(
            TRAINING,
            None,
            "Hold out a tenth of the training rows, stop when the loss on it stands still, "
            "and keep the weights for which it was lowest (else so from 500 rows on).",
            "--early-stopping/--no-early-stopping",
            show_default=False,
        ),
    ] = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    precision: Annotated[
        str | None,
        option(
            TRAINING,
            "bf16",
            "Round the factors of products to bfloat16: faster where layers are wide and the "
            "processor has instructions for it.",
        ),
    ] = None,
    compile: Annotated[
        bool,
        option(
            TRAINING,
            None,
            "Let torch's compiler make the steps: faster for small networks, attention and "
            "batch norm, after a first step of seconds to minutes. It needs a compiler for C++.",
            "--compile",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        option(RUN, "FOLDER", "Where the run goes (else the next free runs/DATA-n)."),
    ] = None,
    force: Annotated[bool, option(RUN, None, "Overwrite the run in --out.", "--force")] = False,
    resume: Annotated[
        Path | None,
        option(
            RUN,
            "FOLDER",
            "Resume the run in this folder, which was stopped before its end; it keeps all "
            "its settings.",
        ),
    ] = None,
    quiet: Annotated[
        bool,
        option(RUN, None, "Print only the folder of the run.", "--quiet"),
    ] = False,
) -> None:
    """Train a network on a data set or a table, and keep the run in a folder.

    Column types are inferred from the values; what is done with each column is printed before
    training, and --as or --ignore change it. Ctrl-C and SIGTERM end a run so that --resume can go
    on with it, and so does one that was killed.

    Examples:

        lpom train flats.csv --target rent
        lpom train churn.csv --target left --class-weight balanced --ignore name
        lpom train german.csv --separator ';' --decimal , --target Preis
        lpom train --resume runs/flats-1
    """
    console = Console(quiet=quiet, highlight=False)
    if resume is not None:
        _check_alone(context)
        _resume(resume, console, quiet)
        return
    tuned = options.method_settings(method, method_settings)
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
        class_weight=options.class_weight(class_weight),
        epochs=epochs,
        batch_size=batch_size,
        early_stopping=early_stopping,
        seed=seed,
        device=device,
        precision=precision,
        compile=compile,
    )
    name = "table" if data == STDIN else Path(data).name.partition(".")[0]
    with run_folder(out, name, force=force) as folder:
        table = options.read_data(context, seed)
        runs.check_settings(table, settings)
        if data not in BUNDLED:
            console.print(plan_table(table.encoder))
        console.print(escape(_header(table, settings)), soft_wrap=True)
        if data != STDIN:  # which can't be read again
            begin(folder, runs.notes_to_resume(table, settings))
        run = _trained(table, settings, folder, quiet)
    _end(run, folder, console, quiet)


def _resume(folder: Path, console: Console, quiet: bool) -> None:
    """Go on with a run from its own files, to the end that it would have had."""
    with begun_folder(folder) as notes:
        with as_written(folder / CHECKPOINT):
            table, settings = runs.again(notes)
        console.print(escape(_header(table, settings)), soft_wrap=True)
        run = _trained(table, settings, folder, quiet)
    _end(run, folder, console, quiet)


def _trained(data: Data, settings: Settings, folder: Path, quiet: bool) -> Run:
    """Train, or go on, and write the files of the run."""
    lines = [] if quiet or sys.stderr.isatty() else [epoch_lines()]
    try:
        run = runs.train(
            data,
            settings,
            progress=False if quiet else None,
            callbacks=lines,
            checkpoint=folder / CHECKPOINT if begun(folder) else None,
        )
        run.write(folder)
    except (KeyboardInterrupt, SystemExit, OSError):
        _say_how_to_resume(folder)
        raise
    if run.metrics["status"] != "interrupted":
        forget_checkpoint(folder)  # last: until then the run can go on
    return run


def _say_how_to_resume(folder: Path) -> None:
    if resumable(folder):
        typer.echo(f"stopped; resume with: lpom train --resume {folder}", err=True)


def _end(run: Run, folder: Path, console: Console, quiet: bool) -> None:
    _report(console, run, folder)
    typer.echo(str(folder) if quiet else f"run: {folder}")
    if run.metrics["status"] == "interrupted":
        _say_how_to_resume(folder)
        raise typer.Exit(130)
    if run.metrics["status"] == "diverged":
        typer.echo(f"error: {run.metrics['diverged']}", err=True)
        raise typer.Exit(2)


def _check_alone(context: typer.Context) -> None:
    for given in options.given(context):
        if given not in ("--resume", "--quiet"):
            raise ValueError(f"--resume takes all settings from the run itself. Leave {given} out.")


def _one_or_many(values: tuple[float, ...]) -> float | list[float]:
    return values[0] if len(values) == 1 else list(values)


def _header(data: Data, settings: Settings) -> str:
    n = len(data.train[1])
    estimator, planned = settings.estimator(data.target, n), runs.planned(data, settings)
    as_default = method_settings(methods.get(settings.method))
    changed = {
        name: value
        for name, value in method_settings(methods.get(estimator.method)).items()
        if value != as_default.get(name)
    }
    if settings.learning_rate is not None:
        changed["learning_rate"] = settings.learning_rate
    tuned = ", ".join(f"{name}={value}" for name, value in changed.items()) or "default settings"
    rows = ", ".join(f"{len(y):,} {part}" for part, (_, y) in data.parts().items())
    batch = planned["batch_size"]
    pace = "all rows at once" if batch is None else f"batches of {batch}"
    most = "at most " if estimator.early_stopping else ""
    return (
        f"data     {data.name}: {data.target.task} of {data.target.name}, rows {rows}\n"
        f"         {data.notes}\n"
        f"network  {runs.network_text(planned['network'])}\n"
        f"method   {planned['method']['name']} ({tuned}), {most}{planned['epochs']} epochs, {pace}"
    )


def _report(console: Console, run: Run, folder: Path) -> None:
    metrics = run.metrics
    if metrics["status"] == "interrupted":
        console.print(f"interrupted after {len(run.history)} epochs; the run is kept")
    if metrics["status"] == "diverged":
        console.print(f"diverged after {len(run.history)} epochs; what came before is kept")
    console.print(results_table(run))
    console.print(training_line(run), soft_wrap=True)
    console.print(scores_table(run))
    for line in advice(run, folder):
        console.print(escape(line), soft_wrap=True)
