"""Convolution, pooling, batch norm and dropout without autograd, against autograd."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lpom
from lpom import networks
from lpom.graph import trace
from lpom.graph.kernels import BatchNorm, Convolution, Dropout, Pooling
from lpom.states import States


class Between(nn.Module):
    """What stands between a state of shape (m, 4, 6, 6), or as many dimensions, and the output."""

    def __init__(self, layers: nn.Module, dims: int = 2) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.first, self.layers = conv(3, 4, 1), layers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(torch.tanh(self.first(x)))


class Call(nn.Module):
    def __init__(self, call) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


LAYERS = {
    "convolution": lambda: nn.Conv2d(4, 5, 3),
    "without bias": lambda: nn.Conv2d(4, 5, 3, bias=False),
    "stride, padding, dilation": lambda: nn.Conv2d(4, 5, 3, 2, (2, 1), 2),
    "groups": lambda: nn.Conv2d(4, 8, 3, groups=2, padding="same"),
    "valid": lambda: nn.Conv2d(4, 8, (1, 3), padding="valid"),
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1, groups=2),
    "batch norm": lambda: nn.Sequential(nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3)),
    "no weights": lambda: nn.BatchNorm2d(4, affine=False),
    "no statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "cumulative": lambda: nn.BatchNorm2d(4, momentum=None),
    "max": lambda: nn.MaxPool2d(2),
    "max that overlaps": lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True),
    "max called": lambda: Call(lambda x: F.max_pool2d(x, 2, stride=1)),
    "mean": lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    "mean called": lambda: Call(lambda x: F.avg_pool2d(x, (2, 3))),
    "adaptive": lambda: nn.AdaptiveAvgPool2d((3, 2)),
    "adaptive called": lambda: Call(lambda x: F.adaptive_avg_pool2d(x, 1)),
    "dropout": lambda: nn.Dropout(0.3),
    "nothing dropped": lambda: nn.Dropout(0.0),
    "all dropped": lambda: nn.Dropout(1.0),
    "several": lambda: nn.Sequential(
        nn.Conv2d(4, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Dropout(0.5), nn.MaxPool2d(2)
    ),
}


class Receiver:
    def __init__(self) -> None:
        self.pulls, self.gradients = {}, {}

    def hand(self, source, pull, *, own):
        self.pulls[source] = self.pulls.get(source, 0) + pull

    def hand_product(self, source, R, W):
        self.hand(source, R @ W, own=True)

    def add(self, parameter, gradient):
        self.gradients[parameter] = self.gradients.get(parameter, 0) + gradient

    def add_sum(self, parameter, R):
        self.add(parameter, R.sum(0))

    def add_product(self, parameter, R, X):
        self.add(parameter, R.T @ X)


def compare(model: nn.Module, inputs: Tensor) -> set[type | str]:
    """Every edge against autograd through a copy of the model; the kernels that were met."""
    graph, twin = trace(model, inputs), copy.deepcopy(model)
    same = dict(zip(model.parameters(), twin.parameters(), strict=True))
    other = trace(twin, inputs)
    met = set()
    X = graph.feed_forward(inputs, {})[1]  # of some pass: any states will do
    model.load_state_dict(twin.state_dict())
    for node, reference in zip(graph, other, strict=True):
        program = node.edge.program_once
        assert program is not None
        met |= {type(o.adjoint) for o in program.carried}
        states = [X[s].clone() for s in node.sources]
        leaves = [X[s].clone().requires_grad_(s > 0) for s in node.sources]
        torch.manual_seed(1)
        expected = reference.edge(leaves)
        torch.manual_seed(1)
        with torch.no_grad():
            Z, known = program.forward(states)
        torch.testing.assert_close(Z, expected.detach(), rtol=1e-12, atol=1e-12)
        if program.by_value:
            met.add("by value")
        R, receiver = torch.randn_like(Z), Receiver()
        with torch.no_grad():
            by_index = dict(zip(node.sources, states, strict=True)).__getitem__
            wanted = program.leading(True, True)
            program.backward(by_index, known, R.clone(), receiver, wanted, Z, last=True)
        ends = [leaf for leaf in leaves if leaf.requires_grad]
        weights = [same[p] for p in node.edge.parameters if p.requires_grad]
        found = torch.autograd.grad(expected, [*ends, *weights], R, allow_unused=True)
        got = [receiver.pulls.get(s) for s in node.sources if s]
        got += [receiver.gradients.get(p) for p in node.edge.parameters if p.requires_grad]
        for one, two in zip(got, found, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-11)
    for (name, one), two in zip(model.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-13, atol=1e-13, msg=name)
    return met


def made(name: str) -> Between:
    torch.manual_seed(0)
    return Between(LAYERS[name]()).double()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", LAYERS)
def test_kernels_are_those_of_autograd(name, layout):
    inputs = torch.randn(5, 3, 6, 6, dtype=torch.float64).contiguous(memory_format=layout)
    compare(made(name), inputs)


@pytest.mark.parametrize("name", ["max", "max that overlaps"])
def test_of_equal_numbers_the_maximum_is_torch_s(name):
    inputs = torch.randint(2, (5, 1, 6, 6)).double().expand(5, 3, 6, 6).contiguous()
    compare(made(name), inputs)


@pytest.mark.parametrize("name", ["batch norm", "no statistics", "cumulative", "dropout"])
def test_kernels_while_nothing_is_learnt(name):
    model = made(name)
    model(torch.randn(5, 3, 6, 6, dtype=torch.float64))  # statistics that are not the first
    compare(model.eval(), torch.randn(5, 3, 6, 6, dtype=torch.float64))


def test_every_kernel_is_tried():
    inputs = torch.randn(5, 3, 6, 6, dtype=torch.float64)
    met = set().union(*(compare(made(name), inputs) for name in LAYERS))
    assert met >= {Convolution, BatchNorm, Pooling, Dropout, "by value"}


@pytest.mark.parametrize("dims", [1, 3])
def test_convolutions_of_other_dimensions(dims):
    torch.manual_seed(0)
    kind, norm = {1: (nn.Conv1d, nn.BatchNorm1d), 3: (nn.Conv3d, nn.BatchNorm3d)}[dims]
    model = Between(nn.Sequential(kind(4, 2, 3, 2, 1), norm(2)), dims).double()
    compare(model, torch.randn(4, 3, *[5] * dims, dtype=torch.float64))


def test_frozen_weights_get_no_gradient():
    model = made("batch norm")
    model.layers[0].weight.requires_grad_(False)
    model.layers[1].bias.requires_grad_(False)
    compare(model, torch.randn(5, 3, 6, 6, dtype=torch.float64))


@pytest.mark.parametrize("name", ["lenet5", "vgg5", "resnet8", "residual20"])
def test_known_networks_need_no_autograd(name):
    shape = (1, 28, 28) if name == "lenet5" else (3, 32, 32)
    options = {"width": 0.125} if name == "vgg5" else {}
    model = networks.get(name, shape, 4, seed=0, **options).double()
    compare(model, torch.rand(3, *shape, dtype=torch.float64))


@pytest.mark.parametrize(
    "layers",
    [
        nn.Conv2d(4, 5, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(4, 5, 2, padding="same"),
        nn.Dropout2d(0.5),
        nn.AvgPool2d(2, divisor_override=3),
        nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 5, 3)),
    ],
    ids=["circular", "uneven", "dropout2d", "divisor", "weight norm"],
)
def test_what_has_no_kernel_has_autograd(layers):
    graph = trace(Between(layers), torch.randn(5, 3, 6, 6))
    assert graph[graph.output].edge.program_once is None


def test_one_number_has_no_variance():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.BatchNorm1d(2))
    program = trace(model, torch.randn(5, 3)).nodes[-1].edge.program_once
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        program.forward([torch.randn(1, 4)])


def test_sums_are_not_written_over_what_others_read():
    """In place only where the value added to is needed by nobody else, and as large as the sum."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)
            self.row = nn.Parameter(torch.randn(2, 1, 4))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.first(x))
            a = self.second(h)
            return (a + h) * 2.0 + a.sum(1, keepdim=True) + self.row.sum(0) + h * 3.0

    torch.manual_seed(0)
    model = Twice().double()
    compare(model, torch.randn(5, 3, dtype=torch.float64))


