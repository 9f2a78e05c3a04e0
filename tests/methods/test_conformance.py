"""What every method promises. A new one joins METHODS, and CASES with its objective."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits
from torch.utils._python_dispatch import TorchDispatchMode

import lpom
from lpom import Exact, Sweeps
from lpom.exceptions import ConvergenceWarning
from lpom.methods import METHODS, Batch, Problem
from lpom.methods.optimizers import advance

from . import objectives as paper


@dataclass(frozen=True)
class Case:
    """How a method is asked to show what it promises.

    ``exact`` are settings under which it converges, in ``steps`` steps on the small problem,
    ``descends`` those under which no step raises the objective. ``variables`` are the lists of
    its state that it minimises over beside the weights, at or above zero if ``constrained``.
    """

    objective: Callable[..., torch.Tensor]
    variables: tuple[str, ...] = ()
    exact: dict[str, Any] = field(default_factory=dict)
    steps: int = 500
    descends: dict[str, Any] | None = None
    constrained: bool = False
    feasible: Callable[..., list[torch.Tensor]] | None = None


def backprop(learning_rate, steps=2000):
    return Case(paper.back_propagation, exact={"learning_rate": learning_rate}, steps=steps)


SAFE = {"states": Sweeps("top-down", rule="safe"), "weights": "exact", "mu": 1.0}
SETTLED = {
    "states": Sweeps("top-down", max_sweeps=40, rule="safe"),
    "weights": Exact(iterations=3, ridge=1e-4),
    "mu": 1.0,
}
FIXED = {"mu_factor": 1.0, "weights": "gauss-newton", "ridge": 0.0, "sweeps": 3}
CASES = {
    "lpom": Case(paper.eq18, ("X",), SETTLED, 200, SAFE),
    "sgd": backprop(0.3),
    "nesterov": backprop(0.05),
    "adagrad": backprop(0.3),
    "rmsprop": backprop(0.01),
    "adam": backprop(0.02),
    "straight-through": backprop(0.02),
    "ramps": backprop(0.02),
    "mac": Case(paper.eq3, ("X",), FIXED, 300, FIXED),
    "bcd": Case(paper.eq5, ("X", "U"), {"alpha": 0.0, "ridge": 1e-6}, 100, {}),
    "admm": Case(
        paper.eq6,
        ("X", "U"),
        {"mu": 1.0, "beta": 1.0, "warm_start": 0},
        200,
        {"warm_start": 1000},
        feasible=paper.output,
    ),
    "admm-hashing": Case(
        paper.eq8, ("X", "U"), {"mu": 5.0, "dual_step": 1.0}, 400, feasible=paper.copies_and_outputs
    ),
    "tikhonov": Case(paper.eq10, ("X",), {"mu": 1.0, "ridge": 1e-6}, 300, {}, constrained=True),
    "lifted": Case(
        paper.eq10_with_ridge,
        ("X",),
        {"mu": 1.0, "rho": 0.0, "ridge": 1e-6, "sweeps": 12},
        250,
        {"mu": 1.0},
        constrained=True,
    ),
}
NAMES = list(METHODS)


@dataclass
class Trial:
    """A method in the middle of its work, all samples in one batch."""

    model: torch.nn.Sequential
    method: Any
    problem: Problem
    batch: Batch
    state: Any

    @property
    def loss(self):
        return self.problem.loss

    @property
    def total_weight(self):
        return self.batch.total_weight

    def run(self, steps):
        for k in range(steps):
            advance(self.state, k / steps)
            self.method.step(self.problem, self.batch, self.state)
        return self

    def objective(self):
        return self.method.objective(self.problem, self.batch, self.state)


def trial(name, model, X, target, weight=None, **settings):
    method = METHODS[name](**settings)
    problem = Problem(model, lpom.losses.get("squared"))
    batch = Batch(X, target, weight, whole=True)
    return Trial(model, method, problem, batch, method.init(problem))


def numbers(n=40, n_in=3, n_out=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, n_in, generator=generator, dtype=torch.float64)
    W = torch.randn(n_in, n_out, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, n_out, generator=generator, dtype=torch.float64)
    return X, 0.3 * X @ W + 0.3 + 0.02 * noise


def blobs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(60) % 3
    centres = 3 * torch.randn(3, 4, generator=generator, dtype=dtype)
    return centres[y] + torch.randn(60, 4, generator=generator, dtype=dtype), y


def relu_net(sizes=(4, 6, 3), dtype=torch.float64):
    return lpom.mlp(list(sizes), "relu", "identity", seed=0, dtype=dtype)


def fitted(name, model, X, y, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        settings = {"epochs": 3, "seed": 0, "loss": "squared", "progress": False, **options}
        settings.setdefault("method", METHODS[name]())
        return lpom.fit(model, X, y, **settings)


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_every_method_has_a_case():
    assert set(CASES) == set(METHODS), "a method joins the suite by an entry in CASES"


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_it_is(name):
    made = METHODS[name]
    assert made.name == name
    assert "(eq. " in made.equation
    assert made.costs and isinstance(made.full_batch, bool)


@pytest.mark.parametrize("name", NAMES)
def test_hyperparameters_are_those_of_scikit_learn(name):
    method = METHODS[name]()
    params = method.get_params()
    assert clone(method).get_params() == params
    key, value = next((k, v) for k, v in params.items() if isinstance(v, float))
    assert METHODS[name]().with_params(**{key: value / 2}).get_params()[key] == value / 2
    with pytest.raises(ValueError, match="nonsense"):
        method.with_params(nonsense=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_shapes_and_dtype_stay(name, dtype):
    X, y = blobs(dtype)
    model = relu_net(dtype=dtype)
    before = weights(model)
    result = fitted(name, model, X, y, batch_size=20)
    for old, new in zip(before, weights(model), strict=True):
        assert new.shape == old.shape and new.dtype == dtype and bool(torch.isfinite(new).all())
    assert any(not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    assert len(result.history[-1].gaps) in (0, 2)  # one per layer, if it has gaps at all


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_weights(name):
    X, y = blobs()
    models = [relu_net(), relu_net()]
    for model in models:
        fitted(name, model, X, y, batch_size=20, seed=7)
    for a, b in zip(*map(weights, models), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_objective_is_the_one_that_the_paper_states(name, weighted):
    X, target = numbers()
    weight = torch.linspace(0.5, 2, len(X), dtype=X.dtype) if weighted else None
    model = lpom.mlp([3, 5, 2], "relu", seed=0, dtype=X.dtype)
    run = trial(name, model, X, target, weight).run(3)
    with torch.no_grad():
        values = CASES[name].objective(run, variables(run))
    expected = values.sum() if weight is None else values @ weight
    assert run.objective().total == pytest.approx(float(expected), rel=1e-10)


@pytest.mark.parametrize("name", [n for n in NAMES if CASES[n].descends is not None])
def test_no_step_raises_the_objective_where_that_is_promised(name):
    X, target = numbers()
    model = lpom.mlp([3, 5, 4, 2], "relu", seed=0, dtype=X.dtype)
    run = trial(name, model, X, target, **CASES[name].descends)
    keeps = hasattr(run.state, "samples")
    for _ in range(20):
        if keeps:
            before = run.objective().total
            run.run(1)
            after = run.objective().total
        else:  # a step starts feed-forward, finds its states, and then moves the weights
            _, forward = run.problem.graph.feed_forward(X)
            states = variables(run)
            with torch.no_grad():
                before = float(CASES[name].objective(run, {"X": forward}).sum())
                run.run(1)
                after = float(CASES[name].objective(run, states).sum())
        assert after <= before + 1e-12 * abs(before)


@pytest.mark.parametrize("name", NAMES)
def test_optimality_conditions_vanish_at_convergence(name):
    """Gradients in all variables, projected where they are bounded; then the constraints."""
    case = CASES[name]
    X, target = numbers()
    activation = "relu" if case.constrained else "tanh"
    model = lpom.mlp([3, 4, 2], activation, seed=0, dtype=X.dtype)
    if case.constrained:  # away from the corner where all hidden states are zero
        torch.nn.init.constant_(model[0].bias, 1.0)
    run = trial(name, model, X, target, **case.exact)
    start = residuals(run, case)
    run.run(case.steps)
    end = residuals(run, case)
    assert max(end) < 1e-3 * max(start), f"{start} -> {end}"


@pytest.mark.parametrize("name", NAMES)
def test_linear_network_ends_at_least_squares(name):
    """Methods for a ReLU get data on which every hidden state stays positive."""
    case = CASES[name]
    X, target = numbers()
    model = lpom.mlp([3, 4, 2], "relu" if case.constrained else "identity", seed=0, dtype=X.dtype)
    if case.constrained:
        torch.nn.init.constant_(model[0].bias, 4.0)
    run = trial(name, model, X, target, **case.exact).run(case.steps)
    design = torch.cat([X, torch.ones(len(X), 1, dtype=X.dtype)], dim=1)
    expected = design @ torch.linalg.lstsq(design, target).solution
    if case.constrained:
        assert bool((model[:2](X) > 0).all())
    assert float((run.model(X).detach() - expected).abs().max()) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_warm_start_goes_on(name):
    X, y = blobs()
    whole, halves = relu_net(), relu_net()
    options = {"batch_size": len(X), "method": METHODS[name](), "endless": True}
    fitted(name, whole, X, y, epochs=4, **options)
    first = fitted(name, halves, X, y, epochs=2, **options)
    fitted(name, halves, X, y, epochs=2, state=first.state, **options)
    for a, b in zip(weights(whole), weights(halves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


class Interrupting(TorchDispatchMode):
    """Raises KeyboardInterrupt in a matrix product that comes after `begin`.

    It knows nothing of who calls torch, so it holds for any way to write a step.
    """

    def __init__(self, operations: int) -> None:
        super().__init__()
        self.left, self.begun = operations, False

    def begin(self, epoch: Any) -> None:
        self.begun = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.begun and func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("product", [2, 5])
@pytest.mark.parametrize("name", NAMES)
def test_interrupted_in_a_step_it_leaves_a_usable_model(name, product):
    X, y = blobs()
    model = relu_net()
    interrupting = Interrupting(product)
    options = {"epochs": 20, "batch_size": 20, "callbacks": [interrupting.begin]}
    with interrupting, pytest.warns(UserWarning, match="interrupted"):
        result = fitted(name, model, X, y, **options)
    assert result.status == "interrupted"
    assert bool(torch.isfinite(model(X)).all())
    again = fitted(name, model, X, y, state=result.state, batch_size=20)
    assert again.status == "finished" and bool(torch.isfinite(model(X)).all())


@pytest.mark.parametrize("name", NAMES)
def test_interrupted_between_epochs_it_keeps_the_weights(name):
    X, y = blobs()
    model, kept = relu_net(), []

    def stop(epoch):
        kept[:] = weights(model)
        if epoch.epoch == 2:
            raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="interrupted"):
        result = fitted(name, model, X, y, epochs=9, callbacks=[stop])
    assert result.status == "interrupted" and len(result.history) == 2
    for a, b in zip(kept, weights(model), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_of_a_sample_counts_as_its_repetitions(name):
    X, target = numbers()
    counts = torch.arange(len(X)) % 3 + 1
    models = [lpom.mlp([3, 5, 2], "relu", seed=0, dtype=X.dtype) for _ in range(2)]
    trial(name, models[0], X, target, counts.to(X)).run(4)
    repeated = X.repeat_interleave(counts, 0), target.repeat_interleave(counts, 0)
    trial(name, models[1], *repeated).run(4)
    for a, b in zip(*map(weights, models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_it_learns_to_read_digits(name):
    X, y = load_digits(return_X_y=True)
    X = (X / 16).astype(np.float32)
    model = lpom.mlp([64, 32, 10], "relu", "identity", seed=0)
    epochs = 40 if METHODS[name].full_batch else 30
    fitted(name, model, X[:1200], y[:1200], epochs=epochs, batch_size=50)
    _, accuracy = lpom.evaluate(model, X[1200:], y[1200:], loss="squared")
    assert accuracy > 0.7  # chance: 0.1


MONOTONE = [a for a in lpom.activations.names() if not lpom.activations.get(a).slope_bound]


@pytest.mark.parametrize("activation", MONOTONE)
@pytest.mark.parametrize("name", NAMES)
def test_any_activation_is_trained_or_refused_with_the_reason(name, activation):
    X, y = blobs()
    model = lpom.mlp([4, 6, 3], activation, seed=0, dtype=X.dtype)
    before = copy.deepcopy(model.state_dict())
    try:
        fitted(name, model, X, y, batch_size=20, epochs=1)
    except ValueError as error:
        assert activation in str(error) and name in str(error)
        for key, value in model.state_dict().items():
            assert torch.equal(value, before[key])
    else:
        assert bool(torch.isfinite(model(X)).all())


def variables(run):
    """What the method minimises over, kept by its state or found afresh; the inputs first."""
    names = CASES[run.method.name].variables
    if names and not hasattr(run.state, "samples"):
        return {"X": settled(run)}
    return {key: list(getattr(run.state, key)) for key in names}


def settled(run):
    found = run.method.settle(run.problem, run.batch, run.state)
    return found if isinstance(found, list) else [x.detach() for x in found.X]


def residuals(run, case):
    """Root mean square of each gradient of the mean objective, and of each constraint."""
    free = variables(run)
    if case.variables and not free["X"]:  # before the first step
        run.objective()
        free = variables(run)
    if case.variables and not free["X"]:
        free["X"] = run.problem.graph.feed_forward(run.batch.inputs)[1]
    for key, values in free.items():
        kept = values[:1] if key == "X" else []
        free[key] = kept + [v.detach().clone().requires_grad_() for v in values[len(kept) :]]
    states = [v for values in free.values() for v in values if v.requires_grad]
    parameters = list(run.model.parameters())
    total = case.objective(run, free).sum()
    gradients = torch.autograd.grad(total, [*states, *parameters])
    found = []
    for value, gradient in zip([*states, *parameters], gradients, strict=True):
        bounded = case.constrained and any(value is x for x in free["X"][1:-1])
        if bounded:
            gradient = value - (value - gradient).clamp(min=0)
        per_sample = 1 if any(value is s for s in states) else len(run.batch)
        found.append(float(gradient.detach().square().mean().sqrt()) / per_sample)
    if case.feasible is not None:
        found += [float(g.detach().square().mean().sqrt()) for g in case.feasible(run)]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_what_a_run_leaves_can_be_pickled(name):
    X, y = blobs()
    model = relu_net()
    state = pickle.loads(pickle.dumps(fitted(name, model, X, y, batch_size=len(X)).state))
    assert state.progress > 0


BLOCKWISE = [name for name in NAMES if METHODS[name].full_batch or name == "lifted"]


@pytest.mark.parametrize("name", [*BLOCKWISE, "lpom"])
def test_half_a_layer_is_not_frozen_in_silence(name):
    X, y = blobs()
    model = relu_net()
    model[0].bias.requires_grad_(False)
    method = METHODS[name](weights="exact") if name == "lpom" else METHODS[name]()
    before = weights(model)
    with pytest.raises(ValueError, match="(?i)freeze"):
        fitted(name, model, X, y, method=method)
    model[0].weight.requires_grad_(False)
    fitted(name, model, X, y, method=method)
    for old, new in zip(before[:2], weights(model)[:2], strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("name", [name for name in NAMES if METHODS[name].full_batch])
def test_what_a_run_leaves_does_not_hold_the_data(name):
    X, y = blobs()
    state = fitted(name, relu_net(), X, y).state

    def tensors(value):
        if isinstance(value, torch.Tensor):
            return [value]
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list | tuple):
            return [tensor for inner in value for tensor in tensors(inner)]
        return tensors(vars(value)) if hasattr(value, "__dict__") else []

    kept = tensors(state)
    assert kept
    for tensor in kept:
        assert tensor.untyped_storage().data_ptr() != X.untyped_storage().data_ptr()
        assert tensor.shape != X.shape or not torch.equal(tensor, X)
