"""Any torch module as a graph of states: it computes the module, and trains it as torch would.

With a very large mu an interleaved step is back-propagation, so one step of plain gradient descent
shows every adjoint and every weight gradient of an edge against autograd on the whole model.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lpom
from lpom import LPOM, Adaptive, UntrainableError, activations, mlp
from lpom.activations import Elementwise, Identity, LeakyReLU, ReLU, Sigmoid, Sign, Softmax, Tanh
from lpom.graph import trace
from lpom.losses import Squared
from lpom.methods import Batch, Problem

DESCENT = LPOM(mu=1e7, weights=Adaptive("sgd", learning_rate=1.0, schedule="constant"))


def kinds(model, example=None):
    return [node.activation for node in trace(model, example)]


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check(model, X):
    """The graph gives what the model gives, and one step is that of back-propagation."""
    graph = trace(model, X)
    model.eval()
    _, states = graph.feed_forward(X)
    torch.testing.assert_close(states[graph.output], model(X).detach(), rtol=1e-12, atol=1e-12)
    model.train()
    target = numbers(*states[graph.output].shape, seed=1)
    reference, before = copy.deepcopy(model), copy.deepcopy(model)
    torch.manual_seed(3)
    Squared().value(reference(X), target).mean().backward()
    problem = Problem.on(graph, Squared(), model)
    torch.manual_seed(3)
    DESCENT.step(problem, Batch(X, target), DESCENT.init(problem))
    moved = False
    for new, old, true in zip(*(m.parameters() for m in (model, before, reference)), strict=True):
        torch.testing.assert_close(old - new, true.grad, rtol=1e-6, atol=1e-6)
        moved = moved or bool((true.grad.abs() > 1e-4).any())
    assert moved
    for (name, new), true in zip(model.named_buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(new, true, msg=f"the buffer {name} differs")
    return graph


def seeded(make, *args, **kwargs):
    torch.manual_seed(0)
    return make(*args, **kwargs).double()


class Between(nn.Module):
    """A function, or a layer, between two Linear layers."""

    def __init__(self, function, n_in=6, n=5, n_between=None, n_out=3):
        super().__init__()
        self.first, self.last = nn.Linear(n_in, n), nn.Linear(n_between or n, n_out)
        self.function = function

    def forward(self, x):
        return self.last(self.function(self.first(x)))


def ended(layers, X):
    """The layers, then a Linear one on all that comes out of them."""
    torch.manual_seed(0)
    model = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3)).double()
    model(X)
    return model


# Activations

ALIKE = {
    "relu": [nn.ReLU(), nn.ReLU(inplace=True), F.relu, torch.relu, lambda x: x.relu(),
             lambda x: x.relu_(), lambda x: F.relu(x, inplace=True), lambda x: x.clamp(min=0)],
    "tanh": [nn.Tanh(), torch.tanh, F.tanh, lambda x: x.tanh(), lambda x: x.tanh_()],
    "sigmoid": [nn.Sigmoid(), torch.sigmoid, F.sigmoid, lambda x: x.sigmoid()],
    "leaky_relu": [nn.LeakyReLU(0.2), lambda x: F.leaky_relu(x, 0.2),
                   lambda x: F.leaky_relu(x, negative_slope=0.2)],
    "elu": [nn.ELU(0.7), lambda x: F.elu(x, 0.7), lambda x: F.elu(x, alpha=0.7)],
    "selu": [nn.SELU(), F.selu, torch.selu],
    "celu": [nn.CELU(0.7), lambda x: F.celu(x, 0.7)],
    "softplus": [nn.Softplus(2.0), lambda x: F.softplus(x, 2.0)],
    "softsign": [nn.Softsign(), F.softsign],
    "logsigmoid": [nn.LogSigmoid(), F.logsigmoid],
    "softshrink": [nn.Softshrink(0.1), lambda x: F.softshrink(x, 0.1)],
    "hardtanh": [nn.Hardtanh(), F.hardtanh, lambda x: x.clamp(-1, 1)],
    "hardsigmoid": [nn.Hardsigmoid(), F.hardsigmoid],
    "relu6": [nn.ReLU6(), F.relu6],
    "clamp": [lambda x: x.clamp(max=0.4), lambda x: torch.clamp_max(x, 0.4)],
    "softmax": [nn.Softmax(-1), lambda x: F.softmax(x, dim=-1), lambda x: x.softmax(-1),
                lambda x: torch.softmax(x, -1)],
    "rms_norm": [nn.RMSNorm(5, elementwise_affine=False), lambda x: F.rms_norm(x, (5,))],
    "layer_norm": [nn.LayerNorm(5, elementwise_affine=False), lambda x: F.layer_norm(x, (5,))],
    "normalize": [lambda x: F.normalize(x, dim=-1)],
}  # fmt: skip


@pytest.mark.parametrize(
    "function",
    [pytest.param(f, id=f"{name}-{k}") for name, all in ALIKE.items() for k, f in enumerate(all)],
)
def test_an_activation_is_known_in_every_spelling(function):
    graph = check(seeded(Between, function), numbers(7, 6))
    assert len(graph) == 2


@pytest.mark.parametrize("name", ALIKE)
def test_spellings_of_one_activation_are_one(name):
    made = [trace(seeded(Between, function))[1].activation for function in ALIKE[name]]
    assert all(one == made[0] for one in made)


def test_activations_of_one_s_own_are_kept():
    softsign = activations.from_function(nn.functional.softsign, lipschitz=1.0, name="softsign")
    assert kinds(nn.Sequential(nn.Linear(2, 2), Elementwise(softsign))) == [softsign]


@pytest.mark.parametrize("name", [n for n in activations.names() if activations.get(n).slope_bound])
def test_a_function_that_turns_back_is_two_states(name):
    """The pre-activation, and a monotone function of it; their difference is the value."""
    model = mlp([3, 5, 2], name, seed=0, dtype=torch.float64)
    inputs, graph = numbers(6, 3), trace(model)
    assert [node.sources for node in graph] == [(0,), (1,), (1, 2)]
    assert graph[1].activation == Identity() and graph[2].activation.slope_bound == 0
    _, X = graph.feed_forward(inputs)
    torch.testing.assert_close(X[-1], model(inputs).detach(), rtol=1e-13, atol=1e-13)
    c = activations.get(name).slope_bound
    torch.testing.assert_close(X[2] - c * X[1], model[1](model[0](inputs)).detach())


@pytest.mark.parametrize(
    "name", [n for n in activations.names() if not activations.get(n).slope_bound]
)
def test_feed_forward_is_the_module_and_remembers_every_node(name):
    model = mlp([3, 5, 4, 2], name, "sigmoid", seed=0, dtype=torch.float64)
    inputs, graph = numbers(6, 3), trace(model)
    Z, X = graph.feed_forward(inputs)
    assert len(Z) == len(X) == 4 and X[0] is inputs
    torch.testing.assert_close(X[-1], model(inputs).detach(), rtol=0, atol=0)
    layers = [module for module in model if isinstance(module, nn.Linear)]
    for i, layer in enumerate(layers, start=1):
        torch.testing.assert_close(Z[i], layer(X[i - 1]).detach(), rtol=0, atol=0)
        torch.testing.assert_close(X[i], graph[i].activation.phi(Z[i]), rtol=0, atol=0)


def test_smoothed_has_the_same_edges_and_no_jumps():
    graph = trace(mlp([3, 5, 2], "sign", seed=0))
    assert graph.jumps
    ramps = graph.smoothed(0.3)
    assert not ramps.jumps and ramps.output == graph.output
    assert [node.activation for node in ramps] == [Sign(0.3), Identity()]
    assert all(a.edge is b.edge for a, b in zip(graph, ramps, strict=True))
    assert not trace(mlp([3, 5, 2], "relu")).jumps


@pytest.mark.parametrize("n", [1, 5])
def test_the_slope_of_prelu_is_a_weight_of_the_edge_above(n):
    model = seeded(nn.Sequential, nn.Linear(6, 5), nn.PReLU(n), nn.Linear(5, 3))
    graph = check(model, numbers(7, 6))
    slope = model[1].weight
    assert [node.activation for node in graph.uses[slope]] == [Identity()]
    assert kinds(model).count(ReLU()) == 2  # relu(z) and relu(-z)


def test_prelu_has_a_slope_for_every_channel_of_a_picture():
    X = numbers(4, 2, 6, 6)
    check(ended([nn.Conv2d(2, 4, 3), nn.PReLU(4)], X), X)


NORMS = {
    "layer": nn.LayerNorm(5),
    "layer without bias": nn.LayerNorm(5, bias=False),
    "rms": nn.RMSNorm(5),
    "group": nn.GroupNorm(5, 5),
}


@pytest.mark.parametrize("name", NORMS)
def test_scale_and_shift_of_a_norm_are_weights_of_the_edge_above(name):
    norm = copy.deepcopy(NORMS[name])
    model = seeded(Between, nn.Sequential(norm, nn.Tanh()))
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(numbers(5, seed=2) / 3)
    X = numbers(7, 6)
    if name == "group":  # one number in each group is always zero: take pictures
        X = numbers(4, 2, 4, 4)
        layers = [nn.Conv2d(2, 6, 3), nn.GroupNorm(3, 6), nn.Tanh()]
        model = ended(layers, X)
        nn.init.normal_(model[1].weight)
        nn.init.normal_(model[1].bias)
        norm = model[1]
    graph = check(model, X)
    for parameter in norm.parameters():
        assert parameter in graph.uses
        assert all(node.activation == Tanh() for node in graph.uses[parameter])


# Edges

CHANNELS = {1: (2, 12), 2: (2, 8, 7), 3: (2, 5, 6, 5)}
LAYERS = {
    1: [
        nn.Conv1d(4, 5, 3),
        nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2),
        nn.Conv1d(4, 5, 3, padding="same", padding_mode="circular", bias=False),
        nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        nn.AvgPool1d(3, 2, padding=1),
        nn.MaxPool1d(3, 2, padding=1, dilation=1),
        nn.AdaptiveAvgPool1d(3),
        nn.AdaptiveMaxPool1d(3),
        nn.Upsample(scale_factor=2),
        nn.ReplicationPad1d(2),
        nn.Dropout1d(0.4),
        nn.BatchNorm1d(4),
    ],
    2: [
        nn.Conv2d(4, 5, 3),
        nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(2, 1), dilation=(1, 2), groups=2),
        nn.Conv2d(4, 5, 3, padding="same", padding_mode="reflect"),
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, dilation=1, groups=2),
        nn.AvgPool2d(3, 2, padding=1, ceil_mode=True, count_include_pad=False),
        nn.MaxPool2d(3, 2, padding=1),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.AdaptiveAvgPool2d((2, 3)),
        nn.AdaptiveAvgPool2d(1),
        nn.AdaptiveMaxPool2d((2, 3)),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Upsample((9, 9), mode="nearest"),
        nn.ZeroPad2d((1, 2, 0, 1)),
        nn.ReflectionPad2d(1),
        nn.ConstantPad2d(1, 0.7),
        nn.PixelShuffle(2),
        nn.Unfold(2),
        nn.Dropout(0.3),
        nn.Dropout2d(0.3),
        nn.AlphaDropout(0.3),
        nn.FeatureAlphaDropout(0.3),
        nn.BatchNorm2d(4),
        nn.BatchNorm2d(4, momentum=None),
        nn.BatchNorm2d(4, affine=False),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.Identity(),
    ],
    3: [
        nn.Conv3d(4, 5, 2),
        nn.Conv3d(4, 6, 2, stride=2, padding=1, dilation=2, groups=2),
        nn.ConvTranspose3d(4, 6, 2, stride=2, padding=1, groups=2),
        nn.AvgPool3d(2),
        nn.MaxPool3d(2, 1),
        nn.AdaptiveAvgPool3d(2),
        nn.AdaptiveMaxPool3d(2),
        nn.Dropout3d(0.3),
        nn.BatchNorm3d(4),
    ],
}


@pytest.mark.parametrize("follows", [nn.Tanh, nn.Identity], ids=["below", "above"])
@pytest.mark.parametrize(
    ("d", "layer"),
    [pytest.param(d, m, id=f"{k}-{m}") for d, all in LAYERS.items() for k, m in enumerate(all)],
)
def test_layers_of_every_kind(d, layer, follows):
    """Below and above an activation: max-pooling changes places with the one below it."""
    X = numbers(5, *CHANNELS[d])
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[d - 1]
    layers = [convolution(2, 4, 3, padding=1), nn.Tanh(), copy.deepcopy(layer), follows()]
    check(ended(layers, X), X)


EDGES = {
    "flatten": lambda x: x.reshape(-1, 2, 6).flatten(1),
    "view": lambda x: x.view(x.shape[0], 3, 4).view(x.size(0), -1),
    "permute": lambda x: x.reshape(-1, 3, 4).permute(0, 2, 1).reshape(-1, 12),
    "transpose": lambda x: x.unflatten(1, (3, 4)).transpose(1, 2).flatten(1),
    "slices": lambda x: torch.cat([x[:, :4], x[:, 8:], x[:, 4:8] * 2], dim=1),
    "chunks": lambda x: torch.cat(x.chunk(3, dim=1)[::-1], dim=1),
    "split": lambda x: torch.cat(torch.split(x, [5, 7], dim=1), dim=-1),
    "pad": lambda x: F.pad(x, (1, 2))[:, 2:14],
    "stack": lambda x: torch.stack([x, -x], dim=1).mean(1) + x,
    "scale": lambda x: 3 * x / 2 - 1,
    "reversed": lambda x: 1 - x,
    "roll and flip": lambda x: x.roll(1, 1).flip(1),
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "interpolate": lambda x: F.interpolate(x[:, None], scale_factor=2.0)[:, 0, :12],
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "in place": lambda x: (x + 0).mul_(2).add_(1),
    "constants": lambda x: x + torch.ones(x.shape[0], 12, dtype=torch.float64),
    "amax": lambda x: x + x.amax(1, keepdim=True),
}


@pytest.mark.parametrize("name", EDGES)
def test_functions_that_are_affine(name):
    check(seeded(Between, lambda x: EDGES[name](torch.tanh(x)), n=12), numbers(7, 6))


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = x + torch.relu(self.inner(x))
        return self.last(x)


class PlainSkip(Skip):
    """The sum is read twice and no activation stands on it: a state of its own."""

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = x + 0.5 * torch.tanh(self.inner(x))
        return self.last(x) - 2 * self.last(x * 0.5)


class Products(nn.Module):
    """A gate, an attention without and with softmax, a state times itself."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.last = nn.Linear(12, 3)

    def forward(self, x):  # (m, 3, 4)
        q, k, v = self.q(x), self.k(x), torch.tanh(self.v(x))
        weights = F.softmax(q @ k.transpose(1, 2) / 2, dim=-1)
        mixed = weights @ v
        gated = mixed * torch.sigmoid(q)
        return self.last((gated + v * v).flatten(1))


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 5)
        self.both, self.last = nn.Bilinear(4, 5, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.both(torch.tanh(self.a(x)), self.b(x))))


