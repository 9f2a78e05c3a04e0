"""Two ranks: the step of one, faults, and what they must agree on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import pytest
import torch
from torch import nn

import lpom
from lpom import Checkpoint, Parallel
from lpom.parallel.pieces import pieces

from . import worker

#: Two ranks that wait for each other, which are one: rows only where no function looks at all
#: rows of a batch, as batch norm does, and as the rule measures the spread of a state.
LAYERS = ["chain-lpom", "chain-sgd-weighted", "wide-adam", "wide-muon", "residual-lpom"]
LAYERS += ["pictures-lpom", "pictures-adam"]
ROWS = ["chain-adam", "chain-sgd-weighted", "pictures-adam", "branched-sgd"]
CASES = [(name, 2, 1, "none") for name in LAYERS] + [(name, 1, 2, "none") for name in ROWS]
#: Here the ranks have to agree with each other alone.
CASES += [(name, 2, 1, "pipelined") for name in ("chain-sgd", "wide-lpom", "residual-adam")]
CASES += [("residual-lpom", 1, 2, "none"), ("branched-lpom", 1, 2, "none")]
CASES += [("loaders", 1, 2, "none")]


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


def end(processes, timeout=600):
    """Exit codes and all that was printed; nobody waits for ever."""
    try:
        texts = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], texts


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two ranks has found, by case."""
    return together(tmp_path_factory.mktemp("ranks"), CASES, 2)


def together(folder, cases, n):
    (folder / "cases.json").write_text(json.dumps(cases))
    codes, texts = end(start(folder, ranks=n))
    assert codes == [0] * n, "\n".join(texts)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(n)]


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


@pytest.mark.parametrize("case", CASES[: len(LAYERS + ROWS)], ids=lambda c: "-".join(map(str, c)))
def test_two_ranks_that_wait_for_each_other_are_one(ranks, case):
    expected = worker.run(case[0])
    assert close(ranks[0][json.dumps(case)], json.loads(json.dumps(expected)))


