"""Tables of settings tried on held-out training data, put into a page of the documentation."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lpom.datasets import Dataset
from lpom.experiments.records import Store, Trial
from lpom.experiments.trials import run
from lpom.files import write_atomically


def length_and_seeds(about: str) -> tuple[int, list[int]]:
    """Epochs and seeds of every trial, from the command line of a script."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", default="0,1")
    options = parser.parse_args()
    return options.epochs, [int(seed) for seed in options.seeds.split(",")]


def first_rows(data: Dataset, rows: int) -> Dataset:
    """The same data with the first ``rows`` of its training rows."""
    return replace(
        data,
        x_train=data.x_train[:rows],
        y_train=data.y_train[:rows],
        notes=f"The first {rows} training images.",
    )


def table(
    rows: Sequence[str],
    columns: Sequence[str],
    trials: Callable[[str, str], Iterator[Trial]],
    data: Dataset,
    store: Store,
) -> str:
    """Run what is missing: the mean and spread of the trials of each row and column, in per cent.

    Lines are printed as they are made.
    """
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for row in rows:
        cells = []
        for column in columns:
            scores = [
                100 * run(replace(trial, part="validation"), data, store).get("score", 0.0)
                for trial in trials(row, column)
            ]
            spread = f" ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
            cells.append(f"{statistics.mean(scores):.2f}{spread}")
        lines.append(f"| {row} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def put(page: Path, script: str, table: str) -> None:
    """Write a table between the marks that a page has for a script."""
    begin, end = f"<!-- table of experiments/{script} -->", "<!-- end of table -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    if not found:
        raise ValueError(f"{page.name} has no place for this table: expected the mark {begin}.")
    after = rest.partition(end)[2]
    write_atomically(page, f"{before}{begin}\n{table}\n{end}{after}".encode())
