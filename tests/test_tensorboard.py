"""Event files for TensorBoard, read back; and what happens without the package."""

from __future__ import annotations

import sys

import pytest
from sklearn.datasets import load_iris

import lpom
from lpom.tensorboard import TensorBoard, scalars
from lpom.training.history import Epoch


def events(folder):
    """Every scalar in the event files of a folder: name -> [(step, value), ...]."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    return {
        name: [(event.step, event.value) for event in read.Scalars(name)]
        for name in read.Tags()["scalars"]
    }


def assert_logged(found, history):
    assert {step for values in found.values() for step, _ in values} == {1, 2}
    for epoch in history:
        expected = scalars(epoch)
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert dict(found[name])[epoch.epoch] == pytest.approx(value, rel=1e-6)


def test_scalars_are_those_of_the_epoch():
    epoch = Epoch(3, 2.0, 50.0, 0.75, 0.5, 0.9, 0.6, 0.8, gaps=(0.1, 0.2), rates=(1.5,))
    assert scalars(epoch) == {
        "objective": 0.75,
        "samples per second": 50.0,
        "seconds": 2.0,
        "loss/training": 0.5,
        "loss/validation": 0.6,
        "score/training": 0.9,
        "score/validation": 0.8,
        "gap/layer 1": 0.1,
        "gap/layer 2": 0.2,
        "rate/layer 1": 1.5,
    }


def test_fit_logs_every_epoch(tmp_path):
    pytest.importorskip("tensorboard")
    X, y = load_iris(return_X_y=True)
    model = lpom.mlp([4, 8, 3], seed=0)
    with TensorBoard(tmp_path) as log:
        result = lpom.fit(model, X.astype("float32"), y, epochs=2, seed=0, callbacks=[log])
    assert_logged(events(tmp_path), result.history)


def test_without_the_package_an_error_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it were not installed
    with pytest.raises(ImportError, match="pip install tensorboard"):
        TensorBoard(tmp_path)