@pytest.mark.parametrize("name", ["residual-lpom", "branched-lpom"])
def test_shares_of_the_rows_are_near_the_whole(ranks, name):
    """Each rank measures batch norm's statistics and spreads on its own rows."""
    expected, found = worker.run(name), ranks[0][json.dumps([name, 1, 2, "none"])]
    for one, other in zip(found["epochs"], expected["epochs"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=0.1)


def test_loaders_of_two_ranks_are_one(ranks):
    expected = json.loads(json.dumps(worker.run_loaders()))
    assert close(ranks[0][json.dumps(["loaders", 1, 2, "none"])], expected)


def test_four_ranks_share_layers_and_rows(tmp_path):
    names = ["pictures-adam", "chain-sgd-weighted"]
    found = together(tmp_path, [(name, 2, 2, "none") for name in names], 4)
    for name in names:
        expected = json.loads(json.dumps(worker.run(name)))
        assert all(close(rank[json.dumps([name, 2, 2, "none"])], expected) for rank in found)


def test_pipelined_weights_below_the_cut_are_one_step_old(ranks):
    """The scheme by hand: two ranks, plain gradients of layers and ReLU."""
    model = worker.chain().double()
    X, y = worker.rows((7,))
    W = [p.detach().clone() for p in model.parameters()][::2]
    b = [p.detach().clone() for p in model.parameters()][1::2]
    rate, below = 0.1, 2
    order, waiting, ends = torch.Generator().manual_seed(3), None, []

    def forward(x, layers):
        states = [x]
        for i in layers:
            states.append(states[-1] @ W[i].T + b[i])
            if i < 3:
                states[-1] = states[-1].relu()
        return states

    def backward(states, pull, layers):
        """Pulls on the states above; what is left is the pull on the lowest of them."""
        gradients = {}
        for i in reversed(layers):
            x, above = states[i - layers[0]], states[i - layers[0] + 1]
            R = pull * (above > 0) if i < 3 else pull
            gradients[i] = R.T @ x / len(x), R.sum(0) / len(x)
            pull = R @ W[i]
        for i, (dW, db) in gradients.items():
            W[i] -= rate * dW
            b[i] -= rate * db
        return pull

    for _ in range(2):
        for rows in torch.randperm(25, generator=order).split(12):
            low = forward(X[rows], range(below))
            if waiting is not None:
                backward(*waiting, range(below))
            high = forward(low[-1], range(below, 4))
            loss = torch.softmax(high[-1], 1) - torch.eye(3)[y[rows]]
            waiting = low, backward(high, loss, range(below, 4))
        backward(*waiting, range(below))  # the end of an epoch waits for all
        waiting = None
        ends.append([t.tolist() for pair in zip(W, b, strict=True) for t in pair])
    found = ranks[0][json.dumps(["chain-sgd", 2, 1, "pipelined"])]
    losses = [epoch["validation_loss"] for epoch in found["epochs"]]
    assert close(list(found["weights"].values()), ends[losses.index(min(losses))])


def test_a_rank_that_is_killed_ends_the_other_which_names_it(tmp_path):
    processes = start(tmp_path, "die")
    codes, texts = end(processes)
    assert codes == [1, -signal.SIGKILL]
    assert f"LostRankError: rank 1 (process {processes[1].pid}" in texts[0]
    plan = Checkpoint(tmp_path / "run", every_epochs=1)
    went_on = worker.run("wide-adam", checkpoint=plan)  # with one rank
    assert close(went_on, worker.run("wide-adam"))


def test_ctrl_c_ends_all_ranks_with_a_checkpoint(tmp_path):
    codes, texts = end(start(tmp_path, "interrupt"))
    assert codes == [0, 0] and all("stopped in order" in text for text in texts), texts
    went_on = worker.run("wide-adam", checkpoint=tmp_path / "run")
    assert close(went_on, worker.run("wide-adam"))


def test_what_ranks_must_agree_on_and_what_ends_one_of_them(tmp_path):
    codes, texts = end(start(tmp_path, "stumble"))
    assert codes == [1, 1]
    for text in texts:
        assert "differ in weights of the model" in text
        assert "all refused" in text
        assert "layers=1 times data=3 is 3 ranks, but 2 processes were started" in text
    assert "ended with ArithmeticError: it stumbled" in texts[0]


def test_without_other_processes_it_says_how_to_start_them():
    with pytest.raises(ValueError, match="torchrun --nproc-per-node 2"):
        worker.run("chain-adam", Parallel(layers=2))


def lengths(model, example, n):
    return [len(piece) for piece in pieces(model, example, n)]


def test_a_model_is_cut_where_the_work_is_even():
    square, X = lpom.mlp([7] * 7, seed=0), torch.zeros(3, 7)
    assert lengths(square, X, 3) == [4, 4, 3]  # Linear and ReLU, and the last one alone
    assert lengths(square, X, 1) == [11]
    first = lpom.mlp([700, 7, 7, 7], seed=0)
    assert lengths(first, torch.zeros(3, 700), 2) == [2, 3]
    nested = worker.residual()
    parts = pieces(nested, torch.zeros(3, 1, 6, 6), 2)
    assert [p for piece in parts for p in piece.parameters()] == list(nested.parameters())
    rows = torch.randn(3, 1, 6, 6)
    torch.testing.assert_close(parts[1](parts[0](rows)), nested(rows))


def test_weights_with_several_uses_stay_together():
    tied = nn.Linear(7, 7)
    model = nn.Sequential(nn.Linear(7, 7), tied, nn.Tanh(), tied, nn.Tanh(), nn.Linear(7, 7))
    with pytest.raises(ValueError, match="layers=3 or fewer"):
        pieces(model, torch.zeros(3, 7), 4)
    assert lengths(model, torch.zeros(3, 7), 3) == [1, 4, 1]


def test_only_a_sequential_is_cut():
    with pytest.raises(ValueError, match="nn.Sequential"):
        pieces(worker.Branched(), torch.zeros(3, 7), 2)
