"""The mathematics of activations: Fenchel-Young gaps, Lipschitz constants, the paper's Table 1."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lpom import activations
from lpom.activations import (
    CELU,
    ELU,
    Activation,
    Clamp,
    Hardshrink,
    Hardtanh,
    LeakyReLU,
    ReLU,
    Sigmoid,
    Sign,
    Softplus,
    Softshrink,
    Staircase,
    Step,
    Tanh,
    Threshold,
    from_function,
    from_table,
    split,
)

CUSTOM = [
    from_function(torch.arctan, lipschitz=1.0, name="arctan"),
    from_function(lambda z: z / 2 + torch.sin(z) / 4, lipschitz=0.75, name="wavy"),
]
CASES = [
    *(split(example)[1] for example in activations.examples() if example.elementwise),
    LeakyReLU(0.3),
    ELU(0.4),
    ELU(2.5),
    CELU(0.3),
    CELU(2.5),
    Softplus(3.0),
    Clamp(None, 0.5),
    Clamp(-1.5, None),
    Softshrink(1.2),
    Hardshrink(0.8),
    Hardshrink(0.8, 0.4),
    Hardshrink(0.8, 1.6),
    Threshold(0.5, -1.0),
    Threshold(0.5, -1.0, 0.7),
    from_table([-3, -1, 0.5, 0.7, 2, 4], [-0.4, -0.4, 0, 1, 1, 1.2]),
    Hardtanh(-0.25, 1.5),
    Step(0.05),
    Step(2.0),
    Sign(0.3),
    Staircase(1, 2.0, 0.5),
    Staircase(3, 0.5, 0.2),
    Staircase(4, 1.0, 1.0),
    Staircase(7, 0.3),
    *CUSTOM,
]
CONTINUOUS = [case for case in CASES if not case.jumps]
JUMPS = [case for case in CASES if case.jumps]

points = st.lists(st.floats(-12, 12), min_size=1, max_size=10)
fractions = st.lists(st.floats(0, 1), min_size=1, max_size=10)


def each(cases: list[Activation]) -> pytest.MarkDecorator:
    ids = [repr(case).replace("constant=", "") for case in cases]
    return pytest.mark.parametrize("activation", cases, ids=ids)


def few(test):
    return settings(max_examples=12, deadline=None)(test)


def column(z: list[float]) -> Tensor:
    return torch.tensor(z, dtype=torch.float64)[:, None]


def in_range(activation: Activation, u: list[float], reach: float = 8.0) -> Tensor:
    low, high = max(activation.lower, -reach), min(activation.upper, reach)
    return (low + (high - low) * torch.tensor(u, dtype=torch.float64)).clamp(low, high)


def distance_to_jumps(activation: Activation, z: Tensor) -> Tensor:
    """Without ramps, all kinks are jumps."""
    return (z[..., None] - torch.tensor(activation.kinks, dtype=z.dtype)).abs().amin(-1)


def flat(activation: Activation) -> bool:
    """Whether it is constant between its jumps."""
    return not isinstance(activation, Hardshrink | Threshold)


@each(CASES)
@given(u=fractions, z=points)
@few
def test_gap_is_fenchel_young_and_never_negative(activation, u, z):
    x, z = torch.broadcast_tensors(in_range(activation, u), column(z))
    gap = activation.gap(x, z)
    definition = activation.conjugate(x) + activation.primitive(z) - x * z
    scale = 1 + activation.conjugate(x).abs() + activation.primitive(z).abs() + (x * z).abs()
    assert ((gap - definition).abs() <= 1e-14 * scale).all()
    assert (gap >= -1e-15 * scale).all()


@each(CASES)
@given(z=points)
@few
def test_gap_is_zero_at_phi(activation, z):
    z = column(z)
    assert activation.gap(activation.phi(z), z).abs().max() <= 1e-13


@each(CASES)
@given(u=fractions, z=points)
@few
def test_gap_grows_away_from_phi(activation, u, z):
    """The conjugate is 1/lipschitz-strongly convex; beside a jump the gap grows linearly.

    A state that is ``d`` from a jump and ``t`` from phi is pushed back by at least ``min(d, t)``
    where the function between jumps has slope 1.
    """
    x, z = torch.broadcast_tensors(in_range(activation, u), column(z))
    away = (x - activation.phi(z)).abs()
    if activation.jumps and flat(activation):
        floor = away * distance_to_jumps(activation, z)
    elif activation.jumps:
        distance = torch.minimum(distance_to_jumps(activation, z), away)
        floor = distance * (away - distance / 2)
    else:
        floor = away**2 / (2 * activation.lipschitz)
    rounding = 1e-14 * (1 + activation.primitive(z).abs() + (x * z).abs())
    assert (activation.gap(x, z) >= floor * (1 - 1e-9) - rounding).all()


@each(CASES)
@given(z=points)
@few
def test_phi_never_decreases_and_stays_in_range(activation, z):
    x = activation.phi(column(z).sort(0).values)
    assert (x.diff(dim=0) >= 0).all()
    assert x.min() >= activation.lower and x.max() <= activation.upper


@each(CONTINUOUS)
@given(a=points, b=points)
@few
def test_lipschitz_is_never_exceeded(activation, a, b):
    a, b = torch.tensor(a, dtype=torch.float64), column(b)
    rise = (activation.phi(a) - activation.phi(b)).abs()
    assert (rise <= activation.lipschitz * (a - b).abs() + 1e-14).all()


@each(CASES)
def test_lipschitz_is_attained(activation):
    z = torch.linspace(-8, 8, 32001, dtype=torch.float64)
    steepest = (activation.phi(z).diff() / z.diff()).max()
    if activation.jumps:  # a whole jump within one cell of the grid
        assert steepest > 0.29 / 5e-4
    else:
        assert 0.99 * activation.lipschitz < steepest < activation.lipschitz * (1 + 1e-9)


@each(CASES)
@given(z=points)
@few
def test_phi_is_the_derivative_of_the_primitive(activation, z):
    z = column(z).requires_grad_()
    (slope,) = torch.autograd.grad(activation.primitive(z).sum(), z)
    torch.testing.assert_close(slope, activation.phi(z), rtol=1e-8, atol=3e-9)

    h, z = 1e-5, z.detach()
    chord = (activation.primitive(z + h) - activation.primitive(z - h)) / (2 * h)
    assert (chord >= activation.phi(z - h) - 1e-8).all()
    assert (chord <= activation.phi(z + h) + 1e-8).all()


@each(CASES)
@given(u=fractions, z=points)
@few
def test_gap_has_the_derivative_that_moves_the_weights(activation, u, z):
    """In z the gap has the derivative ``phi(z) - x``, also at its kinks and in autograd."""
    if activation.jumps:  # where it jumps the gap has a kink
        z = [point for point in z if point not in (activation.kinks or ())]
    x, z = torch.broadcast_tensors(in_range(activation, u), column([0.0, *z]))
    z = z.clone().requires_grad_()
    (slope,) = torch.autograd.grad(activation.gap(x, z).sum(), z)
    torch.testing.assert_close(slope, activation.phi(z) - x, rtol=1e-8, atol=3e-9)


@each(CASES)
@given(u=fractions, z=points)
@example(u=[0.25], z=[0.0])  # where threshold's jump ends
@example(u=[0.5], z=[3.0, -3.0])  # at zero, where signs begin to differ
@few
def test_gap_has_the_derivative_that_moves_the_states(activation, u, z):
    """In x the gap has the derivative ``p - z`` for a ``p`` with ``phi(p) = x``."""
    x, z = torch.broadcast_tensors(in_range(activation, u, reach=4.0), column([0.0, *z]))
    inside = (x > activation.lower + 1e-3) & (x < activation.upper - 1e-3)
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(activation.gap(x, z).sum(), x)
    x, p = x.detach()[inside], (slope + z)[inside]
    h = 1e-7 * (1 + p.abs())
    assert (activation.phi(p - h) <= x + 1e-9).all()
    assert (activation.phi(p + h) >= x - 1e-9).all()


@each(CASES)
def test_conjugate_is_the_largest_of_all_lines(activation):
    """The supremum of ``x z - primitive(z)``, taken over a grid of z."""
    h = 0.004
    z = torch.arange(-100_000, 100_001, dtype=torch.float64) * h
    primitive = activation.primitive(z)
    x = in_range(activation, torch.linspace(0.01, 0.99, 23).tolist(), reach=3.0)
    supremum = torch.stack([(value * z - primitive).max() for value in x])
    missed = h if activation.jumps else activation.lipschitz * h**2 / 8  # by the grid, at most
    difference = activation.conjugate(x) - supremum
    assert difference.min() >= -1e-10
    assert difference.max() <= missed + 1e-10


@each(CASES)
def test_conjugate_is_infinite_exactly_outside_the_range(activation):
    inside = in_range(activation, torch.linspace(0.001, 0.999, 99).tolist())
    assert activation.conjugate(inside).isfinite().all()
    ends = [(activation.lower, -1), (activation.upper, 1)]
    outside = torch.tensor(
        [end + sign * d for end, sign in ends if math.isfinite(end) for d in (1e-9, 0.1, 50.0)],
        dtype=torch.float64,
    )
    assert (activation.conjugate(outside) == math.inf).all()
    assert (activation.gap(outside, 3 * torch.ones_like(outside)) == math.inf).all()


@each(CASES)
@given(y=st.floats(-12, 12))
@few
def test_phi_is_a_proximal_operator(activation, y):
    """``phi(y)`` minimises ``f(x) + (x - y)**2 / 2`` with ``f(x) = conjugate(x) - x**2 / 2``."""
    y = torch.tensor(y, dtype=torch.float64)
    if activation.jumps and distance_to_jumps(activation, y) < 0.01:
        return
    x = torch.linspace(max(activation.lower, -25), min(activation.upper, 25), 8001).double()
    x = x.clamp(activation.lower, activation.upper)
    objective = activation.conjugate(x) - x**2 / 2 + (x - y) ** 2 / 2
    spacing = x.diff().max()
    assert (x[objective.argmin()] - activation.phi(y)).abs() <= spacing * 1.001


# f(x) and g(z) of Table 1, with the constants that the paper leaves out: its ELU row has a jump
# of alpha at 0 in both f and g, which would make f(x) + g(z) + (x - z)**2 / 2 discontinuous.
def sigmoid_row(x, z):
    f = x * x.log() + (1 - x) * (1 - x).log() - x**2 / 2
    return f, (z.exp() + 1).log() - z**2 / 2


def tanh_row(x, z):
    f = ((1 - x) * (1 - x).log() + (1 + x) * (1 + x).log()) / 2 - x**2 / 2
    return f, ((z.exp() + (-z).exp()) / 2).log() - z**2 / 2


def relu_row(x, z):
    return torch.zeros_like(x), torch.where(z >= 0, 0, -(z**2) / 2)


def leaky_relu_row(x, z, alpha=0.3):
    f = torch.where(x >= 0, 0, (1 - alpha) / (2 * alpha) * x**2)
    return f, torch.where(z >= 0, 0, (alpha - 1) / 2 * z**2)


def elu_row(x, z, alpha=0.4):
    f = (alpha + x) * ((x / alpha + 1).log() - 1) - x**2 / 2
    g = alpha * (z.exp() - z) - z**2 / 2
    return torch.where(x >= 0, 0, f + alpha), torch.where(z >= 0, 0, g - alpha)


TABLE_1 = [
    (Sigmoid(), sigmoid_row),
    (Tanh(), tanh_row),
    (ReLU(), relu_row),
    (LeakyReLU(0.3), leaky_relu_row),
    (ELU(0.4), elu_row),
]


@pytest.mark.parametrize(("activation", "row"), TABLE_1, ids=[a.name for a, _ in TABLE_1])
@given(u=st.lists(st.floats(1e-6, 1 - 1e-6), min_size=2, max_size=10), z=points)
@few
def test_gap_is_that_of_table_1(activation, row, u, z):
    x, z = torch.broadcast_tensors(in_range(activation, u), column(z))
    f, g = row(x, z)
    difference = activation.gap(x, z) - (f + g + (x - z) ** 2 / 2)
    torch.testing.assert_close(difference, torch.zeros_like(difference), rtol=0, atol=1e-12)


@each(JUMPS)
@given(z=points, width=st.floats(1e-3, 3.0))
@few
def test_smoothed_differs_only_near_the_jumps(activation, z, width):
    ramp, z = activation.smoothed(width), column(z)
    width = ramp.width
    away = distance_to_jumps(activation, z) > width / 2 + 1e-12
    torch.testing.assert_close(ramp.phi(z)[away], activation.phi(z)[away], rtol=0, atol=1e-14)
    height = ramp.lipschitz * width
    assert ((ramp.phi(z) - activation.phi(z)).abs() <= height / 2 + 1e-12).all()
    assert not ramp.jumps and ramp.smoothed(0.0) == activation


@each(CONTINUOUS)
def test_a_continuous_function_needs_no_smoothing(activation):
    if hasattr(activation, "width"):
        assert activation.smoothed(0.25).width == 0.25
    else:
        assert activation.smoothed(0.25) is activation
