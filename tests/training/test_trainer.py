"""The run: what it draws, in which mode it works, and that it goes on bit for bit."""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import asdict, dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lpom
from lpom import LPOM, Adaptive, Checkpoint, EarlyStopping, Sweeps, methods
from lpom.methods import MAC, METHODS, Adam, Method, Problem, State
from lpom.objectives import Objective


@dataclass(frozen=True)
class Noisy(Method[State]):
    """Draws from torch's global generator, as dropout does, and counts steps in a buffer."""

    name, equation, costs = "noisy", "", ""

    def init(self, problem):
        return State()

    def step(self, problem, batch, state):
        with torch.no_grad():
            for p in problem.graph.parameters:
                p.add_(0.01 * batch.inputs.mean() * torch.randn(p.shape))

    def objective(self, problem, batch, state):
        return Objective(float(batch.inputs.double().sum()), (), ())


class Jittered(Dataset):
    """Rows with noise from torch's global generator, as random crops have."""

    def __init__(self, X, y):
        self.X, self.y = X, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.X[i] + 0.1 * torch.randn(self.X.shape[1]), self.y[i]


def net(seed=0):
    return lpom.mlp([5, 6, 3], seed=seed)


def outcome(model, result):
    """Weights, and the history but for its times."""
    times = ("seconds", "samples_per_second")
    epochs = [{k: v for k, v in asdict(e).items() if k not in times} for e in result.history]
    return [p.tolist() for p in model.parameters()], epochs, result.status


def fitted(model, *data, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="training was interrupted")
        warnings.simplefilter("ignore", lpom.ConvergenceWarning)
        return lpom.fit(model, *data, progress=False, **options)


def sources(blobs, name, generator=None):
    X, y = blobs
    if name == "arrays":
        return (X, y), {"batch_size": 20}
    rows = Jittered(X, y) if name == "jittered" else TensorDataset(X, y)
    return (DataLoader(rows, batch_size=20, shuffle=True, generator=generator),), {}


CASES = [(name, "arrays") for name in METHODS]
CASES += [(name, "loader") for name in METHODS if not METHODS[name].full_batch]
CASES += [("noisy", "arrays"), ("noisy", "jittered"), ("adam", "jittered"), ("averaged", "arrays")]


@pytest.mark.parametrize(("name", "source"), CASES)
def test_stopped_after_any_batch_it_goes_on_bit_for_bit(name, source, blobs, cut_at, tmp_path):
    named = {"noisy": Noisy(), "averaged": LPOM()}
    method = named[name] if name in named else methods.get(name)
    data, options = sources(blobs, source)
    options |= {"averaging": 0.7} if name == "averaged" else {}
    X, y = blobs
    options |= {"method": method, "epochs": 3, "seed": 4, "loss": "squared"}
    options |= {"validation_data": (X[:15], y[:15]), "early_stopping": EarlyStopping(2)}
    model = net()
    expected = outcome(model, fitted(model, *data, **options))
    last = 3 if method.full_batch else 9
    plan = Checkpoint(tmp_path, every_minutes=0)
    for step in range(1, last):  # cut again and again, a step later each time
        cut_at(type(method), 2)
        model = net(seed=0 if step == 1 else step)  # later ones find their weights in the folder
        result = fitted(model, *data, checkpoint=plan, **options)
        assert result.status == "interrupted"
    model = net(seed=99)
    assert outcome(model, fitted(model, *data, checkpoint=plan, **options)) == expected


@pytest.mark.parametrize("seed", [None, 3])
def test_a_loader_with_a_generator_of_its_own_goes_on(seed, blobs, cut_at, tmp_path):
    """Without a seed its state at the start is that of the run; both are found again."""
    options = {"method": Noisy(), "epochs": 3, "seed": seed, "loss": "squared"}
    torch.manual_seed(5)
    data, _ = sources(blobs, "jittered", torch.Generator().manual_seed(8))
    model = net()
    expected = outcome(model, fitted(model, *data, **options))
    torch.manual_seed(5)
    data, _ = sources(blobs, "jittered", torch.Generator().manual_seed(8))
    plan = Checkpoint(tmp_path, every_minutes=0)
    for _ in range(4):
        cut_at(Noisy, 3)
        fitted(net(), *data, checkpoint=plan, **options)
        data, _ = sources(blobs, "jittered", torch.Generator().manual_seed(77))
        torch.manual_seed(78)
    model = net()
    assert outcome(model, fitted(model, *data, checkpoint=plan, **options)) == expected


