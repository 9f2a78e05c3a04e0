"""Theorem 4: Algorithm 2 comes within 4 / k**2 of the minimum; the exact step is Algorithm 2."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor, nn

from lpom import activations, losses
from lpom.weights.blocks import ByConjugateGradients, ByGram, blocks, least_squares
from lpom.weights.exact import exact_step, next_theta
from lpom.weights.gram import Columns, IndependentRows, Rows

from .algorithm2 import Fit, algorithm_2, fits, one_layer, thetas
from .networks import KINDS as GRAPHS
from .strategies import Case, of_kind

#: (rows than columns, ridge, the form that must serve it)
FORMS = {
    "columns": (True, 0.0, Columns),
    "columns-ridge": (True, 0.1, Columns),
    "rows-ridge": (False, 0.1, Rows),
    "independent-rows": (False, 0.0, IndependentRows),
}
ITERATIONS = [1, 2, 7]
moderate = st.floats(0.3, 2.0)


@st.composite
def graph_fits(draw: st.DrawFn, kind: str, *, weighted: bool = True) -> Fit:
    """One block of weights of a graph with all its uses, at random states and shares of mu."""
    case = draw(of_kind(kind, scale=moderate))
    block = draw(st.sampled_from(blocks(case.graph)))
    X = case.states(case.pre_activations(1.5))
    shares = [draw(st.sampled_from([1.0, 0.3])) for _ in block.uses]
    if weighted and draw(st.booleans()):
        return Fit.of(case, block, X, X, shares, case.normal(len(X[0])).abs() + 0.2)
    return Fit.of(case, block, X, X, shares)


def minimiser(fit: Fit) -> Tensor:
    """An optimal W by scipy's quasi-Newton method, from autograd's gradient."""

    def value_and_gradient(flat):
        x = torch.tensor(flat).requires_grad_()
        value = fit.F(x)
        (gradient,) = torch.autograd.grad(value, x)
        return value.item(), gradient.numpy()

    options = {"maxiter": 5000, "maxfun": 20000, "ftol": 0.0, "gtol": 1e-11, "maxcor": 50}
    found = minimize(
        value_and_gradient, fit.start.numpy(), jac=True, method="L-BFGS-B", options=options
    )
    assert abs(found.jac).max() < 1e-5 * (1 + abs(fit.A).max())  # it is one
    return torch.tensor(found.x)


def check_bound(fit: Fit, ridge: float, K: int = 12) -> None:
    """With the z_k of the theorem; a ridge only changes the metric in which z_k is measured."""
    strength = fit.strength(ridge)
    best, theta = minimiser(fit), thetas(K)
    x, lowest, metric = algorithm_2(fit, K, strength), fit.F(best), fit.metric(strength)

    def energy(k: int) -> float:
        v = theta[k - 1] * x[k - 1] - x[k] + (1 - theta[k - 1]) * best
        return float(fit.F(x[k]) - lowest + fit.gamma / 2 * (v @ metric @ v))

    rounding = 1e-6 * (1 + energy(1))  # how well `best` is known
    for k in range(1, K + 2):
        assert energy(k) <= 4 / k**2 * energy(1) + rounding
        if k <= K:  # the recursion that its proof rests on
            assert energy(k + 1) <= theta[k] * energy(k) + rounding


@given(fits(), st.sampled_from([0.0, 0.1, 1.0]))
@settings(max_examples=60)
def test_the_bound_of_theorem_4(fit, ridge):
    check_bound(fit, ridge)


@pytest.mark.parametrize("kind", GRAPHS)
@given(data=st.data(), ridge=st.sampled_from([0.1, 1.0]))
@settings(max_examples=8)
def test_the_bound_of_theorem_4_for_all_uses_at_once(kind, data, ridge):
    """Of shared weights too, with the largest of the Lipschitz constants above them."""
    check_bound(data.draw(graph_fits(kind)), ridge)


def test_the_bound_is_not_loose_by_orders_of_magnitude():
    """The recursion's factor is met within a third where the problem is flat: it cannot be cut."""
    worst = 0.0
    for scale in (1.0, 3.0, 10.0):
        linear = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.constant_(linear.weight, scale)
        X, goal = torch.ones(1, 1).double(), torch.full((1, 1), 0.5).double()
        fit = one_layer(linear, activations.get("sigmoid"), X, goal)
        x, theta = algorithm_2(fit, 6, 0.0), thetas(6)

        def energy(k, x=x, theta=theta, fit=fit):
            v = theta[k - 1] * x[k - 1] - x[k]
            return float(fit.F(x[k]) - math.log(2) + 0.125 * v.square().sum())

        worst = max(worst, max(energy(k + 1) / (theta[k] * energy(k)) for k in range(1, 5)))
    assert 2 / 3 < worst <= 1 + 1e-12


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data(), iterations=st.sampled_from(ITERATIONS))
def test_the_exact_step_is_algorithm_2(form, data, iterations):
    """Without ever forming the pseudo-inverse, in each of the forms, weighted rows or not."""
    tall, ridge, kind = FORMS[form]
    fit = data.draw(fits(tall=tall))
    squares = least_squares(fit.block, fit.uses, ridge)
    assert isinstance(squares, ByGram) and isinstance(squares.gram, kind)
    expected = algorithm_2(fit, iterations, fit.strength(ridge))[-1]
    assume(not torch.allclose(fit.start, expected, rtol=1e-3, atol=1e-3))
    assert not exact_step(fit.block, fit.uses, iterations=iterations, ridge=ridge)
    torch.testing.assert_close(fit.weights(), expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("kind", GRAPHS)
@given(data=st.data(), iterations=st.sampled_from(ITERATIONS))
@settings(max_examples=12)
def test_the_exact_step_on_any_edge_is_algorithm_2(kind, data, iterations):
    """For all uses of a block at once, by Gram matrices or by conjugate gradients."""
    fit = data.draw(graph_fits(kind))
    expected = algorithm_2(fit, iterations, fit.strength_of_the_library(0.3))[-1]
    exact_step(fit.block, fit.uses, iterations=iterations, ridge=0.3)
    size = float(expected.norm())
    torch.testing.assert_close(fit.weights(), expected, rtol=1e-8, atol=1e-9 * (1 + size))


class SharedLayers(nn.Module):
    """A Linear layer and a convolution, each the whole edge in each of its three uses."""

    def __init__(self, act: activations.Activation) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(2, 2, 3, padding=1), nn.Linear(4, 4)
        self.last, self.act = nn.Linear(32, 2), act.to_module()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.act(self.conv(x))
        for _ in range(3):
            x = self.act(self.linear(x))
        return self.last(x.flatten(1))


@pytest.mark.parametrize("layer", ["conv", "linear"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ridge", [0.01, 1.0])
def test_conjugate_gradients_agree_with_the_gram_matrix(layer, weighted, ridge):
    """Given the same ridge, for the rows of all three uses."""
    torch.manual_seed(0)
    model = SharedLayers(activations.get("softplus")).double()
    inputs, target = torch.randn(3, 2, 4, 4).double(), torch.randn(3, 2).double()
    case = Case.of(model, losses.get("squared"), inputs, target, [1.0] * 7)
    (block,) = (b for b in blocks(case.graph) if b.names[0].startswith(layer))
    assert len(block.uses) == 3 and block.layer is getattr(model, layer)
    X = case.states(case.pre_activations())
    weight = torch.tensor([1.0, 0.2, 3.0]).double() if weighted else None
    fit = Fit.of(case, block, X, X, [1.0, 0.5, 0.1], weight)

    by_gram = ByGram(block.layer, fit.uses, ridge)
    by_products = ByConjugateGradients(block, fit.uses, 0.0)
    by_products.ridge = fit.strength(ridge)
    estimated = ByConjugateGradients(block, fit.uses, ridge).ridge
    assert estimated == pytest.approx(fit.strength(ridge), rel=0.3)

    residuals = [case.normal(*use.goal.shape) for use in fit.uses]
    C, x = by_gram.solve(residuals), by_products.solve(residuals)
    for a, b in zip(by_gram.apply(C), by_products.apply(x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    start, changes = fit.start, []
    for squares, coefficients in ((by_gram, C), (by_products, x)):
        squares.add(coefficients)
        changes.append(fit.weights() - start)
        fit.write(start)
    torch.testing.assert_close(*changes, rtol=1e-10, atol=1e-10)


@given(fits(weighted=False), st.sampled_from(ITERATIONS), st.sampled_from([0.0, 0.1]))
def test_a_weight_is_a_number_of_repetitions(fit, iterations, ridge):
    """A row of weight 3 counts as three rows, and one of weight 0 as none, whatever the form."""
    (use,) = fit.uses
    times = (torch.arange(len(use.goal)) + 2) % 4
    linear, act, start = fit.block.layer, use.node.activation, fit.start
    options = {"iterations": iterations, "ridge": ridge}
    by_weight = one_layer(linear, act, use.sources[0], use.goal, times.double())
    exact_step(by_weight.block, by_weight.uses, **options)
    expected = by_weight.weights()
    fit.write(start)
    X, goal = (t.repeat_interleave(times, 0) for t in (use.sources[0], use.goal))
    repeated = one_layer(linear, act, X, goal)
    exact_step(repeated.block, repeated.uses, **options)
    torch.testing.assert_close(expected, repeated.weights(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tall", [True, False])
@given(data=st.data(), iterations=st.sampled_from([1, 7, 60]))
@settings(max_examples=20)
def test_dependent_rows_and_columns_get_the_pseudo_inverse(tall, data, iterations):
    """Rank-deficient states and no ridge: still the paper's iteration, and it is said."""
    fit = data.draw(fits(tall=tall))
    (use,) = fit.uses
    X = torch.cat([use.sources[0], use.sources[0][:1]])
    X = torch.cat([X, X[:, :1] * 2], 1)
    goal = torch.cat([use.goal, use.goal.flip(0)[:1]])  # the same row, another goal
    weight = None if use.weight is None else torch.cat([use.weight, use.weight[:1]])
    bias = len(fit.block.parameters) == 2
    linear = nn.Linear(X.shape[1], goal.shape[1], bias=bias).double()
    nn.init.normal_(linear.weight, generator=torch.Generator().manual_seed(0))
    again = one_layer(linear, use.node.activation, X, goal, weight)
    expected = algorithm_2(again, iterations, 0.0)[-1]
    assert exact_step(again.block, again.uses, iterations=iterations, ridge=0.0)
    torch.testing.assert_close(again.weights(), expected, rtol=1e-5, atol=1e-5)


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