class Recurrent(nn.Module):
    """A loop over the steps of a sequence, however long it is."""

    def __init__(self):
        super().__init__()
        self.into, self.on, self.last = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):  # (m, time, 3)
        state = torch.zeros(x.shape[0], 5, dtype=x.dtype)
        for t in range(x.shape[1]):
            state = torch.tanh(self.into(x[:, t]) + self.on(state))
        return self.last(state)


class Functional(nn.Module):
    """Parameters of one's own and torch's functions, no module at all."""

    def __init__(self):
        super().__init__()
        self.W, self.b = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(5))
        self.V = nn.Parameter(torch.randn(5, 3) / 3)

    def forward(self, x):
        return torch.tanh(F.linear(x, self.W, self.b)) @ self.V


class Own(nn.Sequential):
    """A Sequential that does something else than one layer after the other."""

    def forward(self, x):
        return 2 * super().forward(x) + super().forward(0.5 * x)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def tied():
    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    last.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), last, nn.Tanh(), first)


class Transposed(nn.Module):
    """An autoencoder whose decoder is the encoder's weight, transposed."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(6, 4)
        self.bias = nn.Parameter(torch.zeros(6))

    def forward(self, x):
        code = torch.relu(self.encoder(x))
        return F.linear(code, self.encoder.weight.t(), self.bias)


class Sized(Skip):
    """One state is read for its size alone."""

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.inner(x) + torch.ones_like(x)))


NETWORKS = {
    "skip": (Skip, (7, 6)),
    "plain skip": (PlainSkip, (7, 6)),
    "products": (Products, (7, 3, 4)),
    "bilinear": (Bilinear, (7, 6)),
    "recurrent": (Recurrent, (7, 4, 3)),
    "functional": (Functional, (7, 6)),
    "own sequential": (lambda: Own(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), (7, 6)),
    "own linear": (lambda: nn.Sequential(Doubled(6, 5), nn.Tanh(), Doubled(5, 3)), (7, 6)),
    "tied": (tied, (7, 6)),
    "transposed": (Transposed, (7, 6)),
    "activation made on the way": (
        lambda: Between(lambda x: nn.ReLU()(x)),
        (7, 6),
    ),
    "a size alone": (Sized, (7, 6)),
    "two linear": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)), (7, 6)),
    "two activations": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Sigmoid(), nn.Linear(5, 3)),
        (7, 6),
    ),
    "activation first": (lambda: nn.Sequential(nn.Tanh(), nn.Linear(6, 3)), (7, 6)),
    "softmax last": (lambda: nn.Sequential(nn.Linear(6, 3), nn.Softmax(-1)), (7, 6)),
    "sequence": (
        lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Flatten(), nn.Linear(20, 3)),
        (7, 4, 3),
    ),
    "weight norm": (
        lambda: nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 3)
        ),
        (7, 6),
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_every_shape(name):
    make, shape = NETWORKS[name]
    check(seeded(make), numbers(*shape))


class Modes(nn.Module):
    """Functions that follow the mode of the module."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("var", torch.ones(5))

    def forward(self, x):
        x = F.batch_norm(self.first(x), self.mean, self.var, training=self.training)
        return self.last(F.dropout(torch.tanh(x), 0.3, self.training))


