"""MAC: its objective and optimality conditions by autograd, descent of every block."""

from __future__ import annotations

import copy

import pytest
import torch

import lpom
from lpom.activations import get as activation_of
from lpom.methods import MAC, SGD, Batch, Problem
from lpom.methods.chains import Dense, Layer, Regression
from lpom.methods.mac import gauss_newton_states, gauss_newton_weights

SMOOTH = ["identity", "relu", "leaky_relu", "tanh", "sigmoid", "elu", "softplus", "hardtanh"]
LOSSES = ["squared", "cross-entropy", "hinge"]


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    return X, torch.randint(0, 3, (40,), generator=generator)


def penalty(model, X, target, loss, mu, weight=None):
    """Eq. 3, written with the torch modules themselves."""
    values = lpom.losses.get(loss).value(X[-1], target)
    starts = [k for k, module in enumerate(model) if isinstance(module, torch.nn.Linear)]
    for i, (start, stop) in enumerate(zip(starts, [*starts[1:], len(model)], strict=True)):
        values = values + mu / 2 * (X[i + 1] - model[start:stop](X[i])).square().sum(1)
    return values.sum() if weight is None else values @ weight


def states_of(X, y, loss, n_outputs=3):
    return lpom.losses.get(loss).encode(y, n_outputs, n_outputs, dtype=X.dtype)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("batch_size", [40, 8])
@pytest.mark.parametrize("loss", LOSSES)
def test_objective_is_that_of_the_paper(loss, batch_size, weighted, data):
    X, y = data
    weight = torch.linspace(0.5, 2, 40, dtype=X.dtype) if weighted else None
    model = lpom.mlp([5, 6, 4, 3], "tanh", "sigmoid", seed=0, dtype=X.dtype)
    method = MAC(mu=3.0, mu_factor=2.0)
    problem = Problem(model, lpom.losses.get(loss))
    state = method.init(problem)
    rows = slice(0, batch_size)
    batch = Batch(
        X[rows],
        states_of(X, y, loss)[rows],
        None if weight is None else weight[rows],
        whole=batch_size == 40,
    )
    method.step(problem, batch, state)
    method.end_epoch(problem, batch, state)
    method.step(problem, batch, state)
    with torch.no_grad():
        states = state.X or method.settle(problem, batch, state)
        expected = penalty(model, states, batch.target, loss, 6.0, batch.weight)
    assert method.objective(problem, batch, state).total == pytest.approx(float(expected), 1e-12)


@pytest.mark.parametrize("activation", SMOOTH)
def test_a_state_step_lowers_every_sample(activation, data):
    X, _ = data
    torch.manual_seed(1)
    linear = torch.nn.Linear(5, 7, dtype=X.dtype)
    linear.weight.data.mul_(8)  # strongly curved
    layer = Layer(Dense(linear), activation_of(activation))
    below, above = torch.randn_like(X), 3 * torch.randn(40, 7, dtype=X.dtype)

    def cost(X):
        rest = above - layer.activation.phi(layer.map.apply(X))
        return (X - below).square().sum(1) + rest.square().sum(1)

    costs = [cost(X)]
    for _ in range(20):
        X = gauss_newton_states(layer, below, X, above)
        costs.append(cost(X))
    assert bool((torch.stack(costs).diff(dim=0) <= 1e-12).all())
    assert float(costs[-1].sum()) < 0.9 * float(costs[0].sum())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rows", [40, 4], ids=["tall", "wide"])
@pytest.mark.parametrize("activation", SMOOTH)
def test_a_weight_step_lowers_every_unit(activation, rows, weighted, data):
    X, _ = data
    X = X[:rows]
    torch.manual_seed(1)
    layer = Layer(Dense(torch.nn.Linear(5, 7, dtype=X.dtype)), activation_of(activation))
    above = 3 * torch.randn(rows, 7, dtype=X.dtype)
    weight = torch.linspace(0.1, 2, rows, dtype=X.dtype) if weighted else None
    per_row = 1.0 if weight is None else weight[:, None]
    regression = Regression(layer.map, X, ridge=1e-3, weight=weight)

    def cost():
        return (per_row * (above - layer.activation.phi(layer.map.apply(X))).square()).sum(0)

    costs = [cost()]
    for _ in range(20):
        gauss_newton_weights(layer, regression, X, above, weight)
        costs.append(cost())
    assert bool((torch.stack(costs).diff(dim=0) <= 1e-12).all())
    assert float(costs[-1].sum()) < 0.95 * float(costs[0].sum())


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("activation", ["relu", "tanh", "softplus"])
def test_whole_steps_never_raise_the_objective_at_fixed_mu(activation, loss, data):
    X, y = data
    model = lpom.mlp([5, 6, 4, 3], activation, seed=0, dtype=X.dtype)
    result = lpom.fit(
        model, X, y, method=MAC(mu_factor=1.0), loss=loss, batch_size=40, epochs=30, progress=False
    )
    values = [epoch.objective for epoch in result.history.epochs]
    assert all(after <= before + 1e-12 for before, after in zip(values, values[1:], strict=False))
    assert values[-1] < 0.5 * values[0]


