r"""Functions that turn back are two states; the theorems hold there, and the rule is its step.

With :math:`\phi(z) = \phi_1(z) - c z`, :math:`\phi_1` monotone, a node becomes an identity state v
and a state :math:`s = \phi_1(v)`, and who read the value reads :math:`s - c v`.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lpom
from lpom import LPOM, activations
from lpom.losses import Squared
from lpom.methods import Batch, Problem
from lpom.rule import Displacement
from lpom.states import Sweeps

from .blocks import put
from .strategies import Case, cases, graphs, literal_F

TURNING = [activations.get(name) for name in ("gelu", "silu", "mish", "hardswish", "sine")]
MIXED = [*TURNING, activations.get("tanh"), activations.get("relu")]
moderate = st.floats(0.2, 1.5)
SGD = lpom.Adaptive("sgd", 1.0, "constant")


def drawn(data: st.DataObject, kind: str, acts=MIXED, **options) -> Case:
    options = {"acts": acts, "scale": moderate, "mu": st.floats(0.5, 3.0), **options}
    one = cases(layers=(2, 4), **options) if kind == "chain" else graphs(kind, **options)
    case = data.draw(one)
    case.mu.extend([2.0] * (len(case.graph) + 1 - len(case.mu)))  # of the states a split adds
    return case


@pytest.mark.parametrize("kind", ["chain", "skips", "shared", "products"])
@given(data=st.data(), mu=st.floats(0.5, 50.0))
@settings(max_examples=5)
def test_one_sweep_on_the_split_graph_is_the_rule_on_phi_itself(kind, data, mu):
    case = drawn(data, kind, loss=[Squared()])
    start = [p.detach().clone() for p in case.model.parameters()]
    problem = Problem.on(case.graph, case.loss, case.model)
    method = LPOM(mu=mu, weights=SGD)
    state = method.init(problem)
    state.stack = None
    method.step(problem, Batch(case.inputs, case.target), state)
    moved = [a - b.detach() for a, b in zip(start, case.model.parameters(), strict=True)]
    with torch.no_grad():
        for parameter, old in zip(case.model.parameters(), start, strict=True):
            parameter.copy_(old)
            parameter.grad = None
    outputs = lpom.lift(case.model, mu=mu)(case.inputs)
    gradient = case.loss.gradient(outputs.detach(), case.target)
    outputs.backward(gradient / len(case.inputs))
    for step, parameter in zip(moved, case.model.parameters(), strict=True):
        expected = torch.zeros_like(step) if parameter.grad is None else parameter.grad
        size = 1 + float(expected.abs().max())
        torch.testing.assert_close(step, expected, rtol=1e-11, atol=1e-12 * size * mu)


@pytest.mark.parametrize("kind", ["chain", "skips"])
@given(data=st.data())
@settings(max_examples=2)
def test_F_is_convex_in_each_block_of_states(kind, data):
    """Along any segment between two states, the others fixed (Theorem 1)."""
    case = drawn(data, kind)
    X = case.states(case.pre_activations(1.0))
    Y = case.states(case.pre_activations(1.0))
    for v in range(1, len(X)):
        ends = [float(literal_F(case, put(X, v, x)).detach()) for x in (X[v], Y[v])]
        for t in (0.3, 0.6):
            middle = put(X, v, (1 - t) * X[v] + t * Y[v])
            F = float(literal_F(case, middle).detach())
            size = 1 + sum(map(abs, ends))
            assert F <= (1 - t) * ends[0] + t * ends[1] + 1e-6 * size


@pytest.mark.parametrize("kind", ["chain", "skips"])
@given(data=st.data())
@settings(max_examples=2)
def test_safe_sweeps_never_raise_F(kind, data):
    case = drawn(data, kind, scale=st.floats(0.2, 10.0))
    states = case.at()
    for _ in range(2):
        before = case.F(states.X)
        with torch.no_grad():
            states.settle(Sweeps(order="top-down"))
        assert case.F(states.X) <= before + 1e-8 * (1 + abs(before))


@given(data=st.data())
@settings(max_examples=1)
def test_sweeps_until_nothing_changes_solve_the_conditions(data):
    case = drawn(data, "chain", acts=TURNING, scale=st.floats(0.1, 0.5))
    case.calm(0.4)
    with torch.no_grad():
        states = case.at()
        states.settle(Sweeps(order="top-down", max_sweeps=500, tolerance=1e-12))
    X = [x.detach().requires_grad_() for x in states.X]
    gradients = torch.autograd.grad(literal_F(case, X), X[1:])
    for node, gradient in zip(case.graph, gradients, strict=True):
        assert float(gradient.abs().max()) <= 1e-4 * (1 + case.mu[node.index]), node.name


@given(data=st.data(), size=st.floats(0.01, 0.3))
@settings(max_examples=15)
def test_a_held_displacement_is_mu_by_unit(data, size):
    r"""With :math:`\mu = |g| / d` for each unit the answer is that of one side, state by state."""
    act = data.draw(st.sampled_from(MIXED))
    seed = data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    z, g = torch.randn(2, 8, 5, generator=generator, dtype=torch.float64)
    move = Displacement(size, sides=1).elementwise(z, g)
    d = float(move.pull.abs().max())
    mu = g.abs() / d
    expected = mu * (act.phi(z) - act.phi(z - g / mu))
    torch.testing.assert_close(move.answer(act.phi, z), expected, rtol=1e-9, atol=1e-11)
