"""Two ranks: the step of one, faults, and what they must agree on."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from itertools import chain

import pytest
import torch
from torch import nn

from lpom import LPOM, Adaptive, Checkpoint, Parallel, Sweeps, losses, methods, mlp
from lpom.graph import trace
from lpom.methods import Problem
from lpom.parallel import memory
from lpom.parallel.dividing import divide, shares
from lpom.parallel.lending import lend, lendable, lent_rows
from lpom.parallel.pipeline import check
from lpom.parallel.stages import Stage, cut, plan, work
from lpom.penalties import L1

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
    "wide-adam",
    "wide-sgd-weighted",
    "pictures-adam",
    "pictures-sgd-weighted",
]
CASES = [(name, *spread, "none") for name in NAMES for spread in ((1, 2), (2, 1))]
PIPELINED = ["chain-adam", "chain-sgd", "chain-exact", "residual-adam", "wide-adam"]
PIPELINED += ["pictures-adam"]
CASES += [(name, 2, 1, "pipelined") for name in PIPELINED] + [("loaders", 1, 2, "none")]
CASES += [("steps-adam", 1, 2, "none")]
CASES += [("wide-adam-parts", 2, 1, delay) for delay in ("none", "pipelined")]
#: Messages that do not go through shared memory, or not all of them.
CARRIED = ["wide-adam-wire", "wide-adam-cramped", "pictures-adam-wire", "pictures-adam-cramped"]
CASES += [(name, 2, 1, "pipelined") for name in CARRIED]
#: All states at once over layers and rows; over rows any order.
AT_ONCE = [
    ("chain-atonce", 2, 1, "none"),
    ("chain-atonce", 1, 2, "none"),
    ("chain-atonceplain", 2, 1, "none"),
    ("residual-atonceplain", 2, 1, "none"),
    ("recurrent-atonce", 2, 1, "none"),
    ("chain-topdown", 1, 2, "none"),
]
CASES += AT_ONCE


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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spread", [(1, 2), (2, 1)], ids=["data", "layers"])
def test_two_ranks_that_wait_for_each_other_are_one(ranks, name, spread):
    expected = worker.run(name)
    found = ranks[0][json.dumps([name, *spread, "none"])]
    assert close(found, json.loads(json.dumps(expected)))


@pytest.mark.parametrize("case", AT_ONCE, ids=lambda case: "-".join(map(str, case)))
def test_other_orders_are_those_of_one_rank(ranks, case):
    """As far as the norms agree, which power iterations on each rank find by themselves."""
    expected = json.loads(json.dumps(worker.run(case[0])))
    found = ranks[0][json.dumps(case)]
    for one, other in zip(found["epochs"], expected["epochs"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-9)
    assert close(found["weights"], expected["weights"])


def test_loaders_of_two_ranks_are_one(ranks):
    expected = json.loads(json.dumps(worker.run_loaders()))
    assert close(ranks[0][json.dumps(["loaders", 1, 2, "none"])], expected)


def test_ramps_are_as_wide_as_the_rows_of_all_ranks_want_them(ranks):
    expected = json.loads(json.dumps(worker.run("steps-adam")))
    assert close(ranks[0][json.dumps(["steps-adam", 1, 2, "none"])], expected)


def test_four_ranks_share_layers_and_rows(tmp_path):
    names = ["residual-adam", "chain-exact-weighted"]
    found = together(tmp_path, [(name, 2, 2, "none") for name in names], 4)
    for name in names:
        expected = json.loads(json.dumps(worker.run(name)))
        assert all(close(rank[json.dumps([name, 2, 2, "none"])], expected) for rank in found)


def test_pipelined_weights_below_the_cut_are_one_step_old(ranks):
    """The scheme by hand: two ranks, plain gradient steps, a chain of linear layers and ReLU."""
    model = worker.chain().double()
    X, y = worker.rows((7,))
    W = [p.detach().clone() for p in model.parameters()][::2]
    b = [p.detach().clone() for p in model.parameters()][1::2]
    mu, rate, below = [4.0, 5.0, 5.0, 5.0], 0.1, 2
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
            x, z = states[i - layers[0]], states[i - layers[0]] @ old[i][0].T + old[i][1]
            R = z.relu() - (z - pull).relu() if i < 3 else pull
            gradients[i] = (mu[i] * R.T @ x / len(x), mu[i] * R.sum(0) / len(x))
            pull = R @ W[i] * (mu[i] / mu[i - 1])
        for i, (dW, db) in gradients.items():
            W[i] -= rate * dW
            b[i] -= rate * db
        return pull

    for _ in range(2):
        for rows in torch.randperm(25, generator=order).split(12):
            low = forward(X[rows], range(below))
            before = [(w.clone(), c.clone()) for w, c in zip(W, b, strict=True)]
            if waiting is not None:
                states, pull, old = waiting
                backward(states, pull, range(below))
            high = forward(low[-1], range(below, 4))
            old = before
            loss = (torch.softmax(high[-1], 1) - torch.eye(3)[y[rows]]) / mu[3]
            waiting = low, backward(high, loss, range(below, 4)), before
        states, pull, old = waiting  # the end of an epoch waits for all
        backward(states, pull, range(below))
        waiting = None
        ends.append([t.tolist() for pair in zip(W, b, strict=True) for t in pair])
    found = ranks[0][json.dumps(["chain-sgd", 2, 1, "pipelined"])]
    losses = [epoch["validation_loss"] for epoch in found["epochs"]]
    assert close(list(found["weights"].values()), ends[losses.index(min(losses))])


@pytest.mark.parametrize("delay", ["none", "pipelined"])
def test_large_matrices_that_wait_for_the_pulls_are_moved_as_others_are(ranks, delay):
    found = ranks[0][json.dumps(["wide-adam-parts", 2, 1, delay])]
    assert close(found, ranks[0][json.dumps(["wide-adam", 2, 1, delay])])


@pytest.mark.parametrize("name", CARRIED)
def test_it_is_the_same_what_carries_the_messages(ranks, name):
    found = ranks[0][json.dumps([name, 2, 1, "pipelined"])]
    through_memory = ranks[0][json.dumps([name.rpartition("-")[0], 2, 1, "pipelined"])]
    assert found == through_memory


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
        assert "layers=1 times data=3 is 3 ranks, but 2 processes were started" in text
    assert "ended with ArithmeticError: it stumbled" in texts[0]


def test_without_other_processes_it_says_how_to_start_them():
    with pytest.raises(ValueError, match="torchrun --nproc-per-node 2"):
        worker.run("chain-adam", Parallel(layers=2))


X = torch.zeros(3, 7)


def test_a_chain_is_cut_where_the_work_is_even():
    assert cut(trace(mlp([7] * 7), X), [1, 1, 1, 1, 1, 1], [0] * 7, 3) == [2, 4, 6]
    assert cut(trace(mlp([7] * 7), X), [9, 1, 1, 1, 1, 1], [0] * 7, 2) == [1, 6]


def test_a_cut_where_much_would_cross_is_not_taken():
    graph = trace(mlp([7] * 5), X)
    assert cut(graph, [1e3] * 4, [0, 0, 0, 0, 0], 2) == [2, 4]
    assert cut(graph, [1e3] * 4, [0, 0, 1e3, 0, 0], 2) in ([1, 4], [3, 4])


def test_the_units_of_a_layer_are_divided_where_that_is_more_even():
    graph = trace(mlp([7, 64, 64, 64, 3]), X)
    assert cut(graph, [1, 2, 2, 1e-6], [0] * 5, 2, divides=True) == [1.75, 4]
    assert cut(graph, [1, 2, 2, 1e-6], [0] * 5, 2) == [2, 4]
    assert cut(graph, [1, 12, 1, 1e-6], [0] * 5, 4, divides=True) == [1.25, 1.5, 1.75, 4]
    # not if too much would cross: what the divided units read does as well
    assert cut(graph, [1e3, 2e3, 2e3, 0], [0, 1e3, 1, 1, 0], 2, divides=True) == [2, 4]


def test_rows_of_the_first_part_are_lent_where_it_is_the_larger_one():
    pictures, example = worker.Pictures(), torch.zeros(3, 3, 32, 32)
    graph = trace(pictures, example)
    found = plan(graph, example, 12, 2, divides=True, lends=True)
    assert found.places == [1, 3] and lent_rows(found.lent, 12) > 0
    assert plan(graph, example, 12, 2, divides=True, lends=False).lent == 0
    assert plan(trace(mlp([7] * 5), X), X, 12, 2, divides=True, lends=True).lent == 0
    normed = trace(worker.Residual(), torch.zeros(3, 1, 6, 6))
    assert lendable(graph, 2) and not lendable(normed, 1)  # batch norm looks at all rows


def test_what_can_not_be_divided_stays_together():
    def divisible(model, example):
        graph = trace(model, example)
        return [bool(shares(graph, node)) for node in graph]

    assert divisible(mlp([7, 64, 64, 64]), X) == [True, True, False]  # the loss reads the output
    assert divisible(mlp([7, 16, 32, 3]), X) == [False, True, False]  # too few units
    softmax = nn.Sequential(nn.Linear(7, 64), nn.Softmax(1), nn.Linear(64, 3))
    assert divisible(softmax, X) == [False, False]
    both = nn.Linear(64, 64)
    tied = nn.Sequential(nn.Linear(7, 64), nn.ReLU(), both, nn.ReLU(), both, nn.ReLU())
    assert divisible(tied, X)[1:] == [False, False]
    pictures = torch.zeros(3, 1, 6, 6)
    normed = nn.Sequential(nn.Conv2d(1, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten())
    assert divisible(nn.Sequential(normed, nn.Linear(512, 3)), pictures) == [False, False]
    grouped = nn.Sequential(nn.Conv2d(4, 32, 3, groups=4), nn.ReLU(), nn.Flatten())
    assert not any(divisible(nn.Sequential(grouped, nn.Linear(512, 3)), torch.zeros(3, 4, 6, 6)))
    pooled = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    assert divisible(nn.Sequential(pooled, nn.Linear(128, 3)), pictures) == [True, False]


def skipping():
    """States that several nodes read, of units and of channels."""

    class Skipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution, self.pool = nn.Conv2d(1, 32, 3), nn.MaxPool2d(2)
            self.low, self.high = nn.Linear(128, 32), nn.Linear(32, 32)
            self.head = nn.Linear(32 + 128, 3)

        def forward(self, x):
            first = self.pool(torch.relu(self.convolution(x))).flatten(1)
            second = torch.relu(self.low(first))
            return self.head(torch.cat([second + torch.relu(self.high(second)), first], 1))

    torch.manual_seed(0)
    return Skipping().double(), torch.randn(5, 1, 6, 6).double()


@pytest.mark.parametrize("places", [[0.5, 4], [1.5, 4], [0.5, 1.5, 2.5, 4], [1, 4]])
def test_pieces_side_by_side_are_the_whole(places):
    model, example = skipping()
    graph = trace(model, example)
    Z, whole = graph.feed_forward(example)
    divided = divide(graph, places)
    assert len(divided.graph) == len(graph) + sum(place % 1 > 0 for place in places)
    assert divided.ends[-1] == len(divided.graph)
    _, found = divided.graph.feed_forward(example)
    for origin, expected in enumerate(whole):
        pieces = [x for x, of in zip(found, divided.origins, strict=True) if of == origin]
        torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=1e-12, atol=1e-12)
    for weight, views in divided.rows.items():  # which move it
        assert views[0].data_ptr() == weight.data_ptr()
        assert sum(len(view) for view in views) == len(weight)


@pytest.mark.parametrize("share", [0.2, 0.4, 0.05])
def test_lent_rows_below_the_others_are_the_whole(share):
    model, example = skipping()
    graph = trace(model, example)
    _, whole = graph.feed_forward(example)
    lent = lend(graph, [2, 4], share)
    assert lent.ends == [2, 6] and len(lent.parameters) == 4
    _, found = lent.graph.feed_forward(example)
    for origin, expected in enumerate(whole):
        numbers = [i for i, of in enumerate(lent.origins) if of == origin]
        pieces = [found[i] for i in numbers]
        assert not origin or [len(x) for x in pieces] == [lent.rows(i, 5) for i in numbers]
        torch.testing.assert_close(torch.cat(pieces), expected, rtol=1e-12, atol=1e-12)


def test_an_optimiser_remembers_of_the_rows_what_it_did_of_the_whole():
    def remembering(made, parameters):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter) * torch.arange(len(parameter))[:, None]
        made.step()
        return made

    model = mlp([3, 32, 4])
    weights = [p for p in model.parameters() if p.ndim > 1]
    before = remembering(torch.optim.Adam(weights), weights).state_dict()
    views = [nn.Parameter(weights[0].detach()[:16]), nn.Parameter(weights[0].detach()[16:])]
    rows, owns = {weights[0]: views}, [{views[0]}, {views[1], weights[1]}]
    ranks = []
    for own in owns:
        made = torch.optim.Adam(weights)
        made.load_state_dict(before)
        memory.take_own(made, own, rows)
        assert set(made.state) == own
        ranks.append(made)
    found = [{str(k): v for k, v in made.state_dict()["state"].items()} for made in ranks]
    joined = memory.joined(found)
    expected = {str(k): v for k, v in before["state"].items()}
    torch.testing.assert_close(joined, expected, rtol=0, atol=0)
    memory.give_back(ranks[0], rows, joined)
    assert ranks[0].param_groups[0]["params"][0] is weights[0]
    torch.testing.assert_close(ranks[0].state[weights[0]], before["state"][0], rtol=0, atol=0)


def test_weights_with_several_uses_stay_together():
    example = torch.zeros(3, 5, 4)
    graph = trace(worker.Recurrent(), example)
    steps = max(graph.uses.values(), key=len)
    for layers in (2, 3, 4):
        _, states = graph.feed_forward(example)
        ends = cut(graph, work(graph, example, 100), [x.numel() for x in states], layers)
        assert not any(steps[0].index <= end < steps[-1].index for end in ends)
    with pytest.raises(ValueError, match="Take layers=4 or fewer"):
        cut(graph, [1.0] * len(graph), [0.0] * (len(graph) + 1), 5)


def test_the_parts_of_a_network_say_what_it_says():
    torch.manual_seed(0)
    model = worker.Residual().eval()
    example = torch.randn(3, 1, 6, 6)
    graph = trace(model, example)
    _, states = graph.feed_forward(example)
    for ends in ([1, 4], [2, 4], [3, 4], [1, 2, 3, 4]):
        for layer in range(len(ends)):
            stage = Stage.of(graph, ends, layer)
            needed = chain.from_iterable(stage.received.values())
            stage.inbox.update({index: states[index] for index in needed})
            _, found = stage.graph.feed_forward(example)
            for index, number in stage.numbers.items():
                assert torch.equal(found[number], states[index])


REFUSED = [
    ({"method": "adam"}, "DistributedDataParallel"),
    ({"method": LPOM(states=Sweeps(max_sweeps=2))}, "one plain interleaved sweep"),
    ({"method": LPOM(states=Sweeps("parallel", 9, tolerance=1e-3))}, "sooner on one rank"),
    ({"method": LPOM(mu="auto")}, "mu='auto' looks at all layers"),
    ({"method": LPOM(weights=Adaptive("factored"))}, "optimizer='factored' turns"),
    ({"method": LPOM(penalties=L1(1e-4))}, "penalties compare the weights of all layers"),
]


@pytest.mark.parametrize("options, sentence", REFUSED, ids=lambda value: str(value)[:20])
def test_what_is_not_spread_is_refused(options, sentence):
    graph = trace(mlp([7, 5, 3]), X)
    problem = Problem.on(graph, losses.get("cross-entropy"), mlp([7, 5, 3]))
    with pytest.raises(ValueError, match=re.escape(sentence)):
        check(methods.get(options["method"]), problem, Parallel(layers=2))
