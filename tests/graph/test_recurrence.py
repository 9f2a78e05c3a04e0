"""Recurrent layers written out: the same numbers as torch's, and each gate a state."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lpom
from lpom.activations import Sigmoid, Tanh
from lpom.graph import trace

LAYERS = {
    "tanh": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu", "num_layers": 2}),
    "lstm": (nn.LSTM, {}),
    "lstm, deep, both ways": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "lstm, projected": (nn.LSTM, {"proj_size": 3}),
    "lstm, no bias": (nn.LSTM, {"bias": False}),
    "gru": (nn.GRU, {"num_layers": 2, "bidirectional": True}),
}


class Sequences(nn.Module):
    """A prediction at every step, or from what is left at the end."""

    def __init__(self, kind, every_step=True, **options):
        super().__init__()
        self.every_step = every_step
        self.layers = kind(4, 6, batch_first=True, **options)
        width = options.get("proj_size", 6) * (1 + options.get("bidirectional", False))
        self.out = nn.Linear(width if every_step else options.get("proj_size", 6), 3)

    def forward(self, x):
        outputs, end = self.layers(x)
        if self.every_step:
            return self.out(outputs)
        return self.out(end[0][-1] if isinstance(end, tuple) else end[-1])


def gradients(model, x, g):
    return torch.autograd.grad(model(x), list(model.parameters()), g, allow_unused=True)


@pytest.mark.parametrize("every_step", [True, False])
@pytest.mark.parametrize(("kind", "options"), LAYERS.values(), ids=LAYERS.keys())
def test_written_out_layers_are_torchs(kind, options, every_step):
    torch.manual_seed(0)
    model = Sequences(kind, every_step, **options).double()
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    graph = trace(model, x)
    _, X = graph.feed_forward(x)
    torch.testing.assert_close(X[graph.output], model(x), rtol=1e-12, atol=1e-12)
    used = {id(p) for p in graph.parameters}
    reached = gradients(model, x, torch.ones_like(model(x)))
    for parameter, gradient in zip(model.parameters(), reached, strict=True):
        assert id(parameter) in used or not gradient.any()


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
def test_cells_in_a_loop_of_ones_own(kind):
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.out = kind(4, 6), nn.Linear(6, 3)

        def forward(self, x):
            carried = None
            for t in range(x.shape[1]):
                carried = self.cell(x[:, t], carried)
            return self.out(carried[0] if isinstance(carried, tuple) else carried)

    torch.manual_seed(0)
    model, x = Loop().double(), torch.randn(3, 5, 4, dtype=torch.float64)
    graph = trace(model, x)
    torch.testing.assert_close(graph.feed_forward(x)[1][graph.output], model(x))
    lifted = lpom.lift(model, 1e6, reduction="sum")
    g = torch.ones(3, 3, dtype=torch.float64)
    torch.testing.assert_close(
        gradients(lifted, x, g), gradients(model, x, g), rtol=1e-4, atol=1e-5
    )


def test_gates_are_states_and_every_edge_is_affine_in_each_of_its_sources():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    for kind in (nn.LSTM, nn.GRU):
        graph = trace(Sequences(kind).double(), x)
        kinds = [node.activation for node in graph]
        assert kinds.count(Sigmoid()) == 3 and kinds.count(Tanh()) == (6 if kind is nn.LSTM else 3)
        _, X = graph.feed_forward(x)
        for node in graph:
            assert node.edge.affine
            for k, source in enumerate(node.sources):
                states = [X[s] for s in node.sources]
                a, b = torch.randn_like(X[source]), torch.randn_like(X[source])

                def at(value, states=states, k=k, node=node):
                    return node.edge([*states[:k], value, *states[k + 1 :]])

                middle = at(0.3 * a + 0.7 * b)
                torch.testing.assert_close(middle, 0.3 * at(a) + 0.7 * at(b))


def test_dropout_between_layers_is_that_of_the_module():
    torch.manual_seed(0)
    model = Sequences(nn.LSTM, num_layers=2, dropout=0.5).double()
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    graph = trace(model.eval(), x)
    model.eval()
    torch.testing.assert_close(graph.feed_forward(x)[1][graph.output], model(x))
    model.train()
    drawn = [graph.feed_forward(x)[1][graph.output] for _ in range(2)]
    assert not torch.equal(*drawn)


def test_steps_after_the_end_do_not_count():
    """One step of fit with masked targets is one of a hand-written loop with torch's loss."""
    torch.manual_seed(0)
    model = Sequences(nn.GRU).double()
    x, y = torch.randn(6, 5, 4, dtype=torch.float64), torch.randint(0, 3, (6, 5))
    y[1, 2:] = y[4, 1:] = -100
    fitted, looped = copy.deepcopy(model), copy.deepcopy(model)
    weights = lpom.Adaptive(optimizer="sgd", learning_rate=0.1, schedule="constant")
    result = lpom.fit(fitted, x, y, epochs=1, seed=0, method=lpom.LPOM(mu=2.0, weights=weights))
    lifted = lpom.lift(looped, mu=2.0, batch_dims=2)
    lifted.scale = y.numel() / int((y != -100).sum())
    optimizer = torch.optim.SGD(looped.parameters(), 0.1)
    loss = F.cross_entropy(lifted(x).flatten(0, 1), y.flatten())
    loss.backward()
    optimizer.step()
    assert result.history[-1].loss == pytest.approx(float(loss.detach()))
    for a, b in zip(fitted.parameters(), looped.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    counts = y != -100
    right = (fitted(x).argmax(-1) == y)[counts].double().mean()
    assert lpom.evaluate(fitted, x, y)[1] == pytest.approx(float(right))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_pulls_on_parts_of_a_state_are_pulls_on_the_state(kind, weighted):
    """The step that hands pulls to parts of a state, and the one that hands them to all of it."""
    torch.manual_seed(0)
    model = Sequences(kind, num_layers=2).double()
    x, y = torch.randn(6, 5, 4, dtype=torch.float64), torch.randint(0, 3, (6, 5))
    weight = torch.rand(6, dtype=torch.float64) if weighted else None
    weights = lpom.Adaptive(optimizer="sgd", learning_rate=0.1, schedule="constant")
    mu = {"output": 3.0, "tanh*": 7.0, "*": 20.0}
    found = []
    for states in (lpom.Sweeps(), lpom.Sweeps(rule="plain")):
        fitted = copy.deepcopy(model)
        method = lpom.LPOM(mu=mu, states=states, weights=weights)
        lpom.fit(fitted, x, y, epochs=1, seed=0, method=method, sample_weight=weight)
        found.append(list(fitted.parameters()))
    for a, b, before in zip(*found, model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        assert not torch.equal(a, before)


METHODS = [
    lpom.LPOM(weights=lpom.Adaptive(learning_rate=0.02)),
    lpom.methods.get("adam", learning_rate=0.02),
    lpom.LPOM(weights="exact"),
]


@pytest.mark.parametrize("method", METHODS, ids=["lpom", "adam", "exact"])
def test_numbers_at_every_step(method):
    torch.manual_seed(0)
    x = torch.randn(40, 6, 4)
    y = x.cumsum(1)[..., :3]
    model = Sequences(nn.RNN)
    before = lpom.evaluate(model, x, y)[1]
    result = lpom.fit(model, x, y, method=method, epochs=8, batch_size=10, seed=0)
    assert result.task.n_steps == 6
    assert lpom.evaluate(model, x, y)[1] > before + 0.2


def test_targets_need_a_value_for_every_step():
    model = Sequences(nn.RNN)
    with pytest.raises(ValueError, match="each of the 5 steps"):
        lpom.fit(model, torch.randn(4, 5, 4), torch.zeros(4, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="two or three dimensions"):
        lpom.fit(model, torch.randn(4, 5, 4), torch.zeros(4, dtype=torch.long))
    y = torch.tensor([[0, -100]])
    model = Sequences(nn.RNN)
    with pytest.raises(ValueError, match="can't leave predictions out"):
        lpom.fit(model, torch.randn(1, 2, 4), y, loss="hinge")
