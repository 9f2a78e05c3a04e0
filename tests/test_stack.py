"""One sweep down a stack of Linear layers: the literal transcription, and what is no stack."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import lpom
from lpom.losses import CrossEntropy, Squared
from lpom.methods import Batch, Problem
from lpom.rule import Displacement, Weight
from lpom.stack import Stack

ROWS, MU = 7, (3.0, 5.0, 2.0)


def made(activation: str, *, bias: bool = True) -> nn.Sequential:
    return lpom.mlp([4, 6, 5, 3], activation, bias=bias, seed=0, dtype=torch.float64)


def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, 4, generator=generator, dtype=torch.float64)
    return Batch(inputs, torch.eye(3, dtype=torch.float64)[torch.arange(ROWS) % 3])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["relu", "tanh", "leaky_relu", "softplus"])
@torch.no_grad()
def test_gradients_are_those_of_the_paper_written_down(activation, bias):
    """Eqs. 25 and 28 for three layers, each with its mu."""
    model, given = made(activation, bias=bias), batch()
    stack, rules = Stack.of(model), [Weight(mu) for mu in MU]
    outputs = stack.sweep(given.inputs, given.target, CrossEntropy(), rules, decay=0.3)

    phi = model[1]
    linears = [layer for layer in model if isinstance(layer, nn.Linear)]
    Z1 = linears[0](given.inputs)
    Z2 = linears[1](phi(Z1))
    Z3 = linears[2](phi(Z2))
    torch.testing.assert_close(outputs, Z3)
    R3 = (torch.softmax(Z3, 1) - given.target) / MU[2]
    R2 = phi(Z2) - phi(Z2 - MU[2] / MU[1] * R3 @ linears[2].weight)
    R1 = phi(Z1) - phi(Z1 - MU[1] / MU[0] * R2 @ linears[1].weight)
    below = (given.inputs, phi(Z1), phi(Z2))
    for linear, mu, R, X in zip(linears, MU, (R1, R2, R3), below, strict=True):
        torch.testing.assert_close(linear.weight.grad, mu / ROWS * R.T @ X + 0.3 * linear.weight)
        if bias:
            torch.testing.assert_close(linear.bias.grad, mu / ROWS * R.sum(0))


@pytest.mark.parametrize("activation", ["relu", "tanh", "gelu", "softmax"])
@pytest.mark.parametrize("how", [{"mu": MU}, {}, {"sides": 1}, {"displacement": 0.1}], ids=repr)
@pytest.mark.parametrize("loss", [CrossEntropy(), Squared()])
def test_a_step_is_that_of_the_states_or_of_the_lifted_model(loss, how, activation):
    if "mu" in how and activation == "gelu":
        pytest.skip("the graph has a state more, and a mu for it")
    weights = []
    for short in (True, False):
        model = made(activation)
        problem = Problem(model, loss)
        method = lpom.LPOM(**how, weights=lpom.Adaptive("sgd", 0.1))
        state = method.init(problem)
        assert state.stack is not None
        state.weight_decay = 0.1
        if not short:
            state.stack = None
        for _ in range(3):
            method.step(problem, batch(), state)
        weights.append([W.detach() for W in model.parameters()])
    torch.testing.assert_close(*weights, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("optimizer", ["adam", "factored"])
def test_large_matrices_move_a_few_rows_at_a_time(optimizer, monkeypatch):
    """Their gradients are never there, and the steps are the same."""
    weights, options = [], {"decay": 0.1}
    for large in (1 << 30, 11):
        monkeypatch.setattr("lpom.weights.adam.LARGE", large)
        model, given = made("tanh"), batch()
        stack = Stack.of(model)
        moves = lpom.weights.adaptive.make_optimizer(optimizer, list(model.parameters()), 1e-2)
        for _ in range(3):
            rules = [Displacement()] * 3
            stack.sweep(given.inputs, given.target, CrossEntropy(), rules, moves, **options)
            moves.step()
        assert (model[0].weight.grad is None) == (large == 11 or optimizer == "factored")
        weights.append([W.detach() for W in model.parameters()])
    torch.testing.assert_close(*weights, rtol=1e-10, atol=1e-12)


def test_weighted_rows_go_by_the_states(monkeypatch):
    """The stack knows of no weights: it must not be asked."""
    monkeypatch.setattr(Stack, "sweep", None)
    problem = Problem(made("relu"), CrossEntropy())
    state = lpom.LPOM().init(problem)
    weighted = replace(batch(), weight=torch.ones(ROWS, dtype=torch.float64))
    lpom.LPOM().step(problem, weighted, state)


def shared() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer)


@pytest.mark.parametrize(
    "model",
    [
        shared(),
        lpom.mlp([4, 4, 2], "sign", seed=0),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2)),
    ],
    ids=["shared", "jumps", "dropout"],
)
def test_what_is_no_stack_is_none(model):
    assert Stack.of(model) is None


def test_a_layer_that_a_callback_freezes_stays_as_it_is():
    model = lpom.mlp((6, 5, 4), seed=0, dtype=torch.float64)
    X, y = torch.randn(30, 6, dtype=torch.float64), torch.arange(30) % 4
    frozen = []

    def freeze(epoch):
        if not frozen:
            model[0].weight.requires_grad_(False)
            frozen.append(model[0].weight.clone())

    lpom.fit(model, X, y, epochs=3, batch_size=10, seed=0, callbacks=freeze, progress=False)
    assert torch.equal(model[0].weight, frozen[0])
