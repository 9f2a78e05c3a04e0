"""One rank: runs what the test asks for, and writes down what came of it.

Called with a folder, in whose ``cases.json`` are the names of the cases; RANK and the other
variables of torch.distributed are set as torchrun sets them. The test calls `run` itself to have
the same of one rank.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

import lpom
from lpom import Adaptive, Exact, LPOM

TIMES = ("seconds", "samples_per_second")


class Residual(nn.Module):
    """A small residual network with batch norm and max-pooling."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.inner = nn.Conv2d(4, 4, 3, padding=1)
        self.inner_norm = nn.BatchNorm2d(4, momentum=None)
        self.outer = nn.Conv2d(4, 4, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(4 * 3 * 3, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(x + self.outer(torch.relu(self.inner_norm(self.inner(x)))))
        return self.head(self.pool(x).flatten(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.RNN(4, 5, batch_first=True)
        self.hidden = nn.Linear(5, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(self.cell(x)[0][:, -1])))


def chain():
    return lpom.mlp([7, 9, 8, 6, 3], seed=0)


MODELS = {"chain": (chain, (7,)), "residual": (Residual, (1, 6, 6)), "recurrent": (Recurrent, (5, 4))}
METHODS = {
    "adam": LPOM(mu=5.0),
    "sgd": LPOM(mu={"*.bias": 4.0, "*": 5.0}, weights=Adaptive(optimizer="sgd")),
    "exact": LPOM(mu=5.0, weights=Exact(iterations=2, ridge=0.2)),
}


def run(name, parallel=None, **options):
    """The case ``network-method[-weighted]`` on 37 rows in batches of 12; the last has one."""
    network, method, *more = name.split("-")
    make, shape = MODELS[network]
    torch.manual_seed(1)
    model = make().double()
    generator = torch.Generator().manual_seed(2)
    X = torch.randn(37, *shape, generator=generator, dtype=torch.float64)
    y = torch.arange(37) % 3
    weight = torch.rand(37, generator=generator).double() if "weighted" in more else None
    result = lpom.fit(
        model,
        X,
        y,
        method=METHODS[method],
        epochs=2,
        batch_size=12,
        sample_weight=weight,
        validation_data=(X[:11], y[:11]),
        early_stopping=True,
        seed=3,
        progress=False,
        parallel=parallel,
        **options,
    )
    return outcome(model, result)


def outcome(model, result):
    epochs = [{k: v for k, v in asdict(e).items() if k not in TIMES} for e in result.history]
    return {
        "weights": {name: tensor.tolist() for name, tensor in model.state_dict().items()},
        "epochs": epochs,
        "status": result.status,
    }


def main(folder):
    found = {}
    for case in json.loads((folder / "cases.json").read_text()):
        name, layers, data, delay = case
        found[json.dumps(case)] = run(name, lpom.Parallel(layers=layers, data=data, delay=delay))
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    warnings.simplefilter("error")
    main(Path(sys.argv[1]))
    torch.distributed.destroy_process_group()
