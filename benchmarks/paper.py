"""Run the paper's tables and figures and those beyond it, and write their pages.

    python benchmarks/paper.py table2 [--columns paper,adam] [--rows 300-100] [--seeds 0,1,2]
    python benchmarks/paper.py table2 --quick    # one seed, one epoch, in a folder of its own
    python benchmarks/paper.py --pages           # run nothing, write the pages of the results

Each finished run is a line of ``results/NAME.jsonl`` and is not run again; a run that was cut goes
on from its checkpoint.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

import pages
from beyond import TABLES, Table
from experiments import EXPERIMENTS, Experiment, Role
from records import RESULTS, Record
from trials import Runner, on_held_out

KNOWN = (*EXPERIMENTS, *TABLES)


def run_experiment(
    experiment: Experiment,
    runner: Runner,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    epochs: int | None = None,
    columns: Sequence[str] | None = None,
    rows: Sequence[str] | None = None,
) -> list[Record]:
    """The final runs of an experiment, running what is missing.

    One with curves has one more run of each, with a sixth of the training rows held out and
    watched, and perhaps a long one.
    """
    finals = []
    for column, role in experiment.roles.items():
        if columns is not None and column not in columns:
            continue
        rate = tune(experiment, column, runner, epochs)
        for hidden in experiment.networks:
            row = "-".join(map(str, hidden))
            if rows is not None and row not in rows:
                continue
            for seed in seeds:
                trial = experiment.trial(role, hidden, seed, epochs, rate)
                drawn = experiment.curves
                record = runner.run(trial, kind="final", row=row, column=column, drawn=drawn)
                finals.append(record)
            first = on_held_out(experiment.trial(role, hidden, seeds[0], epochs, rate))
            if experiment.curves:
                runner.run(first, kind="watched", row=row, column=column, closely=True)
            if role.long is not None and epochs is None:
                long = replace(first, epochs=role.long.epochs, precision=role.long.precision)
                runner.run(long, kind="long", row=row, column=column, closely=True)
    return finals


def tune(
    experiment: Experiment, column: str, runner: Runner, epochs: int | None = None
) -> float | None:
    """The learning rate that does best on held-out training rows; none if there is no grid."""
    role: Role = experiment.roles[column]
    hidden, length = experiment.networks[0], experiment.tuning_epochs
    scores = {}
    for rate in role.grid:
        trial = on_held_out(experiment.trial(role, hidden, 0, min(length, epochs or length), rate))
        row = "-".join(map(str, hidden))
        record = runner.run(trial, kind="tuning", row=row, column=column, rate=rate)
        scores[rate] = float(record.get("score", 0.0))
    return max(scores, key=scores.__getitem__) if scores else None


def run_table(
    table: Table,
    runner: Runner,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    epochs: int | None = None,
    columns: Sequence[str] | None = None,
    rows: Sequence[str] | None = None,
) -> list[Record]:
    """All runs of a table beyond the paper, running what is missing."""
    return [
        runner.run(
            trial,
            kind="final",
            row=row.name,
            column=column,
            options=row.trial.options if row.helps else None,
            closely=table.watched,
        )
        for row in table.rows
        if rows is None or row.name in rows
        for column in row.rates
        if columns is None or column in columns
        for trial in row.trials(column, tuple(seeds), epochs)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(KNOWN)}, or all")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--epochs", type=int, help="in place of the experiment's own")
    parser.add_argument("--columns", help="only these, e.g. paper,best,adam,sgd")
    parser.add_argument("--rows", help="only these, e.g. 300-100 or step-5")
    parser.add_argument("--quick", action="store_true", help="one seed, one epoch")
    parser.add_argument("--pages", action="store_true", help="only write the pages")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    given = parser.parse_args()
    names = list(KNOWN) if given.names == ["all"] else given.names
    if unknown := [name for name in names if name not in KNOWN]:
        parser.error(f"unknown name {unknown[0]!r}; there are {', '.join(KNOWN)}.")
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    seeds = [int(seed) for seed in given.seeds.split(",")]
    folder, epochs = given.out, given.epochs
    if given.quick:
        seeds, epochs, folder = seeds[:1], 1, folder.parent / "quick"
    options = {
        "seeds": seeds,
        "epochs": epochs,
        "columns": given.columns and given.columns.split(","),
        "rows": given.rows and given.rows.split(","),
    }
    for name in names:
        runner = Runner(name, folder)
        if name in TABLES:
            run_table(TABLES[name], runner, **options)
        else:
            run_experiment(EXPERIMENTS[name], runner, **options)
        print(pages.Page(name, folder).scores(name))
    if given.pages or (names and folder == RESULTS):
        for name in pages.names():
            print(pages.Page(name, folder).write())


if __name__ == "__main__":
    main()
