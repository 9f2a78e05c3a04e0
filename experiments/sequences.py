"""Settings for networks over sequences, tried on held-out data for LPOM and its rival alike.

    python experiments/sequences.py rnn --epochs 10 --rates 0.001,0.002,0.004
    python experiments/sequences.py lstm --epochs 3 --rates 0.002,0.004 --schedules linear,cosine
    python experiments/sequences.py transformer --epochs 1 --rates 0.002 --widths 0.5,1,2

With widths the attention is hard, the largest score taking all, and the rival is straight-through.

MNIST, row by row; a sixth of the training images is held out, the test set is not touched. What
was found is what `lpom compare` was then given (experiments/networks). Finished runs are kept in
results/sequences.jsonl.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from lpom import datasets
from lpom.experiments.paper import with_rate
from lpom.experiments.records import Store, Trial
from lpom.experiments.trials import run

RESULTS = Path(__file__).parent / "results" / "sequences.jsonl"
NETWORKS = ("rnn", "lstm", "transformer")


class Tried(Store):
    """Keeps no curves."""

    def add(self, record: dict[str, Any]) -> None:
        super().add({name: value for name, value in record.items() if name != "curve"})


def trials(options: argparse.Namespace) -> Iterator[Trial]:
    plain = Trial(
        "mnist",
        (),
        "lpom",
        loss="cross-entropy",
        epochs=options.epochs,
        seed=options.seed,
        part="validation",
        network=options.network,
    )
    if options.widths:
        for rate, width in product(numbers(options.rates), numbers(options.widths)):
            for method in ("lpom", "straight-through"):
                ramps = {"jumps": {"straight": {"width": width}}}
                params = ramps if method == "lpom" else {"width": width}
                params |= with_rate(method, rate)
                hard = {"attention": "one_hot"}
                yield replace(plain, method=method, params=params, options=hard)
        return
    for schedule, rate in product(options.schedules.split(","), numbers(options.rates)):
        for method in ("lpom", "adam"):
            weights = {"learning_rate": rate, "schedule": schedule}
            params = {"weights": {"adaptive": weights}} if method == "lpom" else weights
            yield replace(plain, method=method, params=params)


def numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("--rates", default="0.001,0.002,0.004")
    parser.add_argument("--schedules", default="linear")
    parser.add_argument("--widths", default="")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    data, store = datasets.load("mnist"), Tried(options.out)
    for trial in trials(options):
        record = run(trial, data, store)
        said = record.get("reason") or f"{record['score']:.2%} held out"
        print(trial.method, trial.params, said, flush=True)


if __name__ == "__main__":
    main()
