"""ADMM: transpose reduction, closed forms, the multiplier; both ADMMs block by block."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

import lpom
from lpom.activations import get as activation_of
from lpom.graph import trace
from lpom.methods import ADMM, ADMMHashing, Batch, Problem
from lpom.methods.blocks import preactivation, ridge_states
from lpom.methods.chains import Regression, chain


def data(n=50, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return X, torch.arange(n) % 3


def started(method, activation="relu", loss="squared", n=50):
    X, y = data(n)
    model = lpom.mlp([4, 6, 5, 3], activation, seed=0, dtype=X.dtype)
    problem = Problem(model, lpom.losses.get(loss))
    target = problem.loss.encode(y, 3, 3, dtype=X.dtype)
    return model, problem, Batch(X, target, whole=True), method.init(problem)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_transpose_reduction_does_not_depend_on_the_chunk(ridge, weighted):
    X, _ = data()
    weight = torch.linspace(0.5, 2, len(X), dtype=X.dtype) if weighted else None
    R = torch.randn(len(X), 3, dtype=X.dtype, generator=torch.Generator().manual_seed(1))
    layer = chain(trace(lpom.mlp([4, 3], dtype=X.dtype)))[0]
    solutions = [
        Regression(layer.map, X, ridge=ridge, weight=weight, chunk=chunk).solve(R)
        for chunk in (1, 7, 50, 1000)
    ]
    for other in solutions[1:]:
        torch.testing.assert_close(other, solutions[0], rtol=1e-10, atol=1e-12)
    design = torch.cat([X, torch.ones(len(X), 1, dtype=X.dtype)], 1)
    scale = torch.ones(len(X), 1, dtype=X.dtype) if weight is None else weight.sqrt()[:, None]
    strength = ridge * (scale * design).square().sum() / design.shape[1]
    stacked = torch.cat([scale * design, strength.sqrt() * torch.eye(5, dtype=X.dtype)])
    goal = torch.cat([scale * R, torch.zeros(5, 3, dtype=X.dtype)])
    torch.testing.assert_close(solutions[0], torch.linalg.lstsq(stacked, goal).solution)


@pytest.mark.parametrize("sizes", [(6, 3), (3, 6)], ids=["wide", "tall"])
def test_states_by_ridge_solve_their_normal_equations(sizes):
    generator = torch.Generator().manual_seed(0)
    layer = chain(trace(lpom.mlp(list(sizes), seed=0, dtype=torch.float64)))[0]
    V = torch.randn(8, sizes[0], generator=generator, dtype=torch.float64)
    goal = torch.randn(8, sizes[1], generator=generator, dtype=torch.float64)
    X = ridge_states(layer.map, V, goal, 2.5)
    gradient = X - V + 2.5 * layer.map.adjoint(layer.map.apply(X) - goal)
    assert float(gradient.abs().max()) < 1e-12


MONOTONE = [a for a in lpom.activations.names() if not lpom.activations.get(a).slope_bound]


@pytest.mark.parametrize("activation", MONOTONE)
def test_pre_activations_are_never_worse_than_a_fine_grid(activation):
    generator = torch.Generator().manual_seed(0)
    act = activation_of(activation)
    x, z, old = (3 * torch.randn(200, generator=generator, dtype=torch.float64) for _ in range(3))

    def cost(u):
        return (u - z).square() + (x - act.phi(u)).square()

    found = cost(preactivation(act, x, z, old))
    grid = torch.linspace(-15, 15, 6001, dtype=torch.float64)[:, None]
    best = ((grid - z).square() + (x - act.phi(grid)).square()).min(0).values
    assert bool((found <= best + 1e-7).all())  # at a kink the search misses by its resolution
    assert bool((found <= cost(old)).all())


@pytest.mark.parametrize("loss", ["squared", "hinge", "cross-entropy", "huber"])
@pytest.mark.parametrize("activation", ["relu", "hardtanh", "tanh", "step"])
def test_no_block_of_admm_raises_the_objective(activation, loss, monkeypatch):
    """Every write to the weights or the variables is followed by a look at the objective."""
    method = ADMM(mu=0.5, beta=1.0, warm_start=1000)
    model, problem, batch, state = started(method, activation, loss)
    method.objective(problem, batch, state)  # lays out the variables
    values = []

    class Watched(list):
        def __setitem__(self, key, value):
            super().__setitem__(key, value)
            values.append(method.objective(problem, batch, state).total)

    step = Regression.step

    def watched_step(self, map_, R):
        step(self, map_, R)
        values.append(method.objective(problem, batch, state).total)

    monkeypatch.setattr(Regression, "step", watched_step)
    state.X, state.U = Watched(state.X), Watched(state.U)
    for _ in range(5):
        method.step(problem, batch, state)
    assert len(values) == 5 * (3 + 2 + 3)  # U, X and W of each layer
    for before, after in zip(values, values[1:], strict=False):
        assert after <= before + 1e-10 * abs(before)


def test_multiplier_waits_for_the_warm_start_and_then_enforces_the_output():
    method = ADMM(mu=1.0, beta=1.0, warm_start=3)
    model, problem, batch, state = started(method)
    for _ in range(3):
        method.step(problem, batch, state)
    assert float(state.M.abs().max()) == 0
    missed = []
    for _ in range(200):
        method.step(problem, batch, state)
        missed.append(float((state.U[-1] - model[-1](state.X[-1])).detach().abs().max()))
    assert float(state.M.abs().max()) > 0
    assert missed[-1] < 1e-2 * missed[0]


def test_other_samples_start_anew_and_frozen_layers_stay():
    method = ADMM()
    model, problem, batch, state = started(method)
    model[0].requires_grad_(False)
    kept = copy.deepcopy(model[0].state_dict())
    method.step(problem, batch, state)
    for key, value in model[0].state_dict().items():
        assert torch.equal(value, kept[key])
    half = replace(batch, inputs=batch.inputs[:20], target=batch.target[:20])
    method.step(problem, half, state)
    assert len(state.U[0]) == 20 and state.steps == 1


def test_output_activation_is_refused_with_the_reason():
    model = lpom.mlp([4, 5, 3], "relu", "relu", seed=0)
    problem = Problem(model, lpom.losses.get("squared"))
    with pytest.raises(ValueError, match="output.*relu"):
        ADMM().init(problem)


@pytest.mark.parametrize("activation", ["relu", "tanh", "softplus"])
def test_no_block_of_admm_hashing_raises_the_objective(activation, monkeypatch):
    method = ADMMHashing(mu=0.5, dual_step=1.0, steps=2)
    model, problem, batch, state = started(method, activation)
    for _ in range(3):  # multipliers that are not zero
        method.step(problem, batch, state)
    values = []

    class Watched(list):
        def __setitem__(self, key, value):
            super().__setitem__(key, value)
            values.append(method.objective(problem, batch, state).total)

    move = ADMMHashing._move_weights

    def watched_move(self, *blocks):
        move(self, *blocks)
        values.append(method.objective(problem, batch, state).total)

    monkeypatch.setattr(ADMMHashing, "_move_weights", watched_move)
    state.X, state.U = Watched(state.X), Watched(state.U)
    values.append(method.objective(problem, batch, state).total)
    method.step(problem, batch, state)
    assert len(values) == 1 + 3 + 3 + 3  # the start; X, W and U of each layer
    for before, after in zip(values, values[1:], strict=False):
        assert after <= before + 1e-10 * abs(before)


@pytest.mark.parametrize("lower", [-float("inf"), 0.0])
@pytest.mark.parametrize("strength", [0.1, 1.0, 20.0])
@pytest.mark.parametrize("loss", lpom.losses.names())
def test_proximal_step_of_a_loss_is_its_minimiser(loss, strength, lower):
    """Convex, so nothing nearby is lower: neither any output alone nor along the gradient."""
    made = lpom.losses.get(loss)
    generator = torch.Generator().manual_seed(0)
    v = 2 * torch.randn(60, 3, generator=generator, dtype=torch.float64)
    target = made.encode(torch.arange(60) % 3, 3, 3, dtype=v.dtype)
    x = made.prox(v, target, strength, lower)
    pull = made.gradient(x, target) + strength * (x - v)
    assert bool((x >= lower).all())
    moved = x - (x - pull / (1 + strength)).clamp(min=lower)
    assert float(moved.abs().max()) < 1e-9


def test_proximal_step_of_the_textbook_hinge_is_the_lowest_of_a_grid():
    made = lpom.losses.get("hinge", smoothing=0.0)
    v = torch.linspace(-3, 3, 41, dtype=torch.float64)[:, None]
    grid = torch.linspace(-4, 4, 8001, dtype=torch.float64)[:, None]
    for sign in (-1.0, 1.0):
        target = torch.full_like(v, sign)
        found = made.prox(v, target, 2.0)
        cost = made.value(found, target) + (found - v).square().sum(1)
        other = made.value(grid, torch.full_like(grid, sign)) + (grid - v.T).square().T
        assert bool((cost <= other.min(1).values + 1e-12).all())
