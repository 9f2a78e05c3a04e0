"""Adjoints written by hand, against autograd on the same edges."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lpom
from lpom import networks
from lpom.graph import trace
from lpom.graph.adjoints import ADJOINTS, is_narrow, product

M = 5  # samples


class Between(nn.Module):
    """``call(self, a, b)`` between states a, b of shape (m, 4, 6) and the output."""

    def __init__(self, call) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.scale, self.table = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(4, 1))
        self.register_buffer("mask", torch.rand(4, 6) < 0.5)
        self.register_buffer("factor", 0.5 + torch.rand(6))
        self.layer, self.call = nn.Linear(6, 3), call
        self.same, self.flat = nn.Identity(), nn.Flatten()

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, torch.tanh(self.first(x)), torch.tanh(self.second(x)))


CALLS = {
    "linear": lambda n, a, b: F.linear(a, n.weight, n.scale),
    "layer": lambda n, a, b: n.layer(a - b),
    "a weight turned round": lambda n, a, b: F.linear(a, n.weight.t()),
    "a piece of a weight": lambda n, a, b: F.linear(a, n.weight.chunk(2)[1], n.scale[3:]),
    "mul": lambda n, a, b: a * b,
    "mul by weights": lambda n, a, b: n.scale * a + torch.mul(b, n.table),
    "multiply": lambda n, a, b: torch.multiply(a, 3.0) - b,
    "matmul": lambda n, a, b: a @ b.transpose(1, 2),
    "matmul by a matrix": lambda n, a, b: a @ n.weight,
    "matmul by a vector": lambda n, a, b: torch.matmul(a, n.scale),
    "matmul of a vector": lambda n, a, b: torch.matmul(n.scale, a.transpose(1, 2)),
    "matmul that broadcasts": lambda n, a, b: n.weight[:4, :4] @ b,
    "sums": lambda n, a, b: 1 - a + b - 2 + n.scale + n.table,
    "signs": lambda n, a, b: 1.0 + a - b.neg(),
    "rsub": lambda n, a, b: torch.rsub(a, b),
    "truediv": lambda n, a, b: a / 2 + b / n.factor,
    "div": lambda n, a, b: torch.div(a, n.factor) - b,
    "cat": lambda n, a, b: torch.cat([a, b, n.factor.expand(M, 1, 6)], dim=1),
    "stack": lambda n, a, b: torch.stack([a, b], -1),
    "mean": lambda n, a, b: a.mean(1) + torch.mean(b, dim=(-2,)),
    "sum": lambda n, a, b: a.sum(-1, keepdim=True) - b.sum((1, 2), keepdim=True),
    "masked_fill": lambda n, a, b: (a + b).masked_fill(n.mask, 0.25),
    "flatten": lambda n, a, b: torch.flatten(a + b, 1),
    "shapes": lambda n, a, b: a.unflatten(2, (2, 3)).reshape(-1, 8, 3).view(-1, 24),
    "more shapes": lambda n, a, b: a.unsqueeze(1).squeeze(1).contiguous() + b,
    "a view of a batch's size": lambda n, a, b: a.view(a.size(0), 24) * n.scale[0],
    "axes": lambda n, a, b: a.permute(0, 2, 1) @ b.swapaxes(1, 2).transpose(-1, -2),
    "pieces": lambda n, a, b: a[:, 1:3, 2] + b.narrow(1, 2, 2)[..., -1] - a.select(1, 0)[:, :2],
    "pieces of pieces": lambda n, a, b: a[:, 1:][:, :2].narrow(2, 1, 3) * b[:, 2:, 3:],
    "splits": lambda n, a, b: a.chunk(4, -1)[2] + a.split(2, 2)[0] * b.unbind(1)[3][:, :1, None],
    "where": lambda n, a, b: torch.where(n.mask, a, n.scale) - torch.where(n.mask, 2.0, b),
    "modules": lambda n, a, b: n.flat(n.same(a) * 2 + b),
}  # fmt: skip


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(7, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.table(x) * 2).mean(1))


class Receiver:
    """Adds up what is handed to it, by itself."""

    def __init__(self, sources: dict[int, Tensor], parameters: tuple[nn.Parameter, ...]) -> None:
        self.pulls = {s: torch.zeros_like(x) for s, x in sources.items()}
        self.gradients = {p: torch.zeros_like(p.detach()) for p in parameters}

    def hand(self, source, pull, *, own):
        self.pulls[source] += pull

    def hand_product(self, source, R, W):
        self.pulls[source] += R @ W

    def hand_part(self, source, view, pull):
        view(self.pulls[source]).add_(pull)

    def add_product(self, parameter, R, X):
        self.gradients[parameter] += R.T @ X

    def add_sum(self, parameter, R):
        self.gradients[parameter] += R.sum(0)

    def add(self, parameter, gradient):
        self.gradients[parameter] += gradient


def compare(graph, inputs: Tensor) -> set[str]:
    """Every edge with a program against autograd; the names of the operations that were met."""
    _, X = graph.feed_forward(inputs)
    met = set()
    for node in graph:
        program = node.edge.program
        if program is None:
            continue
        met |= {operation.name for operation in program.carried}
        sources = {s: X[s] for s in node.sources}
        leaves = [X[s].clone() if s == 0 else X[s].clone().requires_grad_() for s in node.sources]
        expected = node.edge(leaves)
        with torch.no_grad():
            Z, known = program.forward([X[s] for s in node.sources])
        torch.testing.assert_close(Z, expected.detach(), rtol=1e-13, atol=1e-13)
        R = torch.randn(Z.shape, dtype=Z.dtype, generator=torch.Generator().manual_seed(node.index))
        ends = {s: leaf for s, leaf in zip(node.sources, leaves, strict=True) if s}
        wanted = [*ends.values(), *node.edge.parameters]
        for states, weights in ((True, True), (True, False), (False, True)):
            receiver = Receiver(sources, node.edge.parameters)
            with torch.no_grad():
                program.backward(
                    sources.__getitem__,
                    known,
                    R.clone(),
                    receiver,
                    program.leading(states, weights),
                )
            found = iter(torch.autograd.grad(node.edge(leaves), wanted, R, allow_unused=True))
            for s in ends:
                close(receiver.pulls[s], next(found), states)
            for p in node.edge.parameters:
                close(receiver.gradients[p], next(found), weights)
    return met


def close(got: Tensor, expected: Tensor | None, asked: bool) -> None:
    if expected is None or not asked:
        expected = torch.zeros_like(got)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def between(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Between(CALLS[name]).double()
    return model, torch.randn(M, 4, 6, dtype=torch.float64)


@pytest.mark.parametrize("name", CALLS)
def test_adjoints_are_those_of_autograd(name):
    model, inputs = between(name)
    graph = trace(model, inputs)
    assert graph[graph.output].edge.program is not None
    compare(graph, inputs)


def test_every_adjoint_is_tried():
    met: set[str] = set()
    for name in CALLS:
        model, inputs = between(name)
        met |= compare(trace(model, inputs), inputs)
    words = torch.randint(0, 7, (M, 3), generator=torch.Generator().manual_seed(0))
    met |= compare(trace(Words().double(), words), words)
    assert met == set(ADJOINTS)


@pytest.mark.parametrize("name", ["rnn", "lstm", "transformer"])
def test_known_sequence_networks_need_no_autograd(name):
    inputs = torch.rand(3, 1, 6, 5, dtype=torch.float64)
    model = networks.get(name, (1, 6, 5), 3, seed=0, width=8).double()
    graph = trace(model, inputs)
    assert all(node.edge.program is not None for node in graph)
    compare(graph, inputs)


@pytest.mark.parametrize(
    "call",
    [
        lambda n, a, b: F.dropout(a, 0.5, n.training) + b,
        lambda n, a, b: a[:, [0, 2]] + b[:, :2],
        lambda n, a, b: torch.add(a, b, alpha=2),
        lambda n, a, b: F.avg_pool1d(a, 2) + b[..., :3],
    ],
    ids=["dropout", "places", "alpha", "pooling"],
)
def test_what_has_no_adjoint_here_has_autograd(call):
    torch.manual_seed(0)
    graph = trace(Between(call), torch.randn(M, 4, 6))
    assert graph[graph.output].edge.program is None


def test_a_step_of_a_stack_is_that_step():
    """The others need not be looked at."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.RNN(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.rnn(x)[0][:, -1])

    inputs = torch.randn(M, 6, 3)
    model = Last()
    graph = trace(model, inputs)
    assert len(graph[graph.output].sources) == 1
    torch.testing.assert_close(graph.feed_forward(inputs)[1][graph.output], model(inputs).detach())


@pytest.mark.parametrize("columns", [1, 4, 20, 100])
def test_products_turned_round_are_the_same(columns):
    R, X = torch.randn(500, 30), torch.randn(500, columns)
    assert is_narrow(R, X) == (columns in (4, 20))
    torch.testing.assert_close(product(R, X), R.T @ X, rtol=1e-4, atol=1e-4)


def test_few_inputs_have_the_gradients_of_a_lifted_loop():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, 2)).double()
    x, y = torch.randn(200, 3, dtype=torch.float64), torch.arange(200) % 2
    looped = copy.deepcopy(model)
    F.cross_entropy(lpom.lift(looped, mu=2.0)(x), y).backward()
    torch.optim.SGD(looped.parameters(), 0.1).step()
    weights = lpom.Adaptive(optimizer="sgd", learning_rate=0.1, schedule="constant")
    lpom.fit(model, x, y, epochs=1, batch_size=200, method=lpom.LPOM(mu=2.0, weights=weights))
    for a, b in zip(model.parameters(), looped.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
