"""Theorem 3: the plain iteration on the outputs contracts by tau, to the block's minimum."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lpom.activations import Identity
from lpom.objectives import kkt_residuals, spectral_rates

from .blocks import assert_minimum, iterate, put, settle
from .strategies import LOSSES, Case, cases, of_kind

#: Bounds on the absolute row sums of the Hessian of each loss, worked out on paper.
ETA = {
    "squared": 1.0,
    "cross-entropy": 0.5,  # row i: p_i (1 - p_i) + sum of p_i p_j = 2 p_i (1 - p_i)
    "binary-cross-entropy": 0.25,
    "hinge": 2.0,  # one over the smoothing
    "huber": 1.0,
}


def tau(case: Case) -> float:
    return case.gamma(case.output) * ETA[case.loss.name] / case.mu[case.output]


@given(cases())
def test_the_rate_is_the_theorems(case):
    _, rates = spectral_rates(case.graph, case.loss, case.mu, case.feed_forward())
    assert rates[-1] == pytest.approx(tau(case), rel=1e-14)


@given(cases(), st.floats(-3, 1))
def test_the_plain_iteration_never_expands_by_more_than_tau(case, exponent):
    P, v = case.pre_activations(), case.output
    nearby = P[v] + 10**exponent * case.normal(*P[v].shape)
    start = case.phi(v, P[v]) - case.phi(v, nearby)
    end = iterate(case, P, v) - iterate(case, put(P, v, nearby), v)
    assert end.norm() <= tau(case) * start.norm() * (1 + 1e-9) + 1e-12 * (1 + P[v].norm())


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
@given(data=st.data())
def test_tau_is_attained(loss, data):
    """Without an activation, where the loss bends most and in the direction in which it does."""
    case = data.draw(cases(acts=[Identity()], loss=[loss], mu=st.floats(0.1, 10.0)))
    start, direction = torch.zeros_like(case.target), torch.zeros_like(case.target)
    direction[:, 0] = 1.0
    if loss.name == "hinge":  # inside its rounded corner
        start = case.target * 0.75
    elif loss.name == "huber":
        start = case.target + 0.1
    elif loss.name == "cross-entropy":  # two classes at odds, the others ruled out
        assume(start.shape[1] > 1)
        direction[:, 1] = -1.0
        start[:, 2:] = -60.0
    P, v, step = case.pre_activations(), case.output, 1e-4 * direction
    moved = iterate(case, put(P, v, start + step), v) - iterate(case, put(P, v, start), v)
    assert float(moved.norm()) == pytest.approx(tau(case) * float(step.norm()), rel=1e-4)


@pytest.mark.parametrize("kind", ["chain", "slices"])
@given(data=st.data(), rate=st.floats(0.05, 0.8))
@settings(max_examples=20)
def test_below_one_the_limit_is_the_minimum_of_its_block(kind, data, rate):
    """The outputs of the second kind are a softmax."""
    case = data.draw(of_kind(kind))
    v = case.output
    case.mu[v] *= tau(case) / rate
    states = case.at(case.pre_activations())
    settle(case, states, v, rate)
    residuals, _ = kkt_residuals(case.graph, case.loss, states.X, case.target, case.mu)
    assert residuals[v - 1] <= 1e-13 * (1 + states.Z(case.graph[v]).norm())
    assert_minimum(case, states, v)
