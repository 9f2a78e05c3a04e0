"""Held-out accuracy after 5 epochs by each fast path and by the plain one, same seeds and batches.

    python experiments/paths.py [--seeds 0,1,2] [--rows 10000]

MNIST, so many rows to train on and 5,000 others held out; the test set is not touched. Plain is the
same network in float32, its modules traced, swept as any graph is, each gradient as a whole. Writes
bench/paths.json, of which performance.py makes a table of docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

import lpom
from lpom import datasets
from lpom.experiments.bench.contest import Report, Row
from lpom.stacks import Stack

HERE = Path(__file__).parent
SMALL, WIDE = (784, 300, 100, 10), (784, 1024, 1024, 10)


class Wrapped(nn.Module):
    """The same network, as one that has to be traced."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x)
        return made


def traced(sizes: tuple[int, ...], seed: int) -> nn.Module:
    return Wrapped(lpom.mlp(sizes, seed=seed))


def double(sizes: tuple[int, ...], seed: int) -> nn.Module:
    return lpom.mlp(sizes, seed=seed).double()


def short(sizes: tuple[int, ...], seed: int) -> nn.Module:
    return lpom.mlp(sizes, seed=seed)


#: Sizes, the network, options of fit, and the short ways that are closed to it.
PATHS: dict[
    str, tuple[tuple[int, ...], Callable[..., nn.Module], dict[str, Any], tuple[str, ...]]
] = {
    "784-300-100-10, plain": (SMALL, traced, {}, ("stack", "large")),
    "784-300-100-10, not traced": (SMALL, short, {}, ("stack", "large")),
    "784-300-100-10, a stack of layers": (SMALL, short, {}, ()),
    "784-300-100-10, float64": (SMALL, double, {}, ()),
    "784-300-100-10, compiled": (SMALL, short, {"compile": True}, ()),
    "784-300-100-10, bf16": (SMALL, short, {"precision": "bf16"}, ()),
    "784-1024x2-10, plain": (WIDE, traced, {}, ("stack", "large")),
    "784-1024x2-10, large matrices in parts": (WIDE, short, {}, ()),
    "784-1024x2-10, bf16": (WIDE, short, {"precision": "bf16"}, ()),
}
_CLOSED = {
    "stack": lambda: patch.object(Stack, "of", return_value=None),
    "large": lambda: patch("lpom.methods.lpom.large_matrices", return_value=set()),
}


def accuracy(name: str, seed: int, train: Any, held: Any, epochs: int = 5) -> float:
    sizes, make, options, closed = PATHS[name]
    model = make(sizes, seed)
    with ExitStack() as stack:
        for way in closed:
            stack.enter_context(_CLOSED[way]())
        lpom.fit(model, *train, epochs=epochs, seed=seed, progress=False, **options)
    return 100 * lpom.evaluate(model, *held)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rows", type=int, default=10_000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    known = datasets.load("mnist")
    order = np.random.default_rng(0).permutation(len(known.x_train))
    X, y = known.x_train[order], known.y_train[order]
    held, train = (X[:5000], y[:5000]), (X[5000:][: given.rows], y[5000:][: given.rows])
    rows = []
    for name in PATHS:
        found = [accuracy(name, int(seed), train, held) for seed in given.seeds.split(",")]
        print(name, found, flush=True)
        case, _, way = name.partition(", ")
        said = ", ".join(f"{value:.2f}" for value in found)
        rows.append(Row(case, way, statistics.mean(found), "%", note=said))
    report = Report("paths", vars(given), rows)
    command = f"python experiments/paths.py --seeds {given.seeds} --rows {given.rows}"
    path = HERE / "bench" / "paths.json"
    path.write_text(json.dumps({"command": command} | report.as_dict(), indent=1) + "\n")


if __name__ == "__main__":
    main()
