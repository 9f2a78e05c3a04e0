"""Learning rates for networks over sequences, tried on held-out data for LPOM and Adam alike.

    python experiments/sequences.py rnn --epochs 10 --rates 0.001,0.002,0.004
    python experiments/sequences.py lstm --epochs 3 --rates 0.002,0.004 --schedules linear,cosine

MNIST, row by row; a sixth of the training images is held out, the test set is not touched. What
was found is what `lpom compare` was then given (experiments/networks). Finished runs are kept in
results/sequences.jsonl.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lpom import datasets
from lpom.experiments.records import Store, Trial
from lpom.experiments.trials import run

RESULTS = Path(__file__).parent / "results" / "sequences.jsonl"
NETWORKS = ("rnn", "lstm", "transformer")


class Tried(Store):
    """Keeps no curves."""

    def add(self, record: dict[str, Any]) -> None:
        super().add({name: value for name, value in record.items() if name != "curve"})


def trials(options: argparse.Namespace) -> Iterator[Trial]:
    for schedule in options.schedules.split(","):
        for rate in map(float, options.rates.split(",")):
            for method in ("lpom", "adam"):
                weights = {"learning_rate": rate, "schedule": schedule}
                yield Trial(
                    "mnist",
                    (),
                    method,
                    {"weights": {"adaptive": weights}} if method == "lpom" else weights,
                    loss="cross-entropy",
                    epochs=options.epochs,
                    seed=options.seed,
                    part="validation",
                    network=options.network,
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("--rates", default="0.001,0.002,0.004")
    parser.add_argument("--schedules", default="linear")
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
