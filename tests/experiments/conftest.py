"""Shared by the tests of experiments: data that train in milliseconds."""

from __future__ import annotations

import numpy as np
import pytest

from lpom.datasets import Dataset
from lpom.experiments import trials


@pytest.fixture
def blobs() -> Dataset:
    """Three clouds of points in five dimensions, 90 to train on and 30 to test."""
    rng = np.random.default_rng(0)
    y = np.arange(120) % 3
    centres = 2.0 * rng.standard_normal((3, 5))
    X = (centres[y] + rng.standard_normal((120, 5))).astype(np.float32)
    return Dataset(
        name="blobs",
        x_train=X[:90],
        y_train=y[:90],
        x_test=X[90:],
        y_test=y[90:],
        classes=("a", "b", "c"),
        feature_names=tuple("abcde"),
        notes="Made up.",
    )


@pytest.fixture
def interrupt(monkeypatch):
    """``interrupt(method_class, n)``: the n-th step from now is cut by Ctrl-C, later ones not."""

    def arrange(method: type, n: int) -> None:
        whole, calls = method.step, 0

        def step(self, *args):
            nonlocal calls
            calls += 1
            if calls == n:
                raise KeyboardInterrupt
            return whole(self, *args)

        monkeypatch.setattr(method, "step", step)

    return arrange


@pytest.fixture(autouse=True)
def kept_at_once(monkeypatch):
    """Every epoch that is finished is kept, however short."""
    monkeypatch.setattr(trials, "CUT_SECONDS", 0.0)
