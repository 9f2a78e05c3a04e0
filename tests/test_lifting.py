"""Lifted modules: LPOM's rule as a backward pass, against the formula and against autograd."""

import copy
import math
import pickle
import signal
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lpom
from lpom.activations import Elementwise, Step


class Model(nn.Module):
    """A function between two layers."""

    def __init__(self, function, n_in=8, n_out=8):
        super().__init__()
        torch.manual_seed(0)
        self.below, self.function = nn.Linear(6, n_in), function
        self.above = nn.Linear(n_out, 3)
        self.double()

    def forward(self, x):
        return self.above(self.function(self.below(x)))


def answer(phi, z, g, mu):
    """The rule with a held weight, literally."""
    return mu * (phi(z) - phi(z - g / mu))


def displaced(phi, z, g, d, sides):
    """The rule with a held displacement, literally; by element."""
    if sides == 2:
        return g * (phi(z + d) - phi(z - d)) / (2 * d)
    return g.abs() / d * (phi(z) - phi(z - d * g.sign()))


ELEMENTWISE = {
    "F.relu": F.relu,
    "torch.relu": torch.relu,
    "method": lambda z: z.relu(),
    "module": nn.ReLU(),
    "in place": lambda z: z.clone().relu_(),
    "inplace=True": lambda z: F.leaky_relu(z.clone(), 0.2, True),
    "tanh": torch.tanh,
    "sigmoid": lambda z: z.sigmoid(),
    "leaky": lambda z: F.leaky_relu(z, 0.2),
    "clamp": lambda z: z.clamp(-0.5, 0.5),
    "abs": abs,
    "exp": torch.exp,
    "gelu": F.gelu,
    "silu": nn.SiLU(inplace=False),
    "hardswish": F.hardswish,
    "sine": torch.sin,
    "erf": torch.special.erf,
    "power of a number": lambda z: 2.0**z,
}
ROWS = {
    "softmax": lambda z: F.softmax(z, dim=-1),
    "softmax with dtype": lambda z: F.softmax(z, dim=-1, dtype=torch.float64),
    "layer norm": lambda z: F.layer_norm(z, z.shape[1:]),
    "module of a norm": nn.LayerNorm(5, elementwise_affine=False),
    "rms norm": lambda z: F.rms_norm(z, z.shape[1:], None, 1e-5),
    "group norm": lambda z: F.group_norm(z, 1),
}
CALLS = ELEMENTWISE | ROWS


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize(("reduction", "scale"), [("mean", 1.0), ("sum", 1.0), ("mean", 0.25)])
def test_a_held_weight_is_the_rule_of_the_paper(call, reduction, scale):
    lifted = lpom.lift(nn.Sequential(Call(call)), mu=2.0, reduction=reduction)
    lifted.scale = scale
    torch.manual_seed(0)
    z = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    g = torch.randn(4, 5, dtype=torch.float64)
    share = scale / 4 if reduction == "mean" else scale
    x = lifted(z)
    torch.testing.assert_close(x, call(z))
    (found,) = torch.autograd.grad(x, z, share * g)
    expected = share * answer(call, z.detach(), g, 2.0)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


class Call(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, z):
        return self.call(z)


