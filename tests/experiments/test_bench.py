"""Costs of a step: memory is counted exactly, ratios refer to the baseline."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from lpom.cli import app
from lpom.experiments.bench import contest, fits, steps, weights
from lpom.experiments.memory import LiveTensors, peak_bytes
from lpom.graph import trace
from lpom.losses import get
from lpom.methods import SGD, Adam, Batch, Problem
from lpom.networks.mlp import mlp
from lpom.weights.blocks import Use, blocks
from lpom.weights.exact import exact_step


def test_live_tensors_are_counted_until_they_are_freed():
    given = torch.ones(500)
    live = LiveTensors()
    with live:
        a = torch.ones(1000)  # 4000 bytes
        b = a * 2
        assert live.held == 8000
        del a
        assert live.held == 4000
        c = b.view(10, 100)  # no memory of its own
        c += 1
        given.mul_(2)
        assert live.held == 4000
        del b
        assert live.held == 4000  # c still looks at it
        del c
    assert (live.held, live.peak) == (0, 8000)


def test_what_autograd_keeps_for_the_way_back_is_counted():
    weight = torch.zeros(100, 100, requires_grad=True)
    live = LiveTensors()
    with live:
        loss = (weight.exp() * 2).sum()  # keeps exp's result
        held = live.held
        loss.backward()
    assert held == 4 * (100 * 100 + 1)
    assert weight.grad is not None
    assert live.peak >= 2 * 4 * 100 * 100


def test_peak_includes_what_the_method_keeps_between_steps():
    """Adam keeps two numbers per weight where SGD keeps none."""
    peaks = {}
    for method in (SGD(), Adam()):
        problem = Problem(mlp([50, 40], seed=0), get("squared"))
        batch = Batch(torch.ones(3, 50), torch.ones(3, 40))
        peaks[method.name] = peak_bytes(method, problem, batch)
    weights = 4 * (50 * 40 + 40)
    assert peaks["sgd"] >= weights
    assert 2 * weights <= peaks["adam"] - peaks["sgd"] <= 2 * weights + 100


def test_a_method_beside_itself_costs_the_same_memory():
    rows = steps.memory(steps.Net.of_sizes((20, 30, 4)), ("adam",), batch_size=5)
    assert [row.ratio for row in rows] == [1.0]  # one name, one row
    rows = steps.memory(steps.Net.of_sizes((20, 30, 4)), ("rmsprop", "lpom"), batch_size=5)
    assert [row.contestant for row in rows] == ["adam", "rmsprop", "lpom"]
    assert all(row.amount > 0 and row.unit == "MiB" for row in rows)


def test_networks_that_look_up_characters_predict_at_every_step():
    net = steps.Net.known("char-transformer", (6,), {"width": 8, "blocks": 1, "heads": 2})
    for method in ("adam", "lpom", "lift"):
        runner = steps.Runner(method, net, 4)
        assert runner.batch.inputs.unique().numel() > 1 and runner.batch.target.shape == (4, 6, 10)
        runner.step()
        assert all(p.grad is not None for p in runner.problem.graph.parameters)


def test_contestants_take_turns_and_each_ratio_is_of_one_round(monkeypatch):
    """A machine that is twice as slow in every other round changes times, not ratios."""
    now, log = [0.0], []

    def turn(name, seconds):
        def run():
            log.append(name)
            round_ = (len(log) - 1) // 2
            now[0] += seconds * (2 if round_ % 2 else 1)

        return run

    monkeypatch.setattr(contest.time, "process_time", lambda: now[0])
    monkeypatch.setattr(contest.torch, "get_num_threads", lambda: 1)
    rows = contest.contest("case", {"a": turn("a", 2.0), "b": turn("b", 3.0)}, rounds=4, per=1.0)
    assert [row.ratio for row in rows] == [1.0, 1.5]
    assert [(row.low, row.high) for row in rows] == [(1.0, 1.0), (1.5, 1.5)]
    assert [row.amount for row in rows] == [3.0, 4.5]
    assert sorted(log[:2]) == sorted(log[2:4]) == ["a", "b"]
    assert log[2:4] != log[4:6]  # who begins changes


def test_ratios_have_a_median_and_quartiles():
    times = [float(k) for k in (5, 1, 2, 3, 4)]
    assert contest.spread(times, [1.0] * 5) == (3.0, 2.0, 4.0)


def test_the_products_of_a_step_are_taken_down():
    """Two layers: two products up, one back, two for the weights; and the same numbers again."""
    runner = steps.Runner("lpom", steps.Net.of_sizes((6, 20, 3)), 4)
    runner.step()
    seen = steps.Products()
    with seen:
        runner.step()
    assert len(seen.calls) == 5
    func, args, kwargs = seen.calls[0]
    assert func(*args, **kwargs).shape == (4, 20)
    seen.again()


def test_exponents_are_those_of_powers():
    assert steps.exponent([(n, 0.3 * n**1.7) for n in (2, 4, 16)]) == pytest.approx(1.7)


def test_the_literal_step_is_the_fast_one():
    """With independent rows and no ridge the two are one formula."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(5, 8, generator=generator, dtype=torch.float64)
    goal = torch.rand(5, 4, generator=generator, dtype=torch.float64)
    model = mlp((8, 4), "relu", "relu", bias=False, seed=0, dtype=torch.float64)
    W = model[0].weight.detach().clone()
    graph = trace(model, X)
    (block,) = blocks(graph)
    exact_step(block, [Use(graph[1], (X,), goal)], iterations=3, ridge=0.0)
    expected = weights.literal(W, X, goal, 3)
    torch.testing.assert_close(model[0].weight.detach(), expected, atol=1e-10, rtol=1e-10)


