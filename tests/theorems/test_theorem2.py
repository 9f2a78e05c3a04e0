"""Theorem 2: the plain iteration on a hidden state contracts by rho, to the block's minimum."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lpom.activations import Identity
from lpom.objective import kkt_residuals, rho, spectral_rates

from .blocks import assert_minimum, iterate, settle
from .strategies import Case, cases

deep = cases(layers=(2, 4))


def literal_rho(case: Case, i: int) -> float:
    """The theorem's constant for the state ``X[i]``, matrix by matrix."""
    W = case.weight(i)
    product = W.T.abs() @ W.abs()
    norms = torch.linalg.matrix_norm(product, 1) * torch.linalg.matrix_norm(product, torch.inf)
    ratio = case.mu[i] / case.mu[i - 1]
    return float(ratio * case.gamma(i - 1) * case.gamma(i) * norms.sqrt())


def norm(case: Case, i: int) -> float:
    return float(torch.linalg.svdvals(case.weight(i)).max())


def spectral_rate(case: Case, i: int) -> float:
    return case.mu[i] / case.mu[i - 1] * case.gamma(i - 1) * case.gamma(i) * norm(case, i) ** 2


def put(P: list[Tensor], i: int, value: Tensor) -> list[Tensor]:
    return [*P[:i], value, *P[i + 1 :]]


@given(deep)
def test_rates_are_the_theorems(case):
    norms, rates = spectral_rates(case.network, case.loss, case.mu, iterations=100)
    for i in range(1, len(case.network)):
        bound, spectral = literal_rho(case, i), spectral_rate(case, i)
        assert rho(case.network, case.mu)[i - 1] == pytest.approx(bound, rel=1e-12)
        assert spectral <= bound * (1 + 1e-12)
        # power iteration comes from below
        assert 0.98 * norm(case, i) <= norms[i] <= norm(case, i) * (1 + 1e-12)
        assert 0.96 * spectral <= rates[i - 1] <= spectral * (1 + 1e-12)


@given(deep, st.floats(-3, 1))
def test_the_plain_iteration_never_expands_by_more_than_rho(case, exponent):
    P = case.pre_activations()
    for i in range(1, len(case.network)):
        nearby = P[i - 1] + 10**exponent * case.normal(*P[i - 1].shape)
        start = case.phi(i - 1, P[i - 1]) - case.phi(i - 1, nearby)
        end = iterate(case, P, i) - iterate(case, put(P, i - 1, nearby), i)
        allowed = min(spectral_rate(case, i), literal_rho(case, i)) * start.norm()
        rounding = 1e-13 * (1 + norm(case, i) ** 2 * case.mu[i] / case.mu[i - 1])
        assert end.norm() <= allowed * (1 + 1e-9) + rounding * (1 + P[i - 1].norm())


@given(cases(layers=(2, 4), acts=[Identity()]))
def test_the_spectral_rate_is_attained(case):
    """Without activations, along the leading right singular vector."""
    P = case.pre_activations()
    for i in range(1, len(case.network)):
        direction = torch.linalg.svd(case.weight(i)).Vh[0].expand_as(P[i - 1])
        moved = iterate(case, put(P, i - 1, P[i - 1] + direction), i) - iterate(case, P, i)
        expected = spectral_rate(case, i) * float(direction.norm())
        assert float(moved.norm()) == pytest.approx(expected, rel=1e-8)


@given(cases(layers=(2, 4), acts=[Identity()]))
def test_rho_is_attained(case):
    """By weights all alike: then the sums of absolute values lose nothing."""
    P = case.pre_activations()
    for i in range(1, len(case.network)):
        case.weight(i).fill_(0.7)
        moved = iterate(case, put(P, i - 1, P[i - 1] + 1), i) - iterate(case, P, i)
        start = P[i - 1].numel() ** 0.5
        assert float(moved.norm()) == pytest.approx(literal_rho(case, i) * start, rel=1e-8)


@given(deep, st.floats(0.05, 0.8))
def test_below_one_the_limit_is_the_only_solution_and_the_minimum_of_its_block(case, rate):
    for i in range(1, len(case.network)):
        case.mu[i] *= rate / literal_rho(case, i)
        P = case.pre_activations()
        before, _ = kkt_residuals(case.network, case.loss, case.states(P), case.target, case.mu)
        states = case.at(P)
        settle(states, i, rate)
        after, _ = kkt_residuals(case.network, case.loss, states.X, case.target, case.mu)
        assert after[i - 1] <= 1e-12 * (1 + before[i - 1] + states.X[i].abs().max())
        assert_minimum(case, states, i)

        again = case.at(put(P, i - 1, case.pre_activation(i - 1)))
        settle(again, i, rate)
        torch.testing.assert_close(again.X[i], states.X[i], rtol=1e-10, atol=1e-10)
