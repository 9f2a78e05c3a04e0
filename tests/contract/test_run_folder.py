"""What a run leaves in its folder, and what Python makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import lpom

SHORT = ("--hidden", "8", "--epochs", "3")


def test_the_model_is_safetensors_and_nothing_is_pickled(trained):
    files = {path.name for path in trained.rglob("*") if path.is_file()}
    assert "model.safetensors" in files
    assert not any(name.endswith((".pkl", ".joblib", ".pt", ".pth")) for name in files)
    assert not (trained / "checkpoint").exists()  # once it has finished


def test_the_history_has_a_line_for_every_epoch(trained):
    epochs = [json.loads(line) for line in (trained / "history.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in epochs] == [1, 2, 3]
    assert all(line["loss"] > 0 and "seconds" in line for line in epochs)


def test_settings_versions_and_results_are_json(trained):
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(trained.glob("*.json")))
    for word in ("people.csv", "drink", "lpom", "relu", "seed", "torch", "accuracy"):
        assert word in text, word


def test_the_folder_can_be_moved(trained, table, lpom_command):
    before = lpom_command("predict", trained, table, "--proba").out
    trained.rename("elsewhere")
    assert lpom_command("predict", "elsewhere", table, "--proba").out == before


def test_a_damaged_model_is_refused(trained, table, lpom_command):
    model = trained / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-9])
    assert "model.safetensors" in lpom_command("predict", trained, table, code=2).err


def test_load_predicts_a_frame(trained, table):
    frame = pd.read_csv(table)
    model = lpom.load(trained)
    assert set(model.predict(frame)) <= {"tea", "coffee"} == set(model.classes_)
    shares = model.predict_proba(frame)
    assert shares.shape == (80, 2) and np.allclose(shares.sum(axis=1), 1, atol=1e-5)
    chosen = np.asarray(model.classes_)[shares.argmax(axis=1)]
    assert (chosen == model.predict(frame)).all()


def test_load_and_the_command_say_the_same(trained, table, lpom_command):
    lpom_command("predict", trained, table, "--out", "p.csv")
    said = pd.read_csv("p.csv")["prediction"].to_numpy(dtype=object)
    assert (said == lpom.load(trained).predict(pd.read_csv(table))).all()


def test_load_of_regression_predicts_in_the_unit_of_the_target(table, lpom_command):
    lpom_command(
        "train",
        table,
        "--target",
        "cups",
        "--ignore",
        "drink",
        "--hidden",
        16,
        "--epochs",
        300,
        "--out",
        "run",
    )
    frame = pd.read_csv(table)
    predicted = np.asarray(lpom.load("run").predict(frame), dtype=float)
    assert predicted.shape == (80,)
    assert np.corrcoef(predicted, frame["cups"])[0, 1] > 0.5


def test_load_refuses_what_is_no_run(here):
    with pytest.raises((ValueError, OSError), match="nothing"):
        lpom.load("nothing")
    assert not Path("nothing").exists()