@pytest.mark.parametrize("training", [False, True])
def test_functions_follow_the_mode_whichever_was_on_when_it_was_traced(training):
    model, X = seeded(Modes).train(training), numbers(7, 6)
    check(model, X)
    model.train(training)
    assert all(module.training == training for module in model.modules())


def test_embeddings_take_whole_numbers():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.last = nn.Embedding(9, 5), nn.Linear(20, 3)

        def forward(self, x):
            return self.last(torch.tanh(self.words(x)).flatten(1))

    X = torch.randint(9, (7, 4), generator=torch.Generator().manual_seed(0))
    check(seeded(Words), X)
    model, y = seeded(Words), X[:, 0] % 3
    method = LPOM(weights=Adaptive(learning_rate=0.05))
    lpom.fit(model, X, y, method=method, epochs=60, seed=0)
    assert lpom.evaluate(model, X, y)[1] == 1.0


def test_batch_norm_counts_every_batch_once_in_every_order():
    """Running statistics move as torch's own training would move them, whatever is swept."""
    X, y = numbers(60, 6), torch.arange(60) % 3
    orders = [
        LPOM(),
        LPOM(states=lpom.Sweeps("interleaved", max_sweeps=3)),
        LPOM(states=lpom.Sweeps("top-down", max_sweeps=3)),
        LPOM(states=lpom.Sweeps("paper", max_sweeps=2)),
        LPOM(weights="exact"),
        "adam",
        "mac",
    ]
    for method in orders:
        norm = nn.BatchNorm1d(6)
        model = seeded(nn.Sequential, norm, nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
        lpom.fit(model, X, y, method=method, epochs=2, batch_size=20, seed=0)
        twin, order = nn.BatchNorm1d(6).double(), torch.Generator().manual_seed(0)
        for _ in range(2):
            for rows in torch.randperm(60, generator=order).split(20):
                twin(X[rows])
        assert int(norm.num_batches_tracked) == 6
        torch.testing.assert_close(norm.running_mean, twin.running_mean)
        torch.testing.assert_close(norm.running_var, twin.running_var)
        assert model.training  # as it was
        loss, _ = lpom.evaluate(model, X, y)
        assert int(norm.num_batches_tracked) == 6
        with torch.no_grad():
            outputs = model.eval()(X)
        assert loss == pytest.approx(float(F.cross_entropy(outputs, y)))


# What was passed over in silence


def test_a_hook_on_a_layer_takes_part():
    model = seeded(nn.Sequential, nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].register_forward_hook(lambda module, args, output: 2 * output)
    graph = check(model, numbers(7, 6))
    assert graph[1].edge.linear is None  # not a plain product any more


def test_a_hook_on_an_activation_is_refused():
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    model[1].register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(UntrainableError, match=r"1 \(Tanh\).*forward hooks"):
        trace(model)


def test_hooks_on_a_container_take_part():
    model = seeded(nn.Sequential, nn.Sequential(nn.Linear(6, 5), nn.Tanh()), nn.Linear(5, 3))
    model[0].register_forward_hook(lambda module, args, output: 2 * output)
    check(model, numbers(7, 6))
    model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    with pytest.raises(UntrainableError, match=r"forward hooks.*give nn.Sequential\(model\)"):
        trace(model)
    check(nn.Sequential(model), numbers(7, 6))


def test_a_compiled_module_is_what_it_wraps():
    model = seeded(nn.Sequential, nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    graph = trace(torch.compile(model, backend="eager"))
    assert graph.parameters[0] is model[0].weight
    X, y = numbers(20, 6), torch.arange(20) % 3
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    with torch.compiler.set_stance("force_eager"):
        lpom.fit(compiled, X, y, epochs=2, seed=0)
    lpom.fit(model, X, y, epochs=2, seed=0)
    assert torch.equal(model[0].weight, compiled._orig_mod[0].weight)


def test_a_module_that_only_wraps_a_sequential():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp([6, 5, 3], "tanh", seed=0)

        def forward(self, x):
            return self.net(x)

    assert kinds(Wrapped()) == [Tanh(), Identity()]
    check(seeded(Wrapped), numbers(7, 6))


# The shape of the graph


def test_linear_layers_and_what_follows_them():
    first, second, third = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(3, 2, bias=False)
    graph = trace(nn.Sequential(first, nn.LeakyReLU(0.2), second, third, nn.Tanh()))
    assert [node.activation for node in graph] == [LeakyReLU(0.2), Identity(), Tanh()]
    assert [node.edge.linear for node in graph] == [first, second, third]
    assert [node.sources for node in graph] == [(0,), (1,), (2,)]
    assert len(graph) == graph.output == 3 and graph[2].edge.linear is second
    expected = [first.weight, first.bias, second.weight, second.bias, third.weight]
    assert all(a is b for a, b in zip(graph.parameters, expected, strict=True))
    assert graph.parameter_names[third.weight] == "3.weight"


def test_a_single_linear_layer_is_a_network():
    assert kinds(nn.Linear(3, 2)) == [Identity()]
    assert kinds(nn.Sequential(nn.Linear(3, 2), nn.Identity())) == [Identity()]


def test_identity_after_an_activation_changes_nothing():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Identity(), nn.Linear(5, 2))
    graph = trace(model)
    assert [node.activation for node in graph] == [ReLU(), Identity()]
    assert graph[2].edge.linear is model[3]  # still a plain product


def test_nested_sequentials_are_read_in_order():
    inner = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU()), nn.Linear(4, 4))
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.Sigmoid()), inner, nn.Tanh())
    assert kinds(model) == [Sigmoid(), ReLU(), Tanh()]


