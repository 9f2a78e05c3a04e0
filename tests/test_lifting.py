"""Lifted modules: LPOM's rule as a backward pass, against the formula and against fit."""

import copy
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
from lpom import networks
from lpom.activations import Elementwise, Step


def answer(phi, z, g, mu):
    """The rule, literally."""
    return mu * (phi(z) - phi(z - g / mu))


CALLS = {
    "F.relu": F.relu,
    "torch.relu": torch.relu,
    "method": lambda z: z.relu(),
    "module": nn.ReLU(),
    "tanh": torch.tanh,
    "sigmoid": lambda z: z.sigmoid(),
    "leaky": lambda z: F.leaky_relu(z, 0.2),
    "clamp": lambda z: z.clamp(-0.5, 0.5),
    "softmax": lambda z: F.softmax(z, dim=-1),
    "softmax with dtype": lambda z: F.softmax(z, dim=-1, dtype=torch.float64),
    "layer norm": lambda z: F.layer_norm(z, (5,)),
    "module of a norm": nn.LayerNorm(5, elementwise_affine=False),
    "rms norm": lambda z: F.rms_norm(z, (5,), None, 1e-5),
    "group norm": lambda z: F.group_norm(z, 1),
    "normalize": lambda z: F.normalize(z, dim=-1),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize(("reduction", "scale"), [("mean", 1.0), ("sum", 1.0), ("mean", 0.25)])
def test_every_way_to_call_an_activation_follows_the_rule(call, reduction, scale):
    class Model(nn.Module):
        def forward(self, z):
            return call(z)

    lifted = lpom.lift(Model(), mu=2.0, reduction=reduction)
    lifted.scale = scale
    z = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    g = torch.randn(4, 5, dtype=torch.float64)
    share = scale / 4 if reduction == "mean" else scale
    x = lifted(z)
    torch.testing.assert_close(x, call(z))
    (found,) = torch.autograd.grad(x, z, share * g)
    expected = share * answer(call, z.detach(), g, 2.0)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", ["relu", "leaky_relu", "identity", "tanh", "softmax", "softplus"])
@pytest.mark.parametrize("knows", [False, True])
def test_answers_are_responses_in_the_units_of_the_gradient(name, knows):
    torch.manual_seed(0)
    activation = lpom.activations.get(name)
    z, g = torch.randn(2, 7, 5, dtype=torch.float64)
    kept = z.clone(), g.clone()
    said = activation.phi(z) if knows else None
    found = activation.answer(z, g, 0.3, said=said)
    torch.testing.assert_close(found, answer(activation.phi, z, g, 0.3), rtol=0, atol=1e-14)
    assert torch.equal(z, kept[0]) and torch.equal(g, kept[1])


def test_a_large_mu_is_back_propagation():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Softplus()).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    plain = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    lifted = lpom.lift(model, mu=1e6, reduction="sum")
    found = torch.autograd.grad(lifted(x).square().sum(), list(model.parameters()))
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)


def test_a_jump_moves_by_its_ramp():
    model = nn.Sequential(nn.Identity(), Elementwise(Step()))
    z = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None].requires_grad_()
    lifted = lpom.lift(model, mu=3.0, reduction="sum", width=2.0)
    torch.testing.assert_close(lifted(z), (z >= 0).double())
    g = torch.ones_like(z)
    (found,) = torch.autograd.grad(lifted(z), z, g)

    def ramp(z):
        return (z / 2 + 0.5).clamp(0, 1)

    torch.testing.assert_close(found, answer(ramp, z.detach(), g, 3.0))


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


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.lstm(x)[0][:, -1])


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.encoder(self.embed(x)).mean(1))


NETWORKS = {
    "mlp": (lambda: lpom.mlp([6, 9, 8, 3], "tanh", seed=0), (6,)),
    "residual": (lambda: networks.get("resnet8", (1, 12, 12), 3), (1, 12, 12)),
    "lstm": (Recurrent, (5, 6)),
    "transformer": (Transformer, (5, 6)),
}


@pytest.mark.parametrize(("make", "shape"), NETWORKS.values(), ids=NETWORKS.keys())
def test_a_step_of_fit_is_a_step_of_a_loop_of_ones_own(make, shape):
    torch.manual_seed(0)
    model = make().double()
    x, y = torch.randn(7, *shape, dtype=torch.float64), torch.randint(0, 3, (7,))
    fitted, looped = copy.deepcopy(model), copy.deepcopy(model)
    weights = lpom.Adaptive(optimizer="sgd", learning_rate=0.1, schedule="constant")
    lpom.fit(fitted, x, y, epochs=1, seed=0, method=lpom.LPOM(mu=2.0, weights=weights))
    optimizer = torch.optim.SGD(looped.parameters(), 0.1)
    F.cross_entropy(lpom.lift(looped, mu=2.0)(x), y).backward()
    optimizer.step()
    for a, b in zip(fitted.parameters(), looped.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    moved = zip(fitted.parameters(), model.parameters(), strict=True)
    assert max(float((a - b).detach().abs().max()) for a, b in moved) > 1e-3


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
    """Another's class, with what can and what can't be lifted."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x):
        z = self.layer(x)
        if float(z.detach().mean()) > 1e9:  # too dynamic for torch.fx
            return z
        return F.gelu(z) * torch.sigmoid(z) + z.exp()


def test_what_cannot_be_lifted_keeps_its_derivative_and_is_listed():
    torch.manual_seed(0)
    model, x = Gated().double(), torch.randn(5, 3, dtype=torch.float64)
    lifted = lpom.lift(model, mu=1e7, reduction="sum")
    assert "nothing lifted yet" in lifted.report()
    (found,) = torch.autograd.grad(lifted(x).sum(), model.layer.bias)
    (plain,) = torch.autograd.grad(model(x).sum(), model.layer.bias)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
    report = lifted.report()
    assert report.startswith("lifted: sigmoid (1)\n")
    assert "gelu: gelu is not monotone" in report
    assert "exp: lpom knows it neither" in report
    with pytest.raises(lpom.UntrainableError, match="gelu can't be lifted: gelu is not monotone"):
        lpom.lift(model, strict=True)(x)


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
    lifted = lpom.lift(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)), mu=0.5)
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
        lpom.lift(model)()


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
def test_recomputed_parts_are_refused_unless_they_are_lifted_inside(reentrant):
    X = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    with pytest.raises(lpom.UntrainableError, match="calls torch.utils.checkpoint"):
        lpom.lift(Recomputing(reentrant, inside=False))(X)
    found, wanted = (Recomputing(way, inside=True) for way in (reentrant, None))
    for model in (found, wanted):
        model(X).square().mean().backward()
    for p, q in zip(found.parameters(), wanted.parameters(), strict=True):
        assert p.grad.abs().sum() > 0
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("name", ["sign", "round", "floor"])
def test_jumps_of_torch_are_told_from_ours(name):
    class Jumps(nn.Module):
        def __init__(self):
            super().__init__()
            self.below, self.above = nn.Linear(6, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.above(getattr(torch, name)(self.below(x)))

    lifted = lpom.lift(Jumps())
    lifted(torch.randn(5, 6))
    assert "the derivative 0" in lifted.report() and "Elementwise" in lifted.report()
    with pytest.raises(lpom.UntrainableError, match=f"{name}.*derivative 0.*Elementwise"):
        lpom.fit(Jumps(), torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1]))
