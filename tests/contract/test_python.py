"""Public names and what they take: what a program that imports lpom relies on."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.base import clone, is_classifier, is_regressor
from torch import nn

import lpom

NAMES = (
    "Adaptive CheckpointError Checkpoint ConvergenceWarning Diagnosis DivergenceError "
    "EarlyStopping Epoch Exact History LPOM LPOMError Lifted MLPClassifier MLPRegressor Result "
    "Sweeps UntrainableError activations compact diagnose evaluate export fit lift load losses "
    "methods mlp objective penalties save unlift"
).split()

PARAMETERS = {
    "fit": "model X y method loss epochs batch_size validation_data sample_weight weight_decay "
    "seed device callbacks early_stopping checkpoint precision compile",
    "evaluate": "model X y loss",
    "lift": "model mu strict",
    "unlift": "model",
    "diagnose": "model X y method loss sample_weight",
    "objective": "model X y states loss mu",
    "mlp": "sizes activation output bias seed dtype",
    "load": "path into",
    "save": "object path",
    "compact": "model example",
    "LPOM": "mu states weights jumps penalties",
    "Adaptive": "optimizer learning_rate schedule",
    "Exact": "iterations ridge",
    "Sweeps": "order rule tolerance",
    "Checkpoint": "folder every_minutes every_epochs keep",
    "EarlyStopping": "patience min_delta watch",
    "MLPClassifier": "hidden_layer_sizes activation method loss alpha batch_size "
    "learning_rate_init max_iter early_stopping validation_fraction n_iter_no_change tol "
    "warm_start device random_state verbose class_weight",
    "MLPRegressor": "hidden_layer_sizes activation method loss alpha batch_size "
    "learning_rate_init max_iter early_stopping validation_fraction n_iter_no_change tol "
    "warm_start device random_state verbose",
}


def data(n=300, columns=6, classes=3):
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(n, columns, generator=generator)
    return X, X[:, :classes].argmax(1)


def test_every_public_name_is_there():
    missing = [name for name in NAMES if not hasattr(lpom, name)]
    assert not missing and set(NAMES) <= set(dir(lpom))
    with pytest.raises(AttributeError, match="nothing"):
        _ = lpom.nothing


def test_every_function_takes_its_parameters():
    for name, parameters in PARAMETERS.items():
        taken = inspect.signature(getattr(lpom, name)).parameters
        assert set(parameters.split()) <= set(taken), name


def test_importing_is_quick_to_begin():
    code = "import sys, lpom; print('torch' in sys.modules)"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert done.stdout.strip() == b"False"


def test_version_is_a_number():
    assert lpom.__version__[0].isdigit()


def test_errors_are_the_ones_of_python_too():
    assert issubclass(lpom.DivergenceError, (lpom.LPOMError, ArithmeticError))
    assert issubclass(lpom.UntrainableError, lpom.LPOMError)
    assert issubclass(lpom.UntrainableError, (ValueError, TypeError))
    assert issubclass(lpom.ConvergenceWarning, Warning)


def test_fit_trains_a_module_and_says_how_it_went():
    X, y = data()
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    result = lpom.fit(model, X, y, epochs=20, batch_size=20, seed=0)
    assert isinstance(result, lpom.Result) and len(result.history) == 20
    assert result.history[-1].epoch == 20
    assert result.history[-1].loss < result.history[0].loss
    loss, score = lpom.evaluate(model, X, y)
    assert loss > 0 and score > 0.7
    assert isinstance(model[0].weight, nn.Parameter)  # it stays an ordinary module


def test_fit_is_reproducible_and_leaves_randomness_alone():
    X, y = data()

    def weights(seed):
        model = lpom.mlp([6, 8, 3], seed=0)
        lpom.fit(model, X, y, epochs=2, seed=seed)
        return torch.cat([parameter.flatten() for parameter in model.parameters()]).detach()

    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = weights(0), weights(0), weights(1)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("method", ["lpom", "sgd", "adam", "mac", "bcd", "admm"])
def test_fit_takes_methods_by_name(method):
    X, y = data()
    model = lpom.mlp([6, 8, 3], seed=0)
    before = lpom.evaluate(model, X, y)[0]
    lpom.fit(model, X, y, method=method, epochs=5, seed=0)
    assert lpom.evaluate(model, X, y)[0] < before


@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid", "step", "sign"])
def test_networks_of_these_activations_are_trained(activation):
    X, y = data()
    model = lpom.mlp([6, 32, 3], activation=activation, seed=0)
    lpom.fit(model, X, y, epochs=30, batch_size=20, seed=0)
    assert lpom.evaluate(model, X, y)[1] > 0.6


def test_the_papers_settings_are_settings_of_the_method():
    X, y = data()
    model = lpom.mlp([6, 8, 3], seed=0)
    method = lpom.LPOM(mu=20.0, weights=lpom.Exact(iterations=2))
    before = lpom.evaluate(model, X, y)[0]
    lpom.fit(model, X, y, method=method, epochs=3, seed=0)
    assert lpom.evaluate(model, X, y)[0] < before
    assert lpom.LPOM(mu=5.0).mu == 5.0 and isinstance(lpom.LPOM().states, lpom.Sweeps)


def test_a_function_of_ones_own_needs_no_derivative():
    X, y = data()
    cubic = lpom.activations.from_function(
        lambda z: z.clamp(-1, 1) ** 3, lipschitz=3.0, name="cubic"
    )
    model = lpom.mlp([6, 32, 3], activation=cubic, seed=0)
    lpom.fit(model, X, y, epochs=20, batch_size=20, seed=0)
    assert lpom.evaluate(model, X, y)[1] > 0.6


def test_lift_keeps_the_outputs_and_is_trained_by_ones_own_loop():
    X, y = data()
    model = lpom.mlp([6, 16, 3], activation="step", seed=0)
    plain = model(X).detach()
    lifted = lpom.lift(model, mu=20.0)
    assert isinstance(lifted, nn.Module) and torch.equal(lifted(X).detach(), plain)
    optimizer = torch.optim.Adam(lifted.parameters(), 0.01)
    losses = []
    for _ in range(40):
        loss = nn.functional.cross_entropy(lifted(X), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    assert torch.equal(lpom.unlift(lifted)(X), lifted(X))


def test_diagnose_and_objective_look_at_a_network():
    X, y = data()
    model = lpom.mlp([6, 8, 3], seed=0)
    assert isinstance(lpom.diagnose(model, X, y), lpom.Diagnosis)
    assert str(lpom.diagnose(model, X, y))
    lpom.objective(model, X, y)


def test_checkpoints_let_the_same_call_go_on(tmp_path):
    X, y = data()

    def train(epochs, folder):
        model = lpom.mlp([6, 8, 3], seed=0)
        checkpoint = lpom.Checkpoint(folder, every_epochs=1)
        result = lpom.fit(model, X, y, epochs=epochs, seed=0, checkpoint=checkpoint)
        return result, next(model.parameters()).detach()

    _, once = train(4, tmp_path / "once")
    result, again = train(4, tmp_path / "once")  # it is finished: nothing more to do
    assert torch.equal(once, again) and len(result.history) == 4


def test_callbacks_and_early_stopping_end_a_run():
    X, y = data()
    seen = []
    model = lpom.mlp([6, 8, 3], seed=0)
    result = lpom.fit(
        model,
        X[:200],
        y[:200],
        epochs=500,
        seed=0,
        validation_data=(X[200:], y[200:]),
        callbacks=lambda *facts: seen.append(facts) and None,
        early_stopping=lpom.EarlyStopping(patience=2),
    )
    assert len(seen) == len(result.history) < 500


@pytest.mark.filterwarnings("ignore:training ended")
def test_classifier_is_scikit_learns():
    X, y = data()
    names = np.array(["a", "b", "c"])[y]
    model = lpom.MLPClassifier((16,), max_iter=60, random_state=0)
    assert is_classifier(model) and clone(model).get_params() == model.get_params()
    model.fit(X.numpy(), names)
    assert model.score(X.numpy(), names) > 0.8
    assert list(model.classes_) == ["a", "b", "c"] and model.n_features_in_ == 6
    assert np.allclose(model.predict_proba(X.numpy()).sum(axis=1), 1, atol=1e-5)


@pytest.mark.filterwarnings("ignore:training ended")
def test_regressor_is_scikit_learns():
    X, _ = data()
    target = X.numpy() @ np.arange(6)
    model = lpom.MLPRegressor((16,), max_iter=200, random_state=0)
    assert is_regressor(model) and model.fit(X.numpy(), target) is model
    assert model.score(X.numpy(), target) > 0.8


@pytest.mark.filterwarnings("ignore:training ended")
def test_a_fitted_estimator_gives_a_torch_module():
    X, y = data()
    model = lpom.MLPClassifier((8,), max_iter=5, random_state=0).fit(X.numpy(), y.numpy())
    assert isinstance(model.to_torch(), nn.Module)


def test_penalties_and_losses_go_by_name_or_instance():
    X, y = data()
    model = lpom.mlp([6, 16, 3], seed=0)
    method = lpom.LPOM(penalties=lpom.penalties.L1(0.05))
    lpom.fit(model, X, y, method=method, loss="squared", epochs=20, batch_size=20, seed=0)
    weights = torch.cat([p.flatten() for p in model.parameters() if p.ndim == 2])
    assert (weights == 0).any()
    assert {"squared", "cross-entropy", "hinge"} <= set(lpom.losses.names())


def test_what_cannot_be_is_refused_by_name():
    X, y = data()
    with pytest.raises((ValueError, TypeError), match="relu"):
        lpom.mlp([6, 8, 3], activation="rleu")
    with pytest.raises((ValueError, TypeError), match="lpom"):
        lpom.fit(lpom.mlp([6, 8, 3]), X, y, method="lpmo")
    with pytest.raises((ValueError, TypeError), match="300"):
        lpom.fit(lpom.mlp([6, 8, 3]), X, y[:-1])
    with pytest.raises((ValueError, TypeError), match="mu"):
        lpom.fit(lpom.mlp([6, 8, 3]), X, y, method=lpom.LPOM(mu=-1.0))
