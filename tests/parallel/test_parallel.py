"""Two ranks: the step of one, faults, and what they must agree on."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from . import worker

NAMES = [
    "chain-adam",
    "chain-exact",
    "chain-exact-weighted",
    "chain-sgd-weighted",
    "residual-adam",
    "residual-exact",
    "recurrent-adam",
    "recurrent-exact",
]
CASES = [(name, *spread, "none") for name in NAMES for spread in ((1, 2), (2, 1))]
CASES += [("chain-adam", 2, 1, "pipelined"), ("residual-adam", 2, 1, "pipelined")]


def start(folder, *arguments, file=worker.__file__, ranks=2):
    """The processes of a program, as torchrun starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spoken = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    return [
        subprocess.Popen(
            [sys.executable, str(file), str(folder), *map(str, arguments)],
            env=os.environ | spoken | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]


def end(processes, timeout=120):
    texts = [process.communicate(timeout=timeout)[0] for process in processes]
    return [process.returncode for process in processes], texts


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two ranks has found, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "cases.json").write_text(json.dumps(CASES))
    codes, texts = end(start(folder))
    assert codes == [0, 0], "\n".join(texts)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def close(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(close, a, b))
    if isinstance(a, float):
        return a == pytest.approx(b, rel=1e-10, abs=1e-10)
    return a == b


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_rank_ends_with_the_same_model_and_history(ranks, case):
    first, second = (found[json.dumps(case)] for found in ranks)
    assert first == second


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spread", [(1, 2), (2, 1)], ids=["data", "layers"])
def test_two_ranks_that_wait_for_each_other_are_one(ranks, name, spread):
    expected = worker.run(name)
    found = ranks[0][json.dumps([name, *spread, "none"])]
    assert close(found, json.loads(json.dumps(expected)))
