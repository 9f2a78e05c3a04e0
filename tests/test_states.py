"""The states of one batch: what is kept, what is evaluated again, and how pulls come about."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lpom
from lpom.graph import trace
from lpom.losses import Squared
from lpom.states import States
from lpom.weights.blocks import blocks


class Skip(nn.Module):
    """A state that is read by the next one and by the output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)
        self.last, self.drop = nn.Linear(4, 2), nn.Dropout(0.5)

    def forward(self, x):
        a = torch.tanh(self.first(x))
        return self.last(self.drop(a + torch.tanh(self.second(a))))


class Gate(nn.Module):
    """Two activations, each on a piece of one layer's values."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.last = nn.Linear(3, 8), nn.Linear(4, 2)

    def forward(self, x):
        a, b = self.both(x).chunk(2, -1)
        return self.last(torch.tanh(a) * torch.sigmoid(b))


class Heads(nn.Module):
    """Linear layers that read one state, and a product of what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.one, self.two, self.three = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        x = torch.tanh(self.first(x[:, None] * x[:, :, None]))
        a, b, c = (layer(x).unflatten(2, (2, 2)).transpose(1, 2) for layer in self.heads)
        mixed = torch.softmax(a @ b.mT, -1) @ c
        return self.last(x + mixed.transpose(1, 2).flatten(2)).mean(1)

    @property
    def heads(self):
        return self.one, self.two, self.three


def states_of(kind: type[nn.Module] = Skip, mu: float = 1.0, **options) -> tuple[nn.Module, States]:
    torch.manual_seed(0)
    model, inputs = kind().double(), torch.randn(5, 3, dtype=torch.float64)
    target, graph = torch.randn(5, 2, dtype=torch.float64), trace(model, inputs)
    with torch.no_grad():
        states = States(graph, inputs, target, Squared(), [mu] * (len(graph) + 1), **options)
    return model, states


def pull(states: States, v: int, g: torch.Tensor) -> None:
    states.pulls[v] = g if states.pulls[v] is None else states.pulls[v] + g


@torch.no_grad()
def test_moving_a_state_makes_those_above_it_disagree():
    """They were feed-forward, and keep what they say; the edge above now says something else."""
    model, states = states_of()
    first, second = states.graph[1], states.graph[2]
    assert [node.sources for node in states.graph] == [(0,), (1,), (1, 2)]
    said = states.Z(second).clone()
    assert states.residual(second) is None
    pull(states, 1, torch.ones(5, 4).double())
    states.move(first)
    torch.testing.assert_close(states.P[2], said)
    torch.testing.assert_close(states.X[1], torch.tanh(model.first(states.X[0]) - 1))
    again = torch.tanh(model.second(states.X[1]))
    torch.testing.assert_close(states.residual(second), again - torch.tanh(said))


@pytest.mark.parametrize("alpha", [None, 0.5])
@torch.no_grad()
def test_a_move_gives_the_residual_that_is_left(alpha):
    """Of a state that was feed-forward, and of one that was moved before."""
    model, states = states_of()
    said = torch.tanh(model.first(states.X[0]))
    for _ in range(2):
        pull(states, 1, torch.full((5, 4), 0.3).double())
        residual = states.move(states.graph[1], alpha)
        torch.testing.assert_close(residual, said - states.X[1].detach())


@torch.no_grad()
def test_moving_weights_makes_all_states_disagree():
    model, states = states_of()
    X = states.X[1].clone()
    model.first.weight.mul_(2)
    states.weights_moved()
    expected = torch.tanh(model.first(states.X[0])) - X
    torch.testing.assert_close(states.residual(states.graph[1]), expected)


@torch.no_grad()
def test_the_pass_chooses_its_masks_once():
    """An edge with dropout is one affine map for as long as the batch lives."""
    _, states = states_of()
    first = states.Z(states.graph[3]).clone()
    states.weights_moved()
    torch.testing.assert_close(states.Z(states.graph[3]), first)
    torch.manual_seed(1)
    other = States(states.graph, states.X[0], states.target, Squared(), [1.0] * 4)
    assert not torch.equal(other.Z(states.graph[3]), first)


@torch.no_grad()
def test_pulls_add_up():
    model, states = states_of()
    said = torch.tanh(model.first(states.X[0]))
    for share in (0.1, 0.2):
        pull(states, 1, torch.full((5, 4), share).double())
    expected = said - torch.tanh(model.first(states.X[0]) - 0.3)
    torch.testing.assert_close(states.move(states.graph[1]), expected)
    assert states.pulls[1] is None


@pytest.mark.parametrize("kind", [Skip, Gate, Heads])
@torch.no_grad()
def test_a_sweep_is_autograd_where_mu_is_large(kind):
    """For states read twice, in pieces, and in products; and the data stays as it is."""
    model, states = states_of(kind, mu=1e7, hold=False)
    model.eval()
    states = States(states.graph, states.X[0], states.target, Squared(), states.mu, hold=False)
    inputs = states.X[0].clone()
    states.pull_output()
    gradients = {}
    for node in reversed(states.graph.nodes):
        residual = states.move(node)
        gradients |= states.weight_gradients(node, residual, None)
        states.pull_sources(node, residual)
    with torch.enable_grad():
        loss = Squared().value(model(inputs), states.target).sum()
        expected = torch.autograd.grad(loss, list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(gradients[parameter], gradient, rtol=1e-5, atol=1e-5)
    assert torch.equal(inputs, states.X[0])


@torch.no_grad()
def test_jumps_move_by_their_ramps_and_say_the_jump():
    model = lpom.mlp([3, 4, 2], "sign", seed=0, dtype=torch.float64)
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).double()
    graph, target = trace(model), torch.zeros(5, 2).double()
    states = States(graph, inputs, target, Squared(), [1.0] * 3, soft=graph.smoothed(2.0))
    Z = model[0](inputs)
    assert torch.equal(states.X[1], torch.where(Z >= 0, 1.0, -1.0).double())
    g = torch.full((5, 4), 0.3).double()
    pull(states, 1, g)
    ramp = Z.clamp(-1, 1) - (Z - g).clamp(-1, 1)
    torch.testing.assert_close(states.move(graph[1]), ramp)


def test_ramps_that_a_model_has_already_keep_their_width():
    narrow = lpom.activations.get("sign").smoothed(0.5)
    graph = trace(nn.Sequential(nn.Linear(2, 3), narrow.to_module(), nn.Linear(3, 1)))
    assert graph.smoothed(2.0)[1].activation == narrow


def test_a_bias_whose_weight_is_used_elsewhere_is_a_block_of_its_own():
    """It is not its layer: an exact step on it leaves the weight alone."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.code = nn.Linear(3, 2)

        def forward(self, x):
            return nn.functional.linear(torch.tanh(self.code(x)), self.code.weight.t())

    found = {block.names: block for block in blocks(trace(Tied()))}
    assert set(found) == {("code.weight",), ("code.bias",)}
    assert found["code.weight",].uses == (1, 2) and found["code.bias",].uses == (1,)
    assert found["code.bias",].layer is None and found["code.weight",].layer is None
