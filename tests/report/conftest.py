"""Runs to report on, trained once for all tests of the page."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from lpom import runs
from lpom.preparation import prepare
from lpom.runs import Settings

HOSTILE = ("<script>alert(1)</script>", "</script><img src=x onerror=alert(1)>", "<!--<b>&amp;")


def train(folder, data="digits", **settings):
    """A small run, kept in a folder; what is said of the data goes to `prepare`."""
    source = {key: settings.pop(key) for key in ("target", "ignore") if key in settings}
    settings = Settings(**{"hidden": (16,), "epochs": 4, **settings})
    run = runs.train(prepare(str(data), **source, seed=settings.seed), settings, progress=False)
    folder.mkdir(parents=True)
    run.write(folder)
    return run


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """The folder of a run on digits, and the run."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    return folder, train(folder)


@pytest.fixture(scope="session")
def deep(tmp_path_factory):
    """A run of ten layers and more epochs than the other."""
    folder = tmp_path_factory.mktemp("runs") / "deep"
    return folder, train(folder, hidden=(8,) * 9, epochs=6, activation="tanh")


@pytest.fixture(scope="session")
def hostile(tmp_path_factory):
    """A run whose classes, columns and folder are named to break out of a page."""
    place = tmp_path_factory.mktemp("hostile")
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(90, 2)), columns=["x", "<i>"])
    frame["kind"] = np.array(HOSTILE)[np.arange(90) % 3]
    frame.to_csv(place / "table.csv", index=False)
    folder = place / "<img onerror=alert(2)> & co"
    return folder, train(folder, place / "table.csv", target="kind")


@pytest.fixture(scope="session")
def flats(tmp_path_factory):
    """A run that predicts a number, the run itself, and its table."""
    place, rng = tmp_path_factory.mktemp("flats"), np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "floor": rng.integers(0, 9, 300),
            "area": rng.uniform(20, 120, 300).round(1),
            "district": rng.choice(["north", "south", "centre"], 300),
        }
    )
    frame["rent"] = (12 * frame["area"] + 300 * (frame["district"] == "centre")).round(2)
    frame.to_csv(place / "flats.csv", index=False)
    folder = place / "run"
    return folder, train(folder, place / "flats.csv", target="rent", epochs=40), frame


@pytest.fixture(name="train")
def train_fixture():
    return train
