"""Tikhonov: non-negative least squares against scipy, every block, what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import nnls

import lpom
from lpom.graph import trace
from lpom.methods import Batch, Problem, Tikhonov
from lpom.methods.blocks import estimated_norm, nonnegative_states
from lpom.methods.chains import Regression, chain


@pytest.mark.parametrize("ratio", [0.1, 1.0, 10.0])
def test_states_are_those_of_non_negative_least_squares(ratio):
    generator = torch.Generator().manual_seed(0)
    layer = chain(trace(lpom.mlp([6, 4], seed=0, dtype=torch.float64)))[0]
    V = torch.randn(10, 6, generator=generator, dtype=torch.float64)
    goal = torch.randn(10, 4, generator=generator, dtype=torch.float64)
    norm = estimated_norm(layer.map)
    found = nonnegative_states(layer.map, V.clamp(min=0), V, goal, ratio, norm=norm, iterations=400)
    W, b = layer.map.matrix()[:, :-1].numpy(), layer.map.matrix()[:, -1].numpy()
    A = np.concatenate([np.eye(6), ratio**0.5 * W])
    for row in range(10):
        right = np.concatenate([V[row].numpy(), ratio**0.5 * (goal[row].numpy() - b)])
        expected, _ = nnls(A, right)
        np.testing.assert_allclose(found[row].numpy(), expected, atol=1e-9)


@pytest.mark.parametrize("iterations", [1, 2, 10])
def test_few_iterations_never_raise_a_sample(iterations):
    generator = torch.Generator().manual_seed(0)
    layer = chain(trace(lpom.mlp([6, 4], seed=0, dtype=torch.float64)))[0]
    V = torch.randn(50, 6, generator=generator, dtype=torch.float64)
    goal = torch.randn(50, 4, generator=generator, dtype=torch.float64)
    start = torch.rand(50, 6, generator=generator, dtype=torch.float64)

    def cost(X):
        return (X - V).square().sum(1) + 9 * (layer.map.apply(X) - goal).square().sum(1)

    norm = estimated_norm(layer.map)
    found = nonnegative_states(layer.map, start, V, goal, 9.0, norm=norm, iterations=iterations)
    assert bool((found >= 0).all())
    assert bool((cost(found) <= cost(start)).all()) and bool((cost(found) < cost(start)).any())


@pytest.mark.parametrize("output", ["identity", "relu"])
@pytest.mark.parametrize("loss", ["squared", "hinge", "cross-entropy"])
def test_no_block_raises_the_objective(loss, output, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(40, 4, generator=generator, dtype=torch.float64)
    model = lpom.mlp([4, 6, 5, 3], "relu", output, seed=0, dtype=X.dtype)
    problem = Problem(model, lpom.losses.get(loss))
    batch = Batch(X, problem.loss.encode(torch.arange(40) % 3, 3, 3, dtype=X.dtype))
    method = Tikhonov(mu=1.0, iterations=3)
    state = method.init(problem)
    values = [method.objective(problem, batch, state).total]

    class Watched(list):
        def __setitem__(self, key, value):
            super().__setitem__(key, value)
            values.append(method.objective(problem, batch, state).total)

    step = Regression.step

    def watched_step(self, map_, R):
        step(self, map_, R)
        values.append(method.objective(problem, batch, state).total)

    monkeypatch.setattr(Regression, "step", watched_step)
    state.X = Watched(state.X)
    for _ in range(5):
        method.step(problem, batch, state)
    assert len(values) == 1 + 5 * 6  # the start; X and W of each layer
    for before, after in zip(values, values[1:], strict=False):
        assert after <= before + 1e-10 * abs(before)
    assert all(bool((x >= 0).all()) for x in state.X[1:-1])
    assert output == "identity" or bool((state.X[-1] >= 0).all())


@pytest.mark.parametrize("hidden, output", [("tanh", "identity"), ("relu", "sigmoid")])
def test_other_activations_are_refused_with_the_reason(hidden, output):
    model = lpom.mlp([4, 5, 3], hidden, output, seed=0)
    problem = Problem(model, lpom.losses.get("squared"))
    with pytest.raises(ValueError, match="(?i)tikhonov.*relu"):
        Tikhonov().init(problem)
