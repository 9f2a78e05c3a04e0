"""A simulator of analogue hardware, trained through by `measured` as it is."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import lpom
from lpom.activations import measured


def analogvnn_unit():
    """Few levels between -1 and 1, and noise on top."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("analogvnn", reason="pip install analogvnn")
        from analogvnn.nn.noise.GaussianNoise import GaussianNoise
        from analogvnn.nn.normalize.Clamp import Clamp
        from analogvnn.nn.precision.ReducePrecision import ReducePrecision

        noise = GaussianNoise(std=0.03, precision=8)
    return nn.Sequential(Clamp(), ReducePrecision(precision=8), noise)


def test_a_simulated_device_is_trained_through_unchanged():
    torch.manual_seed(0)
    unit = analogvnn_unit()
    X, y = load_digits(return_X_y=True)
    X = (X / 16).astype(np.float32)
    device = measured(unit)
    model = nn.Sequential(nn.Linear(64, 20), device.to_module(), nn.Linear(20, 10))
    lpom.fit(model, X[:1300], y[:1300], loss="cross-entropy", epochs=15, batch_size=50, seed=0)
    _, accuracy = lpom.evaluate(model, X[1300:], y[1300:], loss="cross-entropy")
    assert accuracy > 0.8
    assert float(device.noise.mean()) > 0
