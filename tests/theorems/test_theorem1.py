"""Theorem 1: F is convex in each block of states and of weights, and not in two of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lpom import losses, mlp
from lpom.weights.blocks import blocks

from .blocks import put
from .strategies import ACTIVATIONS, KINDS, Case, cases, of_kind

BOUNDED = [a for a in ACTIVATIONS if math.isfinite(a.lower) or math.isfinite(a.upper)]
between = st.lists(st.floats(0, 1), min_size=1, max_size=4)
every_kind = pytest.mark.parametrize("kind", KINDS)


def below_the_chord(value: float, at_0: float, at_1: float, t: float) -> bool:
    chord = (1 - t) * at_0 + t * at_1
    return value <= chord + 1e-11 * (1 + chord)


@every_kind
@given(data=st.data(), shares=between)
@settings(max_examples=10)
def test_F_is_convex_in_each_block_of_states(kind, data, shares):
    case = data.draw(of_kind(kind))
    X = case.states(case.pre_activations())
    for v in range(1, len(X)):
        A, B = X[v], case.phi(v, case.pre_activation(v))

        def F(state, v=v):
            return case.F(put(X, v, state))

        assert math.isfinite(F(A)) and math.isfinite(F(B))
        for t in [0.5, *shares]:
            assert below_the_chord(F(torch.lerp(A, B, t)), F(A), F(B), t)


@every_kind
@given(data=st.data(), shares=between)
@settings(max_examples=10)
def test_F_is_convex_in_each_block_of_weights_and_bias(kind, data, shares):
    """With all their uses, where they are used more than once."""
    case = data.draw(of_kind(kind))
    X = case.states(case.pre_activations())
    for block in blocks(case.graph):
        A = [p.detach().clone() for p in block.parameters]
        B = [a + 3 * case.normal(*a.shape) for a in A]

        @torch.no_grad()
        def F(t, block=block, A=A, B=B):
            for parameter, a, b in zip(block.parameters, A, B, strict=True):
                parameter.copy_(torch.lerp(a, b, t))
            return case.F(X)

        ends = F(0.0), F(1.0)
        assert all(map(math.isfinite, ends))
        for t in [0.5, *shares]:
            assert below_the_chord(F(t), *ends, t)
        F(0.0)


@given(cases(acts=BOUNDED), st.floats(0.01, 0.99), st.floats(1e-9, 100))
def test_F_is_infinite_outside_the_range_and_never_nan(case, t, beyond):
    """Convexity with infinite values: beyond an end outside the range all is infinite."""
    X = case.states(case.pre_activations())
    for node in case.graph:
        v, act = node.index, node.activation
        end = act.upper + beyond if math.isfinite(act.upper) else act.lower - beyond
        outside = X[v].clone()
        outside[0, 0] = end

        def F(state, v=v):
            return case.F(put(X, v, state))

        assert math.isfinite(F(X[v]))
        assert F(outside) == math.inf
        assert F(torch.lerp(X[v], outside, 1 + t)) == math.inf
        assert not math.isnan(F(torch.lerp(X[v], outside, t)))


def test_F_is_not_jointly_convex():
    """One unit a layer, no activation: ``(x2 - w x1)**2`` is zero at (1/2, 2) and (2, 1/2)."""
    model, one = mlp([1, 1, 1], "identity", dtype=torch.float64), torch.ones(1, 1).double()
    case = Case.of(model, losses.get("squared"), one, one, [1e-3, 1.0])
    first, last = (case.graph[v].edge.linear.weight for v in (1, 2))

    def F(w: float, x: float) -> float:
        nn.init.constant_(first, 1.0)
        nn.init.constant_(last, w)
        return case.F([one, x * one, one])

    assert F(1.25, 1.25) > 100 * (F(0.5, 2.0) + F(2.0, 0.5)) / 2


def test_F_is_not_convex_in_two_factors_of_a_product():
    """Which is why each factor is a state of its own."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in range(2))
            nn.init.ones_(self.a.weight), nn.init.ones_(self.b.weight)

        def forward(self, x):
            return self.a(x) * self.b(x)

    one = torch.ones(1, 1).double()
    case = Case.of(Product(), losses.get("squared"), one, one, [1e-3, 1e-3, 1.0])
    assert [node.sources for node in case.graph] == [(0,), (0,), (1, 2)]

    def F(a: float, b: float) -> float:
        return case.F([one, a * one, b * one, one])

    assert F(1.25, 1.25) > 50 * (F(0.5, 2.0) + F(2.0, 0.5)) / 2
