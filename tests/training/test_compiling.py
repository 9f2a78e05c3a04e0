"""Compiled steps: the numbers of the plain ones, or a sentence and the plain ones themselves."""

from __future__ import annotations

import copy
import shutil

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lpom
from lpom import losses
from lpom.exceptions import CheckpointError
from lpom.graph import trace
from lpom.methods import LPOM, Batch, Problem
from lpom.states import Sweeps
from lpom.training import compiling
from lpom.weights.adaptive import Adaptive
from lpom.weights.exact import Exact

compiles = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no compiler for C++ here"
)


class Attention(nn.Module):
    """A softmax, products of states, a skip, and weights that stand in two places."""

    def __init__(self):
        super().__init__()
        self.into, self.norm = nn.Linear(5, 6), nn.RMSNorm(6)
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
        nn.BatchNorm2d(3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12, 4),
    )


MODELS = {
    "layers": (lambda: lpom.mlp((6, 7, 5, 4), "softplus", seed=0), (6,)),
    "convolutions": (convolutions, (2, 8, 8)),
    "attention": (Attention, (3, 5)),
}


def trained(model, X, y, **settings):
    torch.manual_seed(1)
    made = copy.deepcopy(model)
    result = lpom.fit(made, X, y, epochs=2, batch_size=16, seed=0, progress=False, **settings)
    return made, result


def data(shape, rows=42):
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(rows, *shape, generator=generator, dtype=torch.float64)
    return X, torch.arange(rows) % 4


@compiles
@pytest.mark.parametrize("method", ["lpom", "adam"])
@pytest.mark.parametrize("name", MODELS)
def test_compiled_steps_are_the_plain_ones(name, method, monkeypatch):
    """Weights, running statistics, what is drawn, and the last batch, which is smaller."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make().double()
    X, y = data(shape)
    settings = {"weight_decay": 0.01, "sample_weight": torch.rand(len(X), dtype=X.dtype)}
    if method == "lpom":  # Adam makes much of gradients that are zero but for rounding
        settings["method"] = LPOM(weights=Adaptive("sgd", learning_rate=0.1))
    else:
        settings["method"] = "sgd"
    runs, run = [], compiling._Compiled.__call__
    monkeypatch.setattr(
        compiling._Compiled,
        "__call__",
        lambda self, batch: (runs.append(self), run(self, batch))[1],
    )
    plain, one = trained(model, X, y, **settings)
    fast, other = trained(model, X, y, compile=True, **settings)
    assert len(runs) == 6 and runs[0].run is not None and runs[0].run is not runs[0].plain
    start = model.state_dict()
    assert any(not torch.equal(start[k], v) for k, v in plain.state_dict().items())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(fast.state_dict()[name], value, rtol=1e-9, atol=1e-11)
    assert other.history[-1].loss == pytest.approx(one.history[-1].loss, rel=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_a_sweep_as_a_function_has_the_gradients_of_a_step(name):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make().double().train()
    X, y = data(shape)
    loss, method = losses.get("cross-entropy"), LPOM(weights=Adaptive("sgd", learning_rate=1e-9))
    problem = Problem.on(trace(model, X), loss, model)
    batch = Batch(X, loss.encode(y, 4, 4), torch.rand(len(X), dtype=X.dtype))
    state = method.init(problem)
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(2)
    with torch.no_grad():
        outputs, gradients = method.sweep(problem, batch, state)
    assert all(p.grad is None for p in model.parameters()) and state.steps == 0
    model.load_state_dict(before)
    torch.manual_seed(2)
    torch.testing.assert_close(method.step(problem, batch, state), outputs)
    assert set(gradients) == set(model.parameters())
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-10, atol=1e-14)


@compiles
def test_what_the_trace_took_for_granted_is_asked_again(monkeypatch):
    """Batch norm is carried back by its value unless its weights say too little of its input."""
    torch.manual_seed(0)
    model, (X, y) = convolutions().double(), data((2, 8, 8))
    made = {}
    for chosen in (False, True):
        torch.manual_seed(1)
        twin, plain = copy.deepcopy(model), []

        def flatten(epoch, twin=twin):
            with torch.no_grad():
                twin[6].weight[0], twin[6].bias[0] = 0.0, 0.5

        def counted(*given, plain=plain, step=LPOM.step):
            plain.append(1)
            return step(*given)

        with monkeypatch.context() as patched:
            patched.setattr(LPOM, "step", counted)
            lpom.fit(
                twin,
                X,
                y,
                method=LPOM(weights=Adaptive("sgd", learning_rate=0.1)),
                epochs=2,
                batch_size=14,
                seed=0,
                progress=False,
                callbacks=flatten,
                compile=chosen,
            )
        made[chosen] = twin, len(plain)
    assert made[False][1] == 6 and made[True][1] == 3  # those of the second epoch
    for one, other in zip(made[False][0].parameters(), made[True][0].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def swapped(model):
    model[0].weight.data = model[0].weight.data.clamp(-0.1, 0.1)


def frozen(model):
    model[0].weight.requires_grad_(False)


def replaced(model):
    model[1].running_mean = torch.ones(6, dtype=torch.float64)


def quicker(model):
    model[1].momentum = 0.5


@compiles
def test_what_callbacks_do_to_a_model_is_seen():
    """Not only what is written into its tensors: other tensors, which of them move, its numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4)).double()
    X, y = data((6,), rows=32)
    method = LPOM(weights=Adaptive("sgd", learning_rate=0.1))
    for change in (swapped, frozen, replaced, quicker):
        made = []
        for chosen in (False, True):
            twin = copy.deepcopy(model)

            def once(epoch, twin=twin, change=change):
                if epoch.epoch == 1:
                    change(twin)

            settings = {"epochs": 3, "batch_size": 16, "seed": 0, "progress": False}
            lpom.fit(twin, X, y, method=method, callbacks=once, compile=chosen, **settings)
            made.append(twin.state_dict())
        for name, value in made[0].items():
            torch.testing.assert_close(made[1][name], value, rtol=1e-9, atol=1e-11)


