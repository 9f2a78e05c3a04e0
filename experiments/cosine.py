"""How near LPOM's step is to back-propagation's: writes docs/cosine.md.

    python experiments/cosine.py [--seeds 0,1,2]

Both compute a direction for all weights from the same batch of the digits of scikit-learn: LPOM by
one interleaved sweep, back-propagation by autograd. The cosine of the angle between the two is
taken at the first weights, and again after epochs of training by LPOM.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lpom
from lpom import datasets, losses
from lpom.files import write_atomically
from lpom.methods import Batch, Problem
from lpom.methods.base import Method

HERE = Path(__file__).parent
ACTIVATIONS = ("relu", "tanh", "sigmoid")
MUS = (1.0, 5.0, 20.0, 100.0)
SIZES = (64, 100, 50, 10)
EPOCHS = (0, 10)
ROWS = 100
LOSS = losses.get("cross-entropy")


def step(method: Method[Any], model: nn.Module, batch: Batch) -> Tensor:
    """How a method moves all weights, which are put back."""
    problem = Problem(model, LOSS)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    method.step(problem, batch, method.init(problem))
    after = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    nn.utils.vector_to_parameters(before, model.parameters())
    return after - before


def cosine(model: nn.Module, batch: Batch, mu: float) -> float:
    """Between the steps of LPOM and of back-propagation, from the same weights and rows."""
    weights = lpom.Adaptive(optimizer="sgd", learning_rate=1.0, schedule="constant")
    lifted = step(lpom.LPOM(mu=mu, weights=weights), model, batch)
    plain = step(lpom.methods.SGD(learning_rate=1.0, schedule="constant"), model, batch)
    return float(torch.cosine_similarity(lifted, plain, dim=0))


def measure(activation: str, epochs: int, seed: int) -> list[float]:
    """The cosine for every mu, after epochs of training."""
    data = datasets.load("digits")
    X, y = torch.from_numpy(data.x_train) / 16, torch.from_numpy(data.y_train)
    model = lpom.mlp(SIZES, activation, seed=seed)
    if epochs:
        lpom.fit(model, X, y, epochs=epochs, seed=seed, progress=False)
    model.double()
    rows = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed))[:ROWS]
    batch = Batch(X[rows].double(), LOSS.encode(y[rows], 10, 10, torch.float64))
    return [cosine(model, batch, mu) for mu in MUS]


def table(seeds: list[int]) -> str:
    """Means over the seeds, and the least of all."""
    lines = [
        "| activation | epochs trained | " + " | ".join(f"mu = {mu:g}" for mu in MUS) + " |",
        "|---|---|" + "---|" * len(MUS),
    ]
    for activation in ACTIVATIONS:
        for epochs in EPOCHS:
            runs = [measure(activation, epochs, seed) for seed in seeds]
            cells = [
                f"{statistics.mean(column):.4f} (least {min(column):.4f})"
                for column in zip(*runs, strict=True)
            ]
            lines.append(f"| {activation} | {epochs} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0,1,2")
    seeds = [int(seed) for seed in parser.parse_args().seeds.split(",")]
    network, drawn = "-".join(map(str, SIZES)), ", ".join(map(str, seeds))
    text = (
        "<!-- Made by experiments/cosine.py; do not edit. -->\n\n"
        f"Cosine of the angle between the two steps, {network}, cross-entropy, {ROWS} rows of the\n"
        f"digits, double precision; mean over seeds {drawn}.\n\n{table(seeds)}"
    )
    write_atomically(HERE.parent / "docs" / "cosine.md", text.encode())


if __name__ == "__main__":
    main()