@pytest.mark.parametrize("call", ELEMENTWISE.values(), ids=ELEMENTWISE.keys())
@pytest.mark.parametrize("sides", [1, 2])
def test_a_held_displacement_moves_every_element_as_far(call, sides):
    torch.manual_seed(0)
    z = torch.randn(40, 5, dtype=torch.float64, requires_grad=True)
    g = torch.randn(40, 5, dtype=torch.float64)
    for scale in (0.5, 30.0):  # below and above the bound on the spread
        z = (scale * torch.randn(40, 5, dtype=torch.float64)).clamp(-30, 30).requires_grad_()
        d = 0.2 * min(float(z.detach().std()), 1.0)
        lifted = lpom.lift(Call(call), displacement=0.2, sides=sides)
        (found,) = torch.autograd.grad(lifted(z), z, g)
        expected = displaced(call, z.detach(), g, d, sides)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("call", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("sides", [1, 2])
def test_a_held_displacement_moves_every_row_as_far(call, sides):
    torch.manual_seed(0)
    z = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    g = torch.randn(7, 5, dtype=torch.float64)
    g[3] = 0  # a row that nothing comes down to
    (found,) = torch.autograd.grad(lpom.lift(Call(call), displacement=0.2, sides=sides)(z), z, g)
    values, u = z.detach(), g
    size = torch.ones(7, 1, dtype=torch.float64)
    if call not in list(ROWS.values())[:2]:
        centred = call is not ROWS["rms norm"]
        values = values - values.mean(1, keepdim=True) * centred
        u = g - g.mean(1, keepdim=True) * centred
        size = (values.square().sum(1, keepdim=True) + 5 * 1e-5).sqrt()
    e, length = 0.2 * size, u.norm(dim=1, keepdim=True).clamp_min(1e-30)
    low = call(z.detach() - e * u / length)
    high = call(z.detach() + e * u / length) if sides == 2 else call(z.detach())
    expected = length / (sides * e) * (high - low)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


WRITTEN = {
    "quotient": lambda z: z / (1 + z * z),
    "reciprocal": lambda z: 1 / (2 + z.cos()),
    "root mean square by hand": lambda z: z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-6),
    "layer norm by hand": lambda z: (
        (z - z.mean(-1, keepdim=True)) / (z.std(-1, keepdim=True) + 1e-6)
    ),
    "normalize": lambda z: F.normalize(z, dim=-1),
    "norm": lambda z: z * z.norm(dim=-1, keepdim=True),
    "linalg": lambda z: z * torch.linalg.vector_norm(z, dim=-1, keepdim=True),
    "log softmax": lambda z: F.log_softmax(z, -1),
    "log sum exp": lambda z: z * torch.logsumexp(z, -1, keepdim=True),
    "cubic": lambda z: z**3,
    "product": lambda z: z**2,
    "in-place quotient": lambda z: z.clone().div_(2 + z.sin()),
    "gumbel": lambda z: F.gumbel_softmax(z, 1.0),
    "cosine": lambda z: z * F.cosine_similarity(z, z.roll(1, 0), dim=-1)[..., None],
    "distances": lambda z: z + torch.cdist(z, z + 1).sum(-1, keepdim=True),
    "affine norms": nn.LayerNorm(8),
    "rms": nn.RMSNorm(8),
    "local response": lambda z: F.local_response_norm(z[:, None].relu() + z[:, None], 2)[:, 0],
}


@pytest.mark.parametrize("function", WRITTEN.values(), ids=WRITTEN.keys())
def test_smooth_functions_approach_their_derivative_in_second_order(function):
    model = Model(function)
    x = torch.randn(12, 6, dtype=torch.float64)

    def gradient(model):
        torch.manual_seed(5)
        loss = model(x).square().sum()
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    plain = gradient(model)
    errors = []
    for d in (0.02, 0.01):
        lifted = lpom.lift(model, displacement=d, strict=True)
        errors.append(float((gradient(lifted) - plain).norm() / plain.norm()))
    assert errors[0] < 2e-3, errors
    # a product is exact, what has a kink is of first order at worst
    assert errors[1] < max(0.6 * errors[0], 1e-12), errors


PAIRS = {
    "maximum": torch.maximum,
    "max": torch.max,
    "minimum": lambda a, b: torch.minimum(a, other=b),
    "power": lambda a, b: (a * a + 1) ** b,
    "arctangent": lambda a, b: torch.atan2(a, 2 + b * b),
    "broadcast": lambda a, b: torch.logaddexp(a, b[:1]),
}


@pytest.mark.parametrize("function", PAIRS.values(), ids=PAIRS.keys())
def test_functions_of_two_tensors_answer_to_both(function):
    def both(z):
        return function(*z.chunk(2, -1))

    model, x = Model(both, n_in=16), torch.randn(300, 6, dtype=torch.float64)
    lifted = lpom.lift(model, displacement=1e-3, strict=True)
    found, plain = (torch.autograd.grad(m(x).sum(), model.below.weight) for m in (lifted, model))
    torch.testing.assert_close(found, plain, rtol=0.05, atol=0.05)