@pytest.mark.parametrize("activation", ["tanh", "elu", "leaky_relu"])
def test_optimality_conditions_vanish_at_convergence(activation, data):
    """Eqs. (21) and (22): the gradients in states and weights, here by autograd."""
    X, y = data
    model = lpom.mlp([5, 3], output=activation, seed=0, dtype=X.dtype)
    result = lpom.fit(
        model,
        X,
        y,
        method=MAC(mu=0.2, mu_factor=1.0, iterations=10, ridge=0.0),
        loss="squared",
        batch_size=40,
        epochs=100,
        progress=False,
    )
    states = [
        x.detach().clone().requires_grad_(i > 0) for i, x in enumerate([X, *result.state.X[1:]])
    ]
    penalty(model, states, states_of(X, y, "squared"), "squared", 0.2).backward()
    for gradient in [*(x.grad for x in states[1:]), *(p.grad for p in model.parameters())]:
        assert float(gradient.abs().max()) < 1e-4


def test_hidden_states_become_stationary_for_given_weights(data):
    X, y = data
    model = lpom.mlp([5, 6, 4, 3], "tanh", seed=0, dtype=X.dtype).requires_grad_(False)
    method = MAC(mu_factor=1.0, weights="gauss-newton", sweeps=200)
    problem = Problem(model, lpom.losses.get("cross-entropy"))
    state = method.init(problem)
    target = states_of(X, y, "cross-entropy")
    method.step(problem, Batch(X, target, whole=True), state)
    states = [x.detach().clone().requires_grad_(i > 0) for i, x in enumerate(state.X)]
    penalty(model, states, target, "cross-entropy", 1.0).backward()
    for x in states[1:]:
        assert float(x.grad.abs().max()) < 1e-6


def test_linear_network_with_squared_loss_ends_at_least_squares(data):
    X, _ = data
    torch.manual_seed(2)
    y = torch.randn(40, 2, dtype=X.dtype)
    model = lpom.mlp([5, 2], seed=0, dtype=X.dtype)
    method = MAC(mu_factor=1.0)
    lpom.fit(model, X, y, method=method, batch_size=40, epochs=40, progress=False)
    design = torch.cat([X, torch.ones(40, 1, dtype=X.dtype)], 1)
    expected = torch.linalg.lstsq(design, y).solution
    found = torch.cat([model[0].weight, model[0].bias[:, None]], 1).T
    torch.testing.assert_close(found.detach(), expected, rtol=0, atol=1e-4)


def test_growing_penalty_brings_states_to_the_network(data):
    X, y = data
    model = lpom.mlp([5, 6, 3], "tanh", seed=0, dtype=X.dtype)
    method = MAC(mu=1.0, mu_factor=1.5, mu_max=1e4, sweeps=20)
    result = lpom.fit(model, X, y, method=method, batch_size=40, epochs=60, progress=False)
    assert result.state.mu == 1e4
    with torch.no_grad():
        torch.testing.assert_close(result.state.X[-1], model(X), rtol=0, atol=1e-2)


def test_on_batches_a_huge_penalty_is_back_propagation(data):
    """States that minimise the penalty then differ from the feed-forward ones by gradient / mu."""
    X, y = data
    model = lpom.mlp([5, 6, 3], "tanh", seed=0, dtype=X.dtype)
    twin = copy.deepcopy(model)
    huge = MAC(mu=1e6, mu_max=1e6, optimizer="sgd", learning_rate=0.1, sweeps=60)
    options = {"batch_size": 8, "epochs": 2, "seed": 0, "progress": False, "loss": "cross-entropy"}
    lpom.fit(model, X, y, method=huge, **options)
    lpom.fit(twin, X, y, method=SGD(learning_rate=0.1), **options)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_warm_start_goes_on_with_states_and_penalty(data):
    X, y = data
    model = lpom.mlp([5, 6, 3], "relu", seed=0, dtype=X.dtype)
    twin = copy.deepcopy(model)
    options = {"method": MAC(), "batch_size": 40, "progress": False}
    lpom.fit(model, X, y, epochs=6, **options)
    first = lpom.fit(twin, X, y, epochs=3, **options)
    lpom.fit(twin, X, y, epochs=3, state=first.state, **options)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("activation", ["step", "sign", "staircase"])
def test_jumps_are_refused_with_the_reason(activation, data):
    X, y = data
    model = lpom.mlp([5, 6, 3], activation, seed=0, dtype=X.dtype)
    with pytest.raises(ValueError, match=activation):
        lpom.fit(model, X, y, method="mac")


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"mu": 0.0}, "mu.*0"),
        ({"mu_factor": 0.5}, "mu_factor.*1"),
        ({"mu": 5.0, "mu_max": 1.0}, "mu_max.*5"),
        ({"sweeps": 1.5}, "sweeps.*integer"),
        ({"weights": "exact"}, "weights.*exact"),
    ],
)
def test_bad_hyperparameters_are_named(wrong, words, data):
    X, y = data
    with pytest.raises(ValueError, match=words):
        lpom.fit(lpom.mlp([5, 3], dtype=X.dtype), X, y, method=MAC(**wrong))
