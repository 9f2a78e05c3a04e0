"""A process that forks runs of training, so that tests can kill them without paying for imports.

Reads one JSON object per line: what to train, where to keep it, and where to write what came of
it. Answers with the pid of the child, and when that has ended with its exit code (or minus the
signal that killed it); 2 says that checkpoints did not fit.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import lpom

TIMES = ("seconds", "samples_per_second")


def data():
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 3
    centres = 2 * torch.randn(3, 5, generator=generator)
    return centres[y] + torch.randn(60, 5, generator=generator), y


def hold(method: type, steps: int, until: str) -> None:
    """After so many steps the next one waits until there is such a file."""
    step, done = method.step, 0

    def held(self, *args):
        nonlocal done
        while done == steps and not os.path.exists(until):
            time.sleep(0.001)
        done += 1
        return step(self, *args)

    method.step = held


def train(order: dict) -> dict:
    """The run that is asked for, and all of its outcome but times."""
    X, y = data()
    rows, options = (X, y), {"batch_size": 20}
    if order["source"] == "loader":
        rows, options = (DataLoader(TensorDataset(X, y), batch_size=20, shuffle=True),), {}
    if lpom.methods.METHODS[order["method"]].full_batch:
        options = {}
    model = lpom.mlp([5, 6, 3], seed=0)
    folder = order.get("folder")
    plan = None if folder is None else lpom.Checkpoint(folder, every_minutes=0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = lpom.fit(
            model,
            *rows,
            method=order["method"],
            loss="squared",
            epochs=order["epochs"],
            validation_data=(X[:15], y[:15]),
            early_stopping=lpom.EarlyStopping(patience=100),
            seed=3,
            progress=False,
            checkpoint=plan,
            **options,
        )
    epochs = [{k: v for k, v in asdict(e).items() if k not in TIMES} for e in result.history]
    return {
        "status": result.status,
        "weights": [p.tolist() for p in model.parameters()],
        "epochs": epochs,
        "said": [str(warning.message) for warning in said],
    }


def main() -> None:
    torch.set_num_threads(1)
    train({"method": "lpom", "source": "loader", "epochs": 1})  # what torch imports on demand
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if "largest_file" in order:
                    limit = order["largest_file"]
                    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                if "hold" in order:
                    hold(lpom.methods.METHODS[order["method"]], *order["hold"])
                outcome = train(order)
                if "largest_file" not in order:
                    Path(order["out"]).write_text(json.dumps(outcome))
                full = any("File too large" in sentence for sentence in outcome["said"])
                code = 2 if full else 0
            except SystemExit as stop:
                code = stop.code
            finally:
                sys.stderr.flush()
                os._exit(code)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
