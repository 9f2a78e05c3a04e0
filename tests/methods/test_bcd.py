"""BCD: its objective and optimality conditions by autograd, every block against brute force."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

import lpom
from lpom.activations import get as activation_of
from lpom.methods import BCD, Batch, Problem
from lpom.methods.blocks import preactivation

LOSSES = ["squared", "cross-entropy", "hinge"]
ACTIVATIONS = ["relu", "leaky_relu", "tanh", "sigmoid", "softplus", "hardtanh", "staircase"]


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    return X, torch.randint(0, 3, (40,), generator=generator)


def coded(X, y, loss):
    return lpom.losses.get(loss).encode(y, 3, 3, dtype=X.dtype)


def three_splitting(model, X, U, target, loss, mu, weight=None):
    """Eq. 5 with one mu per layer, written with the torch modules themselves."""
    values = lpom.losses.get(loss).value(X[-1], target)
    starts = [k for k, module in enumerate(model) if isinstance(module, torch.nn.Linear)]
    for i, (start, stop) in enumerate(zip(starts, [*starts[1:], len(model)], strict=True)):
        distance = (U[i] - model[start](X[i])).square().sum(1)
        missed = (X[i + 1] - model[start + 1 : stop](U[i])).square().sum(1)
        values = values + mu[i] / 2 * (distance + missed)
    return values.sum() if weight is None else values @ weight


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_objective_is_that_of_the_paper(loss, weighted, data):
    X, y = data
    weight = torch.linspace(0.5, 2, 40, dtype=X.dtype) if weighted else None
    model = lpom.mlp([5, 6, 4, 3], "tanh", "relu", seed=0, dtype=X.dtype)
    method = BCD(mu=[0.5, 2.0, 3.0])
    problem = Problem(model, lpom.losses.get(loss))
    state = method.init(problem)
    batch = Batch(X, coded(X, y, loss), weight, whole=True)
    for _ in range(3):
        method.step(problem, batch, state)
    with torch.no_grad():
        expected = three_splitting(
            model, state.X, state.U, batch.target, loss, [0.5, 2.0, 3.0], weight
        )
    found = method.objective(problem, batch, state)
    assert found.total == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_no_block_raises_the_objective(activation, loss, weighted, data, monkeypatch):
    """The objective is looked at each time a block has been solved, from within the step."""
    X, y = data
    weight = torch.linspace(0.5, 2, 40, dtype=X.dtype) if weighted else None
    model = lpom.mlp([5, 6, 4, 3], activation, "leaky_relu", seed=0, dtype=X.dtype)
    problem = Problem(model, lpom.losses.get(loss))
    batch = Batch(X, coded(X, y, loss), weight, whole=True)
    method = BCD(alpha=0.3, sweeps=1)
    state = method.init(problem)
    method.step(problem, batch, state)
    seen = [method.objective(problem, batch, state).total]

    class Watched(list):
        def __setitem__(self, i, value):
            super().__setitem__(i, value)
            seen.append(method.objective(problem, batch, state).total)

    state.X, state.U = Watched(state.X), Watched(state.U)
    for _ in range(5):
        method.step(problem, batch, state)
        seen.append(method.objective(problem, batch, state).total)
    assert len(seen) == 1 + 5 * (3 + 3 + 1)
    assert all(b <= a + 1e-10 for a, b in zip(seen, seen[1:], strict=False))
    assert seen[-1] < 0.95 * seen[0]


@pytest.mark.parametrize("ratio", [1.0, 0.25])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_scalar_block_is_the_minimum_of_a_fine_grid(activation, ratio):
    torch.manual_seed(0)
    phi = activation_of(activation).phi
    x, z, old = 2 * torch.randn(3, 100, dtype=torch.float64)
    u = preactivation(activation_of(activation), x, z, old, ratio=ratio)
    grid = torch.linspace(-12, 12, 24001, dtype=x.dtype)[:, None]

    def cost(u):
        return (u - z).square() + ratio * (x - phi(u)).square()

    best = cost(grid).amin(0)
    assert bool((cost(u) <= best + 1e-9).all())


@pytest.mark.parametrize(
    "activation, loss", [("tanh", "squared"), ("leaky_relu", "squared"), ("leaky_relu", "huber")]
)
def test_optimality_conditions_vanish_at_convergence(activation, loss, data):
    """Those of the supplement: gradients in W, X and U, here by autograd."""
    X, y = data
    model = lpom.mlp([5, 3], output=activation, seed=0, dtype=X.dtype)
    method = BCD(mu_output=0.2, alpha=0.0, ridge=0.0, sweeps=1)
    result = lpom.fit(model, X, y, method=method, loss=loss, epochs=100, progress=False)
    states = [x.detach().clone().requires_grad_() for x in [X, *result.state.X[1:]]]
    pre = [u.detach().clone().requires_grad_() for u in result.state.U]
    three_splitting(model, states, pre, coded(X, y, loss), loss, [0.2]).backward()
    gradients = [*(v.grad for v in [*states[1:], *pre]), *(p.grad for p in model.parameters())]
    for gradient in gradients:
        assert float(gradient.abs().max()) < 1e-4


def test_linear_network_with_squared_loss_ends_at_least_squares(data):
    X, _ = data
    torch.manual_seed(2)
    y = torch.randn(40, 2, dtype=X.dtype)
    model = lpom.mlp([5, 2], seed=0, dtype=X.dtype)
    lpom.fit(model, X, y, method="bcd", epochs=200, progress=False)
    design = torch.cat([X, torch.ones(40, 1, dtype=X.dtype)], 1)
    expected = torch.linalg.lstsq(design, y).solution
    found = torch.cat([model[0].weight, model[0].bias[:, None]], 1).T
    torch.testing.assert_close(found.detach(), expected, rtol=0, atol=1e-4)


def test_weights_of_samples_count_as_repetitions(data):
    X, y = data
    model = lpom.mlp([5, 6, 3], "relu", seed=0, dtype=X.dtype)
    twin = copy.deepcopy(model)
    repeats = torch.arange(40) % 3
    # the relative ridge sees the number of rows, so it is left out
    options = {"method": BCD(ridge=0.0), "epochs": 5, "progress": False}
    lpom.fit(model, X, y, sample_weight=repeats, **options)
    lpom.fit(twin, X.repeat_interleave(repeats, 0), y.repeat_interleave(repeats), **options)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_states_start_feed_forward_from_the_weights_of_the_model(data):
    X, y = data
    model = lpom.mlp([5, 6, 3], "relu", seed=0, dtype=X.dtype)
    problem = Problem(model, lpom.losses.get("squared"))
    method = BCD()
    batch = Batch(X, coded(X, y, "squared"), whole=True)
    with torch.no_grad():
        loss = ((model(X) - batch.target) ** 2).sum() / 2
    found = method.objective(problem, batch, method.init(problem))
    assert found.total == pytest.approx(float(loss), rel=1e-12)


def test_warm_start_goes_on_and_other_samples_start_anew(data):
    X, y = data
    model = lpom.mlp([5, 6, 3], "relu", seed=0, dtype=X.dtype)
    twin = copy.deepcopy(model)
    options = {"method": "bcd", "progress": False}
    lpom.fit(model, X, y, epochs=6, **options)
    first = lpom.fit(twin, X, y, epochs=3, **options)
    kept = replace(first.state)
    lpom.fit(twin, X, y, epochs=3, state=first.state, **options)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    result = lpom.fit(twin, X[:30], y[:30], epochs=1, state=kept, **options)
    assert len(result.state.U[0]) == 30


def test_float32_stays_float32(data):
    X, y = data
    model = lpom.mlp([5, 6, 3], "relu", seed=0)
    result = lpom.fit(model, X, y, method="bcd", epochs=3, progress=False)
    assert {t.dtype for t in [*model.parameters(), *result.state.X]} == {torch.float32}


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"mu": [1.0, 2.0]}, "mu.* 1.* 2"),
        ({"alpha": -1.0}, "alpha.*0"),
        ({"sweeps": 0}, "sweeps.*integer"),
        ({"ridge": -1.0}, "ridge.*0"),
    ],
)
def test_bad_hyperparameters_are_named(wrong, words, data):
    X, y = data
    with pytest.raises(ValueError, match=words):
        lpom.fit(lpom.mlp([5, 3], dtype=X.dtype), X, y, method=BCD(**wrong))
