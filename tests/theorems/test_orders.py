"""The orders of design.md section 3, against loops that write them out; and what they lead to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from lpom import losses
from lpom.methods import Batch
from lpom.methods.base import Problem
from lpom.methods.lpom import LPOM
from lpom.methods.lpom.states import ORDERS, BatchStates, sweep

from .algorithm2 import Fit, algorithm_2
from .strategies import SMOOTH, Case, cases

CURVED = [act for act in SMOOTH if act.name != "identity"]
moderate = st.floats(0.1, 2.0)


def affine(case: Case, i: int, X: Tensor) -> Tensor:
    W, *b = (parameter.detach() for parameter in case.network[i].map.parameters())
    return X @ W.T + (b[0] if b else 0)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1.0)


def stepped(case: Case, **options: object) -> list[list[Tensor]]:
    """Gradients that one step of the method leaves on each layer's weights and bias."""
    method = LPOM(mu=case.mu, optimizer=sgd, schedule="constant", **options)
    problem = Problem(case.network, case.loss)
    start = [parameter.detach().clone() for parameter in case.network.parameters]
    method.step(problem, Batch(case.inputs, case.target), method.init(problem))
    with torch.no_grad():
        for parameter, old in zip(case.network.parameters, start, strict=True):
            # the optimiser was given just this gradient
            torch.testing.assert_close(old - parameter.grad, parameter.detach())
            parameter.copy_(old)
    return [[parameter.grad for parameter in layer.map.parameters()] for layer in case.network]


def literal_interleaved(case: Case) -> tuple[list[Tensor], list[list[Tensor]]]:
    """X[L], W[L-1], X[L-1], W[L-2], ...: states, and gradients averaged over the batch."""
    m, last = len(case.inputs), case.last
    X = [case.inputs]
    Z = []
    for i in range(last + 1):
        Z.append(affine(case, i, X[i]))
        X.append(case.phi(i, Z[i]))
    X_new = list(X)
    gradients: list[list[Tensor]] = [[] for _ in range(last + 1)]
    pull = case.loss.gradient(X[-1], case.target) / case.mu[-1]
    for i in range(last, -1, -1):
        X_new[i + 1] = case.phi(i, Z[i] - pull)
        R = X[i + 1] - X_new[i + 1]
        gradients[i] = [case.mu[i] / m * R.T @ X[i], case.mu[i] / m * R.sum(0)]
        if i > 0:
            pull = case.mu[i] / case.mu[i - 1] * R @ case.weight(i)
    return X_new, gradients


def literal_sweeps(case: Case, order: str, sweeps: int) -> list[Tensor]:
    """Plain sweeps over the states in one of the other orders, every Z computed when needed."""
    X = [case.inputs]
    for i in range(case.last + 1):
        X.append(case.phi(i, affine(case, i, X[i])))
    L = len(X) - 1

    def update(i: int, X: list[Tensor]) -> Tensor:
        if i == L:
            pull = case.loss.gradient(X[L], case.target) / case.mu[L - 1]
        else:
            R = case.phi(i, affine(case, i, X[i])) - X[i + 1]
            pull = case.mu[i] / case.mu[i - 1] * R @ case.weight(i)
        return case.phi(i - 1, affine(case, i - 1, X[i - 1]) - pull)

    for _ in range(sweeps):
        old = list(X)
        if order == "paper":
            indices = range(1, L + 1)
        else:
            indices = range(L, 0, -1)
        for i in indices:
            X[i] = update(i, old if order == "parallel" else X)
    return X


