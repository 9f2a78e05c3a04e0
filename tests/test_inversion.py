"""Inversion: the convex problem as mathematics, the solver by what it promises."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

import lpom
from lpom import activations
from lpom.exceptions import ConvergenceWarning, UntrainableError
from lpom.inversion import FenchelYoung, Gap, Gaussian, Sparse, TotalVariation, invert
from lpom.penalties import L1, Box

MONOTONE = [
    nn.ReLU(),
    nn.Tanh(),
    nn.Sigmoid(),
    nn.LeakyReLU(0.2),
    nn.Hardtanh(-0.7, 0.7),
    activations.get("softmax").to_module(),
    activations.get("staircase", levels=3, step=0.7).to_module(),
    activations.get("sign").to_module(),
    activations.Elementwise(activations.from_table([-1.0, 0.0, 2.0], [-0.4, 0.0, 1.5])),
]


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def layer(m, n, activation, seed=0):
    linear = nn.Linear(n, m).double()
    linear.weight.data = normal(m, n, seed=seed)
    linear.bias.data = 0.3 * normal(m, seed=seed + 1)
    return nn.Sequential(linear, activation)


def objective(model, gap, y, u, prior=None):
    return gap.value(model[0](u), y) + (0 if prior is None else prior.value(u))


@pytest.mark.parametrize("activation", MONOTONE, ids=str)
def test_the_gradient_is_that_of_the_theorem(activation):
    model = layer(12, 4, activation)
    gap, u = Gap(activations.from_module(activation)), normal(5, 4, seed=3)
    y = model(normal(5, 4, seed=4)).detach()
    z = model[0](u).detach()
    expected = (gap.activation.phi(z) - y) @ model[0].weight.detach()
    numerical = torch.zeros_like(expected)
    for k in range(4):  # and of the values themselves, from both sides
        step = torch.zeros(1, 4, dtype=torch.float64)
        step[0, k] = 1e-6
        up, down = (objective(model, gap, y, u.detach() + s) for s in (step, -step))
        numerical[:, k] = ((up - down) / 2e-6).detach()
    torch.testing.assert_close(numerical, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("activation", MONOTONE, ids=str)
def test_convex_along_any_segment_and_never_negative(activation):
    model = layer(10, 3, activation)
    gap = Gap(activations.from_module(activation))
    y = model(normal(200, 3, seed=5)).detach()
    a, b = 3 * normal(200, 3, seed=6), 3 * normal(200, 3, seed=7)
    share = torch.rand(200, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ends = [objective(model, gap, y, u) for u in (a, b)]
    between = objective(model, gap, y, share * a + (1 - share) * b)
    chord = share[:, 0] * ends[0] + (1 - share[:, 0]) * ends[1]
    assert (between <= chord + 1e-9 * (1 + chord.abs())).all() and between.min() > -1e-9


def test_the_squared_loss_is_not_convex():
    """Of one ReLU already: the gap is what makes the difference."""
    y, u = torch.tensor([1.0]), torch.tensor([-2.0, -0.5, 1.0])
    squared = (u.relu() - y) ** 2 / 2
    assert squared[1] > squared[0] * 0.5 + squared[2] * 0.5 - 1e-9 and squared[0] == squared[1]


@pytest.mark.parametrize("prior", [None, L1(0.1), Box(0, math.inf), Gaussian(0.3), "tv"], ids=str)
@pytest.mark.parametrize("model", ["one layer", "three layers"])
def test_the_objective_never_rises_and_the_condition_holds_in_the_end(model, prior):
    prior = TotalVariation(0.1, (2, 2), iterations=200) if prior == "tv" else prior
    net = layer(12, 4, nn.Hardtanh(-2, 2))
    if model == "three layers":
        net = nn.Sequential(
            net, layer(14, 12, nn.Softplus(), 5), layer(9, 14, nn.LeakyReLU(0.5), 8)
        )
        net = net.requires_grad_(False)
        for module in net.modules():
            if isinstance(module, nn.Linear):
                module.weight.data *= 0.3
    y = net(normal(6, 4, seed=9)).detach() + 0.05
    y = y.clamp(-2, 2) if model == "one layer" else y
    values, n = [], 8000 if model == "three layers" else 3000
    for max_iter in (1, 2, 3, 5, 10, 50, n):
        with warnings.catch_warnings():
            warnings.simplefilter("default" if max_iter == n else "ignore", ConvergenceWarning)
            found = invert(net, y, prior=prior, max_iter=max_iter, tol=1e-6)
        values.append(found.objective)
    for before, after in zip(values[:-1], values[1:], strict=True):
        assert (after <= before + 1e-9).all()
    assert (found.residual <= 1e-6).all() and found.converged.all()
    if model == "one layer" and not isinstance(prior, TotalVariation):  # 0 in grad + subgradient
        gap, u = Gap(activations.get("hardtanh", min_val=-2.0, max_val=2.0)), found.x
        pull = gap.gradient(net[0](u), y) @ net[0].weight
        pull = pull.detach()
        if prior is None:
            assert pull.abs().max() < 1e-3
        elif isinstance(prior, L1):
            assert (pull.abs() <= 0.1 + 1e-3).all()
            kept = u != 0
            torch.testing.assert_close(pull[kept], -0.1 * u[kept].sign(), atol=1e-3, rtol=0)
        elif isinstance(prior, Box):
            assert (u >= 0).all() and (pull >= -1e-3).all() and pull[u > 0].abs().max() < 1e-3
        else:
            torch.testing.assert_close(pull, -0.3 * u, atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("activation", "rows"),
    [(nn.ReLU(), 60), (nn.Hardtanh(-2, 2), 80), (nn.Tanh(), 40), (nn.Sigmoid(), 40)],
    ids=str,
)
def test_what_went_in_is_recovered_exactly(activation, rows):
    model, u = layer(rows, 15, activation, 20), normal(8, 15, seed=21)
    found = invert(model, model(u).detach(), tol=1e-9, max_iter=50_000)
    assert found.x.shape == u.shape and found.converged.all()
    torch.testing.assert_close(found.x, u, atol=1e-4, rtol=0)


def test_each_row_is_a_problem_by_itself():
    model, u = layer(40, 10, nn.ReLU(), 30), normal(3, 10, seed=31)
    u[0] = 0
    y = model(u).detach()
    together = invert(model, y, tol=1e-9)
    for k in range(3):
        alone = invert(model, y[k : k + 1], tol=1e-9)
        torch.testing.assert_close(alone.x[0], together.x[k], atol=1e-5, rtol=0)
    assert len(set(together.n_iter.tolist())) > 1


def test_layers_of_pictures_and_of_a_trained_network():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.LeakyReLU(0.3), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(8 * 9, 60), nn.Tanh(),
    ).double()  # fmt: skip
    net(normal(50, 1, 6, 6))
    y = net.eval()(normal(2, 1, 6, 6, seed=3)).detach()
    net.train()
    start = torch.zeros(2, 1, 6, 6, dtype=torch.float64)
    found = invert(net, y, start=start, tol=1e-6, max_iter=20_000)
    assert net.training
    torch.testing.assert_close(net.eval()(found.x), y, atol=1e-3, rtol=0)


def test_proximal_operators_minimise():
    """Against many random neighbours of what they give."""
    x, step = normal(3, 6, 5, seed=1), torch.tensor([0.1, 1.0, 3.0], dtype=torch.float64)
    for prior in (TotalVariation(0.3, iterations=2000), Gaussian(0.7, 0.2)):

        def value(v, prior=prior):
            return prior.value(v) + ((v - x) ** 2).flatten(1).sum(1) / (2 * step)

        best = prior.prox(x, step)
        for k in range(50):
            other = best + 10.0 ** -(k % 4) * normal(3, 6, 5, seed=100 + k)
            assert (value(best) <= value(other) + 1e-7).all()
    flat = TotalVariation(100.0, iterations=500).prox(x, step)
    mean = x.mean((1, 2), keepdim=True).expand_as(x)
    torch.testing.assert_close(flat, mean, atol=1e-3, rtol=0)
    few = Sparse(2, 3.0).prox(x.flatten(1), step)
    assert ((few != 0).sum(1) == 2).all() and torch.allclose(few.norm(dim=1), 3 * step / step)


def test_what_can_not_be_inverted_is_told():
    y = torch.zeros(1, 3)
    for net, word in [
        (nn.Sequential(nn.Linear(4, 3), nn.GELU()), "monotone"),
        (nn.Sequential(nn.Linear(4, 3), activations.Elementwise(activations.get("step")),
                       nn.Linear(3, 3)), "jumps"),
        (nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (1, 6)), nn.MaxPool1d(2), nn.Flatten(),
                       nn.ReLU()), "affine"),
    ]:  # fmt: skip
        with pytest.raises(UntrainableError, match=word):
            invert(net, y)
    with pytest.raises(ValueError, match="start"):
        invert(nn.Sequential(nn.Conv1d(1, 1, 1)), y)
    with pytest.warns(ConvergenceWarning, match="2 of 2"):
        invert(nn.Sequential(nn.Linear(4, 8)), torch.ones(2, 8), max_iter=2, tol=1e-12)
    with pytest.raises(ValueError, match="y has"):
        lpom.invert(nn.Sequential(nn.Linear(4, 2)), y)


def test_a_data_term_for_deepinv():
    try:
        import deepinv
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision for another torch
        pytest.skip(str(error))
    model, u = layer(60, 16, nn.ReLU(), 40), normal(2, 16, seed=41)
    W, b = model[0].weight.detach(), model[0].bias.detach()
    model[0].bias.data.zero_()
    y = (u @ W.T).relu()
    physics = deepinv.physics.LinearPhysics(
        A=lambda x, **_: x @ W.T, A_adjoint=lambda z, **_: z @ W
    )
    data = FenchelYoung("relu")
    x, step = torch.zeros_like(u), 1 / float(torch.linalg.matrix_norm(W, 2)) ** 2
    for _ in range(3000):
        x = x - step * data.grad(x, y, physics)
    torch.testing.assert_close(x, u, atol=1e-4, rtol=0)
    assert data.fn(x, y, physics).max() < 1e-6 and b is not None
