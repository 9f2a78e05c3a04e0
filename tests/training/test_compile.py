"""Compiled steps and steps in bfloat16: near the plain ones, or refused with the reason."""

from __future__ import annotations

import copy
import shutil
import subprocess

import numpy as np
import pytest
import torch
from torch import nn

import lpom
from lpom.exceptions import CheckpointError
from lpom.methods import LPOM
from lpom.training import compile as room
from lpom.training.compile import Compiled, why_not
from lpom.weights.adaptive import Adaptive
from lpom.weights.exact import Exact

compiles = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no compiler for C++ here"
)
#: One sweep on the model itself, by an optimiser that rounding does not move far.
RULE = LPOM(mu=None, weights=Adaptive("sgd", learning_rate=0.1))


@pytest.fixture
def processor():
    if why_not():
        pytest.skip(f"no products in bfloat16: {why_not()}")


class Attention(nn.Module):
    """A softmax, products of states, a skip, and weights that stand in two places."""

    def __init__(self):
        super().__init__()
        self.into, self.norm = nn.Linear(5, 6), nn.LayerNorm(6)
        self.mix, self.out = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        h = torch.relu(self.into(x))
        q, k = self.mix(h), self.mix(self.norm(h))
        h = h + torch.softmax(q @ k.transpose(1, 2), -1) @ h
        return self.out(h.mean(1))


def convolutions():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.3),
        nn.Conv2d(4, 3, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12, 4),
    )


MODELS = {
    "layers": (lambda: lpom.mlp((6, 7, 5, 4), "softplus", seed=0), (6,)),
    "convolutions": (convolutions, (2, 8, 8)),
    "attention": (Attention, (3, 5)),
}


def data(shape, rows=42):
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(rows, *shape, generator=generator, dtype=torch.float64)
    return X, torch.arange(rows) % 4


def trained(model, X, y, **settings):
    torch.manual_seed(1)
    twin = copy.deepcopy(model)
    settings = {"epochs": 2, "batch_size": 16, "seed": 0, "progress": False} | settings
    return twin, lpom.fit(twin, X, y, **settings)


