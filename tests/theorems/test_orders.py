"""The orders of design.md section 3, against loops that write them out; and what they lead to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lpom import losses
from lpom.methods import LPOM
from lpom.states import ORDERS, Sweeps
from lpom.weights.adaptive import Adaptive
from lpom.weights.blocks import blocks
from lpom.weights.exact import Exact

from .algorithm2 import Fit, algorithm_2
from .strategies import SMOOTH, Case, cases, of_kind

CURVED = [act for act in SMOOTH if act.name != "identity"]
moderate = st.floats(0.1, 2.0)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1.0)


def stepped(case: Case, weight: Tensor | None = None, **sweeps: object) -> list[Tensor]:
    """Gradients that one step of the method leaves on the weights, which it takes back."""
    weights = Adaptive(optimizer=sgd, schedule="constant")
    method = LPOM(mu=case.mu[1:], states=Sweeps(**sweeps), weights=weights)
    parameters = case.graph.parameters
    start = [parameter.detach().clone() for parameter in parameters]
    batch = replace(case.batch, weight=weight)
    method.step(case.problem, batch, method.init(case.problem))
    with torch.no_grad():
        for parameter, old in zip(parameters, start, strict=True):
            if parameter.grad is None:  # nothing came
                parameter.grad = torch.zeros_like(parameter)
            # the optimiser was given just this gradient
            torch.testing.assert_close(old - parameter.grad, parameter.detach())
            parameter.copy_(old)
    return [parameter.grad for parameter in parameters]


def of_weights(case: Case, gradients: list[Tensor]) -> list[Tensor]:
    """Those of a chain's matrices, without the biases, layer by layer."""
    found = zip(case.graph.parameters, gradients, strict=True)
    return [gradient for parameter, gradient in found if parameter.ndim == 2]


@torch.no_grad()
def literal_interleaved(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """X[L], W[L-1], X[L-1], W[L-2], ...: states, and gradients averaged over the batch."""
    m, X = len(case.inputs), case.feed_forward()
    X_new, gradients = list(X), []
    pull = case.loss.gradient(X[-1], case.target) / case.mu[-1]
    for v in range(len(X) - 1, 0, -1):
        X_new[v] = case.phi(v, case.edge(v, X) - pull)
        R = X[v] - X_new[v]
        bias = [] if case.graph[v].edge.linear.bias is None else [case.mu[v] / m * R.sum(0)]
        gradients = [case.mu[v] / m * R.T @ X[v - 1], *bias, *gradients]
        if v > 1:
            pull = case.mu[v] / case.mu[v - 1] * R @ case.weight(v)
    return X_new, gradients


@torch.no_grad()
def literal_sweeps(case: Case, order: str, sweeps: int) -> list[Tensor]:
    """Plain sweeps over the states in one of the other orders, every Z computed when needed."""
    X = case.feed_forward()
    L = len(X) - 1

    def update(v: int, X: list[Tensor]) -> Tensor:
        if v == L:
            pull = case.loss.gradient(X[L], case.target) / case.mu[L]
        else:
            R = case.phi(v + 1, case.edge(v + 1, X)) - X[v + 1]
            pull = case.mu[v + 1] / case.mu[v] * R @ case.weight(v + 1)
        return case.phi(v, case.edge(v, X) - pull)

    for _ in range(sweeps):
        old = list(X)
        for v in range(1, L + 1) if order == "paper" else range(L, 0, -1):
            X[v] = update(v, old if order == "parallel" else X)
    return X


@given(cases(scale=moderate))
def test_interleaved_is_design_section_3(case):
    X, gradients = literal_interleaved(case)
    method = case.method()
    states = method.settle(case.problem, case.batch, method.init(case.problem))
    for a, b in zip(states.X, X, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=1e-12, atol=1e-12)
    for a, b in zip(stepped(case), gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["chain", "skips", "convolutions", "shared", "products"])
@given(data=st.data(), iterations=st.sampled_from([1, 3]))
@settings(max_examples=12)
def test_interleaved_exact_steps_are_algorithm_2(kind, data, iterations):
    """The weights that the states below see are still the old ones; those after are fitted.

    Weights with several uses are fitted to all of them at once, each counted by its mu, when the
    lowest has been reached.
    """
    case = data.draw(of_kind(kind, scale=moderate))
    method = LPOM(mu=case.mu[1:], weights=Exact(iterations=iterations, ridge=0.2))
    state = method.init(case.problem)
    torch.manual_seed(0)  # of the masks of dropout
    states = method.settle(case.problem, case.batch, state)
    case.switches.update(states.switches)
    X = case.feed_forward()
    start = [p.detach().clone() for p in case.graph.parameters]
    for node in reversed(case.graph.nodes):
        for block in blocks(case.graph):
            if min(block.uses) == node.index:
                largest = max(case.mu[v] for v in block.uses)
                shares = [case.mu[v] / largest for v in block.uses]
                fit = Fit.of(case, block, X, states.X, shares)
                fit.write(algorithm_2(fit, iterations, fit.strength_of_the_library(0.2))[-1])
    expected = [p.detach().clone() for p in case.graph.parameters]
    with torch.no_grad():
        for parameter, old in zip(case.graph.parameters, start, strict=True):
            parameter.copy_(old)
    torch.manual_seed(0)
    method.step(case.problem, case.batch, state)
    for found, W in zip(case.graph.parameters, expected, strict=True):
        torch.testing.assert_close(found.detach(), W, rtol=1e-6, atol=1e-6 * (1 + W.norm()))


@pytest.mark.parametrize("order", ["top-down", "paper", "parallel"])
@given(case=cases(scale=moderate, mu=st.floats(0.5, 2.0)), sweeps=st.sampled_from([1, 2, 3]))
def test_orders_are_their_loops(order, case, sweeps):
    X = literal_sweeps(case, order, sweeps)
    options = {"order": order, "max_sweeps": sweeps, "rule": "plain"}
    method = case.method(**options)
    states = method.settle(case.problem, case.batch, method.init(case.problem))
    size = max(float(x.abs().max()) for x in X)
    for a, b in zip(states.X, X, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=1e-9, atol=1e-11 * (1 + size))

    for v, found in enumerate(of_weights(case, stepped(case, **options)), start=1):
        R = case.phi(v, case.edge(v, X).detach()) - X[v]
        expected = case.mu[v] / len(case.inputs) * R.T @ X[v - 1]
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-8 * (1 + size**2))