def test_buffers_belong_to_the_run(blobs, cut_at, tmp_path, monkeypatch):
    step = Adam.step

    def counting(self, problem, batch, state):
        counted[0].count += 1
        return step(self, problem, batch, state)

    monkeypatch.setattr(Adam, "step", counting)
    counted, options = [None], {"method": "adam", "epochs": 2, "batch_size": 10, "seed": 0}
    for n in (7, None):
        counted[0] = net()
        counted[0].register_buffer("count", torch.tensor(0), persistent=False)
        if n is not None:
            cut_at(Adam, n)
        fitted(counted[0], *blobs, checkpoint=Checkpoint(tmp_path, every_minutes=0), **options)
    assert int(counted[0].count) == 10


def test_the_state_dict_is_tensors_and_plain_values_and_not_the_data(blobs):
    X, y = blobs

    def leaves(value):
        if isinstance(value, dict):
            return [leaf for inner in value.values() for leaf in leaves(inner)]
        return (
            [leaf for inner in value for leaf in leaves(inner)]
            if isinstance(value, list)
            else [value]
        )

    for name in METHODS:
        result = fitted(net(), X, y, method=name, loss="squared", epochs=2, batch_size=50)
        for leaf in leaves(result.state.state_dict()):
            if isinstance(leaf, torch.Tensor):
                assert leaf.shape != X.shape or not torch.equal(leaf, X)
            else:
                json.dumps(leaf)
        again = copy.deepcopy(result.state)
        for a, b in zip(leaves(again.state_dict()), leaves(result.state.state_dict()), strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_the_seed_rules_loaders_and_what_torch_draws(blobs):
    def trained(seed, generator=None):
        data, _ = sources(blobs, "jittered", generator)
        model = net()
        return outcome(model, fitted(model, *data, method=Noisy(), seed=seed, epochs=2))

    assert trained(0) == trained(np.int64(0)) != trained(1)
    own = [trained(3, torch.Generator().manual_seed(s)) for s in (1, 2)]
    assert own[0] == own[1]
    own = [trained(None, torch.Generator().manual_seed(s)) for s in (1, 2)]
    assert own[0] != own[1]
    torch.manual_seed(1)
    first = trained(None)
    assert trained(None) != first
    torch.manual_seed(1)
    assert trained(None) == first


def test_a_run_leaves_the_global_generator_as_it_was(blobs):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    data, _ = sources(blobs, "jittered")
    fitted(net(), *data, method=Noisy(), seed=1, epochs=1)
    lpom.evaluate(net(), *data)
    assert torch.equal(torch.rand(3), expected)


def test_all_methods_see_the_same_batches_whatever_is_measured(blobs, monkeypatch):
    """LPOM measures the epoch by a second pass over the data where activations have jumps."""
    X, y = blobs
    shuffled = DataLoader(TensorDataset(X, y), batch_size=10, shuffle=True)
    seen = {}
    for source in ("arrays", "loader"):
        for name in ("lpom", "adam"):
            for validation in (None, (X[:9], y[:9]), shuffled):
                rows, step = [], METHODS[name].step
                with monkeypatch.context() as patch:
                    patch.setattr(
                        METHODS[name],
                        "step",
                        lambda self, p, batch, s, rows=rows, step=step: (
                            rows.append(batch.inputs),
                            step(self, p, batch, s),
                        )[1],
                    )
                    data, options = sources(blobs, source)
                    model = lpom.mlp([5, 6, 3], "step", seed=0)
                    options |= {"method": name, "validation_data": validation}
                    fitted(model, *data, epochs=3, seed=0, **options)
                seen.setdefault(source, []).append(torch.cat(rows))
    for runs in seen.values():
        assert all(torch.equal(runs[0], other) for other in runs[1:])
        assert not torch.equal(runs[0][:50], runs[0][50:100])


def test_steps_run_in_train_mode_and_measuring_in_eval_mode(blobs):
    X, y = blobs
    model = nn.Sequential(nn.Flatten(), net())
    model[1][1].eval()
    modes = {"step": set(), "measured": set()}

    class Looking(Noisy):
        def step(self, problem, batch, state):
            modes["step"].update(m.training for m in model.modules() if m is not model[1][1])
            assert not model[1][1].training  # somebody has put it there

        def objective(self, problem, batch, state):
            modes["measured"].update(module.training for module in model.modules())
            return super().objective(problem, batch, state)

    model[1][0].register_forward_hook(lambda m, *_: modes["measured"].add(m.training))
    before = [module.training for module in model.modules()]
    lpom.fit(model, X, y, method=Looking(), epochs=2, validation_data=(X, y))
    assert modes == {"step": {True}, "measured": {False}}
    assert [module.training for module in model.modules()] == before


def test_the_objective_is_that_of_the_first_rows(blobs):
    """Noisy's objective is the sum of its batch's inputs."""
    X, y = blobs
    history = fitted(
        net(), X, y, method=Noisy(), epochs=3, batch_size=20, seed=1, diagnostics=True
    ).history
    expected = float(X[:20].double().sum()) / 20
    assert history.column("objective") == pytest.approx([expected] * 3)
    data, _ = sources(blobs, "loader")
    history = fitted(net(), *data, method=Noisy(), epochs=3, seed=1).history
    assert len(set(history.column("objective"))) == 1


@pytest.mark.parametrize(
    "method", [LPOM(), LPOM(states=Sweeps(max_sweeps=3)), MAC(), "lifted"], ids=str
)
def test_the_objective_depends_on_weights_and_probe_alone(method, blobs):
    """The same weights after another last batch: the same objective, and the weights stay."""
    X, y = blobs
    method = methods.get(method)
    problem = Problem(net(), lpom.losses.get("squared"))
    target = torch.nn.functional.one_hot(y, 3).float()
    probe = lpom.methods.Batch(X[:10], target[:10])
    state, values = method.init(problem), []
    before = [p.detach().clone() for p in problem.graph.parameters]
    for rows in (slice(10, 20), slice(20, 30)):
        for p, kept in zip(problem.graph.parameters, before, strict=True):
            p.data.copy_(kept)
        method.step(problem, lpom.methods.Batch(X[rows], target[rows]), state)
        for p, kept in zip(problem.graph.parameters, before, strict=True):
            p.data.copy_(kept)
        values.append(method.objective(problem, probe, state).total)
        assert all(torch.equal(p, k) for p, k in zip(problem.graph.parameters, before, strict=True))
    assert values[0] == pytest.approx(values[1], rel=1e-3)  # power iterations go on
    loss = problem.loss.value(net()(X[:10]), target[:10]).sum()
    assert values[0] != pytest.approx(float(loss.detach()), rel=1e-6)  # states have moved


ADVICE = {
    "lpom": (LPOM(), "Try a smaller learning_rate."),
    "exact": (LPOM(weights="exact"), "Try a larger ridge, or a larger mu."),
    "adam": (Adam(), "Try a smaller learning_rate."),
    "mac": (MAC(weights="gauss-newton"), "Try a larger ridge."),
}


@pytest.mark.parametrize("name", ADVICE)
def test_the_advice_after_divergence_is_for_settings_in_use(name, blobs, monkeypatch):
    method, advice = ADVICE[name]

    def break_weights(self, problem, batch, state):
        problem.graph.parameters[0].data.fill_(float("nan"))

    monkeypatch.setattr(type(method), "step", break_weights)
    with pytest.raises(lpom.DivergenceError) as caught:
        lpom.fit(net(), *blobs, method=method, epochs=1)
    assert str(caught.value).endswith(advice)


@pytest.mark.parametrize("name", METHODS)
def test_the_advice_names_parameters_of_the_method(name):
    method = methods.get(name)
    assert method.steadier
    for sentence in method.steadier:
        assert any(name.split("__")[-1] in sentence for name in method.get_params())


@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "rmsprop", "adagrad", torch.optim.AdamW])
def test_another_optimiser_starts_with_no_memory(optimizer, blobs):
    X, y = blobs
    state = fitted(net(), X, y, epochs=1).state
    trained = []
    for given in (state, None):
        model = net()
        fitted(model, X, y, epochs=2, seed=0, method=LPOM(weights=Adaptive(optimizer)), state=given)
        trained.append([p.tolist() for p in model.parameters()])
    assert trained[0] == trained[1]


def test_a_state_for_other_sizes_is_refused(blobs):
    X, y = blobs
    state = fitted(net(), X, y, epochs=1).state
    with pytest.raises(ValueError, match=r"weights of shapes \[\[6, 5\].*this one has \[\[7, 5\]"):
        lpom.fit(lpom.mlp([5, 7, 3]), X, y, state=state)


def test_patience_is_a_number_of_epochs():
    with pytest.raises(ValueError, match="patience must be an integer above 0"):
        EarlyStopping(patience=-1)
    with pytest.raises(ValueError, match="min_delta"):
        EarlyStopping(min_delta=-0.1)
