"""``lpom compare``: training methods beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lpom import datasets, methods
from lpom.commands import options
from lpom.commands.options import NETWORK, RUN, TRAINING
from lpom.datasets.files import STDIN
from lpom.experiments.compare import BY_EPOCH, BY_SECOND, TABLE, Comparison, as_dataset, own_folder
from lpom.experiments.compare import compare as run_comparison
from lpom.experiments.records import Trial
from lpom.experiments.table import Summary
from lpom.runs import Settings
from lpom.training.history import Epoch
from lpom.training.progress import Bar


def compare(
    context: typer.Context,
    data: options.Data,
    chosen: Annotated[
        str,
        typer.Option(
            "--methods",
            metavar="NAMES",
            help="Separated by commas, or all.",
            rich_help_panel=TRAINING,
        ),
    ] = "lpom,adam,sgd",
    hidden: options.Hidden = "100",
    network: options.Network = None,
    network_option: options.NetworkOptions = None,
    augment: Annotated[
        bool,
        typer.Option(
            "--augment", help="Flip and crop the network's pictures.", rich_help_panel=NETWORK
        ),
    ] = False,
    epochs: options.AsNeeded = None,
    seeds: Annotated[
        str,
        typer.Option(metavar="NUMBERS", help="Separated by commas.", rich_help_panel=TRAINING),
    ] = "0,1,2",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A setting of a method, e.g. lpom.states.max_sweeps=3; may be repeated.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    set_epochs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METHOD=N",
            help="Epochs of one method, e.g. admm=50; may be repeated.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    loss: options.LossName = "auto",
    activation: options.ActivationName = "relu",
    output_activation: options.OutputActivation = "identity",
    batch_size: options.AsNeeded = None,
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
    data_dir: options.DataDir = None,
    threads: options.Threads = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="For the results (else one below comparisons/, another for every setting).",
            rich_help_panel=RUN,
        ),
    ] = None,
) -> None:
    """Train by several methods, from the same weights and on the same batches.

    Writes results.jsonl, table.md and two pictures. What is finished is kept: the same command
    again goes on with what is missing. A method that can't do the task is listed with its reason.

    Examples:

        lpom compare churn.csv --target left --methods lpom,adam,admm
        lpom compare mnist --network lenet5 --methods lpom,adam --epochs 10
    """
    if threads is not None:
        torch.set_num_threads(threads)
    chosen_options = options.pairs("--network-option", "width=0.25", network_option)
    if network:
        options.check_no_columns(context)
        dataset = datasets.load(data, data_dir)
    else:
        prepared = options.prepared(context)
        dataset = as_dataset(prepared, data)
    n_rows = len(dataset.x_train)
    size, n_epochs = Settings(epochs=epochs, batch_size=batch_size).planned(n_rows)
    plan = Comparison(
        methods=tuple(methods.names() if chosen == "all" else chosen.split(",")),
        hidden=options.widths(hidden),
        activation=activation,
        output=output_activation,
        loss=loss,
        epochs=n_epochs,
        batch_size=size or n_rows,
        seeds=options.numbers("--seeds", seeds, int),
        network=network or "",
        options={name: options.value(text) for name, text in chosen_options.items()},
        augment=augment,
        settings=_settings(settings or ()),
        epochs_of=_epochs(set_epochs or ()),
    )
    folder = out or own_folder(plan, dataset, "table" if data == STDIN else Path(data).stem)
    trials = plan.trials(dataset.name)
    with Bar(sum(trial.epochs for trial in trials)) as bar:
        follower = _Follower(bar, len(trials))
        try:
            summary = run_comparison(
                plan, dataset, folder, on_epoch=follower.epoch, on_trial=follower.trial
            )
        except KeyboardInterrupt:
            typer.echo(
                f"interrupted: {follower.finished} of {len(trials)} runs are finished and kept in "
                f"{folder}. The same command continues with the rest.",
                err=True,
            )
            raise typer.Exit(130) from None
    console = Console(highlight=False)
    console.print(escape(summary.about), soft_wrap=True)
    console.print(_drawn(summary))
    console.print(f"{escape(summary.notes)}\n", soft_wrap=True)
    for name in (TABLE, BY_EPOCH, BY_SECOND):
        if (folder / name).exists():
            typer.echo(folder / name)


def _drawn(summary: Summary) -> Table:
    """The columns that a terminal has room for, and remarks if there are any."""
    table = Table()
    columns = list(range(5))
    if any(line[-1] for line in summary.body):
        columns.append(len(summary.head) - 1)
    for k in columns:
        table.add_column(summary.head[k], justify="right" if 0 < k < 5 else "left")
    for line in summary.body:
        table.add_row(*(escape(line[k]) for k in columns))
    return table


class _Follower:
    """Moves the bar with the epochs, and says a line about every finished run."""

    def __init__(self, bar: Bar, total: int) -> None:
        self.bar, self.total = bar, total
        self.finished = self.epochs = 0

    def epoch(self, trial: Trial, epoch: Epoch) -> None:
        what = f"{trial.method}, seed {trial.seed}, epoch {epoch.epoch}/{trial.epochs}"
        self.bar.draw(self.epochs + epoch.epoch, what, f"test {epoch.validation_score:.4f}")

    def trial(self, trial: Trial, record: dict[str, Any]) -> None:
        self.finished += 1
        self.epochs += trial.epochs
        outcome = record.get("reason")
        if outcome is None:
            outcome = f"test {record['score']:.4f}, {record['seconds']:.1f} s"
        line = f"[{self.finished}/{self.total}] {trial.method}, seed {trial.seed}: {outcome}"
        typer.echo(line, err=True)


def _settings(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    given: dict[str, list[str]] = {}
    for text in texts:
        method, _, setting = text.partition(".")
        if "=" in method or not setting:
            raise ValueError(f"--set takes METHOD.SETTING=VALUE, e.g. admm.beta=2, got {text!r}.")
        given.setdefault(method, []).append(setting)
    return {
        method: methods.get(method).with_params(**options.method_settings(method, some)).plain()
        for method, some in given.items()
    }


def _epochs(texts: Sequence[str]) -> dict[str, int]:
    made = {}
    for text in texts:
        method, _, number = text.partition("=")
        if not number.isdecimal():
            raise ValueError(f"--set-epochs takes METHOD=EPOCHS, e.g. admm=50, got {text!r}.")
        made[method] = int(number)
    return made
