"""Adam without what surrounds it is torch's Adam, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lpom.weights.adam import Adam, adam


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)).to(dtype)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    weights = list(model.parameters())
    for i, weight in enumerate(weights):
        weight.grad = torch.randn(weight.shape, generator=generator).to(weight)
        if k == 3 and i == 1:
            weight.grad = None  # a weight that the step did not reach
    for group in optimizer.param_groups:
        group["lr"] = 0.01 / (1 + k)
    optimizer.step()


def _same(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def test_it_is_torch_s_adam():
    for dtype in (torch.float32, torch.float64):
        ours, theirs = _model(dtype), _model(dtype)
        first = Adam(ours.parameters(), 0.01)
        second = torch.optim.Adam(theirs.parameters(), lr=0.01, fused=True)
        for k in range(6):
            _step(ours, first, k)
            _step(theirs, second, k)
            assert _same(ours, theirs)


def test_it_goes_on_from_what_either_wrote_down_and_from_a_copy():
    ours = _model()
    first = Adam(ours.parameters(), 0.01)
    for k in range(2):
        _step(ours, first, k)
    theirs, copied = copy.deepcopy(ours), copy.deepcopy((ours, first))
    second = torch.optim.Adam(theirs.parameters(), lr=0.01, fused=True)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    again = copy.deepcopy(ours)
    third = Adam(again.parameters(), 0.5)
    third.load_state_dict(copy.deepcopy(second.state_dict()))
    for k in range(2, 5):
        _step(ours, first, k)
        _step(theirs, second, k)
        _step(again, third, k)
        _step(*copied, k)
        assert _same(ours, theirs)
        assert _same(ours, again)
        assert _same(ours, copied[0])


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_large_matrix_is_moved_in_parts_by_a_gradient_that_is_never_there(decay, monkeypatch):
    monkeypatch.setattr("lpom.weights.adam.LARGE", 25)  # three rows at a time, of eight
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(8, 7, generator=generator, dtype=torch.float64)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    beside = nn.Parameter(torch.ones(2, dtype=torch.float64))
    first, second = Adam([beside, ours], 0.01), torch.optim.Adam([theirs], lr=0.01)
    for share in (0.5, 0.25, torch.tensor(0.125, dtype=torch.float64)):
        R = torch.randn(5, 8, generator=generator, dtype=torch.float64)
        X = torch.randn(5, 7, generator=generator, dtype=torch.float64)
        theirs.grad = share * R.T @ X + decay * theirs.detach()
        with torch.no_grad():
            first.descend(ours, R, X, share, decay)
        first.step()
        second.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert ours.grad is None and torch.equal(beside, torch.ones_like(beside))
    expected = second.state[theirs]
    for name in ("step", "exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(first.state[ours][name], expected[name], check_dtype=False)


def test_weights_of_several_kinds_get_torch_s():
    mixed = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.float64))]
    assert type(adam(mixed, 0.1)) is torch.optim.Adam
    assert type(adam(mixed[:1], 0.1)) is Adam
