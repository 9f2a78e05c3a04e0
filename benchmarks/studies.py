"""Studies on held-out digits, each a table of its page: what the paper leaves open, widths, mu.

    python benchmarks/studies.py choices     # the page "reproduction"
    python benchmarks/studies.py widths      # how jumps are best trained, for docs/choices.md
    python benchmarks/studies.py mu          # how much mu matters, for the same page
    python benchmarks/studies.py sequences   # settings of the known networks over sequences

The test set is not touched. Finished runs are lines of ``results/NAME.jsonl``, and not run again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pages
from experiments import with_rate
from records import RESULTS, Record, Trial
from trials import Runner

EXACT = Trial(
    "mnist",
    (300, 100),
    "lpom",
    {"mu": 20.0, "weights": {"exact": {"ridge": 1.0}}},
    output="leaky_relu",
    output_params={"negative_slope": 0.1},
    loss="squared",
    held_out=True,
)
ADAPTIVE = replace(EXACT, params={"mu": 20.0})
DEEP = (400, 200, 100, 50)


@dataclass(frozen=True)
class Choice:
    """What is varied, and the variants: a label and changes to a trial or to its method."""

    title: str
    base: Trial
    variants: dict[str, dict[str, Any]]

    def trial(self, label: str) -> Trial:
        changes = dict(self.variants[label])
        own = {name: changes.pop(name) for name in list(changes) if hasattr(self.base, name)}
        return replace(self.base, params={**self.base.params, **changes}, **own)


def swept(most: int, rule: str, **order: str) -> dict[str, Any]:
    return {"states": {"sweeps": {**order, "max_sweeps": most, "rule": rule}}}


def exact(**settings: Any) -> dict[str, Any]:
    return {"weights": {"exact": {"ridge": 1.0} | settings}}


OUTPUTS: dict[str, dict[str, Any]] = {
    "leaky ReLU 0.1": {},
    "ReLU": {"output": "relu", "output_params": {}},
    "identity": {"output": "identity", "output_params": {}},
}

CHOICES = [
    Choice(
        "Order of the updates, exact weights",
        EXACT,
        {
            "interleaved, one sweep": {},
            "interleaved, plain": swept(3, "plain"),
            "interleaved, safe": swept(3, "safe"),
            "top-down, plain": swept(3, "plain", order="top-down"),
            "top-down, safe": swept(3, "safe", order="top-down"),
            "paper, plain": swept(3, "plain", order="paper"),
            "paper, safe": swept(3, "safe", order="paper"),
            "parallel, safe": swept(3, "safe", order="parallel"),
        },
    ),
    Choice(
        "Sweeps, exact weights, interleaved",
        EXACT,
        {"1": {}} | {f"{n}": swept(n, "plain") for n in (3, 6)},
    ),
    Choice(
        "Damping in a deep network, exact weights",
        replace(EXACT, hidden=DEEP),
        {
            f"top-down, 5 sweeps, {rule}": swept(5, rule, order="top-down")
            for rule in ("plain", "safe")
        }
        | {"interleaved, one sweep": {}},
    ),
    Choice(
        "Ridge of the exact weight step",
        EXACT,
        {f"{ridge:g}": exact(ridge=ridge) for ridge in (0.0, 0.01, 0.1, 1.0, 10.0)}
        | {f"{a:g} to {b:g}": exact(ridge=[a, b]) for a, b in ((0.01, 1.0), (0.1, 10.0))},
    ),
    Choice(
        "Iterations of Algorithm 2",
        EXACT,
        {"1": {}} | {f"{n}": exact(iterations=n) for n in (3, 10)},
    ),
    Choice(
        "mu, exact weights",
        EXACT,
        {f"{mu:g}": {"mu": mu} for mu in (2.0, 5.0, 20.0, 100.0)},
    ),
    Choice(
        "mu, adaptive weights",
        ADAPTIVE,
        {f"{mu:g}": {"mu": mu} for mu in (2.0, 5.0, 20.0, 100.0)},
    ),
    Choice(
        "Output activation, exact weights",
        EXACT,
        OUTPUTS,
    ),
    Choice(
        "Output activation, adaptive weights",
        ADAPTIVE,
        OUTPUTS,
    ),
    Choice(
        "Bias, exact weights",
        EXACT,
        {"with": {}, "without": {"bias": False}},
    ),
    Choice(
        "Adaptive or exact weight step",
        ADAPTIVE,
        {"adaptive": {}, "exact": exact()},
    ),
    Choice(
        "Loss, adaptive weights, identity output",
        replace(ADAPTIVE, output="identity", output_params={}),
        {name: {"loss": name} for name in ("squared", "cross-entropy", "hinge")},
    ),
]


def _lpom(width: float, relative: bool = True, **settings: Any) -> tuple[str, dict[str, Any]]:
    ramps = {"straight-through": {"width": width, "relative": relative}}
    return "lpom", {"mu": 20.0, "jumps": ramps, **settings}


def _through(width: float, relative: bool = True, **settings: Any) -> tuple[str, dict[str, Any]]:
    return "straight-through", {"width": width, "relative": relative, **settings}


#: Label, and the method with its settings.
WIDTHS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"LPOM, width {w:g}": _lpom(w, False) for w in (1.0, 2.0, 4.0)},
    **{f"LPOM, width {w:g} spreads": _lpom(w) for w in (1.0, 1.5, 2.0, 3.0)},
    **{f"LPOM, width 1.5 spreads, mu {mu:g}": _lpom(1.5, mu=mu) for mu in (5.0, 100.0)},
    "LPOM, ramps narrowing from 1 to 0.1": ("lpom", {"mu": 20.0, "jumps": "continuation"}),
    **{f"straight-through, width {w:g}": _through(w, False) for w in (1.0, 2.0, 4.0)},
    **{f"straight-through, width {w:g} spreads": _through(w) for w in (1.0, 1.5, 2.0, 3.0)},
    "straight-through, identity": _through(2.0, False, ramp="identity"),
    "back-propagation on ramps narrowing from 1 to 0.1": ("ramps", {}),
}

#: Column, and the network with its activation.
_NETWORKS: dict[str, dict[str, Any]] = {
    "300-100 ReLU": {"hidden": (300, 100)},
    "8 x 128 tanh": {"hidden": (128,) * 8, "activation": "tanh"},
    "8 x 128 sigmoid": {"hidden": (128,) * 8, "activation": "sigmoid"},
    "LeNet-5": {"hidden": (), "network": "lenet5"},
    "tanh RNN": {"hidden": (), "network": "rnn"},
}
#: Row, and the method with its settings.
MUS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"mu {mu:g}": ("lpom", {"mu": mu}) for mu in (1.0, 20.0, 200.0)},
    "displacement held": ("lpom", {}),
    "Adam, back-propagation": ("adam", {"learning_rate": 2e-3}),
}


@dataclass(frozen=True)
class Study:
    """Rows and columns of trials. ``page`` is what its table goes into, ``first`` the rows used."""

    page: str
    kind: str
    epochs: int
    cells: Sequence[tuple[str, str, Trial]]
    first: int = 0

    def run(self, name: str, folder: Path, seeds: Sequence[int], epochs: int) -> list[Record]:
        runner = Runner(name, folder, rows=self.first)
        return [
            runner.run(
                replace(trial, seed=seed, epochs=epochs, held_out=True),
                kind=self.kind,
                row=row,
                column=column,
            )
            for row, column, trial in self.cells
            for seed in seeds
        ]


def _widths() -> Iterator[tuple[str, str, Trial]]:
    for label, activation in product(WIDTHS, ("step", "sign")):
        method, params = WIDTHS[label]
        yield label, activation, Trial("mnist", (300, 100), method, params, activation=activation)


def _mus() -> Iterator[tuple[str, str, Trial]]:
    for label, network in product(MUS, _NETWORKS):
        method, params = MUS[label]
        made: Any = _NETWORKS[network]
        yield label, network, Trial("mnist", method=method, params=params, loss=_LOSS, **made)


def _sequences() -> Iterator[tuple[str, str, Trial]]:
    """The same rates for LPOM and its rival; with hard attention also widths of the ramps."""
    for network, rates in (("rnn", (1e-3, 2e-3, 4e-3)), ("lstm", (2e-3, 4e-3))):
        for rate, method in product(rates, ("lpom", "adam")):
            trial = Trial("mnist", (), method, _rated(method, rate), loss=_LOSS, network=network)
            yield network, method, trial
    for width, method in product((0.5, 1.0, 2.0), ("lpom", "straight-through")):
        ramps = (
            {"jumps": {"straight-through": {"width": width}}}
            if method == "lpom"
            else {"width": width}
        )
        params = _rated(method, 2e-3) | ramps
        hard = {"attention": "one_hot"}
        trial = Trial("mnist", (), method, params, loss=_LOSS, network="transformer", options=hard)
        yield "hard transformer", method, trial


def _rated(method: str, rate: float) -> dict[str, Any]:
    return with_rate(method, rate) | ({"mu": 20.0} if method == "lpom" else {})


_LOSS = "cross-entropy"

STUDIES = {
    "choices": Study(
        "reproduction",
        "held out",
        2,
        [(c.title, label, c.trial(label)) for c in CHOICES for label in c.variants],
    ),
    "widths": Study("widths", "held out", 3, list(_widths()), first=24_000),
    "mu": Study("reproduction", "held out", 3, list(_mus()), first=12_000),
    "sequences": Study("", "tried", 3, list(_sequences())),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=STUDIES)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    study = STUDIES[given.name]
    seeds = [int(seed) for seed in given.seeds.split(",")]
    study.run(given.name, given.out, seeds, given.epochs or study.epochs)
    if study.page and given.out == RESULTS:
        print(pages.Page(study.page).write())


if __name__ == "__main__":
    main()
