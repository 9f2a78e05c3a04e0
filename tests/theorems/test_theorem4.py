"""Theorem 4: Algorithm 2 comes within 4 / k**2 of the minimum; the exact step is Algorithm 2."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor, nn

from lpom import activations
from lpom.gram import Columns, IndependentRows, Rows
from lpom.maps import Dense
from lpom.methods.lpom.weights import exact_step, next_theta
from lpom.network import Layer

from .algorithm2 import Fit, algorithm_2, fits, thetas

#: (rows than columns, ridge, the form that must serve it)
FORMS = {
    "columns": (True, 0.0, Columns),
    "columns-ridge": (True, 0.1, Columns),
    "rows-ridge": (False, 0.1, Rows),
    "independent-rows": (False, 0.0, IndependentRows),
}
ITERATIONS = [1, 2, 7]


def minimiser(fit: Fit) -> Tensor:
    """An optimal W by scipy's quasi-Newton method, from autograd's gradient."""
    W = fit.layer.map.matrix()

    def value_and_gradient(flat):
        x = torch.tensor(flat).reshape(W.shape).requires_grad_()
        value = fit.value(x)
        (gradient,) = torch.autograd.grad(value, x)
        return value.item(), gradient.numpy().ravel()

    options = {"maxiter": 5000, "maxfun": 20000, "ftol": 0.0, "gtol": 1e-11, "maxcor": 50}
    found = minimize(
        value_and_gradient, W.numpy().ravel(), jac=True, method="L-BFGS-B", options=options
    )
    assert abs(found.jac).max() < 1e-5  # it is one
    return torch.tensor(found.x).reshape(W.shape)


@given(fits(), st.sampled_from([0.0, 0.1, 1.0]))
@settings(max_examples=60)
def test_the_bound_of_theorem_4(fit, ridge):
    """With the z_k of the theorem; a ridge only changes the metric in which z_k is measured."""
    K, gamma = 12, fit.activation.lipschitz
    best, theta = minimiser(fit), thetas(K)
    x, lowest, metric = algorithm_2(fit, K, ridge), fit.value(best), fit.metric(ridge)

    def energy(k: int) -> float:
        v = theta[k - 1] * x[k - 1] - x[k] + (1 - theta[k - 1]) * best
        return float(fit.value(x[k]) - lowest + gamma / 2 * ((v @ metric) * v).sum())

    rounding = 1e-6 * (1 + energy(1))  # how well `best` is known
    for k in range(1, K + 2):
        assert energy(k) <= 4 / k**2 * energy(1) + rounding
        if k <= K:  # the recursion that its proof rests on
            assert energy(k + 1) <= theta[k] * energy(k) + rounding


def test_the_bound_is_not_loose_by_orders_of_magnitude():
    """The recursion's factor is met within a third where the problem is flat: it cannot be cut."""
    worst = 0.0
    for scale in (1.0, 3.0, 10.0):
        linear = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.constant_(linear.weight, scale)
        X, goal = torch.ones(1, 1).double(), torch.full((1, 1), 0.5).double()
        fit = Fit(Layer(Dense(linear), activations.get("sigmoid")), X, goal, None)
        x, theta = algorithm_2(fit, 6, 0.0), thetas(6)

        def energy(k, x=x, theta=theta, fit=fit):
            v = theta[k - 1] * x[k - 1] - x[k]
            return float(fit.value(x[k]) - math.log(2) + 0.125 * v.square().sum())

        worst = max(worst, max(energy(k + 1) / (theta[k] * energy(k)) for k in range(1, 5)))
    assert 2 / 3 < worst <= 1 + 1e-12


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data(), iterations=st.sampled_from(ITERATIONS))
def test_the_exact_step_is_algorithm_2(form, data, iterations):
    """Without ever forming the pseudo-inverse, in each of the forms, weighted rows or not."""
    tall, ridge, kind = FORMS[form]
    fit = data.draw(fits(tall=tall))
    assert isinstance(fit.layer.map.gram(fit.X, ridge, fit.weight), kind)
    expected = algorithm_2(fit, iterations, ridge)[-1]
    assume(not torch.allclose(fit.layer.map.matrix(), expected, rtol=1e-3, atol=1e-3))
    deficient = exact_step(
        fit.layer, fit.X, fit.goal, iterations=iterations, ridge=ridge, weight=fit.weight
    )
    assert not deficient
    torch.testing.assert_close(fit.layer.map.matrix(), expected, rtol=1e-7, atol=1e-7)


@given(fits(weighted=False), st.sampled_from(ITERATIONS), st.sampled_from([0.0, 0.1]))
def test_a_weight_is_a_number_of_repetitions(fit, iterations, ridge):
    """A row of weight 3 counts as three rows, and one of weight 0 as none, whatever the form."""
    times = (torch.arange(len(fit.X)) + 2) % 4
    start = fit.layer.map.matrix()
    options = {"iterations": iterations, "ridge": ridge}
    exact_step(fit.layer, fit.X, fit.goal, weight=times.double(), **options)
    by_weight = fit.layer.map.matrix()
    fit.layer.map.set_matrix(start)
    exact_step(
        fit.layer,
        fit.X.repeat_interleave(times, 0),
        fit.goal.repeat_interleave(times, 0),
        **options,
    )
    torch.testing.assert_close(by_weight, fit.layer.map.matrix(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tall", [True, False])
@given(data=st.data(), iterations=st.sampled_from([1, 7, 60]))
def test_dependent_rows_and_columns_get_the_pseudo_inverse(tall, data, iterations):
    """Rank-deficient states and no ridge: still the paper's iteration, and it is said."""
    fit = data.draw(fits(tall=tall))
    X = torch.cat([fit.X, fit.X[:1]])
    X = torch.cat([X, X[:, :1] * 2], 1)
    goal = torch.cat([fit.goal, fit.goal.flip(0)[:1]])  # the same row, another goal
    weight = None if fit.weight is None else torch.cat([fit.weight, fit.weight[:1]])
    linear = nn.Linear(X.shape[1], goal.shape[1], bias=fit.A.shape != fit.X.shape).double()
    nn.init.normal_(linear.weight, generator=torch.Generator().manual_seed(0))
    again = Fit(Layer(Dense(linear), fit.activation), X, goal, weight)
    expected = algorithm_2(again, iterations, 0.0)[-1]
    assert exact_step(again.layer, X, goal, iterations=iterations, ridge=0.0, weight=weight)
    torch.testing.assert_close(linear.weight, expected[:, : X.shape[1]], rtol=1e-5, atol=1e-5)


@given(st.integers(1, 200))
def test_theta_satisfies_its_equation(k):
    theta = 0.0
    for _ in range(k):
        before, theta = theta, next_theta(theta)
    assert 0 < theta < 1
    assert 1 - theta == pytest.approx(math.sqrt(theta) * (1 - before), rel=1e-12)
    assert theta == pytest.approx(thetas(k)[-1], rel=1e-12)
    assert 1 - theta < 2 / (k + 1)
    assert 1 - theta > 1.2 / (k + 1)  # and of that order
