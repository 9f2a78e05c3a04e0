"""Search help against learning by heart for a row of `lpom reproduce past`, alike for each method.

    python experiments/search.py 300-100 [--columns lpom,adam,sgd] [--candidates 27] [--epochs 36]
        [--width 0.5]

Each column gets the same number of candidates, drawn from the same space: rate, dropout, batch
norm, label smoothing, weight decay, noise, averaging of weights, and for 2048x3 how far rows are
moved adversarially. By successive halving: all of them train for a few epochs, the better third
three times as long, and so on, each from its beginning. ``--width`` makes the hidden layers
narrower by that share, which saves time.
Judged on a sixth of the training data that is held out; the test set is not touched. Finished runs
are lines of results/tried.jsonl, and are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lpom import datasets
from lpom.experiments.beyond import PAST, Help, Row
from lpom.experiments.records import Trial
from lpom.experiments.reproduce import outcome
from lpom.experiments.trials import run
from lpom.experiments.tried import Tried

RESULTS = Path(__file__).parent / "results"
RATES = {"lpom": (1e-3, 2e-3, 4e-3), "adam": (1e-3, 2e-3, 4e-3), "sgd": (0.1, 0.3, 1.0)}
SPACE: dict[str, tuple[Any, ...]] = {
    "rate": (0, 1, 2),  # of the method's own
    "dropout": tuple(itertools.product((0.0, 0.1, 0.2, 0.3), (0.0, 0.2, 0.4))),
    "norm": (False, True),
    "smoothing": (0.0, 0.1),
    "weight_decay": (0.0, 1e-5, 1e-4),
    "noise": (0.0, 0.2),
    "averaging": (0.0, 0.999),
    "adversarial": (0.0,),
}


#: For rows of wide networks, whose runs are long: what the search of 300-100 found; of dropout
#: alone there are several.
WIDE: dict[str, tuple[Any, ...]] = {
    "rate": (1,),
    "dropout": ((0.1, 0.0), (0.2, 0.0), (0.2, 0.2)),
    "norm": (True,),
    "smoothing": (0.1,),
    "weight_decay": (0.0,),
    "noise": (0.0,),
    "averaging": (0.0,),
    "adversarial": (0.0,),
}
#: The same for 2048x3: rows moved adversarially in place of dropout.
MOVED = WIDE | {"rate": (2,), "dropout": ((0.0, 0.0),), "adversarial": (1.0, 2.0, 3.0)}


def halving(n_candidates: int, epochs: int) -> list[tuple[int, int]]:
    """How many candidates train in each round, and for how many epochs, the last for all."""
    counts = [n_candidates]
    while counts[-1] > 3:
        counts.append(math.ceil(counts[-1] / 3))
    shares = [3**k for k in reversed(range(len(counts)))]
    return [
        (count, max(1, round(epochs / share))) for count, share in zip(counts, shares, strict=True)
    ]


def space_of(row: Row, pictures: bool) -> dict[str, tuple[Any, ...]]:
    """Noise is added to pictures only."""
    if row.trial.dataset == "cifar-10":
        return WIDE | {"dropout": ((0.1, 0.2), (0.2, 0.35), (0.2, 0.5))}
    if row.name == "2048x3":
        return MOVED
    if row.trial.precision is not None:
        return WIDE
    return SPACE if pictures else SPACE | {"noise": (0.0,)}


def candidates(column: str, n: int, space: dict[str, tuple[Any, ...]]) -> list[Help]:
    """The first ``n`` points of a fixed order of a space, with rates of the method's own."""
    points = list(itertools.product(*space.values()))
    drawn = [points[k] for k in np.random.default_rng(0).permutation(len(points))[:n]]
    helps = [Help(**dict(zip(SPACE, point, strict=True))) for point in drawn]
    return [replace(help, rate=RATES[column][int(help.rate)]) for help in helps]


def trial(row: Row, column: str, help: Help, epochs: int) -> Trial:
    helped = replace(row, rates={column: help.rate}, helps={column: help})
    return replace(next(helped.trials(column, (0,), epochs)), part="validation")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("row", choices=[row.name for row in PAST.rows])
    parser.add_argument("--columns", default=",".join(PAST.columns))
    parser.add_argument("--candidates", type=int, default=27)
    parser.add_argument("--epochs", type=int, default=36, help="of the last round")
    parser.add_argument("--width", type=float, default=1.0, help="share of the hidden units")
    options = parser.parse_args()
    row = next(row for row in PAST.rows if row.name == options.row)
    hidden = [round(options.width * n) for n in row.trial.options["hidden"]]
    row = replace(row, trial=replace(row.trial, options=row.trial.options | {"hidden": hidden}))
    data = datasets.load(row.trial.dataset)
    store = Tried(RESULTS, PAST.name)
    for column in options.columns.split(","):
        left = candidates(column, options.candidates, space_of(row, data.image_shape is not None))
        for count, epochs in halving(len(left), options.epochs):
            found = []
            for help in left[:count]:
                record = run(trial(row, column, help, epochs), data, store)
                print(f"{column}, {epochs} epochs, {outcome(record)}: {help}", flush=True)
                found.append((record.get("score", 0.0), help))
            found.sort(key=lambda one: -one[0])
            left = [help for _, help in found]
        print(f"{column}: {left[0]}", flush=True)


if __name__ == "__main__":
    main()
