"""How near LPOM's step is to back-propagation's: the page "cosine", in half a minute.

    python benchmarks/cosine.py [--seeds 0,1,2]

Both compute a direction for all weights from the same batch of the digits of scikit-learn: LPOM by
one interleaved sweep, back-propagation by autograd. The cosine of the angle between the two is
taken at the first weights, and again after epochs of training by LPOM.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import data
import lpom
import pages
from records import RESULTS, Store, machine

SIZES, ROWS = (64, 100, 50, 10), 100
ACTIVATIONS, EPOCHS, MUS = ("relu", "tanh", "sigmoid"), (0, 10), (1.0, 5.0, 20.0, 100.0)


def cosine(model: nn.Module, X: Tensor, y: Tensor, mu: float) -> float:
    """Between the gradients of LPOM and of back-propagation, of the same weights and rows."""

    def gradient(network: nn.Module) -> Tensor:
        found = torch.autograd.grad(F.cross_entropy(network(X), y), list(model.parameters()))
        return nn.utils.parameters_to_vector(found)

    lifted = gradient(lpom.lift(model, mu=mu))
    return float(torch.cosine_similarity(lifted, gradient(model), dim=0))


def measure(store: Store, seed: int) -> None:
    """Records of all activations, lengths and mu that are missing."""
    digits = data.load("digits")
    X, y = torch.from_numpy(digits.x_train) / 16, torch.from_numpy(digits.y_train)
    rows = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed))[:ROWS]
    for activation, epochs in product(ACTIVATIONS, EPOCHS):
        about = {"row": activation, "epochs": epochs, "seed": seed}
        if store.select(**about):
            continue
        model = lpom.mlp(SIZES, activation, seed=seed)
        if epochs:
            lpom.fit(
                model, X, y, method=lpom.LPOM(mu=20.0), epochs=epochs, seed=seed, progress=False
            )
        model.double()
        for mu in MUS:
            value = cosine(model, X[rows].double(), y[rows], mu)
            store.add(about | {"column": f"mu = {mu:g}", "cosine": value} | machine())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    for seed in given.seeds.split(","):
        measure(Store(given.out / "cosine.jsonl"), int(seed))
    if given.out == RESULTS:
        print(pages.Page("cosine").write())


if __name__ == "__main__":
    main()
