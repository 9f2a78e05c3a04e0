"""What the library promises on MNIST. Slow: ``pytest -m slow tests/benchmarks/test_mnist.py``.

Needs the four IDX files under ``mnist/`` in LPOM_DATA or in ../shared/data.
"""

from __future__ import annotations

import pytest
import torch

import data
import lpom
from lpom import LPOM, ConvergenceWarning, Sweeps
from lpom.methods.backprop import Adam

pytestmark = pytest.mark.slow


@pytest.fixture
def mnist(real_data):
    real_data("mnist")
    rows = data.load("mnist")
    X, y, X_test, y_test = map(
        torch.from_numpy, (rows.x_train, rows.y_train, rows.x_test, rows.y_test)
    )
    return (X, y), (X_test, y_test)


def accuracy(mnist, hidden, activation="relu", *, epochs, seed=0, method=None, loss="auto"):
    train, test = mnist
    model = lpom.mlp([784, *hidden, 10], activation, seed=seed)
    lpom.fit(model, *train, method=method or LPOM(), loss=loss, epochs=epochs, seed=seed)
    score = lpom.evaluate(model, *test, loss=loss)[1]
    print(f"{hidden} {activation} seed {seed} {method}: {score:.2%}")
    return score, model


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_defaults_reach_98_per_cent_without_a_dead_class(mnist, seed):
    score, model = accuracy(mnist, (300, 100), epochs=5, seed=seed)
    assert score >= 0.98
    assert lpom.diagnose(model, *mnist[1]).dead_classes == ()
    assert set(model(mnist[1][0]).argmax(1).tolist()) == set(range(10))


def test_the_exact_step_on_one_hidden_layer(mnist):
    score, _ = accuracy(mnist, (300,), epochs=5, method=LPOM(weights="exact"))
    assert score >= 0.965


def test_the_exact_step_stays_finite_in_a_deep_network(mnist):
    score, model = accuracy(
        mnist, (400, 200, 100, 50), epochs=2, method=LPOM(weights="exact"), loss="squared"
    )
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    assert score >= 0.95


@pytest.mark.parametrize(("activation", "least"), [("tanh", 0.96), ("sigmoid", 0.92)])
def test_eight_hidden_layers_as_matched_back_propagation(mnist, activation, least):
    ours, _ = accuracy(mnist, (128,) * 8, activation, epochs=3)
    theirs, _ = accuracy(mnist, (128,) * 8, activation, epochs=3, method=Adam())
    assert ours >= least
    assert ours >= theirs - 0.01


def test_top_down_needs_the_safe_step(mnist):

    def score(rule):
        method = LPOM(mu=0.3, states=Sweeps("top-down", max_sweeps=3, rule=rule))
        return accuracy(mnist, (128,) * 8, "tanh", epochs=3, method=method)[0]

    with pytest.warns(ConvergenceWarning, match="diverge"):
        plain = score("plain")
    safe = score("safe")
    assert plain <= 0.25
    assert safe >= 0.95


@pytest.mark.parametrize(
    ("activation", "least"), [("step", 0.96), ("staircase", 0.96), ("sign", 0.94)]
)
def test_no_derivative_anywhere(mnist, activation, least):
    ours, model = accuracy(mnist, (300, 100), activation, epochs=5)
    assert model[1].activation.jumps
    with pytest.warns(ConvergenceWarning, match="only the last layer learns"):
        theirs, _ = accuracy(mnist, (300, 100), activation, epochs=5, method=Adam())
    assert ours >= least
    assert theirs < 0.85
