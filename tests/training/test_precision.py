"""Products in bfloat16: what is rounded, what is not, and where it is refused."""

from __future__ import annotations

import copy
import subprocess

import pytest
import torch
from torch import nn

import lpom
from lpom.methods import LPOM
from lpom.training import precision
from lpom.training.precision import Bfloat16, why_not
from lpom.weights.exact import Exact

EPS = 2**-8  # of bfloat16


@pytest.fixture
def processor():
    if why_not():
        pytest.skip(f"no products in bfloat16: {why_not()}")


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def rounded(x: torch.Tensor) -> torch.Tensor:
    """The factors that a product has, in float64."""
    return x.to(torch.bfloat16).double()


def close(found, expected):
    """The result is rounded once; sums are those of float32."""
    assert found.dtype == torch.float32
    assert ((found - expected).abs() <= EPS * expected.abs() + 1e-4).all()


@pytest.mark.usefixtures("processor")
def test_factors_are_rounded_and_sums_are_not():
    A, B, C = normal(20, 30), normal(30, 10), normal(20, 10)
    product = rounded(A) @ rounded(B)
    with Bfloat16():
        close(A @ B, product)
        close(torch.mm(A, B, out=torch.empty(20, 10)), product)
        close(nn.functional.linear(A, B.T, C[0]) - C[0], product)
        close(torch.addmm(C, A, B, beta=0.5, alpha=2) - C / 2, 2 * product)
        close(torch.addmm(C, A, B, beta=0, alpha=2, out=torch.empty(20, 10)), 2 * product)
        close(C.clone().addmm_(A, B) - C, product)
        close(torch.bmm(A[None], B[None])[0], product)
        assert (A.double() @ B.double()).dtype == torch.float64
        assert torch.equal(A @ normal(30), A @ normal(30))  # vectors stay as they are
    assert torch.equal(A @ B, A @ B)


@pytest.mark.usefixtures("processor")
def test_convolutions_forwards_and_backwards():
    x, W, b = normal(3, 4, 6, 6).requires_grad_(), normal(5, 4, 3, 3).requires_grad_(), normal(5)
    R = normal(3, 5, 4, 4)
    with Bfloat16():
        found = torch.conv2d(x, W, b)
        back = torch.autograd.grad(found, (x, W), R)
    twins = [rounded(t.detach()).requires_grad_() for t in (x, W)]
    expected = torch.conv2d(*twins)
    close(found.detach() - b[:, None, None], expected)
    for one, other in zip(back, torch.autograd.grad(expected, twins, rounded(R)), strict=True):
        close(one, other)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("method", ["lpom", "adam"])
def test_a_run_is_near_that_in_float32_and_all_it_keeps_is_float32(method):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )
    X, y = normal(60, 1, 6, 6), torch.arange(60) % 3
    ends = []
    for chosen in (None, "bf16"):
        twin = copy.deepcopy(model)
        options = {"method": method, "epochs": 2, "batch_size": 20, "seed": 0}
        result = lpom.fit(twin, X, y, precision=chosen, progress=False, **options)
        memory = [v for of in result.state.optimizer.state.values() for v in of.values()]
        assert {t.dtype for t in [*memory, *twin.parameters()]} == {torch.float32}
        ends.append((result.history[-1].loss, twin.state_dict()))
    assert ends[0][0] != ends[1][0]
    assert ends[1][0] == pytest.approx(ends[0][0], rel=4 * EPS)
    # Adam moves every weight by about its rate, whatever the size of its gradient
    for name in ends[0][1]:
        torch.testing.assert_close(ends[0][1][name], ends[1][1][name], atol=5e-3, rtol=0.05)


def test_what_needs_float32_is_refused():
    model, X, y = lpom.mlp((4, 3, 2), seed=0), normal(20, 4), torch.arange(20) % 2
    with pytest.raises(ValueError, match="whose weights an optimiser moves"):
        lpom.fit(model, X, y, method=LPOM(weights=Exact()), precision="bf16")
    with pytest.raises(ValueError, match="without penalties"):
        lpom.fit(model, X, y, method=LPOM(penalties=lpom.penalties.L1(1e-4)), precision="bf16")
    with pytest.raises(ValueError, match="in float32, and this one is in float64"):
        lpom.fit(model.double(), X, y, precision="bf16")
    with pytest.raises(ValueError, match="unknown precision"):
        lpom.fit(model.float(), X, y, precision="fp8")


@pytest.mark.parametrize(
    ("code", "said"), [(-4, "ends the process \\(SIGILL\\)"), (1, "fails \\(no such thing\\)")]
)
def test_a_processor_that_can_not_is_found_out_elsewhere(code, said, monkeypatch):
    def run(command, **_):
        return subprocess.CompletedProcess(command, code, "", "Traceback\nno such thing\n")

    monkeypatch.setattr(precision.subprocess, "run", run)
    monkeypatch.setattr(precision, "why_not", precision.why_not.__wrapped__)
    model, X, y = lpom.mlp((4, 3, 2), seed=0), normal(20, 4), torch.arange(20) % 2
    with pytest.raises(ValueError, match=said):
        lpom.fit(model, X, y, precision="bf16")


@pytest.mark.usefixtures("processor")
def test_estimators_hand_it_on():
    X, y = normal(200, 20).numpy(), torch.arange(200).numpy() % 3
    made = {
        kind: lpom.MLPClassifier(max_iter=2, random_state=0, precision=kind)
        for kind in (None, "bf16")
    }
    for classifier in made.values():
        with pytest.warns(UserWarning, match="training ended after max_iter"):
            classifier.fit(X, y)
    plain, rounded = (classifier.coefs_[0] for classifier in made.values())
    assert (plain != rounded).any()
    torch.testing.assert_close(torch.tensor(plain), torch.tensor(rounded), atol=2e-2, rtol=0.05)
    with pytest.raises(ValueError, match="with an estimator X.astype"):
        lpom.MLPRegressor(precision="bf16").fit(X.astype("float64"), y.astype("float64"))
