"""Dense: what solvers ask of a linear map, against plain matrix algebra."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lpom.maps import Dense

sizes = st.integers(1, 7)
seeds = st.integers(0, 2**32 - 1)


@st.composite
def maps(draw: st.DrawFn) -> tuple[Dense, torch.Tensor, torch.Tensor]:
    """A map, inputs (m, in) and residuals (m, out)."""
    n_in, n_out, m = draw(sizes), draw(sizes), draw(sizes)
    linear = nn.Linear(n_in, n_out, bias=draw(st.booleans()), dtype=torch.float64)
    generator = torch.Generator().manual_seed(draw(seeds))
    for parameter in linear.parameters():
        nn.init.normal_(parameter, generator=generator)
    X = torch.randn(m, n_in, generator=generator, dtype=torch.float64)
    return Dense(linear), X, torch.randn(m, n_out, generator=generator, dtype=torch.float64)


@given(maps())
def test_apply_is_the_module(drawn):
    map_, X, _ = drawn
    torch.testing.assert_close(map_.apply(X), map_.module(X).detach())
    assert not map_.apply(X).requires_grad
    torch.testing.assert_close(map_.forward(X), map_.module(X))
    assert map_.forward(X).requires_grad
    bias = 0 if map_.bias is None else map_.bias
    torch.testing.assert_close(map_.linear(X) + bias, map_.apply(X))


@given(maps())
def test_adjoint_is_the_transpose(drawn):
    map_, X, R = drawn
    torch.testing.assert_close((map_.linear(X) * R).sum(), (X * map_.adjoint(R)).sum())


@given(maps())
def test_weight_gradient_is_autograd_s(drawn):
    map_, X, R = drawn
    expected = torch.autograd.grad((map_.forward(X) * R).sum(), map_.parameters())
    found = map_.weight_gradient(R, X)
    assert len(found) == len(expected) == len(map_.parameters())
    places = [torch.full_like(a, torch.nan) for a in found]
    again = map_.weight_gradient(R, X, out=places)
    for a, b, c, place in zip(found, expected, again, places, strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(c, b)
        assert c is place


@given(maps())
def test_outputs_are_rows_of_the_design_times_the_matrix(drawn):
    map_, X, _ = drawn
    torch.testing.assert_close(map_.as_rows(map_.apply(X)), map_.design(X) @ map_.matrix().T)


@given(maps())
def test_set_and_add_matrix_write_weights_and_bias_in_place(drawn):
    map_, X, _ = drawn
    pointers = [parameter.data_ptr() for parameter in map_.parameters()]
    matrix = map_.matrix()
    map_.set_matrix(2 * matrix)
    torch.testing.assert_close(map_.matrix(), 2 * matrix)
    torch.testing.assert_close(map_.module(X).detach(), map_.design(X) @ (2 * matrix).T)
    assert pointers == [parameter.data_ptr() for parameter in map_.parameters()]
    map_.add_matrix(-matrix)
    torch.testing.assert_close(map_.matrix(), matrix)
    assert pointers == [parameter.data_ptr() for parameter in map_.parameters()]
    map_.matrix().zero_()  # a copy
    torch.testing.assert_close(map_.matrix(), matrix)


@given(maps())
def test_the_norm_comes_from_below_and_converges(drawn):
    map_, _, _ = drawn
    true = float(torch.linalg.matrix_norm(map_.weight, 2))
    vector, before = map_.start_vector(), 0.0
    assert float(vector.norm()) == pytest.approx(1)
    for _ in range(4):  # going on from the vector is the same as more iterations at once
        norm, vector = map_.norm(vector, iterations=50)
        assert before * (1 - 1e-12) <= float(norm) <= true * (1 + 1e-12)
        before = float(norm)
    at_once, _ = map_.norm(map_.start_vector(), iterations=200)
    assert float(at_once) == pytest.approx(before)
    assert before == pytest.approx(true, rel=0.01)


def test_the_norm_of_a_zero_map_is_zero_and_keeps_the_vector():
    map_ = Dense(nn.Linear(4, 3))
    map_.weight.zero_()
    start = map_.start_vector()
    norm, vector = map_.norm(start, iterations=3)
    assert float(norm) == 0
    assert torch.equal(vector, start)


@given(maps())
def test_absolute_bound_is_both_norms_of_theorem_2(drawn):
    map_, _, _ = drawn
    product = map_.weight.T.abs() @ map_.weight.abs()
    bound = float(map_.absolute_bound())
    assert bound == pytest.approx(float(torch.linalg.matrix_norm(product, 1)))
    assert bound == pytest.approx(float(torch.linalg.matrix_norm(product, torch.inf)))
    assert bound >= float(torch.linalg.matrix_norm(map_.weight, 2)) ** 2 * (1 - 1e-12)


def test_dtype_and_start_follow_the_module():
    single = Dense(nn.Linear(5, 2))
    assert single.start_vector().dtype == torch.float32
    assert torch.equal(single.start_vector(), Dense(nn.Linear(5, 4)).start_vector())
    assert single.design(torch.zeros(3, 5)).shape == (3, 6)
    assert Dense(nn.Linear(5, 2, bias=False)).design(torch.zeros(3, 5)).shape == (3, 5)
