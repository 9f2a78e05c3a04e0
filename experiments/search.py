"""Search help against learning by heart for a row of `lpom reproduce past`, alike for each method.

    python experiments/search.py 300-100 [--columns lpom,adam,sgd] [--candidates 27] [--epochs 36]

Each column gets the same number of candidates, drawn from the same space: rate, dropout, batch
norm, label smoothing, weight decay, noise, averaging of weights. By successive halving: all of them
train for a few epochs, the better third three times as long, and so on, each from its beginning.
Judged on a sixth of the training data that is held out; the test set is not touched. Finished runs
are lines of results/tried.jsonl, and are not run again.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lpom import datasets
from lpom.experiments.beyond import PAST, Row
from lpom.experiments.paper import with_rate
from lpom.experiments.records import Trial
from lpom.experiments.reproduce import outcome
from lpom.experiments.trials import run
from lpom.experiments.tried import Tried
from lpom.experiments.tune import halving

RESULTS = Path(__file__).parent / "results"
RATES = {"lpom": (1e-3, 2e-3, 4e-3), "adam": (1e-3, 2e-3, 4e-3), "sgd": (0.1, 0.3, 1.0)}
SPACE: dict[str, tuple[Any, ...]] = {
    "rate": (0, 1, 2),  # of the method's own
    "inputs left out": (0.0, 0.1, 0.2, 0.3),
    "states left out": (0.0, 0.2, 0.4),
    "norm": (False, True),
    "smoothing": (0.0, 0.1),
    "weight_decay": (0.0, 1e-5, 1e-4),
    "noise": (0.0, 0.0, 0.2),
    "averaging": (0.0, 0.999),
}


def candidates(row: Row, column: str, n: int) -> Iterator[Trial]:
    """The first ``n`` of a fixed order of the space, as runs of a method on held-out data."""
    points = list(itertools.product(*SPACE.values()))
    for k in np.random.default_rng(0).permutation(len(points))[:n]:
        chosen = dict(zip(SPACE, points[k], strict=True))
        left_out = [chosen["inputs left out"], chosen["states left out"]]
        noisy = {"flip": False, "crop": 0, "noise": chosen["noise"]} if chosen["noise"] else False
        yield replace(
            row.trial,
            method=column,
            params=with_rate(column, RATES[column][chosen["rate"]]),
            options={**row.trial.options, "norm": chosen["norm"], "dropout": left_out},
            loss_params={"label_smoothing": chosen["smoothing"]} if chosen["smoothing"] else {},
            weight_decay=chosen["weight_decay"],
            augment=row.trial.augment or noisy,
            averaging=chosen["averaging"],
            part="validation",
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("row", choices=[row.name for row in PAST.rows])
    parser.add_argument("--columns", default=",".join(PAST.columns))
    parser.add_argument("--candidates", type=int, default=27)
    parser.add_argument("--epochs", type=int, default=36, help="of the last round")
    options = parser.parse_args()
    row = next(row for row in PAST.rows if row.name == options.row)
    data = datasets.load(row.trial.dataset)
    store = Tried(RESULTS, PAST.name)
    for column in options.columns.split(","):
        left = list(candidates(row, column, options.candidates))
        for count, epochs in halving(len(left), options.epochs):
            records = []
            for trial in left[:count]:
                record = run(replace(trial, epochs=epochs), data, store)
                print(f"{column}, {epochs} epochs: {outcome(record)}", flush=True)
                records.append((record.get("score", 0.0), trial))
            records.sort(key=lambda found: -found[0])
            left = [trial for _, trial in records]
        for score, trial in records:
            print(f"{column} {score:.2%}: {described(trial)}", flush=True)


def described(trial: Trial) -> str:
    help = {**trial.params, **trial.options, **trial.loss_params, "augment": trial.augment}
    help |= {"weight_decay": trial.weight_decay, "averaging": trial.averaging}
    return ", ".join(f"{name} {value}" for name, value in help.items())


if __name__ == "__main__":
    main()
