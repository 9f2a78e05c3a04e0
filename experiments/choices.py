"""What each choice that the paper left open does: writes docs/reproduction.md.

    python experiments/choices.py [--epochs 2] [--seeds 0,1]

MNIST, 784-300-100-10, measured on a sixth of the training data that is held out; the test set is
not touched. One choice is varied at a time around two settings: the exact weight step as the paper
describes it, and our default. Finished runs are kept in results/choices.jsonl.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lpom import datasets
from lpom.experiments.records import Store, Trial
from lpom.experiments.trials import run
from lpom.files import write_atomically

HERE = Path(__file__).parent

EXACT = Trial(
    "mnist",
    (300, 100),
    "lpom",
    {"weights": {"exact": {"ridge": 1.0}}},
    output="leaky_relu",
    output_params={"negative_slope": 0.1},
    loss="squared",
    part="validation",
)
ADAPTIVE = replace(EXACT, params={})
DEEP = (400, 200, 100, 50)


@dataclass(frozen=True)
class Choice:
    """A title, a sentence on what is varied, and the variants: a label and changes to a trial."""

    title: str
    about: str
    base: Trial
    variants: dict[str, dict[str, Any]]


def swept(most: int, rule: str, **order: str) -> dict[str, Any]:
    return {"states": {"sweeps": {**order, "most": most, "rule": rule}}}


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
        "Interleaved needs one sweep; the others take three, so that the error gets to the bottom.",
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
        "With mu = 20 one sweep moves the output a 21st of its way to the target.",
        EXACT,
        {"1": {}} | {f"{n}": swept(n, "plain") for n in (3, 6)},
    ),
    Choice(
        "Damping in a deep network, exact weights",
        "400-200-100-50: the paper's iteration against the safe step and the interleaved order.",
        replace(EXACT, hidden=DEEP),
        {
            f"top-down, 5 sweeps, {rule}": swept(5, rule, order="top-down")
            for rule in ("plain", "safe")
        }
        | {"interleaved, one sweep": {}},
    ),
    Choice(
        "Ridge of the exact weight step",
        "Relative to the size of the states; 0 takes the pseudo-inverse as the paper does. One "
        "that grows over the run is to quiet the noise of the batches at its end.",
        EXACT,
        {f"{ridge:g}": exact(ridge=ridge) for ridge in (0.0, 0.01, 0.1, 1.0, 10.0)}
        | {f"{a:g} to {b:g}": exact(ridge=[a, b]) for a, b in ((0.01, 1.0), (0.1, 10.0))},
    ),
    Choice(
        "Iterations of Algorithm 2",
        "How far each layer's convex problem is solved on a batch.",
        EXACT,
        {"1": {}} | {f"{n}": exact(iterations=n) for n in (3, 10)},
    ),
    Choice(
        "mu, exact weights",
        "The paper takes 20 on MNIST. States move by about 1/mu of the way.",
        EXACT,
        {f"{mu:g}": {"mu": mu} for mu in (2.0, 5.0, 20.0, 100.0)},
    ),
    Choice(
        "mu, adaptive weights",
        "The optimiser is blind to the scale of the gradient, so mu matters far less.",
        ADAPTIVE,
        {f"{mu:g}": {"mu": mu} for mu in (2.0, 5.0, 20.0, 100.0)},
    ),
    Choice(
        "Output activation, exact weights",
        "Behind a ReLU, what is below zero has reached its target of zero.",
        EXACT,
        OUTPUTS,
    ),
    Choice(
        "Output activation, adaptive weights",
        "The paper's ReLU output can lose a class for good; see the remarks.",
        ADAPTIVE,
        OUTPUTS,
    ),
    Choice(
        "Bias, exact weights",
        "The paper leaves biases out of its formulas.",
        EXACT,
        {"with": {}, "without": {"bias": False}},
    ),
    Choice(
        "Adaptive or exact weight step",
        "The same lifted objective; only the solver of the weight block differs.",
        ADAPTIVE,
        {"adaptive": {}, "exact": dict(EXACT.params)},
    ),
    Choice(
        "Loss, adaptive weights, identity output",
        "The paper takes the squared loss.",
        replace(ADAPTIVE, output="identity", output_params={}),
        {name: {"loss": name} for name in ("squared", "cross-entropy", "hinge")},
    ),
]

HEAD = """# Effect of the choices the paper leaves open

