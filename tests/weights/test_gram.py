"""Least squares in the metric of the states: three forms, one answer."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lpom.weights.gram import Columns, IndependentRows, Rows, gram

shapes = st.tuples(st.integers(1, 8), st.integers(1, 8), st.integers(1, 3))
seeds = st.integers(0, 2**32 - 1)


def draw(shape: tuple[int, int, int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    m, n, out = shape
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(m, n, generator=generator, dtype=torch.float64)
    return A, torch.randn(m, out, generator=generator, dtype=torch.float64)


def literal(A, R, ridge):
    """The minimiser of ``|A D - R|**2 + lambda |D|**2``, the smallest if there are many."""
    lam = ridge * A.square().sum() / A.shape[1]
    stacked = torch.cat([A, lam.sqrt() * torch.eye(A.shape[1], dtype=A.dtype)])
    goal = torch.cat([R, R.new_zeros(A.shape[1], R.shape[1])])
    return torch.linalg.pinv(stacked if ridge else A) @ (goal if ridge else R)


def test_the_form_follows_the_shape():
    A = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    assert isinstance(gram(A.T, 0.0), Columns)
    assert isinstance(gram(A.T, 0.1), Columns)
    assert isinstance(gram(A, 0.1), Rows)
    assert isinstance(gram(A, 0.0), IndependentRows)
    twice = gram(torch.cat([A[:2], A[:2]]), 0.0)
    assert isinstance(twice, Rows) and twice.deficient


@given(shapes, seeds, st.sampled_from([0.0, 1e-3, 0.1, 10.0]))
def test_solve_is_ridge_regression(shape, seed, ridge):
    A, R = draw(shape, seed)
    if torch.linalg.cond(A) > 1e3:
        A = torch.linalg.qr(A)[0] if len(A) >= A.shape[1] else torch.linalg.qr(A.T)[0].T
    form = gram(A, ridge)
    assert not form.deficient
    C = form.solve(R)
    expected = literal(A, R, ridge)
    torch.testing.assert_close(form.weights(C).T, expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(form.apply(C), A @ form.weights(C).T, rtol=1e-8, atol=1e-8)
    first, last = (
        torch.ones(R.shape[1], A.shape[1] - 1).double(),
        torch.ones(R.shape[1], 1).double(),
    )
    form.add(C, first, last)  # a matrix, and its bias
    torch.testing.assert_close(torch.cat([first, last], 1), 1 + form.weights(C))


@given(shapes, seeds, st.sampled_from([0.0, 0.1]))
def test_row_weights_multiply_squared_errors(shape, seed, ridge):
    """The caller scales right-hand sides by the square roots, as the rows are."""
    A, R = draw(shape, seed)
    weight = torch.rand(len(A), generator=torch.Generator().manual_seed(seed)).double() + 0.5
    root = weight.sqrt()[:, None]
    form, scaled = gram(A, ridge, weight), gram(root * A, ridge)
    torch.testing.assert_close(
        form.weights(form.solve(root * R)), scaled.weights(scaled.solve(root * R))
    )


@given(seeds, st.integers(1, 4), st.integers(5, 8), st.integers(5, 8), st.booleans())
def test_dependent_rows_are_said_and_solved_on_their_range(seed, rank, m, n, single):
    """In float32 too: the answer is the pseudo-inverse's, and applying it again stays so."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(m, rank, generator=generator, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(n, rank, generator=generator, dtype=torch.float64))[0]
    A = left @ right.T
    R = torch.randn(m, 2, generator=generator, dtype=torch.float64)
    dtype = torch.float32 if single else torch.float64
    form = gram(A.to(dtype), 0.0)
    assert form.deficient
    found = form.weights(form.solve(R.to(dtype))).T
    tolerance = 1e-4 if single else 1e-10
    torch.testing.assert_close(found.double(), right @ left.T @ R, rtol=0, atol=tolerance)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3)])
def test_rows_of_zeros_ask_for_nothing(shape):
    form = gram(torch.zeros(shape), 0.0)
    assert form.deficient
    assert (form.weights(form.solve(torch.ones(shape[0], 2))) == 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("shape", [(3, 5), (5, 3)])
@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_what_is_not_finite_passes_through(bad, shape, ridge):
    """So that the training loop sees it in the weights and says so."""
    A = torch.ones(shape)
    A[0, 0] = bad
    form = gram(A, ridge)
    assert not form.weights(form.solve(torch.ones(shape[0], 2))).isfinite().all()


def test_a_ridge_is_relative_to_the_rows():
    """Ten times the rows and right-hand sides: the same weights."""
    A, R = draw((6, 4, 2), 0)
    small, large = gram(A, 0.3), gram(10 * A, 0.3)
    torch.testing.assert_close(large.solve(10 * R), small.solve(R))


@pytest.mark.parametrize("shape", [(20, 6), (6, 20)])
def test_with_rtol_it_is_the_truncated_pseudo_inverse(shape):
    """Singular values below ``rtol`` of the largest count as zero, always."""
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(shape, generator=generator, dtype=torch.float64)
    U, s, V = torch.linalg.svd(A, full_matrices=False)
    s = torch.tensor([1.0, 0.5, 0.2, 0.04, 0.02, 0.001], dtype=torch.float64)
    A = U * s @ V
    R = torch.randn(shape[0], 3, generator=generator, dtype=torch.float64)
    for rtol in (0.3, 0.03, 0.01):
        squares = gram(A, 0.0, rtol=rtol)
        found = squares.weights(squares.solve(R))
        expected = (torch.linalg.pinv(A, rtol=rtol) @ R).T
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