@pytest.mark.parametrize("weight", [0.0, 1e-9, -0.5])
def test_batch_norm_is_carried_back_whatever_its_weights_are(weight):
    """Its value says nothing of its input where a weight is zero or far below its bias."""
    model = made("batch norm")
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    with torch.no_grad():
        for norm in norms:
            norm.weight[0], norm.bias[0] = weight, 0.7
    assert norms and "by value" in compare(model, torch.randn(5, 3, 6, 6, dtype=torch.float64))


def test_batch_norm_that_was_moved_since_is_carried_back_by_what_it_was():
    """Where batches overlap, weights move between a pass and its way back: dx has the new ones."""
    x = torch.randn(6, 3, 4, 4, dtype=torch.float64)
    layer = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).double()
    program = trace(layer, x).nodes[-1].edge.program_once
    R, norm = torch.randn_like(x), layer[1]
    with torch.no_grad():
        c = layer[0](x)
        Z, known = program.forward([x])
        norm.weight.mul_(-1.7)
        norm.bias.add_(0.3)
    c.requires_grad_()
    found = Receiver()
    with torch.no_grad():
        program.backward({0: x}.__getitem__, known, R, found, program.leading(True, True), Z)
    xhat = nn.functional.batch_norm(c, None, None, training=True, eps=norm.eps)
    expected = torch.autograd.grad((norm.weight[:, None, None] * xhat * R).sum(), c)[0]
    torch.testing.assert_close(found.gradients[norm.weight], (R * xhat.detach()).sum((0, 2, 3)))
    torch.testing.assert_close(
        found.gradients[layer[0].bias], expected.sum((0, 2, 3)), atol=1e-9, rtol=0
    )
    torch.testing.assert_close(
        found.gradients[layer[0].weight][:, :, 0, 0],
        torch.einsum("nohw,nihw->oi", expected, x),
    )


class Viewed(nn.Module):
    """As many write it: a view, which needs what a maximum gives to lie row by row."""

    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 3, 3), nn.Linear(12, 4)

    def forward(self, x):
        h = nn.functional.max_pool2d(torch.relu(self.conv(x)), 2)
        return self.out(h.view(h.size(0), -1))


@pytest.mark.parametrize("plain", [False, True])
def test_what_is_viewed_above_a_maximum_lies_row_by_row(plain):
    model = Viewed()
    if plain:
        model = nn.Sequential(model.conv, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), model.out)
    x = torch.randn(5, 1, 6, 6)
    edges = [node.edge for node in trace(model, x)]
    assert all(edge.ordered is not plain for edge in edges)
    lpom.fit(model, x, torch.arange(5) % 4, epochs=1, seed=0, progress=False)


def test_what_is_drawn_above_a_maximum_is_drawn_in_the_order_of_torch():
    layers = nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.5), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(12, 4)).double().train()
    x = torch.randn(5, 1, 6, 6, dtype=torch.float64)
    graph = trace(model, x)
    torch.manual_seed(3)
    with torch.no_grad():
        states = States(graph, x, [1.0] * (len(graph) + 1), once=True)
    torch.manual_seed(3)
    torch.testing.assert_close(states.outputs, model(x).detach())
