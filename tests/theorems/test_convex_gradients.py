"""The mathematics of every activation as a gradient of a convex function, of slices too.

Inputs have the shape (samples, 4, 8), and a slice is whatever an activation makes of it.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lpom import activations
from lpom.activations import (
    Activation,
    GroupNorm,
    L2Normalize,
    LayerNorm,
    OneHot,
    RMSNorm,
    Softmax,
    Sparsemax,
    TopK,
    from_function,
    split,
)

MIXING = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(3)).double())[0]


def mixed(z: Tensor) -> Tensor:
    """``Q^T tanh(Q z)``, the gradient of ``sum log cosh(Q z)``."""
    width = z.shape[-1]
    Q = MIXING.to(z) if width == 8 else torch.eye(width, dtype=z.dtype)
    return torch.tanh(z @ Q.T) @ Q


CASES: list[Activation] = [
    *(split(example)[1] for example in activations.examples()),
    Softmax(1),
    Sparsemax(1),
    TopK(1),
    TopK(8),
    TopK(2, 1),
    TopK(3, width=0.5),
    TopK(8, width=0.5),
    TopK(2, 1, width=4.0),
    OneHot(1),
    OneHot(width=0.3),
    L2Normalize(1, 3.0),
    RMSNorm((4, 8), 0.1),
    RMSNorm((8,), 2.0),
    LayerNorm((4, 8), 0.3),
    LayerNorm((8,), 2.0),
    GroupNorm(1),
    GroupNorm(4, 0.2),
]
CUSTOM = [
    from_function(lambda z: torch.softmax(z, -1), lipschitz=0.5, dim=-1, name="mine"),
    from_function(lambda z: torch.softmax(z, 1), lipschitz=0.5, dim=1, name="across"),
    from_function(mixed, lipschitz=1.0, dim=-1, name="mixed"),
]
CONTINUOUS = [case for case in CASES if not case.jumps]
VECTOR = [case for case in CASES if not case.elementwise]
JUMPS = [case for case in VECTOR if case.jumps]
scales = pytest.mark.parametrize("scale", [0.05, 1.0, 20.0])


def each(cases: list[Activation]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("activation", cases, ids=repr)


def normal(seed: int, samples: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 4, 8, generator=generator, dtype=torch.float64)


def values_of(activation: Activation, terms: Tensor) -> Tensor:
    """Terms added up over each slice, in the shape of a gap."""
    if activation.elementwise:
        return terms
    if isinstance(activation, GroupNorm):
        return terms.reshape(len(terms), activation.groups, -1).sum(-1, keepdim=True)
    shape = getattr(activation, "shape", None)
    dims = range(-len(shape), 0) if shape else [activation.dim]
    return terms.sum(tuple(dims), keepdim=True)


def by_definition(activation: Activation, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """The gap as written, and the size of its terms."""
    parts = activation.conjugate(x), activation.primitive(z), values_of(activation, x * z)
    return parts[0] + parts[1] - parts[2], 1 + sum(part.abs() for part in parts)


@each(CASES)
@scales
def test_gap_is_fenchel_young_and_never_negative(activation, scale):
    x, z = activation.phi(scale * normal(0)), scale * normal(1)
    gap = activation.gap(x, z)
    definition, size = by_definition(activation, x, z)
    assert gap.shape == definition.shape and len(gap) == len(z)
    assert ((gap - definition).abs() <= 1e-13 * size).all()
    assert (gap >= -1e-15 * size).all()


@each(CASES)
@scales
def test_gap_is_zero_at_phi_alone(activation, scale):
    """``Phi*(phi(z)) + Phi(z) = <phi(z), z>``, which with the inequality fixes ``Phi*``."""
    z = scale * normal(2)
    x = activation.phi(z)
    definition, size = by_definition(activation, x, z)
    assert (definition.abs() <= 1e-13 * size).all()
    assert activation.gap(x, z).abs().max() <= 1e-12


@each(CONTINUOUS)
@scales
def test_gap_grows_with_the_square_of_the_distance(activation, scale):
    """``Phi*`` is 1/lipschitz-strongly convex."""
    x, z = activation.phi(scale * normal(3)), scale * normal(4)
    away = values_of(activation, (x - activation.phi(z)) ** 2)
    gap = activation.gap(x, z)
    assert (gap >= away / (2 * activation.lipschitz) * (1 - 1e-9) - 1e-13 * (1 + gap)).all()


@each(CASES)
@scales
def test_phi_is_the_gradient_of_the_primitive(activation, scale):
    z = (scale * normal(5)).requires_grad_()
    (slope,) = torch.autograd.grad(activation.primitive(z).sum(), z)
    torch.testing.assert_close(slope, activation.phi(z), rtol=1e-8, atol=3e-9)

    z, way, h = z.detach(), normal(6), 1e-6
    rise = activation.primitive(z + h * way) - activation.primitive(z - h * way)
    ends = [values_of(activation, way * activation.phi(z + end * way)) for end in (-h, h)]
    rounding = 1e-15 / h * (1 + 4 * values_of(activation, z.abs()))
    assert (rise / (2 * h) >= ends[0] - rounding).all()
    assert (rise / (2 * h) <= ends[1] + rounding).all()


@each(CASES)
@scales
def test_gap_has_the_gradients_that_move_weights_and_states(activation, scale):
    """``phi(z) - x`` in z; in x, along moves within the range, ``p - z`` with ``x = phi(p)``."""
    p, z = scale * normal(7), (scale * normal(8)).requires_grad_()
    x = activation.phi(p)
    (slope,) = torch.autograd.grad(activation.gap(x, z).sum(), z)
    torch.testing.assert_close(slope, activation.phi(z) - x, rtol=1e-8, atol=1e-8)

    h, z = 1e-3, z.detach()
    other = activation.phi(p + h * normal(9))
    change = activation.gap(other, z) - activation.gap(x, z)
    predicted = values_of(activation, (other - x) * (p - z))
    curvature = activation.gap(other, p)  # the change is exactly these two
    scale_of_terms = 1 + activation.gap(x, z).abs() + predicted.abs()
    assert ((change - predicted - curvature).abs() <= 1e-11 * scale_of_terms).all()


@each(CONTINUOUS)
@scales
def test_lipschitz_is_never_exceeded(activation, scale):
    a = scale * normal(10, 50)
    for b in (scale * normal(11, 50), a + 1e-4 * normal(12, 50)):
        rise = values_of(activation, (activation.phi(a) - activation.phi(b)) ** 2).sqrt()
        run = values_of(activation, (a - b) ** 2).sqrt()
        assert (rise <= activation.lipschitz * run * (1 + 1e-9) + 1e-13).all()


def steep(activation: Activation) -> Tensor:
    """Where a function of slices is steepest: at 0 for norms, near a tie for a mask."""
    z = torch.zeros(1, 4, 8, dtype=torch.float64)
    if isinstance(activation, Softmax):
        z[:, 2:, :] -= 100
        z[:, :, 2:] -= 100
    elif isinstance(activation, TopK):
        z = z + 0.01 * activation.width * normal(13, 1)
    return z


@each([case for case in VECTOR if not case.jumps and case != TopK(8, width=0.5)])
def test_lipschitz_is_attained_and_the_jacobian_symmetric(activation):
    """The Jacobian, by autograd, is symmetric, never below 0, with norm up to lipschitz."""
    for z in (steep(activation), normal(14, 1)):
        J = torch.autograd.functional.jacobian(activation.phi, z).reshape(32, 32)
        torch.testing.assert_close(J, J.T, rtol=1e-9, atol=1e-9 * activation.lipschitz)
        eigenvalues = torch.linalg.eigvalsh((J + J.T) / 2)
        assert eigenvalues[0] >= -1e-9 * activation.lipschitz
        if torch.equal(z, steep(activation)):
            assert eigenvalues[-1] == pytest.approx(activation.lipschitz, rel=1e-6)


@each(CASES)
@scales
def test_phi_stays_within_its_bounds(activation, scale):
    x = activation.phi(scale * normal(15))
    assert x.min() >= activation.lower - 1e-12 and x.max() <= activation.upper + 1e-12


def outsiders(activation: Activation) -> list[Tensor]:
    """Points beside the range: too large, of another sum, of another sign."""
    x = activation.phi(normal(16))
    if isinstance(activation, Softmax | Sparsemax | TopK | OneHot):
        beyond = x.clone()  # with the sums along both dimensions kept
        beyond[:, :2, :2] += torch.tensor([[-2.0, 2.0], [2.0, -2.0]])
        return [1.001 * x, x + 1e-4, beyond]
    if isinstance(activation, LayerNorm | GroupNorm):
        return [40 * x, 0.5 * x + 1e-3]
    return [40 * x]


@each(VECTOR)
def test_conjugate_is_infinite_outside_its_domain(activation):
    for x in outsiders(activation):
        assert (activation.conjugate(x) == math.inf).any()
        assert (activation.gap(x, normal(17)) == math.inf).any()


@each(VECTOR)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shift", [0.0, 1e3])
@scales
def test_phi_is_never_taken_for_outside(activation, dtype, shift, scale):
    z = (scale * normal(18, 200) + shift).to(dtype)
    gap = activation.gap(activation.phi(z), z)
    rounding = torch.finfo(dtype).eps * (1 + scale + shift) * 128
    spread = 1 + shift / scale if isinstance(activation, LayerNorm | GroupNorm) else 1.0
    assert gap.isfinite().all() and gap.dtype == dtype
    assert gap.abs().max() <= rounding * spread
    if shift == 0:
        assert activation.conjugate(activation.phi(z)).isfinite().all()


@each(VECTOR)
def test_float32_agrees_with_float64(activation):
    x, z = activation.phi(3 * normal(19, 100)), 3 * normal(20, 100)
    gap = activation.gap(x.float(), z.float())
    torch.testing.assert_close(gap.double(), activation.gap(x, z), rtol=1e-4, atol=1e-4)


def sorted_simplex(z: Tensor) -> Tensor:
    """Sparsemax as published: the support is the longest prefix of the sorted row that fits."""
    order = z.sort(descending=True).values
    best = 0.0
    for size in range(1, len(z) + 1):
        level = (float(order[:size].sum()) - 1) / size
        if order[size - 1] > level:
            best = level
    return (z - best).clamp(min=0)


def bisected(z: Tensor, k: int) -> Tensor:
    """The projection on the capped simplex by bisection of its level."""
    low, high = float(z.min()) - 1, float(z.max())
    for _ in range(200):
        middle = (low + high) / 2
        if float((z - middle).clamp(0, 1).sum()) > k:
            low = middle
        else:
            high = middle
    return (z - low).clamp(0, 1)


@scales
@pytest.mark.parametrize("k", [1, 2, 5, 7])
def test_projections_against_other_algorithms(scale, k):
    z = scale * normal(21)
    z[0, 0] = 0.0  # all equal
    z[0, 1, :4] = z[0, 1, 0]
    for row, made in zip(z.flatten(0, 1), TopK(k, width=0.7).phi(z).flatten(0, 1), strict=True):
        torch.testing.assert_close(made, bisected(row / 0.7, k), rtol=0, atol=1e-12)
    for row, made in zip(z.flatten(0, 1), Sparsemax().phi(z).flatten(0, 1), strict=True):
        torch.testing.assert_close(made, sorted_simplex(row), rtol=0, atol=1e-12)
    torch.testing.assert_close(OneHot(width=1.0).phi(z), Sparsemax().phi(z))


@each(JUMPS)
@pytest.mark.parametrize("width", [1.0, 0.1, 1e-3])
def test_smoothed_is_the_mask_wherever_the_ramp_fits_between(activation, width):
    """That is where the k-th and the next are more than the width apart."""
    z, ramp = normal(22, 60), activation.smoothed(width)
    k = getattr(activation, "k", 1)
    ordered = z.movedim(activation.dim, -1).sort(-1, descending=True).values
    if k == ordered.shape[-1]:
        fits = torch.ones(ordered.shape[:-1], dtype=torch.bool)
    else:
        fits = ordered[..., k - 1] - ordered[..., k] > width
    made = ramp.phi(z).movedim(activation.dim, -1)
    mask = activation.phi(z).movedim(activation.dim, -1)
    torch.testing.assert_close(made[fits], mask[fits], rtol=0, atol=1e-12)
    assert (made.sum(-1) - k).abs().max() < 1e-12 and (mask.sum(-1) == k).all()
    assert fits.double().mean() > (0.9 if width < 0.01 else 0.02)
    assert ramp.lipschitz == 1 / width and ramp.smoothed(0.0) == activation
    excess = ramp.primitive(z) - activation.primitive(z)  # w times ||x||^2 / 2, at its largest x
    assert (excess <= 1e-12).all() and (excess >= -k * width / 2 - 1e-12).all()


def test_the_mask_is_of_the_largest():
    z = torch.tensor([[0.3, 2.0, -1.0, 1.0]])
    assert TopK(2).phi(z).tolist() == [[0, 1, 0, 1]]
    assert OneHot().phi(z).tolist() == [[0, 1, 0, 0]]
    assert OneHot(0).phi(z.T).tolist() == [[0], [1], [0], [0]]
    assert TopK(2).primitive(z).tolist() == [[3.0]]


@each(CUSTOM)
def test_a_function_of_one_s_own(activation):
    x, z = activation.phi(2 * normal(23, 3)), 2 * normal(24, 3)
    gap = activation.gap(x, z)
    definition, _ = by_definition(activation, x, z)
    torch.testing.assert_close(gap, definition, rtol=1e-6, atol=1e-6)
    assert (gap >= 0).all() and activation.gap(activation.phi(z), z).max() <= 1e-10
    z.requires_grad_()
    (slope,) = torch.autograd.grad(activation.primitive(z).sum(), z)
    torch.testing.assert_close(slope, activation.phi(z), rtol=1e-7, atol=1e-7)
    (slope,) = torch.autograd.grad(activation.gap(x, z).sum(), z)
    torch.testing.assert_close(slope, activation.phi(z) - x, rtol=1e-7, atol=1e-7)


def test_a_softmax_of_one_s_own_is_softmax():
    mine, known = CUSTOM[0], Softmax()
    x, z = known.phi(2 * normal(25, 3)), 3 * normal(26, 3)
    offset = math.log(8)  # its primitive is 0 at 0
    torch.testing.assert_close(mine.primitive(z), known.primitive(z) - offset, rtol=0, atol=1e-9)
    torch.testing.assert_close(mine.conjugate(x), known.conjugate(x) + offset, rtol=0, atol=1e-6)
    torch.testing.assert_close(mine.gap(x, z), known.gap(x, z), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="conjugate.*mine"):
        mine.conjugate(2 * x)
