"""What a model cuts off from its gradients, by no_grad or detach, is not trained."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lpom
from lpom import LPOM, Adaptive, Exact

X = torch.randn(60, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randn(60, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Cut(nn.Module):
    """A body that one way to the output is cut off from, and a head."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.straight, self.head, self.other = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(8, 2)
        self.double()

    @torch.no_grad()
    def deep(self, x: Tensor) -> Tensor:
        return self.straight(self.body(x))

    def forward(self, x: Tensor) -> Tensor:
        match self.way:
            case "no_grad":
                with torch.no_grad():
                    h = self.body(x)
            case "method":
                h = self.deep(x)
            case "pieces":
                with torch.no_grad():
                    pieces = self.body(x).chunk(2, 1)
                    half = x.shape[1] // 2 + 1
                h = torch.cat([pieces[1], pieces[0]], 1).unflatten(1, (2, half)).flatten(1)
            case "detach":
                h = self.body(x).detach()
            case "half":
                h = self.body(x)
                return self.head(h) + self.other(h.detach())
        return self.head(h)


WAYS = ["no_grad", "method", "pieces", "detach", "half"]


@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_that_of_autograd(way: str) -> None:
    rate, model, same = 0.5, Cut(way), Cut(way)
    loss = 0.5 * (same(X) - Y).square().sum(1).mean()
    loss.backward()
    method = LPOM(
        mu=1e6, weights=Adaptive(lambda p: torch.optim.SGD(p, lr=rate), schedule="constant")
    )
    lpom.fit(model, X, Y, method=method, epochs=1, batch_size=60, seed=0)
    for (name, found), before in zip(model.named_parameters(), same.parameters(), strict=True):
        gradient = torch.zeros_like(before) if before.grad is None else before.grad
        torch.testing.assert_close(found, before - rate * gradient, atol=1e-6, rtol=0, msg=name)
    assert (model.body[0].weight != same.body[0].weight).any() == (way == "half")


@pytest.mark.parametrize("method", [LPOM(weights=Exact()), "mac", "adam", LPOM()])
@pytest.mark.parametrize("way", WAYS[:-1])
def test_no_method_moves_what_is_cut_off(way: str, method: object) -> None:
    model, before = Cut(way), Cut(way)
    lpom.fit(model, X, Y, method=method, epochs=1, batch_size=20, seed=0)
    assert torch.equal(model.body[0].weight, before.body[0].weight)
    assert torch.equal(model.straight.weight, before.straight.weight)
    assert not torch.equal(model.head.weight, before.head.weight)
