"""``lpom tune``: settings that suit a table."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lpom.commands import options
from lpom.commands.options import RUN, TRAINING
from lpom.experiments import tune as tuning
from lpom.experiments.tune import Search, space_for
from lpom.files import write_atomically
from lpom.runs import Settings
from lpom.training.history import Epoch
from lpom.training.progress import Bar

_OWN = ("--candidates", "--vary", "--out", "--force", "--epochs", "DATA")  # not for `lpom train`
_OF_TRAINING = ("hidden", "activation", "learning_rate", "alpha", "batch_size", "mu")


def tune(
    context: typer.Context,
    data: options.Data,
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
    candidates: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Sets of settings to begin with, the defaults among them.",
            rich_help_panel=TRAINING,
        ),
    ] = 27,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=A/B/...",
            help="Values of a setting to choose among, in place of those it has by itself, e.g. "
            "hidden=50/300,100, alpha=0.1 or states.max_sweeps=1/3; may be repeated.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    method: options.MethodName = "lpom",
    loss: options.LossName = "auto",
    class_weight: options.ClassWeight = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Of the last round (else as the size of the data asks for).",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    data_dir: options.DataDir = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="For the results (else tuning/DATA).", rich_help_panel=RUN
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Start anew if a search is there.", rich_help_panel=RUN),
    ] = False,
) -> None:
    """Find settings for a table by successive halving, on its training rows alone.

    Many candidates train for a few epochs, the better third of them three times as long, and so
    on. A fifth of the training rows judges them, by their loss; the test rows are not touched.
    After Ctrl-C the same command goes on. Ends with the command that trains with what won.

    Examples:

        lpom tune flats.csv --target rent
        lpom tune flats.csv --target rent --candidates 9 --vary hidden=50/300,100 --vary alpha=0.1/1
    """
    settings = Settings(
        method=method,
        loss=loss,
        class_weight=options.class_weight(class_weight),
        epochs=epochs,
        seed=seed,
        device=device,
    )
    space = {**space_for(settings), **_varied(vary or ())}
    search = Search(settings, space, candidates)
    prepared = options.prepared(context, seed)
    folder = out or Path("tuning") / Path(data).stem
    console = Console(highlight=False)
    rows = tuning.for_tuning(prepared)
    most = settings.planned(len(rows.train[0]))[1]
    rounds = search.rounds(most)
    for name, values in space.items():
        console.print(escape(f"{name:14} {' / '.join(map(tuning.text, values))}"), soft_wrap=True)
    console.print(
        "rounds         "
        + ", then ".join(f"{count} for {budget} epochs" for count, budget in rounds)
        + f"; {len(rows.train[0]):,} rows to train on, {len(rows.test[0]):,} to judge by",
        soft_wrap=True,
    )
    with Bar(sum(count * budget for count, budget in rounds)) as bar:
        follower = _Follower(bar, rounds)
        try:
            ranked = tuning.tune(
                search,
                prepared,
                folder,
                anew=force,
                on_epoch=follower.epoch,
                on_trial=follower.trial,
            )
        except KeyboardInterrupt:
            typer.echo(
                f"interrupted: {follower.finished} of {follower.total} trainings are finished and "
                f"kept in {folder}. The same command goes on with the rest.",
                err=True,
            )
            raise typer.Exit(130) from None
    metric = "R²" if prepared.target.task == "regression" else "accuracy"
    lines = tuning.table(space, ranked, metric)
    best = search.with_candidate(ranked[0]["settings"], most)
    command = shlex.join(_command(context, data, ranked[0]["settings"], best))
    page = tuning.markdown(f"{prepared.name}, {prepared.target.name}", lines, command)
    write_atomically(folder / tuning.TABLE, page.encode())
    console.print(_drawn(lines))
    typer.echo(f"{folder / tuning.TABLE}\n{folder / tuning.SEARCH}")
    typer.echo(f"next: {command}")


class _Follower:
    """Moves the bar with the epochs, and says a line about every finished training."""

    def __init__(self, bar: Bar, rounds: list[tuple[int, int]]) -> None:
        self.bar, self.rounds = bar, rounds
        self.total = sum(count for count, _ in rounds)
        self.finished = self.epochs = 0

    def epoch(self, number: int, candidate: int, epoch: Epoch) -> None:
        what = f"round {number + 1}/{len(self.rounds)}, training {self.finished + 1}/{self.total}"
        self.bar.draw(self.epochs + epoch.epoch, what, f"loss {epoch.loss:.4g}")

    def trial(self, number: int, trial: dict[str, Any]) -> None:
        self.finished += 1
        self.epochs += trial["epochs"]
        outcome = trial.get("reason")
        if outcome is None:
            outcome = f"validation loss {tuning.text(trial['loss'])}"
        chosen = ", ".join(f"{k}={tuning.text(v)}" for k, v in trial["settings"].items())
        typer.echo(f"[{self.finished}/{self.total}] {chosen or 'defaults'}: {outcome}", err=True)


def _varied(texts: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    made = {}
    for name, values in options.pairs("--vary", "alpha=0.1/1", texts).items():
        name = name.replace("-", "_")
        read = options.widths if name == "hidden" else options.value
        made[name] = tuple(read(value) for value in values.split("/"))
    return made


def _command(
    context: typer.Context, data: str, chosen: dict[str, Any], best: Settings
) -> list[str]:
    """The words that train with the chosen settings, and all else as it was given here."""
    words = ["lpom", "train", data]
    for option, value in options.given(context).items():
        if option not in _OWN:
            many = value if isinstance(value, list) else [value]
            words += [word for one in many for word in (option, str(one))]
    for name, value in chosen.items():
        if name in _OF_TRAINING:
            words += [f"--{name.replace('_', '-')}", tuning.text(value)]
        else:
            words += ["--set", f"{name}={tuning.text(value)}"]
    return [*words, "--epochs", str(best.epochs)]


def _drawn(lines: list[list[str]]) -> Table:
    head, *body = lines
    table = Table(caption=tuning.LEGEND, caption_justify="left", padding=0)
    for name in head:
        justify: Literal["left", "right"] = "left" if name == "activation" else "right"
        # a value that is cut could not be given to train
        table.add_column(name.replace("_", "\n"), justify=justify, overflow="fold")
    for k, line in enumerate(body):
        table.add_row(*map(Text, line), style=None if k else "bold")
    return table
