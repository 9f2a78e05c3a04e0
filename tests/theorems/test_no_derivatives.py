"""No activation is ever differentiated: every call during ``fit`` is watched, in all orders."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import lpom
from lpom import LPOM, activations
from lpom.activations import Activation
from lpom.states import ORDERS, Sweeps
from lpom.weights.adaptive import Adaptive
from lpom.weights.exact import Exact

#: What torch's own activations are called, where a model is run by its own forward.
CALLS = ("relu", "tanh", "sigmoid", "softmax", "layer_norm", "leaky_relu", "softplus", "hardtanh")


class Watch(TorchFunctionMode):
    """Fails where an activation of torch meets a tensor that autograd follows."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, z = getattr(func, "__name__", ""), args[0] if args else None
        if name in CALLS and isinstance(z, Tensor):  # and no value that is but traced
            followed = torch.is_grad_enabled() and z.requires_grad
            assert not followed, f"{name} under autograd"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def watched(monkeypatch):
    """Counts calls of phi."""
    count = {"phi": 0}
    kinds = {type(example) for example in activations.examples()}
    while kinds:
        kind = kinds.pop()
        kinds |= {base for base in kind.__bases__ if issubclass(base, Activation)}
        if "phi" in vars(kind) and kind is not Activation and not hasattr(kind.phi, "watched"):
            monkeypatch.setattr(kind, "phi", watch_phi(kind.phi, count))

    with Watch():
        yield count


def watch_phi(plain, count):
    def phi(self: Activation, z: Tensor) -> Tensor:
        count["phi"] += 1
        assert not torch.is_grad_enabled(), f"{self!r} with gradients enabled"
        X = plain(self, z)
        assert X.grad_fn is None, f"{self!r} is followed by autograd"
        return X

    phi.watched = True
    return phi


class Residual(nn.Module):
    """A convolutional network with batch norm, pooling, dropout and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.pool, self.drop, self.last = nn.MaxPool2d(2), nn.Dropout(0.2), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.norm1(self.first(x))))
        x = torch.relu(self.norm2(self.second(x)) + x)
        return self.last(self.drop(x.flatten(1)))


class Gated(nn.Module):
    """A product of states, a softmax and a layer norm with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value, self.last = nn.Linear(16, 6), nn.Linear(16, 6), nn.Linear(6, 3)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        mixed = torch.softmax(self.gate(x), 1) * torch.tanh(self.value(x))
        return self.last(self.norm(mixed))


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), lpom.mlp([16, 8, 6, 3], "relu", seed=0)),
    "jumps": lambda: nn.Sequential(nn.Flatten(), lpom.mlp([16, 8, 3], "sign", seed=0)),
    "residual": Residual,
    "gated": Gated,
}


@pytest.mark.filterwarnings("ignore:order=.* with one sweep")
@pytest.mark.parametrize("weights", [Adaptive(), Exact()], ids=["adaptive", "exact"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", MODELS)
def test_no_activation_is_differentiated(name, order, weights, watched):
    """One sweep and several; and the weights do move."""
    torch.manual_seed(0)
    model = MODELS[name]()
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(24, 1, 4, 4, generator=generator)
    y = torch.randint(0, 3, (24,), generator=generator)
    for most in (1, 2):
        before = [p.detach().clone() for p in model.parameters()]
        method = LPOM(states=Sweeps(order=order, max_sweeps=most), weights=weights)
        lpom.fit(model, X, y, method=method, epochs=1, batch_size=12, seed=0)
        moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert any(moved)
    assert watched["phi"] > 20


def test_the_watch_sees_back_propagation(watched):
    """Else it would say nothing."""
    model = MODELS["gated"]()
    X, y = torch.randn(8, 16), torch.tensor([0, 1, 2, 0] * 2)
    with pytest.raises(AssertionError, match="under autograd"):
        lpom.fit(model, X, y, method="adam", epochs=1)
