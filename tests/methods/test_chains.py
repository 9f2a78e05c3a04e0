"""Chains of Linear layers, for the methods that need one; what their solvers ask of a layer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lpom
from lpom import UntrainableError
from lpom.activations import Identity, Tanh
from lpom.graph import trace
from lpom.methods.chains import Dense, chain
from lpom.objectives import matrix_norm, start_vector

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
    bias = 0 if map_.bias is None else map_.bias
    torch.testing.assert_close(map_.linear(X) + bias, map_.apply(X))


@given(maps())
def test_adjoint_is_the_transpose(drawn):
    map_, X, R = drawn
    torch.testing.assert_close((map_.linear(X) * R).sum(), (X * map_.adjoint(R)).sum())


@given(maps())
def test_outputs_are_rows_of_the_design_times_the_matrix(drawn):
    map_, X, _ = drawn
    torch.testing.assert_close(map_.apply(X), map_.design(X) @ map_.matrix().T)


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
    W = drawn[0].weight
    true = float(torch.linalg.matrix_norm(W, 2))
    vector, before = start_vector(W[:1]), 0.0
    assert float(vector.norm()) == pytest.approx(1)
    for _ in range(4):  # going on from the vector is the same as more iterations at once
        norm, vector = matrix_norm(W, vector, iterations=50)
        assert before * (1 - 1e-12) <= float(norm) <= true * (1 + 1e-12)
        before = float(norm)
    at_once, _ = matrix_norm(W, start_vector(W[:1]), iterations=200)
    assert float(at_once) == pytest.approx(before)
    assert before == pytest.approx(true, rel=0.01)


def test_the_norm_of_a_zero_map_is_zero():
    W = torch.zeros(3, 4)
    assert float(matrix_norm(W, start_vector(W[:1]), iterations=3)[0]) == 0


def test_the_design_follows_the_module():
    single = Dense(nn.Linear(5, 2))
    assert single.design(torch.zeros(3, 5)).shape == (3, 6)
    assert Dense(nn.Linear(5, 2, bias=False)).design(torch.zeros(3, 5)).shape == (3, 5)


def chained(*modules):
    return chain(trace(nn.Sequential(*modules)))


def test_layers_one_after_the_other_with_flattened_data():
    first, second = nn.Linear(4, 3), nn.Linear(3, 2)
    found = chained(nn.Flatten(), first, nn.Tanh(), nn.Identity(), second)
    assert [layer.map.module for layer in found] == [first, second]
    assert [layer.activation for layer in found] == [Tanh(), Identity()]
    assert len(found) == 2 and found[1].map.module is second


def test_a_chain_feeds_forward_as_the_model():
    model = lpom.mlp([3, 5, 4, 2], "relu", "sigmoid", seed=0, dtype=torch.float64)
    inputs = torch.randn(6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    Z, X = chain(trace(model)).feed_forward(inputs)
    assert [len(Z), len(X)] == [3, 4] and X[0] is inputs
    torch.testing.assert_close(X[-1], model(inputs).detach(), rtol=0, atol=0)
    for i in range(3):
        torch.testing.assert_close(Z[i], model[2 * i](X[i]).detach(), rtol=0, atol=0)


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)) + x)


SHARED = nn.Linear(3, 3)
TIED = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
TIED[2].weight = TIED[0].weight
OTHERS = {
    "a skip": (Skip(), r"'output' .* states \(0, 1\) by add, last"),
    "a convolution": (nn.Sequential(nn.Conv1d(1, 2, 3), nn.ReLU()), "'1' .* by 0"),
    "softmax": (nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1)), "elementwise activation.*'1'"),
    "two uses": (nn.Sequential(SHARED, nn.ReLU(), SHARED), "0.weight is used twice"),
    "one weight of two layers": (TIED, "0.weight is used twice"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_networks_are_refused_by_name(name):
    model, sentence = OTHERS[name]
    with pytest.raises(UntrainableError, match=sentence):
        chain(trace(model))


@pytest.mark.parametrize("method", ["bcd", "admm", "admm-hashing", "tikhonov", "lifted"])
def test_methods_of_chains_refuse_a_skip_and_name_those_that_do_not(method):
    X, y = torch.randn(20, 3), torch.randn(20, 2)
    with pytest.raises(UntrainableError, match="chains of Linear layers.*Use 'lpom', 'mac' or"):
        lpom.fit(Skip(), X, y, method=method, epochs=1)


@pytest.mark.parametrize("method", ["lpom", "mac", "adam", "sgd"])
def test_other_methods_take_it(method):
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(40, 3, generator=generator)
    torch.manual_seed(0)
    model, y = Skip(), X[:, :2] + 1
    before, _ = lpom.evaluate(model, X, y)
    quick = lpom.methods.get(method)
    quick = quick if method == "mac" else quick.with_learning_rate(0.02)
    lpom.fit(model, X, y, method=quick, epochs=60, batch_size=20, seed=0)
    assert lpom.evaluate(model, X, y)[0] < 0.8 * before
