r"""One interleaved sweep on a graph, against autograd with another rule for activations.

Design.md section 10: the sweep is back-propagation in which every activation answers the incoming
:math:`g` with :math:`\mu (\phi(z) - \phi(z - g / \mu))` in place of :math:`\phi'(z) g`. That is
written here as a ``torch.autograd.Function`` and put in the place of the model's activations; the
model's own forward and torch's autograd do the rest, and know nothing of graphs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lpom import activations
from lpom.activations import Activation, LayerNorm, from_module

from .networks import KINDS as GRAPHS
from .strategies import SMOOTH, Case, of_kind
from .test_orders import back_propagation, stepped


class Answer(torch.autograd.Function):
    """``phi(z)``, which answers ``g`` with ``mu (phi(z) - phi(z - g / mu))``; mu per sample."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, phi: Any, mu: Tensor, moved: list[Tensor]) -> Tensor:
        ctx.save_for_backward(z, mu)
        ctx.phi, ctx.moved = phi, moved
        return phi(z)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        z, mu = ctx.saved_tensors
        mu = mu.view(-1, *[1] * (z.ndim - 1))
        ctx.moved.append(ctx.phi(z - g / mu))
        return mu * (ctx.phi(z) - ctx.moved[-1]), None, None, None


class Answering(nn.Module):
    """Stands in the place of an activation, in all its uses; each has its own mu."""

    def __init__(self, activation: Activation, mu: Sequence[Tensor]) -> None:
        super().__init__()
        self.activation, self.mu = activation, mu
        self.moved: list[list[Tensor]] = []

    def forward(self, z: Tensor) -> Tensor:
        self.moved.append([])
        mu = self.mu[len(self.moved) - 1]
        return Answer.apply(z, self.activation.phi, mu, self.moved[-1])  # type: ignore[no-any-return]


class AffineNorm(nn.Module):
    """A layer norm: the activation answers, its scale and shift are autograd's."""

    def __init__(self, norm: nn.LayerNorm, answering: Answering) -> None:
        super().__init__()
        self.weight, self.bias, self.answering = norm.weight, norm.bias, answering

    def forward(self, z: Tensor) -> Tensor:
        return self.answering(z) * self.weight + self.bias


def transcribed(case: Case, share: Tensor) -> tuple[nn.Module, dict[str, Answering]]:
    """A copy of the model whose activations answer; ``share`` of mu for each sample."""
    model, names = copy.deepcopy(case.model), {}
    mus = {node.name: case.mu[node.index] * share for node in case.graph}
    for name, module in list(model.named_modules()):
        norm = isinstance(module, nn.LayerNorm) and module.elementwise_affine
        if not (norm or activations.is_activation(module)):
            continue
        state = "layer_norm" if norm else name
        own = [mu for node, mu in mus.items() if node == state or node.startswith(f"{state}#")]
        if not own:  # an identity that is no state answers g with g
            own = [share]
        act = LayerNorm(module.normalized_shape, module.eps) if norm else from_module(module)
        names[state] = Answering(act, own)
        model.set_submodule(name, AffineNorm(module, names[state]) if norm else names[state])
    return model, names


def gradients(
    case: Case, weight: Tensor | None = None
) -> tuple[list[Tensor], dict[str, Answering]]:
    """Of the weighted mean loss, by autograd through the answers."""
    each = torch.ones(len(case.inputs), dtype=torch.float64) if weight is None else weight
    share = each / each.sum()
    model, names = transcribed(case, share)
    loss = case.loss.value(model(case.inputs), case.target) @ share
    found = dict(model.named_parameters())
    own = {parameter: name for name, parameter in case.model.named_parameters()}
    wanted = [found[own[parameter]] for parameter in case.graph.parameters]
    return list(torch.autograd.grad(loss, wanted)), names


@pytest.mark.parametrize("kind", GRAPHS)
@given(data=st.data())
@settings(max_examples=15)
def test_one_interleaved_sweep_is_autograd_with_another_rule(kind, data):
    """Equal to rounding in weight gradients, each node with a mu of its own."""
    case = data.draw(of_kind(kind, scale=st.floats(0.1, 2.0)))
    torch.manual_seed(1)  # of the masks of dropout
    found = stepped(case)
    torch.manual_seed(1)
    expected, _ = gradients(case)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12 * float(1 + b.norm()))


@pytest.mark.parametrize("kind", [kind for kind in GRAPHS if kind != "convolutions"])
@given(data=st.data())
@settings(max_examples=10)
def test_with_sample_weights_too(kind, data):
    """A sample that counts twice has twice the mu. (Batch norm would mix the samples.)"""
    case = data.draw(of_kind(kind, scale=st.floats(0.1, 2.0)))
    weight = case.normal(len(case.inputs)).abs() + 0.1
    found = stepped(case, weight)
    expected, _ = gradients(case, weight)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12 * float(1 + b.norm()))


@pytest.mark.parametrize("kind", [kind for kind in GRAPHS if kind != "convolutions"])
@given(data=st.data())
@settings(max_examples=10)
def test_the_states_are_those_of_the_answers(kind, data):
    """``phi(z - g / mu)``, g the derivative of each sample's own loss."""
    case = data.draw(of_kind(kind, scale=st.floats(0.1, 2.0)))
    method = case.method()
    states = method.settle(case.problem, case.batch, method.init(case.problem))
    _, names = gradients(case)
    seen = 0
    for state, answering in names.items():
        for k, (moved,) in enumerate(m for m in answering.moved if m):
            wanted = state if k == 0 else f"{state}#{k + 1}"
            for node in case.graph:
                if node.name == wanted:
                    X = states.X[node.index].detach()
                    torch.testing.assert_close(moved, X, rtol=1e-12, atol=1e-12)
                    seen += 1
    assert seen >= 1


@pytest.mark.parametrize("kind", GRAPHS)
@given(data=st.data())
@settings(max_examples=8)
def test_large_mu_gives_the_back_propagation_gradient_of_a_graph(kind, data):
    """Through skips, products, shared weights and batch norm; the error falls as 1 / mu."""
    acts = [act for act in SMOOTH if act.name != "elu"]  # whose second derivative jumps
    case = data.draw(of_kind(kind, acts=acts, scale=st.floats(0.1, 1.0), mu=st.floats(0.5, 2.0)))
    torch.manual_seed(1)
    exact = back_propagation(case)
    size = torch.stack([gradient.norm() for gradient in exact]).norm()
    errors = []
    for factor in (1e4, 1e5):
        torch.manual_seed(1)
        found = stepped(case.with_mu(factor))
        errors.append(torch.stack([(a - b).norm() for a, b in zip(found, exact, strict=True)]))
    assert (errors[1] <= 0.12 * errors[0] + 1e-9 * (1 + size)).all()
    assert errors[1].norm() <= 0.05 * size + 1e-9
