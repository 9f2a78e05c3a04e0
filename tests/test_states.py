"""The states of one batch: what is kept, what is evaluated again, and what is written over."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lpom
from lpom.graph import trace
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


def made(seed: int = 0) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(seed)
    return Skip().double(), torch.randn(5, 3, dtype=torch.float64)


@torch.no_grad()
def test_moving_a_state_makes_those_above_it_disagree():
    """They were feed-forward, and keep what they say; the edge above now says something else."""
    model, inputs = made()
    graph = trace(model)
    states = States(graph, inputs, [1.0] * 4)
    first, second = graph[1], graph[2]
    assert [node.sources for node in graph] == [(0,), (1,), (1, 2)]
    said = states.Z(second).clone()
    assert states.residual(second) is None
    states.pull(first, torch.ones(5, 4).double())
    states.move(first)
    torch.testing.assert_close(states.P[2], said)
    torch.testing.assert_close(states.X[1], torch.tanh(model.first(inputs) - 1))
    again = torch.tanh(model.second(states.X[1]))
    torch.testing.assert_close(states.residual(second), again - torch.tanh(said))


@torch.no_grad()
def test_moving_weights_makes_all_states_disagree():
    model, inputs = made()
    graph = trace(model)
    states = States(graph, inputs, [1.0] * 4)
    X = states.X[1].clone()
    model.first.weight.mul_(2)
    states.weights_moved()
    torch.testing.assert_close(states.residual(graph[1]), torch.tanh(model.first(inputs)) - X)


@torch.no_grad()
def test_the_pass_chooses_its_masks_once():
    """An edge with dropout is one affine map for as long as the batch lives."""
    model, inputs = made()
    graph = trace(model)
    states = States(graph, inputs, [1.0] * 4)
    first = states.Z(graph[3]).clone()
    states.weights_moved()
    torch.testing.assert_close(states.Z(graph[3]), first)
    other = States(graph, inputs, [1.0] * 4)
    assert not torch.equal(other.Z(graph[3]), first)


@torch.no_grad()
def test_what_is_written_over_is_not_what_is_needed():
    """With ``once`` memory is used again; gradients are the same, and the data stays."""
    model, inputs = made()
    model.eval()  # no masks, so that both passes are one
    graph, before = trace(model), inputs.clone()
    gradients = []
    for once in (True, False):
        states = States(graph, inputs, [1.0, 2.0, 3.0, 4.0], once=once)
        states.pull(graph[3], states.outputs - 1)
        for node in reversed(graph.nodes):
            states.carry_back(node, states.move(node), None, len(inputs))
        gradients.append([parameter.grad.clone() for parameter in graph.parameters])
        states.weights_moved()
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)
    assert torch.equal(inputs, before)


@torch.no_grad()
def test_weights_that_no_sweep_reached_keep_no_gradient():
    """An optimiser would move them by what an earlier batch said."""
    model, inputs = made()
    graph = trace(model)
    for parameter in graph.parameters:
        parameter.grad = torch.ones_like(parameter)
    states = States(graph, inputs, [1.0] * 4)
    states.carry_back(graph[3], torch.ones(5, 2).double(), None, 5)
    states.gradients.drop_old()
    assert model.first.weight.grad is None and model.second.bias.grad is None
    torch.testing.assert_close(model.last.bias.grad, torch.ones(2).double())


@torch.no_grad()
def test_jumps_move_by_their_ramps_and_say_the_jump():
    model = lpom.mlp([3, 4, 2], "sign", seed=0, dtype=torch.float64)
    inputs, graph = (
        torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).double(),
        trace(model),
    )
    states = States(graph, inputs, [1.0] * 3, soft=graph.smoothed(2.0), once=True)
    Z = model[0](inputs)
    assert torch.equal(states.state(1), torch.where(Z >= 0, 1.0, -1.0).double())
    pull = torch.full((5, 4), 0.3).double()
    states.pull(graph[1], pull)
    ramp = Z.clamp(-1, 1) - (Z - pull).clamp(-1, 1)
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


@pytest.mark.parametrize("once", [True, False])
@torch.no_grad()
def test_pulls_add_up(once):
    model, inputs = made()
    graph = trace(model)
    states = States(graph, inputs, [1.0] * 4, once=once)
    said = torch.tanh(model.first(inputs))
    for share in (0.1, 0.2):
        states.pull(graph[1], torch.full((5, 4), share).double())
    expected = said - torch.tanh(model.first(inputs) - 0.3)
    torch.testing.assert_close(states.move(graph[1]), expected)
    assert states.pulls[1] is None


class Heads(nn.Module):
    """Linear layers that read one state, and a product of what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.one, self.two, self.three = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        x = torch.tanh(self.first(x))
        a, b, c = (layer(x).unflatten(2, (2, 2)).transpose(1, 2) for layer in self.heads)
        mixed = torch.softmax(a @ b.mT, -1) @ c
        return self.last(x + mixed.transpose(1, 2).flatten(2)).mean(1)

    @property
    def heads(self):
        return self.one, self.two, self.three


@torch.no_grad()
def test_pulls_of_products_are_those_of_autograd_at_any_mu():
    torch.manual_seed(0)
    model, inputs = Heads().double(), torch.randn(5, 6, 3, dtype=torch.float64)
    graph, g = trace(model, inputs), torch.randn(5, 2, dtype=torch.float64)
    mu = [1e7 * (1 + k % 3) for k in range(len(graph.nodes) + 1)]  # so large that slopes count
    states = States(graph, inputs, mu, once=True)
    states.pull(graph.nodes[-1], g / mu[-1])
    for node in reversed(graph.nodes):
        states.carry_back(node, states.move(node), None, 1.0)
    with torch.enable_grad():
        found = torch.autograd.grad(model(inputs), list(model.parameters()), g)
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-5)


class Normed(nn.Module):
    """Batch norm before a state, before a sum of states, and before the output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.last = nn.Linear(3, 4)
        self.norms = nn.ModuleList([nn.BatchNorm2d(3), nn.BatchNorm2d(3), nn.BatchNorm1d(4)])

    def forward(self, x):
        a = torch.relu(self.norms[0](self.first(x)))
        b = torch.tanh(self.norms[1](self.second(a)) + a)
        return self.norms[2](self.last(b.mean((2, 3))))


def test_gradients_of_large_matrices_are_let_go_of_and_change_nothing(monkeypatch):
    """They are moved some rows at a time, and steps are the same."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(24, 2, 4, 4, generator=generator, dtype=torch.float64)
    y, weight = torch.arange(24) % 4, torch.rand(24, generator=generator, dtype=torch.float64)
    made = {}
    for large in (1 << 30, 5):
        monkeypatch.setattr("lpom.weights.adam.LARGE", large)
        torch.manual_seed(0)
        nets = Normed().double(), lpom.mlp((32, 6, 6, 4), seed=0, dtype=torch.float64)
        for model, inputs in zip(nets, (X, X.flatten(1)), strict=True):
            options = {"sample_weight": weight, "weight_decay": 0.01, "epochs": 3, "batch_size": 8}
            lpom.fit(model, inputs, y, **options, seed=0, progress=False)
        made[large] = [*nets[0].state_dict().values(), *nets[1].parameters()]
    for one, other in zip(*made.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