def test_when_an_accuracy_was_reached():
    curves = {
        "a": [[(1.0, 0.9), (2.0, 0.98)], [(1.0, 0.98), (2.0, 0.97)], [(1.5, 0.98)]],
        "b": [[(3.0, 0.99)], [(3.0, 0.99)], [(3.0, 0.99)]],
        "c": [[(1.0, 0.5)], [(1.0, 0.5)], [(1.0, 0.99)]],
    }
    a, b, c = weights._reached(0.98, curves)
    assert (a.amount, a.ratio, a.note) == (1.5, 1.0, "1 epochs")
    assert (b.amount, b.ratio) == (3.0, 2.0)
    assert (c.amount, c.ratio, c.note) == (None, None, "never")
    late = {"a": [[(3.0, 0.99)], [(5.0, 0.99)], [(9.0, 0.9)]], "b": [[(2.0, 0.99)]] * 3}
    a, b = weights._reached(0.98, late)
    assert (a.amount, a.note) == (5.0, "1 epochs, 2 of 3 seeds")
    assert (b.amount, b.ratio, b.low) == (2.0, 2 / 5, None)


PARTS = {
    "step": ["--sizes", "6,5,3", "--rounds", "2", "--batch-size", "4", "--method", "lpom, exact"],
    "memory": ["--network", "lenet5", "--input-shape", "1,28,28", "--batch-size", "2"],
    "limit": ["--sizes", "6,5,3", "--rounds", "2", "--batch-size", "4"],
    "scaling": ["--largest", "32", "--rounds", "1"],
    "sklearn": ["--table", "digits", "--hidden", "5", "--rounds", "1", "--batch-size", "900"],
    "exact": ["--inputs", "6", "--outputs", "5", "--rounds", "2", "--batch-size", "4"],
    "data": ["--rounds", "1", "--batch-size", "5000"],
    "predict": ["--rounds", "1"],
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_a_table_and_a_file(part, tmp_path, monkeypatch):
    monkeypatch.setattr(fits, "_ROWS", 1)
    path = tmp_path / "bench.json"
    arguments = ["bench", part, *PARTS[part], "--json", str(path)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    found = json.loads(path.read_text())
    assert found["part"] == part
    assert {"torch", "lpom", "processor", "threads"} <= found["machine"].keys()
    assert found["rows"]
    reference = found["rows"][0]
    assert reference["ratio"] == 1.0
    assert reference["contestant"] in result.output
    for row in found["rows"]:
        assert row["amount"] > 0 or row["unit"] == "exponent"
        assert row["unit"] != "ms" or 0 < row["low"] <= row["ratio"] <= row["high"]


@pytest.mark.filterwarnings("ignore:Got `batch_size`")
def test_seconds_to_an_accuracy(blobs, monkeypatch):
    monkeypatch.setattr(weights.datasets, "load", lambda name: blobs)
    plans = {name: replace(plan, batch_size=20) for name, plan in weights.PLANS.items()}
    monkeypatch.setattr(weights, "PLANS", plans)
    names = ["adam", "lpom, adam", weights.SKLEARN]
    found = weights.to_accuracy(names, sizes=(5, 6, 3), seeds=[0], levels=[0.0, 1.01])
    assert [row.contestant for row in found] == 2 * ["adam", "lpom, adam", "scikit-learn"]
    assert all(row.amount > 0 and row.ratio > 0 for row in found[:3])
    assert all(row.note == "never" for row in found[3:])


@pytest.mark.parametrize(
    ("part", "method", "said"),
    [
        ("memory", "lpom, compiled", "not seen from outside"),
        ("limit", "lpom, compiled", "not seen from outside"),
        ("step", "adam, compiled, bf16", "not both"),
    ],
)
def test_what_cannot_be_told_of_compiled_steps_is_refused(part, method, said):
    arguments = ["bench", part, "--sizes", "6,5,3", "--method", method]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code != 0 and said in " ".join(result.output.split())


def test_the_command_says_what_sizes_are():
    result = CliRunner().invoke(app, ["bench", "step", "--sizes", "6,x"])
    assert result.exit_code == 2
    assert "--sizes takes comma-separated integers" in result.output


def test_the_command_knows_its_tables():
    result = CliRunner().invoke(app, ["bench", "sklearn", "--table", "wine"])
    assert result.exit_code != 0
