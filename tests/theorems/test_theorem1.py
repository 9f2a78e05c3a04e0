"""Theorem 1: F is convex in each block of states and of weights, and not in two of them."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lpom import losses
from lpom.network import Lifted, mlp
from lpom.objective import evaluate

from .strategies import ACTIVATIONS, cases

BOUNDED = [a for a in ACTIVATIONS if math.isfinite(a.lower) or math.isfinite(a.upper)]
between = st.lists(st.floats(0, 1), min_size=1, max_size=4)


def below_the_chord(value: float, at_0: float, at_1: float, t: float) -> bool:
    chord = (1 - t) * at_0 + t * at_1
    return value <= chord + 1e-11 * (1 + chord)


@given(cases(), between)
def test_F_is_convex_in_each_block_of_states(case, shares):
    P = case.pre_activations()
    for i in range(len(case.network)):
        X = case.states(P)
        A, B = X[i + 1], case.phi(i, case.pre_activation(i))

        def F(state, X=X, i=i):
            return case.F([*X[: i + 1], state, *X[i + 2 :]])

        assert math.isfinite(F(A)) and math.isfinite(F(B))
        for t in [0.5, *shares]:
            assert below_the_chord(F(torch.lerp(A, B, t)), F(A), F(B), t)


@given(cases(), between)
def test_F_is_convex_in_each_block_of_weights_and_bias(case, shares):
    X = case.states(case.pre_activations())
    for layer in case.network:
        A = layer.map.matrix()
        B = A + 3 * case.normal(*A.shape)

        def F(matrix, layer=layer):
            layer.map.set_matrix(matrix)
            return case.F(X)

        ends = F(A), F(B)
        assert all(map(math.isfinite, ends))
        for t in [0.5, *shares]:
            assert below_the_chord(F(torch.lerp(A, B, t)), *ends, t)
        layer.map.set_matrix(A)


@given(cases(acts=BOUNDED), st.floats(0.01, 0.99), st.floats(1e-9, 100))
def test_F_is_infinite_outside_the_range_and_never_nan(case, t, beyond):
    """Convexity with infinite values: beyond an end outside the range all is infinite."""
    X = case.states(case.pre_activations())
    for i, layer in enumerate(case.network):
        act = layer.activation
        end = act.upper + beyond if math.isfinite(act.upper) else act.lower - beyond
        outside = X[i + 1].clone()
        outside[0, 0] = end

        def F(state, X=X, i=i):
            return case.F([*X[: i + 1], state, *X[i + 2 :]])

        assert math.isfinite(F(X[i + 1]))
        assert F(outside) == math.inf
        assert F(torch.lerp(X[i + 1], outside, 1 + t)) == math.inf
        assert not math.isnan(F(torch.lerp(X[i + 1], outside, t)))


def test_F_is_not_jointly_convex():
    """One unit a layer, no activation: ``(x2 - w x1)**2`` is zero at (1/2, 2) and (2, 1/2)."""
    model = mlp([1, 1, 1], "identity", dtype=torch.float64)
    network, one = Lifted.from_module(model), torch.ones(1, 1, dtype=torch.float64)

    def F(w: float, x: float) -> float:
        nn.init.constant_(model[0].weight, 1.0)
        nn.init.constant_(model[-1].weight, w)
        X = [one, x * one, one]
        return evaluate(network, losses.get("squared"), X, one, [1e-3, 1.0]).total

    assert F(1.25, 1.25) > 100 * (F(0.5, 2.0) + F(2.0, 0.5)) / 2
