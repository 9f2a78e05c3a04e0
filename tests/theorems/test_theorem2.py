"""Theorem 2: the plain iteration on a hidden state contracts by rho, to the block's minimum."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lpom.activations import Identity
from lpom.objectives import kkt_residuals, rho, spectral_rates

from .blocks import assert_minimum, iterate, put, settle
from .networks import KINDS as GRAPHS
from .strategies import KINDS, Case, cases, of_kind

deep = cases(layers=(2, 4))
every_kind = pytest.mark.parametrize("kind", KINDS)


def literal_rho(case: Case, v: int) -> float:
    """The theorem's constant for the state ``X[v]`` of a chain, matrix by matrix."""
    W = case.weight(v + 1)
    product = W.T.abs() @ W.abs()
    norms = torch.linalg.matrix_norm(product, 1) * torch.linalg.matrix_norm(product, torch.inf)
    ratio = case.mu[v + 1] / case.mu[v]
    return float(ratio * case.gamma(v) * case.gamma(v + 1) * norms.sqrt())


def norm(case: Case, v: int) -> float:
    """Of the layer below ``X[v]``."""
    return float(torch.linalg.svdvals(case.weight(v)).max())


def spectral_rate(case: Case, v: int) -> float:
    gammas = case.gamma(v) * case.gamma(v + 1)
    return case.mu[v + 1] / case.mu[v] * gammas * norm(case, v + 1) ** 2


@given(deep)
def test_rates_are_the_theorems(case):
    X = case.feed_forward()
    norms, rates = spectral_rates(case.graph, case.loss, case.mu, X, iterations=100)
    for v in case.hidden:
        bound, spectral = literal_rho(case, v), spectral_rate(case, v)
        assert rho(case.graph, case.mu, X)[v - 1] == pytest.approx(bound, rel=1e-12)
        assert spectral <= bound * (1 + 1e-12)
        # power iteration comes from below
        assert 0.98 * norm(case, v + 1) <= norms[v] <= norm(case, v + 1) * (1 + 1e-12)
        assert 0.96 * spectral <= rates[v - 1] <= spectral * (1 + 1e-12)


@pytest.mark.parametrize("kind", GRAPHS)
@given(data=st.data())
@settings(max_examples=5)
def test_rates_add_up_over_the_consumers(kind, data):
    """Norms are those of the edges' matrices, at the states where a product is measured."""
    case = data.draw(of_kind(kind))
    X = case.states(case.pre_activations())
    norms, rates = spectral_rates(
        case.graph, case.loss, case.mu, X, iterations=100, switches=case.switches
    )
    for node, largest, rate in zip(case.graph, norms, rates, strict=True):
        true = max(
            float(torch.linalg.matrix_norm(case.jacobian(node.index, s, X), 2))
            for s in node.sources
        )
        assert 0.98 * true <= largest <= true * (1 + 1e-12)
        expected = case.rate(node.index, X)
        assert 0.96 * expected <= rate <= expected * (1 + 1e-12)
    for value, v in zip(rho(case.graph, case.mu, X), case.hidden, strict=True):
        plain = all(above.edge.linear is not None for above in case.graph.consumers[v])
        assert math.isnan(value) != plain


@every_kind
@given(data=st.data(), exponent=st.floats(-3, 1))
@settings(max_examples=10)
def test_the_plain_iteration_never_expands_by_more_than_its_rate(kind, data, exponent):
    case = data.draw(of_kind(kind))
    P = case.pre_activations()
    X = case.states(P)
    for v in range(1, len(P)):
        nearby = P[v] + 10**exponent * case.normal(*P[v].shape)
        start = X[v] - case.phi(v, nearby)
        end = iterate(case, P, v) - iterate(case, put(P, v, nearby), v)
        rate = case.rate(v, X)
        if kind == "chain" and v in case.hidden:
            assert rate <= literal_rho(case, v) * (1 + 1e-12)
        size = sum(float(X[n.index].norm()) for n in case.graph) + float(P[v].norm())
        rounding = 1e-13 * (1 + case.gamma(v)) * (1 + rate) * (1 + size)
        assert end.norm() <= rate * start.norm() * (1 + 1e-9) + rounding


@given(cases(layers=(2, 4), acts=[Identity()]))
def test_the_spectral_rate_is_attained(case):
    """Without activations, along the leading right singular vector."""
    P = case.pre_activations()
    for v in case.hidden:
        direction = torch.linalg.svd(case.weight(v + 1)).Vh[0].expand_as(P[v])
        moved = iterate(case, put(P, v, P[v] + direction), v) - iterate(case, P, v)
        expected = spectral_rate(case, v) * float(direction.norm())
        assert float(moved.norm()) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("kind", ["skips", "shared", "products"])
@given(data=st.data())
@settings(max_examples=10)
def test_without_activations_the_iteration_is_a_sum_over_the_consumers(kind, data):
    r"""It takes a change d of the state to :math:`-\sum_c (\mu_c / \mu_v) A_c^T A_c d`."""
    case = data.draw(of_kind(kind, acts=[Identity()]))
    P = case.pre_activations()
    for v in case.hidden:
        if not isinstance(case.graph[v].activation, Identity):
            continue
        above = [c for c in case.graph.consumers[v] if isinstance(c.activation, Identity)]
        if len(above) < len(case.graph.consumers[v]):
            continue
        direction, expected = case.normal(*P[v].shape), 0.0
        for consumer in above:
            J = case.jacobian(consumer.index, v, case.states(P))
            ratio = case.mu[consumer.index] / case.mu[v]
            expected = expected - ratio * J.T @ (J @ direction.flatten())
        moved = iterate(case, put(P, v, P[v] + direction), v) - iterate(case, P, v)
        size = float(expected.norm()) + sum(float(p.norm()) for p in P)
        torch.testing.assert_close(moved.flatten(), expected, rtol=1e-9, atol=1e-11 * size**2)


@given(cases(layers=(2, 4), acts=[Identity()]))
def test_rho_is_attained(case):
    """By weights all alike: then the sums of absolute values lose nothing."""
    P = case.pre_activations()
    for v in case.hidden:
        case.weight(v + 1).fill_(0.7)
        moved = iterate(case, put(P, v, P[v] + 1), v) - iterate(case, P, v)
        start = P[v].numel() ** 0.5
        assert float(moved.norm()) == pytest.approx(literal_rho(case, v) * start, rel=1e-8)


@every_kind
@given(data=st.data(), rate=st.floats(0.05, 0.8))
@settings(max_examples=10)
def test_below_one_the_limit_is_the_only_solution_and_the_minimum_of_its_block(kind, data, rate):
    """On a chain even by the theorem's own rho."""
    case = data.draw(of_kind(kind))
    for v in case.hidden:
        P = case.pre_activations()
        X = case.states(P)
        now = literal_rho(case, v) if kind == "chain" else case.rate(v, X)
        assume(now > 1e-9)
        case.mu[v] *= now / rate
        before, _ = residuals(case, X)
        states = case.at(P)
        settle(case, states, v, rate)
        after, _ = residuals(case, states.X)
        assert after[v - 1] <= 1e-12 * (1 + before[v - 1] + states.X[v].abs().max())
        assert_minimum(case, states, v)

        again = case.at(put(P, v, case.pre_activation(v)))
        settle(case, again, v, rate)
        torch.testing.assert_close(again.X[v], states.X[v], rtol=1e-10, atol=1e-10)


def residuals(case: Case, X: list[torch.Tensor]) -> tuple[list[float], list[float]]:
    return kkt_residuals(case.graph, case.loss, X, case.target, case.mu, case.switches)