def back_propagation(case: Case) -> list[Tensor]:
    """Autograd's gradient of the mean loss."""
    mean_loss = case.loss.value(case.model(case.inputs), case.target).sum() / len(case.inputs)
    return list(torch.autograd.grad(mean_loss, case.graph.parameters))


def distances(case: Case, exact: list[Tensor]) -> Tensor:
    """How far each parameter's gradient of one interleaved sweep is from the exact one."""
    found = stepped(case)
    return torch.stack([(a - b).norm() for a, b in zip(found, exact, strict=True)])


@given(cases(acts=SMOOTH, scale=moderate, mu=st.floats(0.5, 2.0)))
def test_large_mu_gives_the_back_propagation_gradient(case):
    """The error falls as 1 / mu: a tenth for ten times the mu, layer by layer."""
    exact = back_propagation(case)
    near = distances(case.with_mu(1e3), exact)
    nearer = distances(case.with_mu(1e4), exact)
    size = torch.stack([gradient.norm() for gradient in exact]).norm()
    assert (nearer <= 0.12 * near + 1e-10 * (1 + size)).all()
    assert nearer.norm() <= 0.05 * size + 1e-10


@given(cases(acts=CURVED, scale=st.floats(0.5, 2.0), mu=st.floats(0.5, 2.0)))
def test_at_moderate_mu_it_is_another_gradient(case):
    """Else the limit would say nothing."""
    exact = back_propagation(case)
    assume(sum(float(gradient.norm()) for gradient in exact) > 1e-2)
    assert distances(case, exact).norm() > 1e-5


def signal(case: Case, **sweeps: object) -> list[float]:
    """Sizes of the weight gradients, layer by layer."""
    return [float(gradient.norm()) for gradient in of_weights(case, stepped(case, **sweeps))]


#: Widths and data for which every layer's gradient is truly not zero.
lively = cases(acts=CURVED, layers=(2, 4), scale=st.floats(0.3, 1.5), mu=st.floats(0.5, 2.0))


@given(lively, st.sampled_from(["plain", "safe"]))
def test_the_paper_s_first_sweep_sends_no_signal_down(case, rule):
    """Hidden states of a feed-forward start are fixed points: only the last layer learns."""
    sizes = signal(case, order="paper", rule=rule)
    assert sizes[:-1] == [0.0] * len(case.hidden)
    downwards = signal(case, order="top-down", rule=rule)
    if sizes[-1] > 1e-6:  # not for cross-entropy on a single output
        assert all(size > 0 for size in downwards)
        assert all(size > 0 for size in signal(case, order="interleaved"))


@given(lively)
def test_parallel_carries_the_error_one_layer_a_sweep(case):
    reached = signal(case, order="parallel", max_sweeps=1)
    alive = reached[-1] > 1e-6
    for sweeps in range(1, len(case.graph) + 1):
        sizes = signal(case, order="parallel", max_sweeps=sweeps, rule="plain")
        below = len(sizes) - sweeps
        assert sizes[:below] == [0.0] * below
        assert not alive or all(size > 0 for size in sizes[below:])


@pytest.mark.parametrize("order", ORDERS)
@given(case=cases(scale=moderate))
@settings(max_examples=15)
def test_every_order_is_still_at_a_fixed_point(order, case):
    """Where the loss does not pull, feed-forward states and all weights stay where they are."""
    outputs = case.feed_forward()[-1]
    content = replace(case, loss=losses.get("squared"), target=outputs)
    for size in signal(content, order=order, max_sweeps=2):
        assert size <= 1e-12 * (1 + float(outputs.norm()))
