"""How much mu matters, and whether mu="auto" is ever worse: for docs/networks.md.

    python experiments/mu.py [--epochs 3] [--seeds 0,1]

MNIST, 10,000 training images, 2,000 others held out; the test set is not touched. The table is
printed and put into the page. Finished runs are kept in results/mu.jsonl.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lpom import datasets
from lpom.experiments.held_out import first_rows, length_and_seeds, put, table
from lpom.experiments.records import Store, Trial

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "networks.md"
ROWS = 12_000

#: Column, and the network with its activation.
NETWORKS: dict[str, dict[str, Any]] = {
    "300-100 ReLU": {"hidden": (300, 100)},
    "8 x 128 tanh": {"hidden": (128,) * 8, "activation": "tanh"},
    "8 x 128 sigmoid": {"hidden": (128,) * 8, "activation": "sigmoid"},
    "LeNet-5": {"hidden": (), "network": "lenet5"},
    "tanh RNN": {"hidden": (), "network": "rnn"},
}
#: Row, and the method with its settings.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"mu {mu:g}": ("lpom", {"mu": mu}) for mu in (1.0, 20.0, 200.0)},
    'mu "auto"': ("lpom", {"mu": "auto"}),
    "Adam, back-propagation": ("adam", {"learning_rate": 2e-3}),
}


def trials(label: str, network: str, epochs: int, seeds: list[int]) -> Iterator[Trial]:
    method, params = METHODS[label]
    for seed in seeds:
        yield Trial(
            "mnist",
            method=method,
            params=params,
            loss="cross-entropy",
            epochs=epochs,
            seed=seed,
            **NETWORKS[network],
        )


def main() -> None:
    epochs, seeds = length_and_seeds(__doc__)
    data = first_rows(datasets.load("mnist"), ROWS)
    store = Store(HERE / "results" / "mu.jsonl")
    made = table(
        list(METHODS),
        list(NETWORKS),
        lambda row, column: trials(row, column, epochs, seeds),
        data,
        store,
    )
    put(PAGE, "mu.py", made)


if __name__ == "__main__":
    main()
