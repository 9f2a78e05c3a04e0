"""Rows moved to where the network errs: the direction, its length, and what the generator rules."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lpom
from data.adversarial import adversarial_loader, worst_direction

N = 40
DRAW = torch.Generator().manual_seed(0)
X = torch.randn(N, 6, generator=DRAW, dtype=torch.float64)
Y = torch.randint(3, (N,), generator=DRAW)


def network(activation: str = "tanh") -> nn.Module:
    return lpom.mlp([6, 8, 3], activation=activation, seed=0, dtype=torch.float64)


def test_direction_is_that_of_each_rows_own_loss() -> None:
    model = network()
    found = worst_direction(model, X, Y, F.cross_entropy)
    for k in range(N):
        x = X[k : k + 1].clone().requires_grad_()
        F.cross_entropy(model(x), Y[k : k + 1]).backward()
        torch.testing.assert_close(found[k], (x.grad / x.grad.norm())[0])


def test_of_linear_networks_the_direction_is_known() -> None:
    """The loss w x - t squared grows along w, to the side on which the output is too large."""
    layer = nn.Linear(6, 1, bias=False, dtype=torch.float64)
    target = torch.zeros(N, 1, dtype=torch.float64)
    found = worst_direction(layer, X, target, F.mse_loss)
    w = layer.weight.detach()
    torch.testing.assert_close(found, torch.sign(X @ w.T) * w / w.norm())


def test_lifted_the_direction_is_the_pull_on_the_data() -> None:
    r"""One layer of phi under a sum: g = W^T mu (phi(z) - phi(z - v / mu)), by hand."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1, bias=False)).double()
    lifted = lpom.lift(model, mu=0.7, reduction="sum")
    found = worst_direction(lifted, X, Y, lambda outputs, y: outputs.sum())
    first, last = model[0], model[2]
    with torch.no_grad():
        z, v = first(X), last.weight
        g = 0.7 * (torch.tanh(z) - torch.tanh(z - v / 0.7)) @ first.weight
    torch.testing.assert_close(found, F.normalize(g))
    plain = worst_direction(model, X, Y, lambda outputs, y: outputs.sum())
    assert (found - plain).norm(dim=1).max() > 0.1


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e150])
def test_directions_have_length_one_however_small_or_large_the_slope_is(scale: float) -> None:
    layer = nn.Linear(6, 1, dtype=torch.float64)
    found = worst_direction(layer, X, Y, lambda outputs, y: scale * outputs.sum())
    torch.testing.assert_close(found.norm(dim=1), torch.ones(N, dtype=torch.float64))


def moves(loader: torch.utils.data.DataLoader) -> tuple[Tensor, Tensor]:
    """Length of each row's move and by how much its own loss grew, in one epoch."""
    model, lengths, grown = loader.dataset.model, [], []
    for rows, numbers in loader:
        lengths.append((rows - X[numbers]).norm(dim=1))
        with torch.no_grad():
            before, after = (
                F.cross_entropy(model(x), Y[numbers], reduction="none") for x in (X[numbers], rows)
            )
        grown.append(after - before)
    return torch.cat(lengths), torch.cat(grown)


def by_number(outputs: Tensor, numbers: Tensor) -> Tensor:
    return F.cross_entropy(outputs, Y[numbers])


def test_rows_are_moved_by_a_share_of_the_size_and_their_loss_grows() -> None:
    loader = adversarial_loader(network(), X, torch.arange(N), 16, size=0.2, loss=by_number)
    found = [moves(loader) for _ in range(25)]
    lengths, grown = (torch.cat(parts) for parts in zip(*found, strict=True))
    assert float(lengths.max()) <= 0.2
    # uniform between zero and the size, whose mean has a standard error of size / sqrt(12 n)
    assert abs(float(lengths.mean()) - 0.1) < 5 * 0.2 / math.sqrt(12 * len(lengths))
    assert bool((grown > 0).all())


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5)).double()
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    worst_direction(model, X, Y, F.cross_entropy)
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
