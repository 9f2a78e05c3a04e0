"""``lpom train``: train a network and keep the run in a folder."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from lpom import datasets, methods, runs
from lpom.commands import options, text
from lpom.commands.options import NETWORK, RUN, TRAINING
from lpom.commands.show import advice, plan_table, results_table, scores_table, training_line
from lpom.datasets.files import STDIN
from lpom.exceptions import LostRankError, ModelFileError
from lpom.folders import (
    CHECKPOINT,
    TENSORBOARD,
    begin,
    begun,
    begun_folder,
    forget_checkpoint,
    forget_events,
    read_begun,
    resumable,
    run_folder,
)
from lpom.parallel import Parallel, launch
from lpom.pictures import prepare_pictures
from lpom.preparation import Prepared
from lpom.runs import Run, Settings
from lpom.tables import Features
from lpom.tensorboard import TensorBoard
from lpom.training import Callback
from lpom.training.progress import epoch_lines


def train(
    context: typer.Context,
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
    network: options.Network = None,
    network_options: options.NetworkOptions = None,
    augment: Annotated[
        bool | None,
        typer.Option(
            "--augment/--no-augment",
            help="Flip and crop pictures at random while --network trains (so for cifar-10).",
            show_default=False,
            rich_help_panel=NETWORK,
        ),
    ] = None,
    activation: options.ActivationName = "relu",
    output_activation: options.OutputActivation = "identity",
    method: options.MethodName = "lpom",
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
            help="Any other of the method, e.g. states.max_sweeps=3; may be repeated.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    loss: options.LossName = "auto",
    alpha: Annotated[
        float,
        typer.Option(
            metavar="NUMBER",
            help="Strength of the L2 penalty on weights.",
            rich_help_panel=TRAINING,
        ),
    ] = Settings.alpha,
    class_weight: options.ClassWeight = None,
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
    seed: options.Seed = 0,
    device: options.Device = "auto",
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="bf16",
            help="Round the factors of products to bfloat16: faster where layers are wide and the "
            "processor has instructions for it.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    compile: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Let torch's compiler make the steps: faster for small networks, attention and "
            "batch norm, after a first step of seconds to minutes. It needs a compiler for C++.",
            rich_help_panel=TRAINING,
        ),
    ] = False,
    parallel: Annotated[
        str | None,
        typer.Option(
            metavar="layers=N,data=N",
            help="Share layers and rows among so many processes, started here or by torchrun.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
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
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Go on with the run in this folder, which was stopped before its end; it keeps "
            "all its settings. With --parallel among so many processes.",
            rich_help_panel=RUN,
        ),
    ] = None,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", help="Print only the folder of the run.", rich_help_panel=RUN),
    ] = False,
) -> None:
    """Train a network on a data set or a table, and keep the run in a folder.

    Numbers, dates, yes/no and categories are told from the values; what is done with each column
    is printed before training, and --as or --ignore change it. With --network pictures stay
    pictures, and --network char-transformer learns to write from any text file. Ctrl-C and SIGTERM
    end a run so that --resume can go on with it, and so does one that was killed.

    Examples:

        lpom train flats.csv --target rent
        lpom train churn.csv --target left --class-weight balanced --ignore name
        lpom train german.csv --separator ';' --decimal , --target Preis
        lpom train cifar-10 --network resnet8 --epochs 15
        lpom train --resume runs/flats-1
    """
    if resume is not None:
        _check_alone(context)
    spread = None if parallel is None else _spread(parallel, data)
    if spread is not None and spread.size > 1 and launch.rank() is None:
        raise typer.Exit(launch.launch("lpom.cli", sys.argv[1:], spread.size))
    helps = spread is not None and bool(launch.rank())  # the first rank has the run
    quiet, tensorboard = quiet or helps, tensorboard and not helps
    console = Console(quiet=quiet, highlight=False)
    if resume is not None:
        _resume(resume, console, quiet, spread, helps)
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
        network=network,
        network_options={
            key: options.value(text)
            for key, text in options.pairs(
                "--network-option", "width=0.25", network_options
            ).items()
        },
        augment=augment,
    )
    name = "table" if data == STDIN else Path(data).name.partition(".")[0]
    with ExitStack() as stack:
        if helps:
            out = Path(stack.enter_context(TemporaryDirectory())) / "run"
        folder = stack.enter_context(run_folder(out, name, force=force))
        if text.is_for_texts(network):
            _check_for_text(context)
            text.start(data, settings, folder, console, tensorboard=tensorboard, quiet=quiet)
            return
        if network is not None:
            options.check_no_columns(context)
            prepared = prepare_pictures(data, data_dir)
        else:
            prepared = options.prepared(context, seed)
        runs.rehearse(prepared, settings)
        if data not in datasets.names() and isinstance(prepared.features, Features):
            console.print(plan_table(prepared.features.plan))
        console.print(escape(_header(prepared, settings)), soft_wrap=True)
        if spread is not None:
            console.print(escape(f"ranks    {spread}"), soft_wrap=True)
        if prepared.source is not None:
            notes = runs.notes_to_resume(prepared, settings)
            begin(folder, {**notes, "tensorboard": tensorboard})
        if tensorboard:
            forget_events(folder)
        run = _trained(
            prepared, settings, folder, tensorboard=tensorboard, quiet=quiet, parallel=spread
        )
        if not tensorboard:
            forget_events(folder)
    if not helps:
        _end(run, folder, console, quiet)


def _resume(
    folder: Path, console: Console, quiet: bool, parallel: Parallel | None, helps: bool
) -> None:
    """Go on with a run from its own files, to the end that it would have had.

    Who ``helps`` the first of several processes has a folder that is thrown away.
    """
    with ExitStack() as stack:
        notes = read_begun(folder) if helps else stack.enter_context(begun_folder(folder))
        if helps:
            folder = Path(stack.enter_context(TemporaryDirectory()))
        if "text" in notes:
            if parallel is not None:
                raise ValueError("texts are learnt by one process. Leave --parallel out.")
            text.resume(notes, folder, console, quiet=quiet)
            return
        try:
            prepared, settings = runs.again(notes)
            tensorboard = bool(notes["tensorboard"])
        except (KeyError, AttributeError) as error:
            raise ModelFileError(
                f"{folder / CHECKPOINT} lacks what `lpom train` writes ({error!r}). Train again."
            ) from error
        console.print(escape(_header(prepared, settings)), soft_wrap=True)
        run = _trained(
            prepared,
            settings,
            folder,
            tensorboard=tensorboard and not helps,
            quiet=quiet,
            parallel=parallel,
        )
    if not helps:
        _end(run, folder, console, quiet)


def _spread(text: str, data: str) -> Parallel:
    """What --parallel says, as ``layers=2,data=1,delay=none``."""
    if data == STDIN:
        raise ValueError("several processes can't all read standard input; give a file.")
    given = options.pairs("--parallel", "layers=2,data=1", text.split(","))
    return Parallel().with_params(**{name: options.value(value) for name, value in given.items()})


def _trained(
    data: Prepared,
    settings: Settings,
    folder: Path,
    *,
    tensorboard: bool,
    quiet: bool,
    parallel: Parallel | None = None,
) -> Run:
    """Train, or go on, and write the files of the run."""
    checkpoint = folder / CHECKPOINT if begun(folder) else None
    with ExitStack() as logs:
        log: list[Callback] = [] if quiet or sys.stderr.isatty() else [epoch_lines()]
        if tensorboard:
            log.append(logs.enter_context(TensorBoard(folder / TENSORBOARD)))
        try:
            run = runs.train(
                data,
                settings,
                progress=False if quiet else None,
                callbacks=log,
                checkpoint=checkpoint,
                parallel=parallel,
            )
            run.write(folder)
        except (KeyboardInterrupt, SystemExit, OSError, LostRankError):
            _say_how_to_go_on(folder)
            raise
    if run.config["status"] != "interrupted":
        forget_checkpoint(folder)  # last: until then the run can go on
    return run


def _say_how_to_go_on(folder: Path) -> None:
    if resumable(folder):
        typer.echo(f"stopped; go on with: lpom train --resume {folder}", err=True)


def _end(run: Run, folder: Path, console: Console, quiet: bool) -> None:
    _report(console, run, folder)
    typer.echo(str(folder) if quiet else f"run: {folder}")
    if run.config["status"] == "interrupted":
        _say_how_to_go_on(folder)
        raise typer.Exit(130)
    if run.config["status"] == "diverged":
        typer.echo(f"error: {run.config['diverged']}", err=True)
        raise typer.Exit(2)


def _check_alone(context: typer.Context) -> None:
    for option in options.given(context):
        if option not in ("--resume", "--quiet", "--parallel"):
            raise ValueError(
                f"--resume takes all settings from the run itself. Leave {option} out."
            )


def _check_for_text(context: typer.Context) -> None:
    for option in options.given(context):
        if option not in text.OPTIONS:
            raise ValueError(f"{option} is not for texts. Leave it out.")


def _one_or_many(values: tuple[float, ...]) -> float | list[float]:
    return values[0] if len(values) == 1 else list(values)


def _header(data: Prepared, settings: Settings) -> str:
    n = len(data.train[0])
    estimator = settings.estimator(data)
    as_default = runs.method_settings(methods.get(settings.method))
    changed = {
        name: value
        for name, value in runs.method_settings(methods.get(estimator.method)).items()
        if value != as_default.get(name)
    }
    if settings.learning_rate is not None:
        changed["learning_rate"] = settings.learning_rate
    tuned = ", ".join(f"{name}={value}" for name, value in changed.items()) or "default settings"
    rows = ", ".join(f"{len(X):,} {part}" for part, (X, _) in data.parts().items())
    batch, epochs = settings.planned(n)
    pace = "all rows at once" if batch is None else f"batches of {batch}"
    most = "at most " if estimator.early_stopping else ""
    left_out = data.notes.removeprefix(f"{data.name}; ")
    return (
        f"data     {data.name}: {data.target.task} of {data.target.name}, rows {rows}\n"
        f"         {left_out}\n"
        f"network  {runs.network_text(runs.network(data, settings))}\n"
        f"method   {settings.method} ({tuned}), {most}{epochs} epochs, {pace}"
    )


def _report(console: Console, run: Run, folder: Path) -> None:
    config = run.config
    if config["status"] == "interrupted":
        console.print(f"interrupted after {len(run.history)} epochs; the run is kept")
    if config["status"] == "diverged":
        console.print(f"diverged after {len(run.history)} epochs; what came before is kept")
    console.print(results_table(config))
    console.print(training_line(run), soft_wrap=True)
    console.print(scores_table(config))
    for line in advice(run, folder):
        console.print(escape(line), soft_wrap=True)
