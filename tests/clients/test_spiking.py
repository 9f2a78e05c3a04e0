"""`lpom.spike` in the places where snnTorch and SpikingJelly take a surrogate gradient."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import lpom


class Window(torch.autograd.Function):
    """A rectangular surrogate, written out."""

    @staticmethod
    def forward(ctx, z, window):
        ctx.save_for_backward(z)
        ctx.window = window
        return (z >= 0).to(z.dtype)

    @staticmethod
    def backward(ctx, g):
        (z,) = ctx.saved_tensors
        width = min(ctx.window, 2 * float(z.square().mean().sqrt()))
        return g * (z.abs() < width / 2) / width, None


class Written(nn.Module):
    def __init__(self, window):
        super().__init__()
        self.window = window

    def forward(self, z):
        return Window.apply(z, self.window)


def data():
    generator = torch.Generator().manual_seed(0)
    centres = 2 * torch.rand(4, 16, generator=generator)
    y = torch.randint(4, (200,), generator=generator)
    return (centres[y] + 0.3 * torch.randn(200, 16, generator=generator)).clamp(min=0), y


def snntorch_network(surrogate):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        snntorch = pytest.importorskip("snntorch")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.below, self.above = nn.Linear(16, 30), nn.Linear(30, 4)
            self.first = snntorch.Leaky(beta=0.9, spike_grad=surrogate)
            self.second = snntorch.Leaky(beta=0.9, spike_grad=surrogate)

        def forward(self, x):
            mem1, mem2 = self.first.init_leaky(), self.second.init_leaky()
            total = 0.0
            for _ in range(8):
                spikes, mem1 = self.first(self.below(x), mem1)
                spikes, mem2 = self.second(self.above(spikes), mem2)
                total = total + spikes + 0.1 * mem2
            return total

    return Net()


def spikingjelly_network(surrogate):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("spikingjelly")
        from spikingjelly.activation_based import functional, neuron

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(
                nn.Linear(16, 30),
                neuron.LIFNode(surrogate_function=copy.deepcopy(surrogate)),
                nn.Linear(30, 4),
                neuron.LIFNode(surrogate_function=copy.deepcopy(surrogate)),
            )

        def forward(self, x):
            functional.reset_net(self)
            return sum(self.layers(x) for _ in range(8))

    return Net()


networks = pytest.mark.parametrize("make", [snntorch_network, spikingjelly_network])


@networks
@pytest.mark.parametrize("window", [1.8, 4.0])
def test_it_is_straight_through_with_a_window(make, window):
    x, y = data()
    gradients = []
    for surrogate in (lpom.spike(window), Written(window)):
        model = make(surrogate)
        nn.functional.cross_entropy(model(x), y).backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert gradients[0] and any(g.abs().max() > 0 for g in gradients[0])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


@networks
def test_a_spiking_network_learns(make):
    x, y = data()
    model = make(lpom.spike())
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert float((model(x).argmax(1) == y).double().mean()) > 0.9


def test_other_jumps_and_wrong_windows():
    z = torch.randn(50, requires_grad=True)
    sign = lpom.spike(1.0, activation=lpom.activations.get("sign"))
    assert set(sign(z).tolist()) == {-1.0, 1.0}
    with pytest.raises(ValueError, match="window"):
        lpom.spike(-1.0)
