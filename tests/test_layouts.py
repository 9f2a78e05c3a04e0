"""Pictures train in the layout that is fast: nothing may depend on how tensors lie in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lpom
from lpom.weights.adam import Adam


def small_network() -> nn.Module:
    """With biases: where a pre-activation is zero, a state is pulled and a derivative is not."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 6, 2), nn.ReLU(),
            nn.Flatten(), nn.Linear(24, 4),
        )  # fmt: skip


@pytest.mark.parametrize("method", [lpom.LPOM(mu=1e4), lpom.methods.get("mac", mu=1.0)])
def test_gradients_lie_in_memory_as_their_weights_do(method, monkeypatch):
    """A fused optimiser goes through both side by side."""
    seen = []
    plain = Adam.step

    def step(self, *args):
        parameters = [p for group in self.param_groups for p in group["params"]]
        seen.extend(p.grad.stride() == p.stride() for p in parameters if p.grad is not None)
        return plain(self, *args)

    monkeypatch.setattr(Adam, "step", step)
    X, y = torch.randn(40, 3, 8, 8), torch.arange(40) % 4
    lpom.fit(small_network(), X, y, method=method, epochs=1, batch_size=20, seed=0)
    assert seen and all(seen)


def test_many_steps_with_a_large_mu_are_those_of_back_propagation():
    """Ten steps of Adam: a gradient in a wrong place would part the two at once."""
    X, y = torch.randn(100, 3, 8, 8).double(), torch.arange(100) % 4
    trained = []
    for method in (lpom.LPOM(mu=1e6), "adam"):
        model = small_network().double()
        lpom.fit(model, X, y, method=method, epochs=2, batch_size=20, seed=0)
        trained.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    start = torch.cat([p.detach().flatten() for p in small_network().double().parameters()])
    moved = (trained[1] - start).norm()
    assert (trained[0] - trained[1]).norm() < 0.01 * moved
