"""Methods beside each other, from Python and from the shell, also such as are written elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import lpom
from lpom import methods
from lpom.cli.app import app

OWN = '''
from dataclasses import dataclass
from lpom.methods import SGD

@dataclass(frozen=True, repr=False)
class Mine(SGD):
    """Steps of my own."""

    name = "mine"
'''


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def data():
    X = torch.randn(120, 4, generator=torch.Generator().manual_seed(0))
    return X, (X[:, 0] > 0).long()


def test_all_methods_start_from_the_same_weights_and_the_model_stays():
    X, y = data()
    model = lpom.mlp([4, 8, 2], seed=0)
    before = [parameter.clone() for parameter in model.parameters()]
    found = lpom.compare(model, X, y, methods=["lpom", lpom.methods.Adam()], epochs=2)
    again = lpom.compare(model, X, y, methods=["adam"], epochs=2)
    assert [trial.method for trial in found] == ["lpom", "adam"]
    assert found[1].loss == again[0].loss
    assert all(map(torch.equal, before, model.parameters()))
    assert len(found[0].curve) == 2 and found[0].seconds > 0


def test_a_function_makes_a_model_for_each_seed():
    X, y = data()
    found = lpom.compare(
        lambda seed: lpom.mlp([4, 8, 2], seed=seed), X, y, methods=["adam"], seeds=[0, 1],
        epochs={"default": 1, "adam": 3}, validation_data=(X[:50], y[:50]),
    )  # fmt: skip
    assert [trial.seed for trial in found] == [0, 1] and found[0].loss != found[1].loss
    assert len(found[0].curve) == 3 and "± " in str(found)


def test_a_method_that_cannot_has_a_reason():
    X, y = data()
    found = lpom.compare(lpom.mlp([4, 8, 2], "tanh", seed=0), X, y, methods=["tikhonov", "adam"])
    assert found[0].reason and not found[1].reason
    assert str(found).index("adam") < str(found).index("tikhonov")


def test_what_makes_no_sense_is_refused():
    X, y = data()
    model = lpom.mlp([4, 8, 2], seed=0)
    with pytest.raises(ValueError, match="once"):
        lpom.compare(model, X, y, methods=["adam", "adam"])
    with pytest.raises(ValueError, match="'mac'"):
        lpom.compare(model, X, y, methods=["adam"], epochs={"mac": 3})


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_method.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_method:Mine"
    sys.modules.pop("own_method", None)


def test_a_method_written_elsewhere_is_named_by_its_place(own):
    assert type(methods.get(own)).__name__ == "Mine"
    with pytest.raises(ValueError, match="cannot be imported"):
        methods.get("own_method:Yours")
    with pytest.raises(TypeError, match="Method"):
        methods.get("pathlib:Path")
    with pytest.raises(TypeError, match="init, objective, step"):
        methods.get("lpom.methods:Method")
    shown = call("compare", "iris", "--methods", f"lpom,{own}", "--seeds", 0, "--epochs", 2).stdout
    assert "mine" in shown and "lpom" in shown


def test_finished_trainings_are_kept():
    call_ = ("compare", "iris", "--methods", "lpom,adam", "--epochs", 2, "--out", "both")
    call(*call_, "--seeds", "0")
    first = Path("both/results.jsonl").read_text()
    call(*call_, "--seeds", "0,1")
    lines = Path("both/results.jsonl").read_text().splitlines()
    assert len(lines) == 4 and "\n".join(lines).startswith(first.strip())
    assert {json.loads(line)["trial"]["seed"] for line in lines} == {0, 1}


def test_settings_and_epochs_of_one_method():
    call(
        "compare", "iris", "--methods", "lpom,adam", "--seeds", 0, "--epochs", 2, "--out", "both",
        "--set", "adam.learning_rate=0.01", "--set-epochs", "adam=4",
    )  # fmt: skip
    lines = Path("both/results.jsonl").read_text().splitlines()
    trials = [json.loads(line)["trial"] for line in lines]
    assert [len(trial["curve"]) for trial in trials] == [2, 4]
    said = call("compare", "iris", "--methods", "lpom", "--set", "adam.mu=1", code=2).stderr
    assert "adam" in said


def test_methods_tell_what_they_are_good_for():
    shown = call("methods").stdout
    assert "good for" in shown and all(name in shown for name in methods.names())


def test_no_command_has_an_option_of_truth_values():
    for name in ("train", "predict", "report", "compare", "tune", "export", "info"):
        assert "<bool>" not in call(name, "--help").stdout.lower()
    assert "<bool>" not in call("--help").stdout.lower()


def test_misspelt_options_suggest_the_right_one():
    assert "--hidden" in call("train", "digits", "--hiden", "8", code=2).stderr
    assert "--target" in call("tune", "t.csv", "--tagret", "y", code=2).stderr
