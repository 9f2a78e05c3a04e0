"""The adding problem: what a tanh RNN remembers of two numbers among a hundred.

    python benchmarks/adding.py [--methods lpom,adam] [--seeds 0,1,2]

A sequence has 100 steps of two features: a number drawn from [0, 1], and a mark that is one at two
steps, one in either half, and zero elsewhere. What is wanted is the sum of the two marked numbers;
saying 1 whatever comes has a mean squared error of 1/6.

The network is a tanh RNN of 64 units and a linear output. Half of its units remember: their
recurrent weights begin as the identity. The others look at the present step: they begin with no
recurrent weights and with random weights on the features. 20,000 sequences to learn from, 2,000
others to measure on, after the last epoch alone. Finished runs are lines of results/adding.jsonl.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from torch import Tensor, nn

from experiments import with_rate
from lpom import methods
from lpom.training import fit
from records import RESULTS, Store, machine

STEPS, WIDTH, ROWS, TEST_ROWS = 100, 64, 20_000, 2_000


def sequences(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Features (rows, steps, 2) and the sums (rows, 1)."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(rows, STEPS, generator=generator)
    half = STEPS // 2
    places = torch.randint(half, (rows, 2), generator=generator) + torch.tensor([0, half])
    marks = torch.zeros(rows, STEPS).scatter_(1, places, 1.0)
    return torch.stack([numbers, marks], -1), (numbers * marks).sum(1, keepdim=True)


class Adder(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.recurrent = nn.RNN(2, WIDTH, batch_first=True)
        self.sum = nn.Linear(WIDTH, 1)
        generator = torch.Generator().manual_seed(seed)
        half = WIDTH // 2
        features, across, bias, _ = self.recurrent.parameters()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()
            across[:half, :half] = torch.eye(half)
            across[:half, half:].normal_(0, 0.02, generator=generator)
            features[half:].normal_(0, 2, generator=generator)
            bias[half:].uniform_(-2, 2, generator=generator)
            self.sum.weight.uniform_(-1 / 8, 1 / 8, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        said: Tensor = self.sum(self.recurrent(x)[0][:, -1])
        return said


def error(method: str, rate: float, epochs: int, seed: int, store: Store) -> float:
    """The mean squared error on the sequences to measure on; from the file if it is there."""
    about = {"kind": "final", "column": method, "method": method, "rate": rate}
    about |= {"epochs": epochs, "seed": seed}
    record = store.find(about)
    if record is None:
        model = Adder(seed)
        params = with_rate(method, rate) | ({"mu": 20.0} if method == "lpom" else {})
        result = fit(
            model,
            *sequences(ROWS, seed=2 * seed),
            method=methods.get(method, **params),
            loss="squared",
            epochs=epochs,
            batch_size=100,
            seed=seed,
            progress=False,
            callbacks=lambda epoch: print(f"{method} {seed}: {epoch.epoch} {epoch.loss}"),
        )
        X, y = sequences(TEST_ROWS, seed=2 * seed + 1)
        with torch.no_grad():
            measured = float((model(X) - y).square().mean())
        about |= {"mean squared error": measured, "seconds": result.training_seconds}
        record = store.add(about | machine())
    return float(record["mean squared error"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default="lpom,adam")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    for method in options.methods.split(","):
        seeds = [int(seed) for seed in options.seeds.split(",")]
        store = Store(options.out / "adding.jsonl")
        errors = [error(method, options.rate, options.epochs, seed, store) for seed in seeds]
        spread = f" ± {statistics.stdev(errors):.4f}" if len(errors) > 1 else ""
        print(f"{method}: mean squared error {statistics.mean(errors):.4f}{spread}")


if __name__ == "__main__":
    main()
