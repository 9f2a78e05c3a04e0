"""``lpom compare``: training methods beside each other."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, final

import numpy as np
import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lpom import methods, mlp
from lpom.cli import options
from lpom.cli.data import Data
from lpom.cli.options import RUN, TRAINING, option
from lpom.cli.run import sizes
from lpom.cli.settings import Settings
from lpom.comparison import Comparison, Trial, each_trial
from lpom.files import write_atomically
from lpom.training.callbacks import Bar

RESULTS, TABLE = "results.jsonl", "table.md"


def compare(
    context: typer.Context,
    data: options.Table,
    chosen: Annotated[
        str,
        option(
            TRAINING,
            "NAMES",
            "Separated by commas, or all; package.module:Class is one of your own.",
            "--methods",
        ),
    ] = "lpom,adam,sgd",
    hidden: options.Hidden = "100",
    epochs: options.AsNeeded = None,
    seeds: Annotated[
        str,
        option(TRAINING, "NUMBERS", "Separated by commas."),
    ] = "0,1,2",
    settings: Annotated[
        list[str] | None,
        option(
            TRAINING,
            "NAME=VALUE",
            "A setting of a method, e.g. lpom.states.max_sweeps=3; may be repeated.",
            "--set",
        ),
    ] = None,
    set_epochs: Annotated[
        list[str] | None,
        option(TRAINING, "METHOD=N", "Epochs of one method, e.g. admm=50; may be repeated."),
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
    out: Annotated[
        Path | None,
        option(
            RUN,
            "FOLDER",
            "For the results (else one below comparisons/, another for every setting).",
        ),
    ] = None,
) -> None:
    """Train by several methods, from the same weights and on the same batches.

    Writes results.jsonl and table.md. Finished trainings are kept: rerun the same command to
    resume. A method that can't do the task is listed with its reason.

    Examples:

        lpom compare churn.csv --target left --methods lpom,adam,admm
        lpom compare digits --methods lpom,mypackage.mine:MyMethod --epochs 10
    """
    table_read = options.read_data(context)
    n_rows = len(table_read.train[1])
    size, n_epochs = Settings(epochs=epochs, batch_size=batch_size).planned(n_rows)
    names = methods.names() if chosen == "all" else chosen.split(",")
    plan = _Plan(
        table_read,
        _methods(names, settings or ()),
        tuple(options.numbers("--seeds", seeds, int)),
        {"default": n_epochs} | _epochs(set_epochs or ()),
        options.widths(hidden),
        activation,
        output_activation,
        loss,
        size or n_rows,
    )
    folder = out or Path("comparisons") / f"{Path(table_read.name).stem}-{plan.digest}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        found = plan.run(folder)
    except KeyboardInterrupt:
        typer.echo(
            f"interrupted; what is finished is kept in {folder}. Rerun the same command to resume.",
            err=True,
        )
        raise typer.Exit(130) from None
    head, *body = found.rows()
    page = f"# {table_read.name}\n\n{plan.about()}\n\n{found}\n"
    write_atomically(folder / TABLE, page.encode())
    table = Table()
    for k, name in enumerate(head):
        table.add_column(name, justify="right" if 0 < k < 6 else "left")
    for line in body:
        table.add_row(*map(escape, line))
    console = Console(highlight=False)
    console.print(escape(plan.about()), soft_wrap=True)
    console.print(table)
    typer.echo(folder / TABLE)


@final
@dataclass(frozen=True)
class _Plan:
    """What is compared."""

    data: Data
    methods: list[methods.Method[Any]]
    seeds: tuple[int, ...]
    epochs: dict[str, int]
    hidden: tuple[int, ...]
    activation: str
    output: str
    loss: str
    batch_size: int

    @property
    def sizes(self) -> list[int]:
        return sizes(self.data, self.hidden, self.output)

    def describe(self) -> dict[str, Any]:
        return {
            "data": self.data.describe(),
            "methods": [[method.name, repr(method)] for method in self.methods],
            "network": [self.sizes, self.activation, self.output],
            "training": [self.epochs, self.loss, self.batch_size],
        }

    @property
    def digest(self) -> str:
        """Another one for every setting, so that no table is written over by that of another."""
        text = json.dumps([self.describe(), self.seeds], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:6]

    def about(self) -> str:
        (_, y), (_, y_test) = self.data.train, self.data.test
        widths = "-".join(map(str, self.sizes))
        return (
            f"Network {widths}, {self.activation}, output {self.output}; "
            f"{self.epochs['default']} epochs, batches of {self.batch_size}; {len(y):,} rows to "
            f"train on, {len(y_test):,} to test; seeds {', '.join(map(str, self.seeds))}. "
            f"{self.data.notes}"
        )

    def _tensors(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Inputs and targets to train on and to test; numbers to predict are standardised."""
        y = self.data.train[1]
        target = self.data.target
        mean, scale = (y.mean(0), y.std(0)) if target.task == "regression" else (0.0, 1.0)
        parts = []
        for X, truth in (self.data.train, self.data.test):
            if target.task == "regression":
                truth = ((truth - mean) / scale).astype(np.float32)
            elif truth.ndim == 1:
                truth = np.searchsorted(np.array(target.classes[0]), truth)
            inputs = self.data.encoder.transform(X)
            parts.append((torch.as_tensor(inputs), torch.as_tensor(truth)))
        return parts

    def run(self, folder: Path) -> Comparison:
        """Run what `folder` does not have yet."""
        path = folder / RESULTS
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        settings = json.loads(json.dumps(self.describe(), default=str))
        records = [record for record in map(json.loads, lines) if record["of"] == settings]
        kept = {(r["trial"]["method"], r["trial"]["seed"]): r["trial"] for r in records}
        (X, y), (X_test, y_test) = self._tensors()
        trials = [Trial.from_record(record) for record in kept.values()]
        total = len(self.seeds) * len(self.methods)
        with Bar(total) as bar:
            for seed in self.seeds:
                missing = [m for m in self.methods if (m.name, seed) not in kept]
                if not missing:
                    continue
                for trial in each_trial(
                    mlp(self.sizes, self.activation, self.output, seed=seed),
                    X,
                    y,
                    methods=missing,
                    seeds=[seed],
                    epochs={k: v for k, v in self.epochs.items() if _named(k, missing)},
                    validation_data=(X_test, y_test),
                    loss=self.loss,
                    batch_size=self.batch_size,
                    progress=False,
                ):
                    trials.append(trial)
                    record = {"of": settings, "trial": trial.to_record()}
                    with path.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(record) + "\n")
                    outcome = trial.reason or f"test {trial.score:.4f}, {trial.seconds:.1f} s"
                    done = f"[{len(trials)}/{total}] {trial.method}, seed {seed}: {outcome}"
                    bar.draw(len(trials), done, "")
                    print(done, file=sys.stderr)
        order = {method.name: k for k, method in enumerate(self.methods)}
        wanted = [t for t in trials if t.method in order and t.seed in self.seeds]
        return Comparison(sorted(wanted, key=lambda trial: (order[trial.method], trial.seed)))


def _named(name: str, chosen: Sequence[methods.Method[Any]]) -> bool:
    return name == "default" or name in [method.name for method in chosen]


def _methods(names: Sequence[str], texts: Sequence[str]) -> list[methods.Method[Any]]:
    given: dict[str, list[str]] = {}
    for text in texts:
        method, _, setting = text.partition(".")
        if "=" in method or not setting:
            raise ValueError(f"--set takes METHOD.SETTING=VALUE, e.g. admm.beta=2, got {text!r}.")
        if method not in names:
            raise ValueError(f"--set: {method!r} is not compared; methods are {', '.join(names)}.")
        given.setdefault(method, []).append(setting)
    return [
        methods.get(name).with_params(**options.method_settings(name, given.get(name)))
        for name in names
    ]


def _epochs(texts: Sequence[str]) -> dict[str, int]:
    epochs = {}
    for text in texts:
        method, _, number = text.partition("=")
        if not number.isdecimal():
            raise ValueError(f"--set-epochs takes METHOD=EPOCHS, e.g. admm=50, got {text!r}.")
        epochs[method] = int(number)
    return epochs
