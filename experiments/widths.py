"""How jumps are best trained: widths, mu and methods on held-out data, for docs/discrete.md.

    python experiments/widths.py [--epochs 3] [--seeds 0,1]

MNIST, 784-300-100-10, 20,000 training images, 4,000 others held out; the test set is not touched.
The table is printed and put between the marks of docs/discrete.md. Finished runs are kept in
results/widths.jsonl.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lpom import datasets
from lpom.experiments.held_out import first_rows, length_and_seeds, put, table
from lpom.experiments.records import Store, Trial

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "discrete.md"

ROWS = 24_000
ACTIVATIONS = ("step", "sign")


def lpom(width: float, relative: bool = True, **settings: Any) -> tuple[str, dict[str, Any]]:
    return "lpom", {"jumps": {"straight": {"width": width, "relative": relative}}, **settings}


def through(width: float, relative: bool = True, **settings: Any) -> tuple[str, dict[str, Any]]:
    return "straight-through", {"width": width, "relative": relative, **settings}


#: Label, and the method with its settings.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"LPOM, width {w:g}": lpom(w, False) for w in (1.0, 2.0, 4.0)},
    **{f"LPOM, width {w:g} spreads": lpom(w) for w in (1.0, 1.5, 2.0, 3.0)},
    **{f"LPOM, width 1.5 spreads, mu {mu:g}": lpom(1.5, mu=mu) for mu in (5.0, 100.0)},
    "LPOM, ramps narrowing from 1 to 0.1": ("lpom", {"jumps": "continuation"}),
    **{f"straight-through, width {w:g}": through(w, False) for w in (1.0, 2.0, 4.0)},
    **{f"straight-through, width {w:g} spreads": through(w) for w in (1.0, 1.5, 2.0, 3.0)},
    "straight-through, identity": through(2.0, False, ramp="identity"),
    "back-propagation on ramps narrowing from 1 to 0.1": ("ramps", {}),
}


def trials(label: str, activation: str, epochs: int, seeds: list[int]) -> Iterator[Trial]:
    method, params = VARIANTS[label]
    for seed in seeds:
        yield Trial(
            "mnist",
            (300, 100),
            method,
            params,
            activation=activation,
            epochs=epochs,
            seed=seed,
        )


def main() -> None:
    epochs, seeds = length_and_seeds(__doc__)
    data = first_rows(datasets.load("mnist"), ROWS)
    store = Store(HERE / "results" / "widths.jsonl")
    made = table(
        list(VARIANTS),
        ACTIVATIONS,
        lambda row, column: trials(row, column, epochs, seeds),
        data,
        store,
    )
    put(PAGE, "widths.py", made)


if __name__ == "__main__":
    main()
