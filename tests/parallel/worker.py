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
from lpom import LPOM, Adaptive, Exact, Sweeps
from lpom.parallel import Pipeline, Ranks, boxes
from lpom.weights import adam

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


class Pictures(nn.Module):
    """A small network with a large first state."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 16, 7, padding=3)
        self.second = nn.Conv2d(16, 8, 3)
        self.head = nn.Linear(8 * 3 * 3, 3)

    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu(self.first(x)), 4)
        x = nn.functional.max_pool2d(torch.relu(self.second(x)), 2)
        return self.head(x.flatten(1))


def wide():
    return lpom.mlp([7, 48, 64, 32, 3], seed=0)


def chain():
    return lpom.mlp([7, 9, 8, 6, 3], seed=0)


def steps():
    return lpom.mlp([7, 9, 8, 3], "step", seed=0)


MODELS = {
    "chain": (chain, (7,)),
    "steps": (steps, (7,)),
    "residual": (Residual, (1, 6, 6)),
    "recurrent": (Recurrent, (5, 4)),
    "wide": (wide, (7,)),
    "pictures": (Pictures, (3, 32, 32)),
}
METHODS = {
    "adam": LPOM(mu=5.0),
    "sgd": LPOM(mu={"0.*": 4.0, "*": 5.0}, weights=Adaptive("sgd", 0.1, "constant")),
    "exact": LPOM(mu=5.0, weights=Exact(iterations=2, ridge=0.2)),
    "atonce": LPOM(mu=5.0, states=Sweeps("parallel", max_sweeps=4)),
    "atonceplain": LPOM(
        mu={"0.*": 4.0, "*": 5.0},
        states=Sweeps("parallel", max_sweeps=3, rule="plain"),
        weights=Exact(iterations=2, ridge=0.2),
    ),
    "topdown": LPOM(mu=5.0, states=Sweeps("top-down", max_sweeps=2)),
}


FOLDER, share_memory = boxes._FOLDER, Ranks.share_memory


def cramped(self, sizes, messages):
    share_memory(self, {layer: size // 4 for layer, size in sizes.items()}, messages)


def run(name, parallel=None, **options):
    """The case ``network-method[-more]...`` on 25 rows in batches of 12; the last has one.

    In parts: gradients of matrices are never there as a whole. On wire: ranks share no memory.
    Cramped: what they share holds the message of the last batch only.
    """
    network, method, *more = name.split("-")
    adam.LARGE = 5 if "parts" in more else 1 << 19
    boxes._FOLDER = Path("/nowhere") if "wire" in more else FOLDER
    Ranks.share_memory = cramped if "cramped" in more else share_memory
    make, shape = MODELS[network]
    torch.manual_seed(options.pop("model_seed", 1))
    model = make().double()
    X, y = rows(shape)
    weight = torch.linspace(0, 2, 25).double() if "weighted" in more else None
    # plain steps of all states at once may do that; the same numbers are wanted all the same
    warnings.filterwarnings("ignore", "the sweeps over the states diverge")
    result = lpom.fit(
        model,
        X,
        y,
        method=METHODS[method],
        epochs=1 if method == "exact" else 2,
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

    def disturbed(self, batch):
        nonlocal done
        done += 1
        if done == step_number and self.ranks.rank == rank:
            happens()
        return step(self, batch)

    Pipeline.step = disturbed


def stumble():
    raise ArithmeticError("it stumbled")


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