@compiles
@pytest.mark.parametrize("method", [RULE, "sgd"], ids=["lpom", "sgd"])
@pytest.mark.parametrize("name", MODELS)
def test_compiled_steps_are_the_plain_ones(name, method, monkeypatch):
    """Weights, running statistics, what is drawn, and the last batch, which is smaller."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, (X, y) = make().double(), data(shape)
    runs, call = [], Compiled.__call__

    def counted(self, *args, **kwargs):
        runs.append(self)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(Compiled, "__call__", counted)
    settings = {
        "method": method,
        "weight_decay": 0.01,
        "sample_weight": torch.rand(len(X)).double(),
    }
    plain, one = trained(model, X, y, **settings)
    fast, other = trained(model, X, y, compile=True, **settings)
    assert len(runs) == 6 and runs[0].run is not runs[0].model
    assert any(
        not torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(fast.state_dict()[key], value, rtol=1e-9, atol=1e-11)
    assert other.history[-1].loss == pytest.approx(one.history[-1].loss, rel=1e-9)


def frozen(model):
    model[0].weight.requires_grad_(False)


def quicker(model):
    model[1].momentum = 0.5


def replaced(model):
    model[1].running_mean = torch.ones(6, dtype=torch.float64)


@compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")  # as it compiles again
@pytest.mark.parametrize("change", [frozen, quicker, replaced])
def test_what_callbacks_do_to_a_model_is_seen(change):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4)).double()
    X, y = data((6,), rows=32)
    states = []
    for compiled in (False, True):
        twin = copy.deepcopy(model)

        def once(epoch, twin=twin):
            if epoch.epoch == 1:
                change(twin)

        settings = {"epochs": 3, "batch_size": 16, "seed": 0, "callbacks": once}
        lpom.fit(twin, X, y, method=RULE, compile=compiled, **settings)
        states.append(twin.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-9, atol=1e-11)


def test_a_compiler_that_is_not_there_is_said_and_changes_nothing(monkeypatch):
    def missing(model, **options):
        def run(*args):
            raise RuntimeError("No working C++ compiler found\nand much more")

        return run

    monkeypatch.setattr(torch, "compile", missing)
    model, (X, y) = convolutions().double(), data((2, 8, 8))
    plain, _ = trained(model, X, y, method=RULE)
    with pytest.warns(UserWarning, match=r"could not be compiled .*No working C\+\+ compiler"):
        fast, _ = trained(model, X, y, method=RULE, compile=True)
    for name, value in plain.state_dict().items():
        assert torch.equal(fast.state_dict()[name], value), name


@pytest.mark.parametrize("method", [LPOM(weights=Exact(ridge=0.1)), LPOM(mu=20.0), "bcd"], ids=str)
def test_steps_that_do_not_run_the_model_are_not_compiled(method):
    model, (X, y) = lpom.mlp((6, 5, 4), seed=0, dtype=torch.float64), data((6,))
    plain, _ = trained(model, X, y, method=method)
    with pytest.warns(UserWarning, match="compile=True"):
        fast, _ = trained(model, X, y, method=method, compile=True)
    assert all(map(torch.equal, fast.parameters(), plain.parameters()))


@compiles
def test_a_compiled_run_resumes_and_no_other_does(tmp_path):
    X, y = data((6,))
    model = lpom.mlp((6, 7, 5, 4), "softplus", seed=0, dtype=torch.float64)
    whole, _ = trained(model, X, y, method=RULE, compile=True)
    kept = {"checkpoint": lpom.Checkpoint(tmp_path / "run", every_minutes=0), "method": RULE}

    def interrupted(epoch):
        raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="interrupted"):
        trained(model, X, y, compile=True, callbacks=interrupted, **kept)
    with pytest.raises(CheckpointError, match="compile"):
        trained(model, X, y, **kept)
    resumed, _ = trained(model, X, y, compile=True, **kept)
    assert all(map(torch.equal, resumed.parameters(), whole.parameters()))


def test_partial_fit_is_not_compiled_call_by_call(monkeypatch):
    monkeypatch.setattr(Compiled, "_compiled", None)
    X, y = data((6,))
    model = lpom.MLPClassifier((7,), compile=True, method=RULE)
    model.partial_fit(X.numpy(), y.numpy(), classes=range(4))


@compiles
def test_estimators_compile():
    X, y = data((6,))
    settings = {"max_iter": 9, "tol": 9.0, "n_iter_no_change": 2, "random_state": 0}
    plain, fast = (
        lpom.MLPClassifier((7,), method=RULE, compile=chosen, **settings).fit(X, y)
        for chosen in (False, True)
    )
    for one, other in zip(plain.coefs_, fast.coefs_, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("method", [RULE, "sgd", "adam"], ids=["lpom", "sgd", "adam"])
@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_is_near_float32_and_all_that_stays_is_float32(name, method):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, (X, y) = make(), data(shape)
    X, settings = X.float(), {"method": method, "weight_decay": 0.01}
    plain, one = trained(model, X, y, **settings)
    rounded, other = trained(model, X, y, precision="bf16", **settings)
    memory = [
        v for of in other.state.optimizer.state.values() for v in of.values() if v is not None
    ]
    assert {t.dtype for t in [*memory, *rounded.parameters()]} == {torch.float32}
    assert other.history[-1].loss != one.history[-1].loss
    assert other.history[-1].loss == pytest.approx(one.history[-1].loss, rel=0.05)
    for a, b in zip(plain.parameters(), rounded.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=0.05)


def test_what_needs_float32_is_refused():
    model, (X, y) = lpom.mlp((6, 3, 4), seed=0), data((6,))
    for method in (LPOM(weights=Exact()), LPOM(mu=20.0), "mac"):
        with pytest.raises(ValueError, match="precision"):
            lpom.fit(model, X, y, method=method, precision="bf16")
    with pytest.raises(ValueError, match="float32.*float64"):
        lpom.fit(copy.deepcopy(model).double(), X, y, method=RULE, precision="bf16")
    with pytest.raises(ValueError, match="unknown precision"):
        lpom.fit(model, X, y, method=RULE, precision="fp8")
    with pytest.raises(ValueError, match="leave compile or precision out"):
        lpom.fit(model, X, y, method=RULE, compile=True, precision="bf16")


@pytest.mark.parametrize(("code", "said"), [(-4, "SIGILL"), (1, "no such thing")])
def test_a_processor_that_can_not_is_found_out_in_another_process(code, said, monkeypatch):
    def run(command, **_):
        return subprocess.CompletedProcess(command, code, "", "Traceback\nno such thing\n")

    monkeypatch.setattr(room.subprocess, "run", run)
    monkeypatch.setattr(room, "why_not", room.why_not.__wrapped__)
    model, (X, y) = lpom.mlp((6, 3, 4), seed=0), data((6,))
    with pytest.raises(ValueError, match=said):
        lpom.fit(model, X, y, method="adam", precision="bf16")