def test_factors_of_a_product_and_values_read_twice_are_states():
    graph = trace(seeded(Products), numbers(3, 3, 4))
    products = [node for node in graph if node.edge.multiplies]
    assert [node.activation for node in products] == [Softmax(), Identity(), Identity()]
    for node in products:
        assert len(node.sources) >= 2
    assert kinds(seeded(PlainSkip)).count(Identity()) >= 3
    assert kinds(Skip()) == [Tanh(), ReLU(), Identity()]  # the sum is a part of the last edge


def test_max_pooling_stays_above_the_activation():
    X = numbers(2, 1, 8, 8)
    graph = trace(ended([nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)], X), X)
    assert graph.feed_forward(X)[1][1].shape == (2, 3, 8, 8)


def test_a_parameter_has_all_its_uses():
    model = seeded(tied)
    graph = trace(model)
    assert [node.index for node in graph.uses[model[0].weight]] == [1, 2, 3]
    assert [node.index for node in graph.uses[model[0].bias]] == [1, 3]
    recurrent = seeded(Recurrent)
    graph = trace(recurrent, numbers(3, 6, 3))
    assert len(graph.uses[recurrent.on.weight]) == 6  # as many as there are time steps


def test_nodes_are_called_after_their_modules():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.act, self.last = nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)

        def forward(self, x):
            return self.last(self.act(self.first(self.act(self.first(x)))))

    names = [node.name for node in trace(Named())]
    assert names == ["act", "act#2", "output"]