@compiles
def test_batches_with_and_without_weights_take_turns():
    X, y = data((6,), rows=8)
    batches = [(X, y), (X, y, torch.linspace(0.1, 1, 8, dtype=X.dtype))] * 2
    model = lpom.mlp((6, 5, 4), seed=0, dtype=torch.float64)
    made = [copy.deepcopy(model), copy.deepcopy(model)]
    for twin, chosen in zip(made, (False, True), strict=True):
        loader = DataLoader(batches, batch_size=None)
        lpom.fit(twin, loader, epochs=2, seed=0, progress=False, compile=chosen)
    for one, other in zip(made[0].parameters(), made[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_gradients_in_one_memory_are_told_apart():
    """Weight decay is added to each, and the next plain step writes into them."""
    model = lpom.mlp((4, 4, 4), seed=0, dtype=torch.float64)
    X, y = data((4,))
    problem, method = Problem.on(trace(model, X), losses.get("cross-entropy"), model), LPOM()
    first, second = (p for p in model.parameters() if p.ndim == 2)
    one = torch.ones(4, 4, dtype=X.dtype)
    method.descend(problem, method.init(problem), {first: one, second: one})
    assert torch.equal(first.grad, second.grad)
    assert first.grad.data_ptr() != second.grad.data_ptr()
    assert all(p.grad is None for p in model.parameters() if p.ndim == 1)


class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6, momentum=None)  # one over a count, which it asks for
        self.layers = lpom.mlp((6, 5, 4), seed=0)

    def forward(self, x):
        return self.layers(self.norm(x))


@compiles
def test_what_the_compiler_cannot_follow_is_said_and_changes_nothing():
    model = Asks().double()
    X, y = data((6,))
    plain, _ = trained(model, X, y)
    with pytest.warns(UserWarning, match="could not be compiled"):
        fast, _ = trained(model, X, y, compile=True)
    for name, value in plain.state_dict().items():
        assert torch.equal(fast.state_dict()[name], value), name


def test_a_compiler_that_is_not_there_is_said(monkeypatch):
    def missing(*given, **options):
        raise RuntimeError("No working C++ compiler found\nand much more")

    monkeypatch.setattr("torch._inductor.compile", missing)
    model = lpom.mlp((6, 5, 4), seed=0, dtype=torch.float64)
    X, y = data((6,))
    plain, _ = trained(model, X, y)
    with pytest.warns(
        UserWarning, match=r"\(No working C\+\+ compiler found\), and is made without"
    ):
        fast, _ = trained(model, X, y, compile=True)
    assert all(map(torch.equal, fast.parameters(), plain.parameters()))


@pytest.mark.parametrize(
    ("method", "activation", "said"),
    [
        (LPOM(weights=Exact(ridge=0.1)), "relu", "adaptive weights"),
        (LPOM(states=Sweeps(max_sweeps=2)), "relu", "one interleaved sweep"),
        (LPOM(mu="auto"), "relu", "numbers for mu"),
        (LPOM(penalties=lpom.penalties.L1(1e-4)), "relu", "no penalties"),
        (LPOM(weights=Adaptive("factored")), "relu", "factored"),
        (LPOM(), "step", "without jumps"),
        ("bcd", "relu", "method='lpom' and back-propagation"),
    ],
)
def test_steps_that_cannot_be_compiled_are_made_without(method, activation, said):
    model = lpom.mlp((6, 5, 4), activation, seed=0, dtype=torch.float64)
    X, y = data((6,))
    plain = copy.deepcopy(model)
    settings = {"method": method, "epochs": 2, "seed": 0, "progress": False}
    lpom.fit(plain, X, y, **settings)
    with pytest.warns(UserWarning, match=f"(?s)compile=True is for .*{said}.*without"):
        lpom.fit(model, X, y, compile=True, **settings)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_recurrent_layers_are_not_compiled():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.out = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 4)

        def forward(self, x):
            return self.out(self.layer(x)[0][:, -1])

    torch.manual_seed(0)
    model, (X, y) = Reads().double(), data((5, 3))
    plain, _ = trained(model, X, y)
    with pytest.warns(UserWarning, match="networks without recurrent layers"):
        fast, _ = trained(model, X, y, compile=True)
    assert all(map(torch.equal, fast.parameters(), plain.parameters()))


