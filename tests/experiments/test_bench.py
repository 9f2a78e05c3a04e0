"""Costs of a step: memory is counted exactly, ratios refer to the baseline."""

from __future__ import annotations

import torch
from typer.testing import CliRunner

from lpom.cli import app
from lpom.experiments.bench import bench_step
from lpom.experiments.memory import LiveTensors, peak_bytes
from lpom.losses import get
from lpom.methods import SGD, Adam, Batch, Problem
from lpom.networks.mlp import mlp


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
        problem = Problem.of(mlp([50, 40], seed=0), get("squared"))
        batch = Batch(torch.ones(3, 50), torch.ones(3, 40))
        peaks[method.name] = peak_bytes(method, problem, batch)
    weights = 4 * (50 * 40 + 40)
    assert peaks["sgd"] >= weights
    assert 2 * weights <= peaks["adam"] - peaks["sgd"] <= 2 * weights + 100


def test_a_method_beside_itself_costs_the_same_memory():
    first, second = bench_step((20, 30, 4), contenders=("adam",), batch_size=5, rounds=2, warmup=1)
    assert first.bytes == second.bytes
    assert (first.time_ratio, first.memory_ratio, second.memory_ratio) == (1.0, 1.0, 1.0)


def test_the_command_shows_every_method():
    arguments = ["--sizes", "6,5,3", "--rounds", "1", "--batch-size", "4", "--threads", "1"]
    result = CliRunner().invoke(app, ["bench", "step", *arguments, "--method", "lpom"])
    assert result.exit_code == 0
    assert "lpom" in result.output
    assert "6-5-3, batches of 4, 1 rounds" in result.output


def test_the_command_says_what_sizes_are():
    result = CliRunner().invoke(app, ["bench", "step", "--sizes", "6,x"])
    assert result.exit_code == 2
    assert "--sizes takes comma-separated integers" in result.output