The paper does not print its iteration counts, ridge, biases, label coding or output treatment, and
its authors published no code. Each table varies one choice. Where nothing else is said, the
network is 784-300-100-10 with ReLU, biases and a leaky ReLU output (slope 0.1), the targets are
one-hot with 0 and 1, the loss is squared, mu is 20, and one interleaved sweep updates states and
weights; exact weights have a ridge of 1 and one iteration of Algorithm 2.

MNIST, accuracy in per cent on {share} training images held out, after {epochs} epochs of batches
of 100 on the others, mean ± standard deviation over seeds {seeds}; the test set was not touched.
Made by `python experiments/choices.py` from `experiments/results/choices.jsonl`; do not edit.
{origin}

After so few epochs a table tells how fast a setting learns, more than how far it gets: settings of
the longer runs of [experiments/README.md](experiments.md) were chosen by longer runs,
which are listed there. In short:

- With exact weights mu = 20 makes short steps, and all that lengthens them learns faster: a smaller
  mu, more sweeps, more iterations of Algorithm 2, a smaller ridge.
- Plain top-down sweeps diverge in a deep network, and damped ones are slow. Interleaved updates,
  the weights beside the states, need no damping.
- A ReLU output may lose a class; a leaky one does not, and learns no slower. Biases hardly matter.
- Adaptive weights learn fastest, and mu hardly matters to them.
"""


def trials(choice: Choice, label: str, epochs: int, seeds: list[int]) -> Iterator[Trial]:
    """The runs of one variant: fields of a trial are replaced, the rest are the method's."""
    changes = dict(choice.variants[label])
    own = {name: changes.pop(name) for name in list(changes) if hasattr(choice.base, name)}
    base = replace(choice.base, params={**choice.base.params, **changes}, epochs=epochs, **own)
    for seed in seeds:
        yield replace(base, seed=seed)


def table(choice: Choice, epochs: int, seeds: list[int], data: Any, store: Store) -> str:
    """Run what is missing and lay it out."""
    lines = [f"## {choice.title}", "", choice.about, ""]
    lines += ["| variant | held out | training | remarks |", "|---|---|---|---|"]
    for label in choice.variants:
        records = [run(trial, data, store) for trial in trials(choice, label, epochs, seeds)]
        remarks = sorted({remark.split(":")[0] for r in records for remark in r["remarks"]})
        remarks += sorted({r["reason"] for r in records if "reason" in r})
        done = [r for r in records if "score" in r]
        cells = ["", ""]
        if done:
            cells = [_mean([100 * r[key] for r in done]) for key in ("score", "train_score")]
        lines.append("| " + " | ".join([label, *cells, "; ".join(remarks)]) + " |")
        print(lines[-1], flush=True)
    return "\n".join([*lines, ""])


def _mean(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", default="0,1")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    data = datasets.load("mnist")
    store = Store(HERE / "results" / "choices.jsonl")
    tables = [table(choice, options.epochs, seeds, data, store) for choice in CHOICES]
    earlier = any(record["machine"].get("core") for record in store)
    origin = "The runs are older than the graphs of states (the earlier core)." if earlier else ""
    head = HEAD.format(share="10,000", epochs=options.epochs, seeds=options.seeds, origin=origin)
    page = "\n".join([head, *tables])
    write_atomically(HERE.parent / "docs" / "reproduction.md", page.encode())


if __name__ == "__main__":
    main()
