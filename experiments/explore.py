"""Try a setting on held-out training data; experiments/README.md lists what was tried.

    python experiments/explore.py table2 --method lifted --loss cross-entropy --epochs 5 ridge=10
    python experiments/explore.py table2 --epochs 5 mu=5.0 "weights={'exact': {'ridge': 0.3}}"

The network is the experiment's first unless --hidden names another. Settings of the method follow
as NAME=VALUE. The test set is not touched. Tried runs are lines of results/tried.jsonl.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path
from typing import Any

from lpom import datasets
from lpom.experiments.paper import EXPERIMENTS
from lpom.experiments.records import Trial
from lpom.experiments.trials import run
from lpom.experiments.tried import Tried

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE")
    parser.add_argument("--hidden", help="e.g. 300,100")
    parser.add_argument("--method", default="lpom")
    parser.add_argument("--loss", default="squared")
    parser.add_argument("--output", default="identity")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_intermixed_args()
    experiment = EXPERIMENTS[options.experiment]
    hidden = experiment.networks[0]
    if options.hidden:
        hidden = tuple(int(width) for width in options.hidden.split(","))
    trial = Trial(
        experiment.dataset,
        hidden,
        options.method,
        {name: _value(text) for name, _, text in (s.partition("=") for s in options.settings)},
        output=options.output,
        loss=options.loss,
        epochs=options.epochs,
        seed=options.seed,
        part="validation",
    )
    tried = Tried(RESULTS, experiment.name)
    record = run(trial, datasets.load(experiment.dataset), tried)
    print(record.get("reason") or f"{record['score']:.2%} held out, {record['train_score']:.2%}")


def _value(text: str) -> Any:
    """A number or a pair of numbers where it is one, else a word."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


if __name__ == "__main__":
    main()
