"""Steps in the metric of both Kronecker factors, beside dense inverses in float64."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import lpom
from lpom.losses import CrossEntropy
from lpom.methods import Batch, Problem
from lpom.weights import factored
from lpom.weights.factored import Factored

INS, OUTS, ROWS = 6, 4, 50
METHOD = lpom.LPOM(weights=lpom.Adaptive("factored", learning_rate=1e-2))


def rows(n: int) -> torch.Tensor:
    """With eigenvalues apart from each other, so that orthogonal iteration is soon done."""
    generator = torch.Generator().manual_seed(n)
    return torch.randn(ROWS, n, generator=generator, dtype=torch.float64) * 2.0 ** -torch.arange(n)


def dense(Y: torch.Tensor, damping: float) -> torch.Tensor:
    """``d (S + d I)^-1``."""
    S, n = Y.T @ Y / len(Y), Y.shape[1]
    d = damping * S.trace() / n
    return d * torch.linalg.inv(S + d * torch.eye(n, dtype=Y.dtype))


@pytest.fixture
def nothing_kept(monkeypatch):
    """The factors are those of the last rows alone, so that iterations come to their end."""
    monkeypatch.setattr(factored, "KEPT", 0.0)


@pytest.mark.parametrize("side", ["X", "R"])
def test_with_all_eigenvectors_the_metric_is_the_damped_inverse(nothing_kept, side):
    Y, memory = rows(INS), {}
    for _ in range(60):
        factored._see(memory, side, Y)
    found = factored._turned(memory, side, torch.eye(INS, dtype=torch.float64))
    torch.testing.assert_close(found, dense(Y, factored.DAMPING[side]), rtol=1e-6, atol=1e-9)


def test_with_few_eigenvectors_the_others_are_taken_for_their_mean(nothing_kept, monkeypatch):
    monkeypatch.setattr(factored, "RANK", 2)
    Y, memory = rows(INS), {}
    for _ in range(60):
        factored._see(memory, "R", Y)
    s, U = torch.linalg.eigh(Y.T @ Y / ROWS)
    d = factored.DAMPING["R"] * s.mean()
    s = torch.cat([s[:-2].mean().expand(INS - 2), s[-2:]])
    expected = (s[0] + d) * U @ torch.diag(1 / (s + d)) @ U.T
    found = factored._turned(memory, "R", torch.eye(INS, dtype=torch.float64))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_the_first_looks_are_a_plain_mean():
    Y, memory = rows(INS), {}
    for k in range(1, 4):
        factored._see(memory, "X", k * Y)
    torch.testing.assert_close(memory["X trace"], (1 + 4 + 9) / 3 * Y.square().sum() / ROWS)


@torch.no_grad()
def test_a_step_is_the_momentum_of_turned_gradients_at_the_size_of_the_rate(nothing_kept):
    weight = nn.Parameter(rows(INS)[:OUTS].clone())
    X, R, share, decay = rows(INS), rows(OUTS), 0.3, 0.1
    optimizer = Factored([weight], lr=0.0)
    for _ in range(300):  # until the eigenvectors stand still
        optimizer.descend(weight, R, X, share, decay)
    optimizer.state[weight]["exp_avg"].zero_()
    optimizer.param_groups[0]["lr"] = 0.01
    P_X, P_R = dense(X, factored.DAMPING["X"]), dense(R, factored.DAMPING["R"])
    expected, M = weight.clone(), torch.zeros_like(weight)
    for _ in range(3):
        M = factored.MOMENTUM * M + P_R @ (share * R.T @ X + decay * expected) @ P_X
        expected -= 0.01 * M / M.square().mean().sqrt()
        optimizer.descend(weight, R, X, share, decay)
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-6, atol=1e-9)


def test_nothing_moves_where_nothing_pulls():
    weight = nn.Parameter(rows(INS)[:OUTS].clone())
    before = weight.detach().clone()
    with torch.no_grad():
        Factored([weight], lr=0.01).descend(weight, 0 * rows(OUTS), rows(INS), 1.0, 0.0)
    assert torch.equal(weight, before)


def test_matrices_of_a_stack_are_its_own_and_the_rest_is_adams():
    model = lpom.mlp([6, 5, 10], seed=0)
    problem = Problem(model, CrossEntropy())
    state = METHOD.init(problem)
    METHOD.step(problem, Batch(torch.ones(2, 6), torch.eye(10)[:2]), state)
    turned = [n for n, p in model.named_parameters() if "X U" in state.optimizer.state[p]]
    assert turned == [name for name, p in model.named_parameters() if p.ndim == 2]


def test_it_learns_and_goes_on_bit_for_bit(tmp_path):
    X, y = load_digits(return_X_y=True)
    X = (X / 16).astype("float32")
    given = {"method": METHOD, "epochs": 4, "seed": 0, "progress": False}
    whole, parts = lpom.mlp([64, 40, 10], seed=0), lpom.mlp([64, 40, 10], seed=0)
    assert lpom.fit(whole, X, y, **given).history[-1].score > 0.95

    kept = lpom.Checkpoint(tmp_path, every_epochs=1)

    def interrupt(epoch):
        if epoch.epoch == 3:
            raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="interrupted"):
        lpom.fit(parts, X, y, **given, checkpoint=kept, callbacks=interrupt)
    lpom.fit(parts, X, y, **given, checkpoint=kept)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "settings",
    [{"states": lpom.Sweeps(max_sweeps=2)}, {"penalties": lpom.penalties.L1(1e-6)}],
    ids=["two sweeps", "penalties"],
)
def test_where_it_is_adam_it_says_so(settings):
    method = METHOD.with_params(**settings)
    model = lpom.mlp([4, 5, 3], seed=0)
    with pytest.warns(lpom.ConvergenceWarning, match="move as Adam moves them"):
        lpom.fit(model, torch.randn(20, 4), torch.arange(20) % 3, method=method, epochs=1, seed=0)