@given(cases(scale=moderate))
def test_interleaved_is_design_section_3(case):
    X, gradients = literal_interleaved(case)
    states = BatchStates(case.network, case.loss, case.target, case.inputs, case.mu)
    sweep(states, "interleaved", lambda i, R: None)
    for a, b in zip(states.X, X, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    found = stepped(case)
    for layer, expected in zip(found, gradients, strict=True):
        for a, b in zip(layer, expected, strict=False):  # there may be no bias
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@given(cases(scale=moderate), st.sampled_from([1, 3]))
def test_interleaved_exact_steps_are_algorithm_2(case, iterations):
    """The weights that the states below see are still the old ones; those after are fitted."""
    X, _ = literal_interleaved(case)
    _, X_old = case.network.feed_forward(case.inputs)
    expected = [
        algorithm_2(Fit(layer, X_old[i], X[i + 1], None), iterations, 0.2)[-1]
        for i, layer in enumerate(case.network)
    ]
    method = LPOM(mu=case.mu, weights="exact", iterations=iterations, ridge=0.2)
    problem = Problem(case.network, case.loss)
    method.step(problem, Batch(case.inputs, case.target), method.init(problem))
    for layer, W in zip(case.network, expected, strict=True):
        torch.testing.assert_close(layer.map.matrix(), W, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("order", ["top-down", "paper", "parallel"])
@given(case=cases(scale=moderate, mu=st.floats(0.5, 2.0)), sweeps=st.sampled_from([1, 2, 3]))
def test_orders_are_their_loops(order, case, sweeps):
    X = literal_sweeps(case, order, sweeps)
    method = LPOM(mu=case.mu, order=order, sweeps=sweeps, step_rule="plain")
    found = method.settle(Problem(case.network, case.loss), Batch(case.inputs, case.target))
    size = max(float(x.abs().max()) for x in X)
    for a, b in zip(found, X, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11 * (1 + size))

    gradients = stepped(case, order=order, sweeps=sweeps, step_rule="plain")
    for i, layer in enumerate(gradients):
        R = case.phi(i, affine(case, i, X[i])) - X[i + 1]
        expected = case.mu[i] / len(case.inputs) * R.T @ X[i]
        torch.testing.assert_close(layer[0], expected, rtol=1e-7, atol=1e-8 * (1 + size**2))


def back_propagation(case: Case) -> list[Tensor]:
    """Autograd's gradient of the mean loss."""
    outputs = case.inputs
    for layer in case.network:
        outputs = layer.activation.phi(layer.map.forward(outputs))
    mean_loss = case.loss.value(outputs, case.target).sum() / len(case.inputs)
    return list(torch.autograd.grad(mean_loss, case.network.parameters))


def distances(case: Case, exact: list[Tensor]) -> Tensor:
    """How far each parameter's gradient of one interleaved sweep is from the exact one."""
    found = [gradient for layer in stepped(case) for gradient in layer]
    return torch.stack([(a - b).norm() for a, b in zip(found, exact, strict=True)])


@given(cases(acts=SMOOTH, scale=moderate, mu=st.floats(0.5, 2.0)))
def test_large_mu_gives_the_back_propagation_gradient(case):
    """The error falls as 1 / mu: a tenth for ten times the mu, layer by layer."""
    exact = back_propagation(case)
    near = distances(replace(case, mu=[1e3 * mu for mu in case.mu]), exact)
    nearer = distances(replace(case, mu=[1e4 * mu for mu in case.mu]), exact)
    size = torch.stack([gradient.norm() for gradient in exact]).norm()
    assert (nearer <= 0.12 * near + 1e-10 * (1 + size)).all()
    assert nearer.norm() <= 0.05 * size + 1e-10


@given(cases(acts=CURVED, scale=st.floats(0.5, 2.0), mu=st.floats(0.5, 2.0)))
def test_at_moderate_mu_it_is_another_gradient(case):
    """Else the limit would say nothing."""
    exact = back_propagation(case)
    assume(sum(float(gradient.norm()) for gradient in exact) > 1e-2)
    assert distances(case, exact).norm() > 1e-5


def signal(case: Case, **options: object) -> list[float]:
    """Sizes of the weight gradients, layer by layer."""
    return [float(layer[0].norm()) for layer in stepped(case, **options)]


#: Widths and data for which every layer's gradient is truly not zero.
lively = cases(acts=CURVED, layers=(2, 4), scale=st.floats(0.3, 1.5), mu=st.floats(0.5, 2.0))


@given(lively, st.sampled_from(["plain", "safe"]))
def test_the_paper_s_first_sweep_sends_no_signal_down(case, rule):
    """Hidden states of a feed-forward start are fixed points: only the last layer learns."""
    sizes = signal(case, order="paper", step_rule=rule)
    assert sizes[:-1] == [0.0] * case.last
    downwards = signal(case, order="top-down", step_rule=rule)
    if sizes[-1] > 1e-6:  # not for cross-entropy on a single output
        assert all(size > 0 for size in downwards)
        assert all(size > 0 for size in signal(case, order="interleaved"))


@given(lively)
def test_parallel_carries_the_error_one_layer_a_sweep(case):
    reached = signal(case, order="parallel", sweeps=1)
    alive = reached[-1] > 1e-6
    for sweeps in range(1, len(case.network) + 1):
        sizes = signal(case, order="parallel", sweeps=sweeps, step_rule="plain")
        below = len(sizes) - sweeps
        assert sizes[:below] == [0.0] * below
        assert not alive or all(size > 0 for size in sizes[below:])


@pytest.mark.parametrize("order", ORDERS)
@given(case=cases(scale=moderate))
def test_every_order_is_still_at_a_fixed_point(order, case):
    """Where the loss does not pull, feed-forward states and all weights stay where they are."""
    _, X = case.network.feed_forward(case.inputs)
    content = replace(case, loss=losses.get("squared"), target=X[-1])
    for size in signal(content, order=order, sweeps=2):
        assert size <= 1e-12 * (1 + float(X[-1].norm()))
