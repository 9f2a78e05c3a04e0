"""Penalties: values and proximal operators against brute force and closed forms."""

from __future__ import annotations

import pytest
import torch
from scipy.optimize import minimize
from sklearn.base import clone

import lpom
from lpom import LPOM, penalties
from lpom.penalties import (
    L1,
    Binary,
    Box,
    GroupL1,
    Levels,
    NuclearNorm,
    Ternary,
    by_pattern,
    get,
    harmonic_mean,
)

CONVEX = [L1(), Box(-0.4, 0.6), GroupL1(), GroupL1(groups="inputs"), NuclearNorm()]
GRIDS = [Binary(), Ternary(), Levels(bits=3), Binary(scales="layer"), Levels(scales="layer")]
SHAPES = [(3, 4), (2, 3, 2, 2)]


def drawn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def named(value):
    return repr(value) if isinstance(value, penalties.Penalty) else None


def values_by_hand(W):
    flat = W.flatten(1)
    return {
        L1(): sum(abs(w) for w in W.flatten().tolist()),
        GroupL1(): sum(
            W[0].numel() ** 0.5 * float((W[k] ** 2).sum()) ** 0.5 for k in range(len(W))
        ),
        GroupL1(groups="inputs"): sum(
            W[:, 0].numel() ** 0.5 * float((W[:, k] ** 2).sum()) ** 0.5 for k in range(W.shape[1])
        ),
        NuclearNorm(): float(torch.linalg.eigvalsh(flat @ flat.T).clamp(min=0).sqrt().sum()),
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_values_are_those_of_the_formulas(shape):
    W = drawn(*shape)
    for penalty, expected in values_by_hand(W).items():
        assert float(penalty.value(W)) == pytest.approx(expected, rel=1e-12), penalty
    assert float(Box(-3.0, 3.0).value(W.clamp(-3, 3))) == 0.0
    assert float(Box(-0.1, 0.1).value(W)) == torch.inf


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("penalty", CONVEX, ids=named)
def test_the_prox_is_better_than_what_a_search_finds(penalty, shape):
    """A general minimiser of the definition ends no lower, and close by (the problem is
    strongly convex)."""
    W, step = drawn(*shape), 0.3

    def definition(V):
        V = torch.as_tensor(V, dtype=torch.float64).reshape(shape)
        if isinstance(penalty, Box):  # by the search's own bounds
            return float((V - W).square().sum()) / (2 * step)
        return float(penalty.value(V) + (V - W).square().sum() / (2 * step))

    found = penalty.prox(W, step)
    bounds = [(penalty.low, penalty.high)] * W.numel() if isinstance(penalty, Box) else None
    start = W.clamp(penalty.low, penalty.high) if isinstance(penalty, Box) else W
    options = {"method": "Powell", "bounds": bounds, "tol": 1e-8}
    search = minimize(definition, start.flatten().numpy(), **options)
    assert definition(found) <= search.fun + 1e-9
    assert definition(found) >= search.fun - 0.05 * abs(search.fun)
    noise = 1e-3 * drawn(20, *shape, seed=1)
    for near in found + noise:
        near = near.clamp(penalty.low, penalty.high) if isinstance(penalty, Box) else near
        assert definition(found) <= definition(near)


@pytest.mark.parametrize("penalty", [L1(), Box(-0.4, 0.6)], ids=named)
def test_the_prox_with_a_step_for_each_weight_is_that_of_single_weights(penalty):
    W, steps = drawn(3, 4), drawn(3, 4, seed=1).abs()
    found = penalty.prox(W, steps)
    grid = torch.linspace(-3, 3, 60001, dtype=torch.float64)
    for w, t, v in zip(W.flatten(), steps.flatten(), found.flatten(), strict=True):
        h = grid.abs() if isinstance(penalty, L1) else torch.zeros_like(grid)
        if isinstance(penalty, Box):
            h[(grid < penalty.low) | (grid > penalty.high)] = torch.inf
        best = grid[(h + (grid - w) ** 2 / (2 * t)).argmin()]
        assert float(v) == pytest.approx(float(best), abs=2e-4)


@pytest.mark.parametrize("penalty", GRIDS, ids=named)
def test_the_prox_on_a_grid_is_exact_for_its_scales(penalty):
    W, steps = drawn(3, 8), 0.2 * drawn(3, 8, seed=1).abs()
    found, scale = penalty.prox(W, steps), penalty.scale(W)
    most = {Binary: 1, Ternary: 1}.get(type(penalty), 2 ** (getattr(penalty, "bits", 1) - 1) - 1)
    integers = [k for k in range(-most, most + 1) if k or not isinstance(penalty, Binary)]
    grid = torch.linspace(-4, 4, 80001, dtype=torch.float64)
    for j, k in torch.cartesian_prod(torch.arange(3), torch.arange(8)).tolist():
        levels = torch.tensor(integers, dtype=torch.float64) * scale[min(j, len(scale) - 1), 0]
        h = (grid[:, None] - levels).abs().amin(1)
        best = grid[(h + (grid - W[j, k]) ** 2 / (2 * steps[j, k])).argmin()]
        assert float(found[j, k]) == pytest.approx(float(best), abs=2e-4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("penalty", GRIDS, ids=named)
def test_levels_are_few_nearest_and_stay(penalty, shape):
    W = drawn(*shape)
    Q = penalty.prox(W, torch.inf)
    torch.testing.assert_close(penalty.nearest(Q), Q, rtol=1e-12, atol=1e-12)
    assert float(penalty.value(Q)) == pytest.approx(0, abs=1e-12)
    most = {Binary: 2, Ternary: 3}.get(type(penalty), 2 ** getattr(penalty, "bits", 1) - 1)
    channels = [Q] if penalty.scales == "layer" else list(Q)
    assert all(len(channel.unique()) <= most for channel in channels)


@pytest.mark.parametrize("penalty", [Binary(), Ternary()], ids=named)
def test_scales_are_the_best_in_least_squares(penalty):
    W = drawn(1, 400)
    error = float((W - penalty.nearest(W)).square().sum())
    for scale in torch.linspace(0.1, 3, 300).double():
        levels = scale * torch.tensor([-1.0, 1.0] + [0.0] * isinstance(penalty, Ternary))
        assert error <= float((W[..., None] - levels).square().amin(-1).sum()) * 1.02


@pytest.mark.parametrize("penalty", CONVEX, ids=named)
def test_convex_ones_bring_any_two_weights_closer(penalty):
    for seed in range(20):
        A, B = drawn(4, 5, seed=seed), drawn(4, 5, seed=seed + 100)
        step = 0.1 + 0.1 * seed
        apart = torch.linalg.vector_norm(penalty.prox(A, step) - penalty.prox(B, step))
        assert float(apart) <= float(torch.linalg.vector_norm(A - B)) * (1 + 1e-12)


def test_what_hangs_together_takes_the_harmonic_mean_of_its_steps():
    W, steps = drawn(3, 4), drawn(3, 4, seed=1).abs()
    for k in range(3):
        one = 1 / (1 / steps[k]).mean()
        torch.testing.assert_close(
            GroupL1().prox(W, steps)[k : k + 1], GroupL1().prox(W[k : k + 1], float(one))
        )
    one = float(harmonic_mean(steps, [0, 1]))
    torch.testing.assert_close(NuclearNorm().prox(W, steps), NuclearNorm().prox(W, one))


def test_a_strong_penalty_leaves_nothing_and_a_zero_group_stays():
    W = drawn(3, 4)
    W[1] = 0
    for penalty in (L1(), GroupL1(), NuclearNorm()):
        assert int(torch.count_nonzero(penalty.prox(W, 1e3))) == 0
    assert bool((GroupL1().prox(W, 1e-3)[1] == 0).all())
    assert bool(torch.isfinite(GroupL1().prox(W, 1e-3)).all())


def test_sizes_count_what_is_left():
    W = drawn(6, 4)
    W[2] = 0
    assert torch.count_nonzero(GroupL1().sizes(W)) == 5
    assert torch.count_nonzero(L1().sizes(W)) == 20
    low = W[:, :2] @ W[:2]
    assert torch.count_nonzero(NuclearNorm().sizes(low)) == 2
    kept = GroupL1().sizes(W) > GroupL1().sizes(W).median()
    assert torch.count_nonzero(GroupL1().restrict(W, kept).abs().sum(1)) == kept.sum()
    two = torch.tensor([True, True, False, False])
    assert torch.linalg.matrix_rank(NuclearNorm().restrict(W, two)) == 2


def test_strengths_follow_their_path():
    assert L1(0.1).strength_at(0.5) == 0.1
    assert L1((1e-6, 1e-2)).strength_at(0.5) == pytest.approx(1e-4)
    assert Binary(settled=0.5).strength_at(0.5) == torch.inf
    assert Binary((1e-4, 1e-2), settled=0.5).strength_at(0.25) == pytest.approx(1e-3)
    assert Box().strength_at(0.3) == 1.0


def test_they_are_found_by_name():
    assert get("l1") == L1() and get({"groupl1": {"groups": "inputs"}}) == GroupL1(groups="inputs")
    assert by_pattern({"levels": {"bits": 2}}) == Levels(bits=2)
    assert by_pattern({"0.weight": "box", "*": L1(1.0)}) == {"0.weight": Box(), "*": L1(1.0)}
    assert by_pattern(None) is None
    with pytest.raises(ValueError, match="nuclearnorm"):
        get("l2")


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: L1(-1.0), "strength"),
        (lambda: L1(keep=1.5), "share between 0 and 1, got 1.5"),
        (lambda: L1((0.0, 1.0)), "first number"),
        (lambda: GroupL1(groups="rows"), "groups"),
        (lambda: Box(1, -1), "low <= high"),
        (lambda: Levels(bits=1), "bits"),
        (lambda: Binary(scales="none"), "scales"),
        (lambda: NuclearNorm(every=0), "every"),
    ],
)
def test_settings_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_penalties_by_name_can_be_cloned():
    method = LPOM(penalties={"*.weight": L1(1e-4)})
    assert clone(lpom.MLPClassifier(method=method)).method.penalties == method.penalties
