"""Attention written out: the same numbers as torch's, queries and keys states of their own."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lpom
from lpom import activations
from lpom.activations import LayerNorm, ReLU, Softmax, split
from lpom.graph import trace
from lpom.losses import Squared
from lpom.states import States

D = torch.float64


def same_as_the_model(model, x):
    graph = trace(model, x)
    _, X = graph.feed_forward(x)
    torch.testing.assert_close(X[graph.output], model(x), rtol=1e-11, atol=1e-12)
    return graph


def close_to_back_propagation(model, *inputs):
    """The lifted model computes the same, and with a large mu has the same gradients."""
    lifted = lpom.lift(model, mu=1e6, reduction="sum")
    plain, ours = model(*inputs), lifted(*inputs)
    torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-12)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(plain.square().sum(), parameters, allow_unused=True)
    found = torch.autograd.grad(ours.square().sum(), parameters, allow_unused=True)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    return lifted.report()


MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "booleans": {"attn_mask": torch.tensor([[True, False, True], [True, True, True]]).repeat(2, 1)},
    "floats": {"attn_mask": torch.linspace(-1, 1, 12, dtype=D).view(4, 3)},
    "scaled": {"scale": 0.3},
}


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS.keys())
def test_scaled_dot_product_attention(options):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(4, 6) for _ in range(3))
            if "attn_mask" in options:
                self.register_buffer("mask", options["attn_mask"])

        def forward(self, x):
            more = {**options, "attn_mask": self.mask} if "attn_mask" in options else options
            return F.scaled_dot_product_attention(
                self.q(x), self.k(x[:, :3]), self.v(x[:, :3]), **more
            ).mean(1)

    torch.manual_seed(0)
    model, x = Attention().double(), torch.randn(2, 4, 4, dtype=D)
    graph = same_as_the_model(model, x)
    assert [node.activation for node in graph].count(Softmax(-1)) == 1
    assert "softmax (1)" in close_to_back_propagation(model, x)


def test_heads_may_share_keys():
    q, k, v = (torch.randn(2, heads, 3, 4, dtype=D, requires_grad=True) for heads in (6, 2, 2))

    class Attention(nn.Module):
        def forward(self, q):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    torch.testing.assert_close(lpom.lift(Attention())(q), Attention()(q), rtol=1e-12, atol=1e-12)


class MultiHead(nn.Module):
    def __init__(self, batch_first=True, other=None, **options):
        super().__init__()
        self.batch_first = batch_first
        widths = {} if other is None else {"kdim": other, "vdim": other}
        self.attention = nn.MultiheadAttention(6, 2, batch_first=batch_first, **widths)
        self.other = None if other is None else nn.Linear(6, other)
        self.options = options

    def forward(self, x):
        kv = x if self.other is None else self.other(x)
        return self.attention(x, kv, kv, **self.options)[0].mean(1 if self.batch_first else 0)


MULTI = {
    "self": {},
    "time first": {"batch_first": False},
    "other width": {"other": 5},
    "causal": {"attn_mask": torch.ones(4, 4, dtype=torch.bool).triu(1)},
    "floats": {"attn_mask": torch.linspace(-1, 1, 16, dtype=D).view(4, 4), "need_weights": False},
}


@pytest.mark.parametrize("options", MULTI.values(), ids=MULTI.keys())
def test_multi_head_attention(options):
    torch.manual_seed(0)
    model = MultiHead(**options).double()
    x = torch.randn(3, 4, 6, dtype=D)
    x = x if model.batch_first else x.transpose(0, 1)
    if model.batch_first:  # the tracer takes dimension 0 as that of the samples
        same_as_the_model(model, x)
    assert "softmax (1)" in close_to_back_propagation(model, x)


def test_padding_and_a_mask_for_every_head():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(6, 2, batch_first=True).double()
    x = torch.randn(3, 4, 6, dtype=D, requires_grad=True)
    padding = torch.tensor([[False] * 4, [False] * 3 + [True], [False, False, True, True]])
    heads = torch.randn(6, 4, 4, dtype=D)
    options = {"attn_mask": heads, "average_attn_weights": False}
    floats = torch.zeros(3, 4, dtype=D).masked_fill(padding, -math.inf)
    plain = attention(x, x, x, key_padding_mask=floats, **options)
    lifted = lpom.lift(attention)(x, x, x, key_padding_mask=floats, **options)
    torch.testing.assert_close(lifted, plain, rtol=1e-12, atol=1e-12)
    one = attention(x[1], x[1], x[1], key_padding_mask=padding[1])
    alone = lpom.lift(attention)(x[1], x[1], x[1], key_padding_mask=padding[1])
    torch.testing.assert_close(alone, one, rtol=1e-12, atol=1e-12)


class Encoder(nn.Module):
    def __init__(self, masked=False, **options):
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 9, batch_first=True, **{"dropout": 0.0, **options})
        norm = nn.LayerNorm(6)
        self.layers = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)
        mask = torch.ones(4, 4, dtype=torch.bool).triu(1) if masked else None
        self.register_buffer("mask", mask)

    def forward(self, x):
        return self.layers(x, mask=self.mask).mean(1)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_encoders(norm_first, masked):
    torch.manual_seed(0)
    model = Encoder(masked, norm_first=norm_first).double()
    x = torch.randn(3, 4, 6, dtype=D)
    graph = same_as_the_model(model, x)
    kinds = [node.activation for node in graph]
    assert kinds.count(Softmax(-1)) == kinds.count(ReLU()) == 2
    assert kinds.count(LayerNorm((6,))) == 5 - norm_first  # that of the data itself is no state
    close_to_back_propagation(model, x)


def test_every_edge_of_a_transformer_is_affine_in_each_source():
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6, dtype=D)
    graph = trace(Encoder().double(), x)
    _, X = graph.feed_forward(x)
    for node in graph:
        for k, source in enumerate(node.sources):
            states = [X[s] for s in node.sources]
            a, b = torch.randn_like(X[source]), torch.randn_like(X[source])

            def at(value, states=states, k=k, node=node):
                return node.edge([*states[:k], value, *states[k + 1 :]])

            torch.testing.assert_close(at(0.3 * a + 0.7 * b), 0.3 * at(a) + 0.7 * at(b))


def test_dropout_follows_the_mode_of_the_module():
    torch.manual_seed(0)
    model = Encoder(dropout=0.5).double()
    x = torch.randn(3, 4, 6, dtype=D)
    graph = trace(model, x)
    model.eval()
    torch.testing.assert_close(graph.feed_forward(x)[1][graph.output], model(x))
    model.train()
    drawn = [graph.feed_forward(x)[1][graph.output] for _ in range(2)]
    assert not torch.equal(*drawn)


def test_gelu_is_an_activation():
    graph = trace(Encoder(activation="gelu"), torch.randn(3, 4, 6))
    assert split(activations.get("gelu"))[1] in [node.activation for node in graph]


def test_a_transformer_learns():
    """Which of two signs is at the place that another step points to."""
    torch.manual_seed(0)
    x = torch.randn(400, 4, 6).sign()
    y = (torch.where(x[:, 0, 0] > 0, x[:, 1, 0], x[:, 2, 0]) > 0).long()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.place = nn.Parameter(torch.randn(4, 6))
            self.encoder = Encoder(norm_first=True)
            self.out = nn.Linear(6, 2)

        def forward(self, x):
            return self.out(self.encoder(x + self.place))

    model = Model()
    method = lpom.LPOM(weights=lpom.Adaptive(learning_rate=0.01))
    lpom.fit(model, x, y, method=method, epochs=15, batch_size=20, seed=0)
    assert lpom.evaluate(model, x, y)[1] > 0.9


@pytest.mark.parametrize("batch_first", [True, False])
def test_the_weight_of_a_sample_is_that_of_as_many_alike(batch_first):
    """Where torch has the steps first the states have the samples first all the same."""

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = nn.MultiheadAttention(4, 2, batch_first=batch_first, dtype=D)
            self.out = nn.Linear(4, 3, dtype=D)

        def forward(self, x):
            x = x if batch_first else x.transpose(0, 1)
            x = self.attend(x, x, x)[0]
            return self.out(x if batch_first else x.transpose(0, 1)).mean(1)

    torch.manual_seed(0)
    model, x = Attends(), torch.randn(3, 3, 4, dtype=D)  # as many steps as samples
    pull = 0.3 * torch.randn(3, 3, dtype=D)
    found = []
    for rows, weight in (([0, 1, 2], torch.tensor([2, 1, 0], dtype=D)), ([0, 0, 1], None)):
        graph = trace(model, x)
        with torch.no_grad():
            mu = [2.0] * (len(graph) + 1)
            states = States(graph, x[rows], pull[rows], Squared(), mu, hold=False)
            states.pulls[graph.output] = pull[rows]
            sums = {p: torch.zeros_like(p) for p in graph.parameters}
            for node in reversed(graph.nodes):
                residual = states.move(node)
                for p, gradient in states.weight_gradients(node, residual, weight).items():
                    sums[p] += gradient
                states.pull_sources(node, residual)
        found.append(list(sums.values()))
    torch.testing.assert_close(found[0], found[1], rtol=1e-11, atol=1e-13)
