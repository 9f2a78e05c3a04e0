"""Straight-through and ramps: step by step what a plain torch loop with hand-written rules does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import lpom
from lpom.activations import Elementwise, Sign, Staircase, Step
from lpom.methods import METHODS, Ramps, StraightThrough


class ByHand(torch.autograd.Function):
    """``jump`` forward, ``slope(z)`` times the gradient backward."""

    @staticmethod
    def forward(ctx, z, jump, slope):
        ctx.save_for_backward(slope(z))
        return jump(z)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0] * gradient, None, None


class Rule(nn.Module):
    def __init__(self, jump, slope):
        super().__init__()
        self.jump, self.slope = jump, slope

    def forward(self, z):
        return ByHand.apply(z, self.jump, self.slope)


class InTurn(nn.Module):
    """The first module in the first call, the second in the second."""

    def __init__(self, modules):
        super().__init__()
        self.turns = iter(modules)

    def forward(self, z):
        return next(self.turns)(z)


class Net(nn.Module):
    """A convolution with batch norm, a branch that skips a layer, and two kinds of activation."""

    def __init__(self, jump):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.lower, self.upper, self.top = nn.Linear(27, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.jump, self.smooth = jump, nn.Tanh()

    def forward(self, x):
        x = self.smooth(self.lower(self.jump(self.norm(self.conv(x))).flatten(1)))
        return self.top(x + self.jump(self.upper(x)))


def inside(half):
    return lambda z: (z.abs() <= half).to(z)


def scaled(factor, function):
    return lambda z: factor * function(z)


JUMPS = {
    "sign": (Sign(), lambda z: torch.where(z >= 0, 1.0, -1.0).to(z)),
    "step": (Step(), lambda z: (z >= 0).to(z)),
    "staircase": (Staircase(3, 0.5), lambda z: (2 * z + 0.5).floor().clamp(0, 3) / 2),
}
RULES = [
    ("sign", {}, inside(1)),
    ("sign", {"width": 0.5}, scaled(4, inside(0.25))),
    ("sign", {"ramp": "identity"}, torch.ones_like),
    ("step", {}, scaled(0.5, inside(1))),
    ("step", {"width": 4.0, "ramp": "identity"}, scaled(0.25, torch.ones_like)),
    # ramps of 0.5 and more meet: a clipped ReLU
    ("staircase", {}, lambda z: ((z >= 0) & (z <= 1.5)).to(z)),
]


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(30, 1, 5, 5, generator=generator, dtype=torch.float64)
    return X, torch.randint(0, 3, (30,), generator=generator)


def made(jump):
    torch.manual_seed(0)
    return Net(jump).double()


def plain_steps(model, X, y, rate, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for k in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - k / steps)
        optimizer.zero_grad()
        functional.cross_entropy(model(X), y).backward()
        optimizer.step()
        yield k / steps


def fitted(model, X, y, method, epochs):
    lpom.fit(model, X, y, method=method, epochs=epochs, batch_size=len(X), progress=False)


@pytest.mark.parametrize("name, settings, slope", RULES)
def test_straight_through_is_the_rule_written_by_hand(name, settings, slope, data):
    activation, jump = JUMPS[name]
    model, twin = made(Elementwise(activation)), made(Rule(jump, slope))
    for _ in plain_steps(twin, *data, rate=0.01, steps=4):
        pass
    method = StraightThrough(0.01, **{"width": 2.0, "relative": False, **settings})
    fitted(model, *data, method, epochs=4)
    for ours, plain in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-11)


def test_ramps_narrow_geometrically_and_the_jump_is_measured(data):
    model, twin = made(Elementwise(Sign())), made(nn.Hardtanh())
    for progress in plain_steps(twin, *data, rate=0.01, steps=4):
        # the width for the step that follows: from 2 to 0.5
        half = 2.0 * 0.25 ** (progress + 0.25) / 2
        twin.jump = Rule(lambda z, h=half: (z / h).clamp(-1, 1), scaled(1 / half, inside(half)))
    fitted(model, *data, Ramps(0.01, first=2.0, last=0.5), epochs=4)
    for ours, plain in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-11)
    hidden = model.eval().jump(model.norm(model.conv(data[0])))
    assert set(hidden.unique().tolist()) == {-1.0, 1.0}


@pytest.mark.parametrize("name", ["straight-through", "ramps"])
def test_without_jumps_it_is_adam(name, data):
    models = [made(nn.LeakyReLU(0.1)) for _ in range(2)]
    for model, method in zip(models, (METHODS[name](), METHODS["adam"]()), strict=True):
        fitted(model, *data, method, epochs=3)
    for ours, plain in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-11)


def test_lpom_with_a_large_mu_takes_the_straight_through_step(data):
    """phi(Z) - phi(Z - pull) over the pull is the ramp's slope as the pull goes to zero."""
    model = made(Elementwise(Sign()))
    start = copy.deepcopy(model.state_dict())
    weights = lpom.Adaptive(optimizer="sgd", learning_rate=1.0)
    jumps = lpom.StraightThrough(2.0, relative=False)
    fitted(model, *data, lpom.LPOM(mu=1e5, weights=weights, jumps=jumps), epochs=1)
    twin = made(Rule(JUMPS["sign"][1], inside(1)))
    functional.cross_entropy(twin(data[0]), data[1]).backward()
    for name, parameter in twin.named_parameters():
        step = start[name] - model.state_dict()[name]
        torch.testing.assert_close(step, parameter.grad, rtol=1e-3, atol=1e-7)


def test_relative_widths_are_in_standard_deviations_of_each_layer(data):
    """The first step measures before it goes back: both methods take ramps of these widths."""
    model, twin = made(Elementwise(Sign())), made(Elementwise(Sign()))
    with torch.no_grad():
        Z = twin.norm(twin.conv(data[0]))
        hidden = twin.smooth(twin.lower(twin.jump(Z).flatten(1)))
        halves = [1.0 * float(z.std(correction=0)) / 2 for z in (Z, twin.upper(hidden))]
    rules = [Rule(JUMPS["sign"][1], scaled(1 / half, inside(half))) for half in halves]
    twin = made(InTurn(rules))
    functional.cross_entropy(twin(data[0]), data[1]).backward()
    start = copy.deepcopy(model.state_dict())
    weights = lpom.Adaptive(optimizer="sgd", learning_rate=1.0)
    fitted(model, *data, lpom.LPOM(mu=1e6, weights=weights), epochs=1)
    for name, parameter in twin.named_parameters():
        step = start[name] - model.state_dict()[name]
        torch.testing.assert_close(step, parameter.grad, rtol=1e-3, atol=1e-7)
    model.load_state_dict(start)
    fitted(model, *data, StraightThrough(1e-3, schedule="constant"), epochs=1)
    for name, parameter in twin.named_parameters():
        moved = (start[name] - model.state_dict()[name]) / 1e-3  # Adam's first step is the sign
        clear = parameter.grad.abs() > 1e-4
        torch.testing.assert_close(moved[clear].round(), parameter.grad.sign()[clear])


@pytest.mark.parametrize("settings", [{"width": 0.0}, {"ramp": "soft"}])
def test_settings_are_checked(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        StraightThrough(**settings)
    with pytest.raises(ValueError, match="width"):
        Ramps(last=0.0)