def test_compile_and_precision_are_not_for_each_other():
    X, y = data((6,))
    with pytest.raises(ValueError, match="leave compile or precision out"):
        lpom.fit(lpom.mlp((6, 5, 4), seed=0), X.float(), y, compile=True, precision="bf16")


@compiles
def test_a_compiled_run_goes_on_and_no_other_does(tmp_path):
    X, y = data((6,))
    model = lpom.mlp((6, 7, 5, 4), "softplus", seed=0, dtype=torch.float64)
    whole, _ = trained(model, X, y, compile=True)
    kept = {"checkpoint": lpom.Checkpoint(tmp_path / "run", every_minutes=0)}

    def interrupted(epoch):
        raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="interrupted"):
        trained(model, X, y, compile=True, callbacks=interrupted, **kept)
    with pytest.raises(CheckpointError, match="compile"):
        trained(model, X, y, **kept)
    gone_on, _ = trained(model, X, y, compile=True, **kept)
    assert all(map(torch.equal, gone_on.parameters(), whole.parameters()))


def test_partial_fit_is_not_compiled_call_by_call(monkeypatch):
    monkeypatch.setattr("lpom.training.trainer.compiled", None)
    X, y = data((6,))
    lpom.MLPClassifier((7,), compile=True).partial_fit(X.numpy(), y.numpy(), classes=range(4))


@compiles
def test_estimators_compile():
    X, y = data((6,))
    made = [
        lpom.MLPClassifier(
            (7,), max_iter=9, tol=9.0, n_iter_no_change=2, random_state=0, compile=chosen
        ).fit(X, y)
        for chosen in (False, True)
    ]
    for one, other in zip(*(model.coefs_ for model in made), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9)
