"""Hostile numbers: a grid of settings and sizes ends in a finite network or in a plain word.

Every run must end with ``DivergenceError``, or with weights and a loss that are finite; and one
that made the network much worse must have said so.
"""

from __future__ import annotations

import itertools
import math
import random
import warnings

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import lpom
from lpom import LPOM, Adaptive, DivergenceError, Exact, Sweeps
from lpom.methods import METHODS
from lpom.states import ORDERS

pytestmark = pytest.mark.faults

MUS = [1e-3, 0.1, 1.0, 20.0, 1e3, 1e6]
RATES = [1e-6, 1e-3, 0.1, 10.0, 1e3]
SCALES = [1e-6, 1e-3, 1.0, 1e3, 1e6]
ACTIVATIONS = ["relu", "tanh", "sigmoid", "softplus", "step", "elu", "leaky_relu", "staircase"]
LOSSES = ["cross-entropy", "squared", "hinge"]


def lpom_cases():
    weights = [Adaptive(learning_rate=rate) for rate in RATES]
    weights += [Exact(ridge=ridge) for ridge in (0.0, 0.1, 10.0)]
    grid = itertools.product(MUS, ORDERS, (1, 3), weights)
    return [
        LPOM(mu=mu, states=Sweeps(order=order, max_sweeps=most), weights=weight)
        for mu, order, most, weight in grid
    ]


def other_cases():
    for name, kind in METHODS.items():
        for value in MUS:
            if "mu" in kind.__dataclass_fields__ and name != "lpom":
                most = {"mu_max": max(value, 100.0)} if name == "mac" else {}
                yield kind(mu=value, **most)
        for rate in RATES:
            if "learning_rate" in kind.__dataclass_fields__:
                yield kind(learning_rate=rate)


@pytest.fixture(scope="module")
def digits():
    X, y = load_digits(return_X_y=True)
    return (X[:200] / 16).astype(np.float32), y[:200]


def check(method, activation, loss, scale, digits):
    X, y = digits[0] * scale, digits[1]
    model = lpom.mlp([64, 12, 12, 10], activation, seed=0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        start, _ = lpom.evaluate(model, X, y, loss=loss)
        try:
            options = {"method": method, "loss": loss, "epochs": 2, "seed": 0, "progress": False}
            result = lpom.fit(model, X, y, **options)
        except DivergenceError as error:
            assert "Try" in str(error) or not method.steadier
            result = None
        except ValueError as error:  # what a method can't do, in words
            assert any(word in str(error) for word in ("need", "refuse", "can't", "only")), error
            return
        after, _ = lpom.evaluate(model, X, y, loss=loss)
    words = " ".join(str(warning.message) for warning in said)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    if result is not None:
        zeros = result.task.loss.value(torch.zeros(1, 10), result.task.target(y[:1]))
        assert math.isfinite(result.history[-1].loss) or "loss is" in words
        assert after <= 3 * max(start, float(zeros)) or "learnt nothing" in words


@pytest.mark.parametrize("kind", ["lpom", "others"])
def test_no_silent_nan_and_no_silent_failure(kind, digits, request):
    methods = lpom_cases() if kind == "lpom" else list(other_cases())
    cases = list(itertools.product(methods, ACTIVATIONS, LOSSES, SCALES))
    many = 1500 if request.config.getoption("--long") else 25
    for method, activation, loss, scale in random.Random(kind).sample(cases, many):
        try:
            check(method, activation, loss, scale, digits)
        except Exception as error:
            raise AssertionError(f"{method}, {activation}, {loss}, scale {scale:g}") from error
    print(f"{many} of {len(cases)} runs of {kind}")


@pytest.mark.parametrize(
    "rows", ["constant columns", "one row again and again", "denormal", "zeros", "one huge value"]
)
@pytest.mark.parametrize("method", ["lpom", "adam", "bcd", "mac"])
def test_rows_without_information(rows, method, digits):
    X, y = digits[0].copy(), digits[1]
    match rows:
        case "constant columns":
            X[:, 1:] = 1.0
        case "one row again and again":
            X[:] = X[0]
        case "denormal":
            X *= np.float32(1e-42)
        case "zeros":
            X[:] = 0
        case "one huge value":
            X[3, 3] = 1e15
    check(lpom.methods.get(method), "relu", "cross-entropy", 1.0, (X, y))


def test_activations_that_are_all_zero(digits):
    X, y = digits
    model = lpom.mlp([64, 12, 10], "relu", seed=0)
    torch.nn.init.constant_(model[0].bias, -100.0)
    result = lpom.fit(model, X, y, epochs=2, seed=0, progress=False)
    assert math.isfinite(result.history[-1].loss)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
