"""The benchmarks of devices and solvers, in small."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest
import torch
from sklearn.datasets import load_digits

import devices


@pytest.fixture
def data():
    X, y = load_digits(return_X_y=True)
    x = torch.tensor(X / 16).float().repeat(1, 13)[:, :784]  # as wide as MNIST
    y = torch.tensor(y)
    return SimpleNamespace(
        train=(x[:1200], y[:1200]), test=(x[1200:], y[1200:]), nominal=torch.tanh
    )


def layers(n):
    scatter = 0.05 * torch.randn(500, devices.UNITS)
    return lambda seed: [devices.Device(torch.tanh, scatter, seed + k, True) for k in range(n)]


def test_every_rule_trains_two_layers_of_devices(data, capsys):
    options = SimpleNamespace(seeds=1, epochs=5, probes=100)
    rules = [*devices.LPOM, *devices.RIVALS, "mu=1"]
    scores = devices.run(options, "in small", rules, layers(2), data)
    assert set(scores) == set(rules)
    best = scores["oracle"][0]
    assert best > 60
    for rule in ("lpom", "lpom d=0.5", "fitted"):
        assert scores[rule][0] > best - 10
    assert "3.0" in capsys.readouterr().out.split("lpom ")[1]  # readings a value


def test_a_device_drifts_in_the_course_of_a_run():
    device = layers(1)(0)[0]
    z, device.drifts = torch.randn(4, devices.UNITS), 0.2
    before = device.exact(z)
    device.time = 1.0
    assert not torch.allclose(device.exact(z), before)


@pytest.mark.parametrize("name", ["shortest path", "knapsack"])
def test_solvers_lower_the_regret(name):
    pytest.importorskip("pyepo", reason="pip install pyepo")
    import solvers

    problem = solvers.Problem(name, 0, 200, 200)
    assert solvers.paths(5).shape == (70, 40)
    options = argparse.Namespace(epochs=0, rate=0.01)
    start = problem.regret(solvers.train(problem, solvers.lifted(problem), 0, options))
    options.epochs = 10
    assert problem.regret(solvers.train(problem, solvers.lifted(problem), 0, options)) < 0.7 * start