def test_a_large_mu_is_back_propagation():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Softplus()).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    plain = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    lifted = lpom.lift(model, mu=1e6, reduction="sum")
    found = torch.autograd.grad(lifted(x).square().sum(), list(model.parameters()))
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("jump", [Elementwise(Step()), torch.sign, torch.floor, torch.round])
def test_a_jump_is_read_half_a_window_from_both_sides(jump):
    """The window is the smaller of 2 and one spread: straight-through."""
    for scale in (0.7, 9.0):
        z = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None] * scale + 0.01
        z.requires_grad_()
        lifted = lpom.lift(Call(jump))
        with torch.no_grad():
            values = jump(z)
        torch.testing.assert_close(lifted(z), values)
        g = torch.ones_like(z)
        (found,) = torch.autograd.grad(lifted(z), z, g)
        half = min(2.0, float(z.detach().std())) / 2
        with torch.no_grad():
            expected = (jump(z + half) - jump(z - half)) / (2 * half)
        torch.testing.assert_close(found, expected)
        assert found.abs().sum() > 0


@pytest.mark.parametrize("in_place", [nn.ReLU(inplace=True), F.relu_, lambda z: z.relu_()])
def test_in_place_activations_change_their_input(in_place):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x):
            x = self.layer(x)
            in_place(x)
            return x

    torch.manual_seed(0)
    model = Model()
    x = torch.randn(6, 3)
    with torch.no_grad():
        z = model.layer(x)
    lifted = lpom.lift(model, 1.0, reduction="sum")
    out = lifted(x)
    torch.testing.assert_close(out, torch.relu(z))
    (found,) = torch.autograd.grad(out.sum(), model.layer.bias)
    expected = answer(torch.relu, z, torch.ones(6, 4), 1.0).sum(0)
    torch.testing.assert_close(found, expected)


def test_accumulated_gradients_are_those_of_the_whole_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.randint(0, 2, (8,))
    lifted = lpom.lift(model, mu=1.0)
    F.cross_entropy(lifted(x), y).backward()
    whole = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    lifted.scale = 1 / 4
    for rows in torch.arange(8).split(2):
        (F.cross_entropy(lifted(x[rows]), y[rows]) / 4).backward()
    for parameter, gradient in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-14)


MIXED = """
import copy, torch, lpom
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
x, y = torch.randn(64, 6), torch.randint(0, 3, (64,))

def gradients(mu, dtype=None, scale=1.0):
    lifted = lpom.lift(copy.deepcopy(model), mu=mu)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    optimizer = torch.optim.SGD(lifted.parameters(), 0.1)
    lifted.scale = scaler.get_scale()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        outputs = lifted(x)
    scaler.scale(F.cross_entropy(outputs.float(), y)).backward()
    scaler.unscale_(optimizer)
    return torch.cat([p.grad.flatten() for p in lifted.parameters()])

whole = gradients(0.5)
found = [gradients(0.5, scale=2.0**12), gradients(500.0)]
found += [gradients(0.5, dtype, 2.0**12) for dtype in (torch.bfloat16, torch.float16)]
print(*[float((g - whole).norm() / whole.norm()) for g in found])
"""


def test_mixed_precision_keeps_the_meaning_of_mu():
    """GradScaler alone changes nothing, autocast no more than its rounding; another mu does."""
    done = subprocess.run([sys.executable, "-c", MIXED], capture_output=True, text=True)
    if done.returncode == -signal.SIGILL:
        pytest.skip("this processor has no such instructions")
    scaled, other, bfloat, half = map(float, done.stdout.split())
    assert scaled < 1e-6 and bfloat < 0.02 and half < 0.002, done.stderr
    assert other > 0.2


def test_half_precision_loses_no_pull():
    """The pull is 2000 times smaller than z: a difference of two bfloat16 numbers would be zero."""
    torch.manual_seed(0)
    lifted = lpom.lift(nn.Sequential(nn.Tanh()), mu=2000.0, reduction="sum")
    z = torch.randn(64, dtype=torch.bfloat16, requires_grad=True)
    (found,) = torch.autograd.grad(lifted(z).sum(), z)
    assert found.dtype == torch.bfloat16
    exact = 1 - torch.tanh(z.detach().float()) ** 2
    torch.testing.assert_close(found.float(), exact, rtol=0.01, atol=0.001)


