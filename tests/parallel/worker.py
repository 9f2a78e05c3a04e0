"""One rank: runs what the test asks for, and writes down what came of it.

Called with a folder, in whose ``cases.json`` are the names of the cases, or with a folder and what
is to go wrong; RANK and the other variables of torch.distributed are set as torchrun sets them.
The test calls `run` itself to have the same of one rank.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lpom
from lpom import LPOM, Adaptive
from lpom.parallel import Pipeline
from lpom.penalties import L1

TIMES = ("seconds", "samples_per_second")


def wide():
    return lpom.mlp([7, 48, 64, 32, 3], seed=0)


def chain():
    return lpom.mlp([7, 9, 8, 6, 3], seed=0)


def residual():
    """Batch norm, and modules within modules."""
    inner = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    head = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3))
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Softplus(), inner, head)


def pictures():
    return nn.Sequential(
        nn.Conv2d(3, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(4),
        nn.Conv2d(6, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(72, 3),
    )  # fmt: skip


class Branched(nn.Module):
    """No Sequential: its rows can be shared, its layers can't."""

    def __init__(self):
        super().__init__()
        self.low, self.high, self.head = nn.Linear(7, 9), nn.Linear(9, 9), nn.Linear(9, 3)

    def forward(self, x):
        x = torch.tanh(self.low(x))
        return self.head(x + torch.relu(self.high(x)))


MODELS = {
    "chain": (chain, (7,)),
    "wide": (wide, (7,)),
    "residual": (residual, (1, 6, 6)),
    "pictures": (pictures, (3, 20, 20)),
    "branched": (Branched, (7,)),
}
METHODS = {
    "lpom": LPOM(mu=None),
    "adam": "adam",
    "sgd": lpom.methods.get("sgd", learning_rate=0.1, schedule="constant"),
    "muon": LPOM(mu=None, weights=Adaptive("muon")),
}


def run(name, parallel=None, **options):
    """The case ``network-method[-more]...`` on 25 rows in batches of 12; the last has one."""
    network, method, *more = name.split("-")
    make, shape = MODELS[network]
    torch.manual_seed(options.pop("model_seed", 1))
    model = make().double()
    X, y = rows(shape)
    weight = torch.linspace(0, 2, 25).double() if "weighted" in more else None
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


def rows(shape):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(25, *shape, generator=generator, dtype=torch.float64), torch.arange(25) % 3


def run_loaders(parallel=None):
    """Each rank has rows and a loader of its own, one of them a batch more; then all in one."""
    parts = [torch.arange(0, 13).split(6), torch.arange(13, 25).split(6)]
    if parallel is not None:
        batches = parts[int(os.environ["RANK"])]
    else:
        batches = [torch.cat([parts[0][0], parts[1][0]]), torch.cat([parts[0][1], parts[1][1]])]
        batches.append(parts[0][2])
    model = chain().double()
    X, y = rows((7,))
    loader = DataLoader(TensorDataset(X, y), batch_sampler=[b.tolist() for b in batches])
    result = lpom.fit(
        model, loader, method=METHODS["adam"], epochs=2, seed=3, progress=False, parallel=parallel
    )
    found = outcome(model, result)
    for epoch in found["epochs"]:
        for of_the_first_batch in ("objective", "gaps", "rates"):
            del epoch[of_the_first_batch]
    return found


def outcome(model, result):
    epochs = [{k: v for k, v in asdict(e).items() if k not in TIMES} for e in result.history]
    return {
        "weights": {name: tensor.tolist() for name, tensor in model.state_dict().items()},
        "epochs": epochs,
        "status": result.status,
    }


def two(folder):
    found = {}
    for case in json.loads((folder / "cases.json").read_text()):
        name, layers, data, delay = case
        parallel = lpom.Parallel(layers=layers, data=data, delay=delay)
        ran = run_loaders(parallel) if name == "loaders" else run(name, parallel)
        found[json.dumps(case)] = ran
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


def in_the_second_epoch(rank, happens, step_number=5):
    """Let something happen to one rank in the middle of the second epoch, or at another step."""
    step, done = Pipeline.step, 0

    def disturbed(self, *arguments):
        nonlocal done
        done += 1
        if done == step_number and self.ranks.rank == rank:
            happens()
        return step(self, *arguments)

    Pipeline.step = disturbed


def stumble():
    raise ArithmeticError("it stumbled")


REFUSED = {
    "mu": ({"method": LPOM(mu=20.0)}, "runs the model"),
    "a rival": ({"method": "bcd"}, "runs the model"),
    "factored": ({"method": LPOM(mu=None, weights=lpom.Adaptive("factored"))}, "factored"),
    "penalties": ({"method": LPOM(mu=None, penalties=L1(1e-4))}, "penalties"),
    "averaging": ({"averaging": 0.9}, "averaging"),
    "compile": ({"compile": True}, "parallel"),
}


def refused(name, parallel):
    """Such a call says so by the word."""
    options, word = REFUSED[name]
    try:
        lpom.fit(chain(), torch.zeros(9, 7), torch.arange(9) % 3, parallel=parallel, **options)
    except ValueError as error:
        assert word in str(error), error
    else:
        raise AssertionError(name)


def main(folder, *fault):
    match fault:
        case ():
            two(folder)
        case ("die",):
            in_the_second_epoch(1, lambda: os.kill(os.getpid(), signal.SIGKILL))
            plan = lpom.Checkpoint(folder / "run", every_epochs=1)
            run("wide-adam", lpom.Parallel(layers=2, delay="none"), checkpoint=plan)
        case ("interrupt",):  # as a terminal does it: all of them
            for rank in (0, 1):
                in_the_second_epoch(rank, lambda: os.kill(os.getpid(), signal.SIGINT), 2)
            warnings.filterwarnings("ignore", message="training was interrupted")
            run("wide-adam", lpom.Parallel(layers=2, delay="none"), checkpoint=folder / "run")
            print("stopped in order")
        case ("stumble",):
            for name in REFUSED:
                refused(name, lpom.Parallel(layers=2))
            print("all refused")
            for parallel in (lpom.Parallel(data=2), lpom.Parallel(data=3)):
                try:
                    run("residual-adam", parallel, model_seed=int(os.environ["RANK"]))
                except ValueError as error:
                    print(error)
            in_the_second_epoch(1, stumble)
            run("chain-adam", lpom.Parallel(data=2))


if __name__ == "__main__":
    warnings.simplefilter("error")
    main(Path(sys.argv[1]), *sys.argv[2:])
    torch.distributed.destroy_process_group()