def test_tracing_leaves_the_model_as_it_is():
    model = seeded(nn.Sequential, nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    trace(model, numbers(3, 6))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(module.training for module in model.modules())


# What can't be trained


def test_a_refusal_names_the_operation_the_line_and_what_to_do():
    class Wavy(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x):
            hidden = torch.square(self.first(x))
            return self.last(hidden)

    with pytest.raises(UntrainableError) as caught:
        trace(Wavy())
    said = str(caught.value)
    assert said.startswith("square, line ") and "hidden = torch.square(self.first(x))" in said
    assert "test_tracing.py" in said


def refused(forward):
    class Refused(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    Refused.forward = forward
    return Refused()


def branches(self, x):
    return self.last(x) if self.first(x).sum() > 0 else x


REFUSED = {
    "log-softmax": (
        lambda s, x: s.last(F.log_softmax(s.first(x), -1)),
        "log_softmax.*cross-entropy",
    ),
    "log-softmax module": (
        lambda s, x: s.last(nn.LogSoftmax(-1)(s.first(x))),
        "LogSoftmax|log_softmax.*cross-entropy",
    ),
    "quotient": (lambda s, x: s.first(x) / (2 + torch.tanh(s.last(x))), "divides by a state"),
    "exp": (lambda s, x: s.last(torch.exp(s.first(x))), "exp.*line.*affine"),
    "branch": (branches, "torch.fx cannot follow Refused.*line .*first.*values of tensors"),
    "tuple": (lambda s, x: (s.first(x), s.last(x)), "returns tuple; it must return one tensor"),
    "dict": (lambda s, x: {"a": s.first(x)}, "returns .*dict.*; it must return one tensor"),
    "no weights": (lambda s, x: x.tanh(), "does not depend on its weights|no weights"),
    "mode": (
        lambda s, x: s.first(x) if s.training else s.last(s.first(x)),
        "other operations in training than in evaluation",
    ),
    "rows": (lambda s, x: [s.first(row) for row in x][0], "size of the batch|cannot follow"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_said(name):
    forward, sentence = REFUSED[name]
    with pytest.raises(UntrainableError, match=sentence):
        trace(refused(forward), torch.zeros(3, 3))


def test_two_inputs_are_refused_unless_one_has_a_default():
    def two(self, x, other):
        return self.last(x) + self.first(other)

    def default(self, x, scale=2.0):
        return self.last(scale * x)

    with pytest.raises(UntrainableError, match=r"takes 2 inputs \(x, other\); give it one tensor"):
        trace(refused(two))
    assert kinds(refused(default)) == [Identity()]


@pytest.mark.parametrize("error", [RuntimeError, KeyError, ZeroDivisionError])
def test_whatever_a_model_raises_while_it_is_traced_is_said_by_name(error):
    class Picky(nn.Linear):
        def forward(self, x):
            raise error("a reason")

    class Fixed(nn.Linear):
        """Knows one size of batch."""

        def forward(self, x):
            return torch.cat(
                [super().forward(x).view(8, 2)[:, k] for k in range(x.view(8, 3).ndim)]
            )

    for model in (Picky(3, 2), Fixed(3, 2)):
        problem = Problem(model, Squared(), torch.randn(8, 3))
        with pytest.raises(UntrainableError, match=type(model).__name__):
            trace(model, problem.example)
        assert not problem.has_graph


def test_lazy_layers_must_have_met_data():
    lazy = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(UntrainableError, match=r"0\.weight is lazy .*call the model once"):
        trace(lazy)
    lazy(torch.randn(5, 3))
    assert kinds(lazy) == [ReLU(), Identity()]


@pytest.mark.parametrize("module", [nn.LSTM(3, 4), nn.MultiheadAttention(4, 2)], ids=repr)
def test_modules_that_are_not_known_are_named(module):
    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = module, nn.Linear(4, 2)

        def forward(self, x):
            x = self.inner(x, x, x)[0] if isinstance(self.inner, nn.MultiheadAttention) else x
            return self.last(self.inner(x)[0] if isinstance(self.inner, nn.LSTM) else x)

    with pytest.raises(UntrainableError, match=f"inner.*{type(module).__name__}"):
        trace(Holds())


def test_weights_computed_from_others_take_no_exact_step():
    model, X = seeded(NETWORKS["weight norm"][0]), numbers(20, 6)
    with pytest.raises(ValueError, match="computed from other parameters"):
        lpom.fit(model, X, torch.arange(20) % 3, method=LPOM(weights="exact"), epochs=1)


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.ones(4, 3))
        self.second = nn.Parameter(torch.ones(2, 4))

    def forward(self, x):
        return torch.tanh(x @ self.first.T) @ self.second.mT


def test_a_transposed_weight_is_a_weight():
    graph = trace(Transposed())
    assert [node.edge.names for node in graph] == [("first",), ("second",)]