class Gated(nn.Module):
    """Another's class: a layer's output in pieces, control flow, in-place calls."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.last = nn.Linear(6, 8), nn.Linear(4, 3)

    def forward(self, x):
        z = self.layer(x)
        if float(z.detach().mean()) > 1e9:  # too dynamic for torch.fx
            return z
        p, q = z.chunk(2, -1)
        return self.last(torch.tanh(p) * torch.sigmoid(q))


def test_pieces_of_a_layer_have_the_right_gradient():
    model, x = Gated().double(), torch.randn(9, 6, dtype=torch.float64)
    lifted = lpom.lift(model, displacement=1e-4, strict=True)
    for found, plain in zip(gradients(lifted, x), gradients(model, x), strict=True):
        torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-9)
    assert lifted.report() == "lifted: tanh (1), sigmoid (1)"


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z.sin()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos()


@torch.jit.ignore
def _tanh_twice(z):
    return torch.tanh(torch.tanh(z))


KEPT = {
    "an autograd function": (Own.apply, "Own"),
    "vmap": (lambda z: torch.func.vmap(torch.tanh)(z), "tanh"),
    "linear algebra": (lambda z: z @ torch.linalg.inv(z.T @ z + torch.eye(8)), "linalg_inv"),
}


@pytest.mark.parametrize(("function", "name"), KEPT.values(), ids=KEPT.keys())
def test_what_cannot_be_lifted_is_named_by_autograds_graph(function, name):
    model, x = Model(function).float(), torch.randn(9, 6)
    lifted = lpom.lift(model)
    assert "nothing lifted yet" in lifted.report()
    found, plain = gradients(lifted, x), gradients(model, x)
    torch.testing.assert_close(found, plain)
    assert f"kept its own derivative: {name}" in lifted.report()
    with pytest.raises(lpom.UntrainableError, match=name):
        lpom.lift(model, strict=True)(x)


def test_reentrant_checkpointing_is_named():
    model = Recomputing(True, inside=False)
    lifted = lpom.lift(model)
    lifted(torch.randn(5, 6, requires_grad=True))
    assert "CheckpointFunction" in lifted.report()


def test_a_derivative_inside_forward_is_the_derivative():
    """The model itself asks for it: its value may not depend on a displacement."""

    def slope(z):
        with torch.enable_grad():
            return torch.autograd.grad(torch.tanh(z).sum(), z, create_graph=True)[0]

    model, x = Model(slope), torch.randn(5, 6, dtype=torch.float64)
    lifted = lpom.lift(model, displacement=0.3)
    torch.testing.assert_close(lifted(x), model(x), rtol=0, atol=0)
    for found, plain in zip(gradients(lifted, x), gradients(model, x), strict=True):
        torch.testing.assert_close(found, plain)


def test_displacements_by_function_kind_and_module():
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.GELU()).double()
    x = torch.randn(20, 6, dtype=torch.float64)

    def first(**settings):
        return gradients(lpom.lift(model, **settings), x)[0]

    whole = first(displacement=0.3)
    parts = {"gelu": 0.3, "norm": 0.3, "*": 1e-3}
    torch.testing.assert_close(first(displacement=parts), whole, rtol=0, atol=0)
    modules = {"1": 0.3, "2": 0.3, "3": 0.3, "*": 1e-3}
    torch.testing.assert_close(first(displacement=modules), whole, rtol=0, atol=0)
    assert not torch.allclose(first(displacement={"norm": 0.3}), whole)
    one = first(displacement=0.3, sides={"norm": 1, "*": 2})
    assert not torch.allclose(one, whole) and not torch.allclose(
        one, first(displacement=0.3, sides=1)
    )
    with pytest.raises(ValueError, match="displacement"):
        lpom.lift(model, displacement="large")
    with pytest.raises(ValueError, match="sides"):
        lpom.lift(model, sides=3)


LAYERS = {
    "lstm": nn.LSTM(6, 7, 2, batch_first=True, bidirectional=True),
    "gru": nn.GRU(6, 7, 2, bias=False),
    "rnn": nn.RNN(6, 7),
    "projected": nn.LSTM(6, 7, proj_size=3),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("packed", [False, True])
def test_recurrent_layers_approach_autograd(layer, packed):
    layer = copy.deepcopy(layer).double()
    x = torch.randn(5, 4, 6, dtype=torch.float64)
    if packed:
        lengths = [5, 3, 3, 1] if not layer.batch_first else [4, 3, 2, 2, 1]
        x = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=layer.batch_first)

    def gradient(model):
        outputs, state = model(x)
        outputs = outputs.data if packed else outputs
        parts = [outputs, *(state if isinstance(state, tuple) else (state,))]
        loss = sum((p * torch.linspace(-1, 1, p.numel()).view_as(p)).sum() for p in parts)
        return torch.autograd.grad(loss, list(layer.parameters()))

    for sides, rtol in ((2, 1e-5), (1, 1e-2)):
        lifted = lpom.lift(layer, displacement=1e-3, sides=sides)
        for found, plain in zip(gradient(lifted), gradient(layer), strict=True):
            torch.testing.assert_close(found, plain, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn"])
@pytest.mark.parametrize("sides", [1, 2])
def test_the_fast_path_of_recurrent_layers_is_the_plain_one(name, sides, monkeypatch):
    """Where no spread is below its bound both move by the same displacement."""
    layer = copy.deepcopy(LAYERS[name]).double()
    monkeypatch.setattr("lpom.rule.spread", lambda z, most=1.0: z.new_ones(()))
    monkeypatch.setattr("lpom.recurrent.spread", lambda z, most=1.0: z.new_ones(()))
    x = torch.randn(5, 4, 6, dtype=torch.float64)
    g = torch.randn_like(layer(x)[0])
    lifted = lpom.lift(layer, displacement=0.2, sides=sides)
    fast = torch.autograd.grad(lifted(x)[0], list(layer.parameters()), g)
    monkeypatch.setattr("lpom.recurrent.Displacement", int)  # nothing is one
    plain = torch.autograd.grad(lifted(x)[0], list(layer.parameters()), g)
    for a, b in zip(fast, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", ["none", "causal", "boolean", "added", "padded left", "groups"])
def test_attention_in_blocks_is_attention_written_out(kind, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr("lpom.attention.SCORES", 4 * 7 * 3)
    monkeypatch.setattr("lpom.attention.FEW", 0)
    q, k, v = (torch.randn(2, 4, 7, 5, dtype=torch.float64, requires_grad=True) for _ in range(3))
    options = {"is_causal": True} if kind == "causal" else {}
    mask = None
    if kind == "boolean":
        mask = torch.rand(2, 1, 7, 7) > 0.3
        mask[..., 0] = True
    if kind == "added":
        mask = torch.randn(4, 7, 7, dtype=torch.float64, requires_grad=True)
    if kind == "padded left":
        mask = torch.ones(7, 7, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)
        mask[0, :, :, :3] = False
    if kind == "groups":
        k, v = (t[:, :2].detach().clone().requires_grad_() for t in (k, v))
        options = {"enable_gqa": True}
    wanted = [q, k, v] + ([mask] if kind == "added" else [])

    class Attends(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, mask, **options)

    class Written(nn.Module):
        def forward(self, q, k, v):
            if kind == "groups":
                k, v = (t.repeat_interleave(2, 1) for t in (k, v))
            scores = q @ k.mT / math.sqrt(5)
            if kind == "causal":
                scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
            elif mask is not None and mask.dtype == torch.bool:
                scores = scores.masked_fill(~mask, -torch.inf)
            elif mask is not None:
                scores = scores + mask
            shares = scores.softmax(-1)
            if kind == "padded left":
                shares = shares.masked_fill(~mask.any(-1, keepdim=True), 0)
            return shares @ v

    g = torch.randn_like(q)
    found, written = (lpom.lift(m, displacement=0.5) for m in (Attends(), Written()))
    torch.testing.assert_close(found(q, k, v), Attends()(q, k, v))
    a = torch.autograd.grad(found(q, k, v), wanted, g)
    if kind == "padded left":  # the softmax of a row that sees nothing is NaN where it is written
        small = lpom.lift(Attends(), displacement=1e-4)
        b = torch.autograd.grad(Attends()(q, k, v), wanted, g)
        a = torch.autograd.grad(small(q, k, v), wanted, g)
    else:
        b = torch.autograd.grad(written(q, k, v), wanted, g)
    for x, y in zip(a, b, strict=True):
        assert x.isfinite().all()
        torch.testing.assert_close(x, y, rtol=1e-7, atol=1e-9)


def test_dropout_of_attention_is_torchs():
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
    x = torch.randn(3, 5, 8)
    lifted = lpom.lift(layer)
    values = []
    for model in (layer, lifted):
        torch.manual_seed(1)
        values.append(model(x, x, x, need_weights=False)[0])
    torch.testing.assert_close(*values)
    assert "kept" not in lifted.report()


class Counts(lpom.activations.Sigmoid):
    """Sees whether it is ever called where gradients are recorded."""

    def phi(self, z):
        assert not torch.is_grad_enabled()
        return super().phi(z)


def test_no_activation_is_evaluated_with_gradients_on():
    model = nn.Sequential(nn.Linear(6, 8), Elementwise(Counts()), nn.Linear(8, 3))
    gradients(lpom.lift(model), torch.randn(4, 6))


def test_weights_are_shared_and_names_stay():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    lifted = lpom.lift(model)
    assert lpom.unlift(lifted) is model and lpom.unlift(model) is model
    assert lpom.unlift(lpom.lift(lifted)) is model
    assert list(lifted.parameters())[0] is model[0].weight
    assert lifted.state_dict().keys() == model.state_dict().keys()
    other = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    lifted.load_state_dict(other.state_dict())
    torch.testing.assert_close(model[0].weight, other[0].weight)
    outer = nn.ModuleDict({"net": lifted})
    assert set(outer.state_dict()) == {"net.0.weight", "net.0.bias"}
    outer.load_state_dict(outer.state_dict())
    model.extra = 7
    assert lifted.extra == 7
    with pytest.raises(AttributeError, match="nowhere"):
        _ = lifted.nowhere


def gradients(model, x):
    return torch.autograd.grad(model(x).square().mean(), list(model.parameters()))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles_are_lifted(copied):
    torch.manual_seed(0)
    lifted = lpom.lift(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)), displacement=0.5)
    x = torch.randn(4, 3)
    torch.testing.assert_close(gradients(copied(lifted), x), gradients(lifted, x))
    assert not torch.equal(gradients(lifted, x)[0], gradients(lifted.module, x)[0])


def test_export_gives_the_plain_graph():
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).eval()
    x = torch.randn(4, 3)
    exported = torch.export.export(lpom.lift(model), (x,))
    torch.testing.assert_close(exported.module()(x), model(x))


def test_mistakes_are_explained():
    model = nn.Sequential(nn.Linear(3, 8))
    with pytest.raises(ValueError, match="mu"):
        lpom.lift(model, mu=0)
    with pytest.raises(ValueError, match="reduction"):
        lpom.lift(model, reduction="median")
    with pytest.raises(TypeError, match="without any"):
        lpom.lift(model, mu=1.0)()


class Recomputing(nn.Module):
    """A middle part that is run again on the way back."""

    def __init__(self, reentrant, *, inside):
        super().__init__()
        torch.manual_seed(0)
        self.below, self.above = nn.Linear(6, 6), nn.Linear(6, 3)
        part = nn.Sequential(nn.Linear(6, 6), Elementwise(Step()))
        self.part = lpom.lift(part, mu=2.0) if inside else part
        self.reentrant = reentrant

    def forward(self, x):
        h = self.below(x)
        if self.reentrant is None:
            return self.above(self.part(h))
        return self.above(checkpoint(self.part, h, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_parts_can_be_lifted_inside(reentrant):
    X = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    if not reentrant:
        with pytest.raises(lpom.UntrainableError, match="checkpoint"):
            lpom.lift(Recomputing(reentrant, inside=False))(X)
    found, wanted = (Recomputing(way, inside=True) for way in (reentrant, None))
    for model in (found, wanted):
        model(X).square().mean().backward()
    for p, q in zip(found.parameters(), wanted.parameters(), strict=True):
        assert p.grad.abs().sum() > 0
        torch.testing.assert_close(p.grad, q.grad)
