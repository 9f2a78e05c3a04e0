"""Search regularisation for a row of the table `past`, alike for each method.

    python benchmarks/search.py 300-100 [--columns lpom,adam,sgd] [--candidates 27] [--epochs 36]

Each column gets the same number of candidates, drawn from the same space, by successive halving:
all of them train for a few epochs, the better third three times as long, and so on, each from its
beginning. Judged on a sixth of the training data that is held out; the test set is not touched.
Runs are lines of ``results/past.jsonl`` of the kind "tried", and are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np

import data
from beyond import PAST, Help, Row
from records import RESULTS, Trial
from trials import Runner

FACTOR = 3  # candidates are divided, and epochs multiplied by it, from round to round
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


def halving(n_candidates: int, epochs: int) -> list[tuple[int, int]]:
    """How many candidates train in each round, and for how many epochs, the last for all.

    >>> halving(27, 90)
    [(27, 10), (9, 30), (3, 90)]
    """
    counts = [n_candidates]
    while counts[-1] > FACTOR:
        counts.append(math.ceil(counts[-1] / FACTOR))
    last = len(counts) - 1
    return [(n, max(1, round(epochs / FACTOR ** (last - k)))) for k, n in enumerate(counts)]


def trial(row: Row, column: str, help: Help, epochs: int) -> Trial:
    helped = replace(row, rates={column: help.rate}, helps={column: help})
    return replace(next(helped.trials(column, (0,), epochs)), held_out=True)


def search(row: Row, column: str, runner: Runner, n: int, epochs: int) -> Help:
    """The best of ``n`` candidates by successive halving."""
    pictures = data.load(row.trial.dataset).image_shape is not None
    left = candidates(column, n, space_of(row, pictures))
    for count, length in halving(len(left), epochs):
        scores = {
            help: runner.run(trial(row, column, help, length), kind="tried").get("score", 0.0)
            for help in left[:count]
        }
        left = sorted(scores, key=lambda help: -scores[help])
    return left[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("row", choices=[row.name for row in PAST.rows])
    parser.add_argument("--columns", default=",".join(PAST.columns))
    parser.add_argument("--candidates", type=int, default=27)
    parser.add_argument("--epochs", type=int, default=36, help="of the last round")
    given = parser.parse_args()
    row = next(row for row in PAST.rows if row.name == given.row)
    for column in given.columns.split(","):
        best = search(row, column, Runner(PAST.name, RESULTS), given.candidates, given.epochs)
        print(f"{column}: {best}", flush=True)


if __name__ == "__main__":
    main()
