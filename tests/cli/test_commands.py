"""The shell command: what it trains, writes and prints, and how it answers mistakes."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_diabetes, load_iris
from sklearn.metrics import r2_score
from sklearn.pipeline import make_pipeline
from typer.testing import CliRunner

import lpom
from lpom import activations, methods
from lpom.cli.app import _loaded, app
from lpom.cli.folder import FILES
from lpom.cli.run import Run
from lpom.cli.tables import no_better
from lpom.estimators.data import split_rows
from lpom.methods import LPOM
from lpom.tables import TableEncoder
from lpom.training.history import History

FAST = ("--hidden", "8", "--epochs", "3")


def call(*arguments, code=0):
    """Run a command that ends with this exit code; what it prints."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.stdout


def fail(*arguments):
    """Run a command that must fail with one sentence and leave every file as it was."""
    before = snapshot()
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 2, result.output + repr(result.exception)
    assert snapshot() == before
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert "Traceback" not in result.output
    return result.stderr.removeprefix("error: ")


def snapshot():
    return {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")}


def people(n=60):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "age": rng.integers(20, 80, n),
            "height": rng.normal(1.7, 0.1, n).round(3),
            "colour": rng.choice(["red", "green", "blue"], n),
            "member": rng.random(n) < 0.5,
            "name": [f"person {k}" for k in range(n)],
        }
    )
    likes = (frame["age"] > 50) ^ (frame["colour"] == "red")
    return frame.assign(drink=np.where(likes, "tea", "coffee"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on a table of all kinds of columns, and the table."""
    folder = tmp_path_factory.mktemp("trained")
    people().to_csv(folder / "people.csv", index=False)
    call(
        "train", folder / "people.csv", "--target", "drink", "--ignore", "name", "--quiet",
        "--out", folder / "run", "--hidden", "8", "--epochs", "30", "--no-early-stopping",
    )  # fmt: skip
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LPOM_DEBUG", raising=False)


@pytest.fixture
def table():
    people().to_csv("people.csv", index=False)
    return ("people.csv", "--target", "drink", "--ignore", "name")


def test_digits_with_the_defaults_reach_96_percent():
    shown = call("train")
    assert "network  60-100-10" in shown and "run: runs/digits-1" in shown
    assert "lpom predict runs/digits-1 NEW.csv" in shown and "column" not in shown
    metrics = json.loads(Path("runs/digits-1/metrics.json").read_text())
    assert metrics["results"]["test"]["score"] >= 0.96
    accuracy = re.search(r"test *│ *\d+ │ *[\d.]+ │ *([\d.]+) %", shown)
    assert float(accuracy[1]) == pytest.approx(100 * metrics["results"]["test"]["score"], abs=0.01)
    assert f"{metrics['timing']['samples_per_second']:,.0f} samples/s" in shown


def test_a_run_folder_holds_the_whole_run(trained):
    assert sorted(path.name for path in (trained / "run").iterdir()) == sorted(FILES)
    run = Run.read(trained / "run")
    settings = run.settings
    assert len(run.history) == settings["epochs"] == 30
    assert run.history.metric == "accuracy" and run.history[-1].validation_score is None
    assert settings["method"] == {"name": "lpom", **LPOM().plain()}
    assert run.metrics["status"] == "finished" and settings["seed"] == 0
    assert settings["versions"]["lpom"] == lpom.__version__
    assert settings["data"]["rows"] == {"train": 48, "test": 12}
    assert settings["network"]["sizes"][1:] == [8, 1]
    kept = run.predictions
    assert len(kept["row"]) == 12 and set(kept["prediction"]) <= {"tea", "coffee"}
    source = people().iloc[[int(row) - 1 for row in kept["row"]]]
    assert list(source["drink"]) == kept["truth"]
    assert list(source["colour"]) == kept["column colour"] and "column name" not in kept


def test_the_same_seed_trains_the_same_model(table):
    call("train", *table, *FAST, "--quiet", "--out", "a")
    call("train", *table, *FAST, "--quiet", "--out", "b")
    call("train", *table, *FAST, "--quiet", "--out", "c", "--seed", 1)
    said = [Path(run, "predictions.csv").read_text() for run in "abc"]
    assert said[0] == said[1] != said[2]
    histories = [Run.read(Path(run)).history.column("loss") for run in "abc"]
    assert histories[0] == histories[1] != histories[2]


def test_folders_are_numbered_and_never_written_over(table):
    assert call("train", *table, *FAST, "--quiet") == "runs/people-1\n"
    assert call("train", *table, *FAST, "--quiet") == "runs/people-2\n"
    sentence = fail("train", *table, *FAST, "--out", "runs/people-1")
    assert "runs/people-1 already holds a run" in sentence and "--force" in sentence
    call("train", *table, *FAST, "--out", "runs/people-1", "--force", "--epochs", 4)
    assert len(History.from_jsonl("runs/people-1/history.jsonl")) == 4
    assert "is a file; expected a folder" in fail("train", *table, "--out", "people.csv")


def test_options_reach_the_network_the_method_and_the_loss(table):
    shown = call(
        "train", *table, "--hidden", "7,5", "--activation", "tanh", "--output-activation", "elu",
        "--mu", "3,2,1", "--set", "states.order=top-down", "--set", "states.max_sweeps=2",
        "--loss", "squared", "--alpha", 0.5, "--class-weight", "tea=2,coffee=1",
        "--learning-rate", 0.01, "--epochs", 2, "--batch-size", 16, "--seed", 5, "--device", "cpu",
        "--test-fraction", 0.5, "--out", "run",
    )  # fmt: skip
    assert "-7-5-1, tanh, elu output" in shown and "mu=[3.0, 2.0, 1.0]" in shown
    config = Run.read(Path("run")).settings
    assert config["network"]["sizes"][1:] == [7, 5, 1] and config["loss"] == "squared"
    assert config["method"]["mu"] == [3, 2, 1]
    sweeps = config["method"]["states"]["sweeps"]
    assert sweeps["max_sweeps"] == 2 and sweeps["order"] == "top-down"
    assert config["alpha"] == 0.5 and config["class_weight"] == {"tea": 2, "coffee": 1}
    assert (config["epochs"], config["batch_size"], config["seed"]) == (2, 16, 5)
    assert config["data"]["rows"]["test"] == 30


@pytest.mark.filterwarnings("ignore:training ended after max_iter")
def test_shell_and_python_give_the_same_numbers(table):
    """The estimators of the library behind their encoder, made by hand with the same settings."""
    call("train", *table, "--hidden", "8", "--epochs", 40, "--seed", 3, "--out", "run", "--quiet")
    inputs = pd.read_csv("people.csv", dtype=str).drop(columns="drink")
    codes = (people()["drink"] == "tea").astype(int).to_numpy()
    kept, _ = split_rows(60, 0.2, np.random.default_rng(3), codes)
    pipeline = make_pipeline(
        TableEncoder(ignore=["name"]),
        lpom.MLPClassifier(
            (8,), batch_size=32, max_iter=40, n_iter_no_change=40, alpha=1.0, random_state=3
        ),
    )
    pipeline.fit(inputs.iloc[kept], people()["drink"].iloc[kept])
    run = lpom.load("run")
    assert list(run.predict(inputs)) == list(pipeline.predict(inputs))
    np.testing.assert_array_equal(run.predict_proba(inputs), pipeline.predict_proba(inputs))


@pytest.mark.parametrize("name", ["iris", "wine", "breast-cancer", "diabetes"])
def test_every_bundled_table_trains(name):
    call("train", name, "--hidden", "50", "--epochs", 30, "--learning-rate", 0.01, "--out", "run")
    config = Run.read(Path("run")).metrics
    result = config["results"]["test"]["score"]
    assert result > (0.2 if name == "diabetes" else 0.8)
    baseline = config["results"]["test"]["baseline"]
    assert result > baseline["R²" if name == "diabetes" else "accuracy"]
    assert config["metric"] == ("r2" if name == "diabetes" else "accuracy")


@pytest.mark.parametrize("method", methods.names())
def test_every_method_trains_from_the_shell(method):
    call("train", "iris", *FAST, "--method", method, "--out", "run", "--quiet")
    assert Run.read(Path("run")).settings["method"]["name"] == method


def test_no_hidden_layer():
    call("train", "iris", "--hidden", "none", "--epochs", 2, "--out", "run", "--quiet")
    assert len(Run.read(Path("run")).settings["network"]["sizes"]) == 2
    assert Run.read(Path("run")).estimator.hidden_layer_sizes == ()


@pytest.mark.parametrize("ending", ["csv", "parquet", "npz", "xlsx"])
def test_a_regression_from_every_kind_of_file(ending):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 3))
    y = 1000 + 50 * (X @ [1.0, -2.0, 0.5])
    if ending == "npz":
        np.savez("data.npz", X=X, y=y)
        options = ("data.npz",)
    else:
        frame = pd.DataFrame(X, columns=["a", "b", "c"]).assign(price=y)
        write = {"csv": frame.to_csv, "parquet": frame.to_parquet, "xlsx": frame.to_excel}[ending]
        write(f"data.{ending}", index=False)
        options = (f"data.{ending}", "--target", "price")
    shown = call("train", *options, "--hidden", "50", "--learning-rate", 0.01, "--out", "run")
    assert "regression" in shown and "R²" in shown
    assert Run.read(Path("run")).metrics["results"]["test"]["score"] > 0.9
    answers = pd.read_csv(io.StringIO(call("predict", "run", f"data.{ending}")))
    assert np.corrcoef(answers["prediction"], y)[0, 1] > 0.95
    assert abs(answers["prediction"].mean() - y.mean()) < 20
    assert "no probabilities" in fail("predict", "run", f"data.{ending}", "--proba")


def test_predictions_are_names_on_stdout_or_in_a_file(trained):
    people(9).to_csv("new.csv", index=False)
    people(9).drop(columns=["drink", "name"]).to_csv("bare.csv", index=False)
    shown = call("predict", trained / "run", "new.csv")
    rows = list(csv.DictReader(io.StringIO(shown)))
    assert len(rows) == 9 and {row["prediction"] for row in rows} <= {"tea", "coffee"}
    assert call("predict", trained / "run", "bare.csv") == shown  # the target is not looked at
    assert call("predict", trained / "run", "new.csv", "--out", "answers.csv") == ""
    assert Path("answers.csv").read_text() == shown
    assert "answers.csv is there already" in fail(
        "predict", trained / "run", "new.csv", "--out", "answers.csv"
    )
    call("predict", trained / "run", "new.csv", "--out", "answers.csv", "--force")
    assert "--out names the table to predict" in fail(
        "predict", trained / "run", "new.csv", "--out", "new.csv"
    )


def test_predictions_are_those_of_a_plain_forward_pass(trained):
    model = lpom.load(trained / "run")
    frame = pd.read_csv(trained / "people.csv").drop(columns=["drink", "name"])
    shown = call("predict", trained / "run", trained / "people.csv", "--proba")
    answers = pd.read_csv(io.StringIO(shown))
    outputs = model[-1].to_torch()(torch.from_numpy(model[0].transform(frame)))
    tea = outputs.sigmoid().detach().numpy()[:, 0]
    np.testing.assert_allclose(answers["probability_tea"], tea, atol=1e-6)
    np.testing.assert_allclose(answers["probability_coffee"], 1 - tea, atol=1e-6)
    assert list(answers["prediction"]) == ["tea" if share > 0.5 else "coffee" for share in tea]
    assert list(model.classes_) == ["coffee", "tea"]
    assert list(model.predict(frame)) == list(answers["prediction"])


def test_what_is_written_and_how_good_it_is_are_said(trained):
    people(9).assign(extra=1).to_csv("new.csv", index=False)
    command = ["predict", str(trained / "run"), "new.csv", "--out", "a.csv", "--keep", "name"]
    result = CliRunner().invoke(app, command)
    written = pd.read_csv("a.csv")
    assert list(written.columns) == ["name", "prediction"] and len(written) == 9
    assert list(written["name"]) == [f"person {k}" for k in range(9)]
    right = np.mean(written["prediction"] == people(9)["drink"])
    assert "wrote 9 predictions of drink to a.csv\n" in result.stderr
    assert f"accuracy {100 * right:.2f} %" in result.stderr
    assert "on the 9 rows that have drink" in result.stderr
    everything = call("predict", trained / "run", "new.csv", "--keep", "all")
    assert everything.splitlines()[0] == ",".join([*people(9).columns, "extra", "prediction"])
    sentence = fail("predict", trained / "run", "new.csv", "--keep", "nam")
    assert "unknown column to keep 'nam'; did you mean 'name'" in sentence


def test_all_problems_of_a_file_come_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    people().assign(pay="29,477").to_csv("people.csv", index=False)
    said = fail("train", "people.csv", "--target", "drnk", "--ignore", "nme", "--as", "agee=date")
    for word in (
        "'drnk'; did you mean 'drink'",
        "'nme'; did you mean 'name'",
        "'agee'",
        "'29,477'",
    ):
        assert word in said


def test_errors_of_several_targets_stand_by_their_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    people().assign(pay=lambda t: 1000.0 * t["age"] ** 2).to_csv("people.csv", index=False)
    both = ("--target", "pay", "--target", "height")
    said = call("train", "people.csv", *both, *FAST, "--out", "run")
    for name in ("MAE of pay", "RMSE of pay", "MAE of height", "RMSE of height"):
        assert name in said
    assert "e+0" not in said[said.index("MAE of pay") :]  # large numbers are written out
    assert "MAE of height" in CliRunner().invoke(app, ["predict", "run", "people.csv"]).stderr


def test_help_breaks_its_lines_where_the_terminal_ends():
    lines = call("train", "--help").splitlines()
    first = next(k for k, line in enumerate(lines) if "are inferred from the" in line)
    assert all(len(line.strip()) > 60 for line in lines[first : first + 2])


@pytest.mark.parametrize("name", ["train", "tune", "predict", "report", "compare"])
def test_examples_in_the_help_are_commands_that_are_understood(name):
    said = call(name, "--help")
    lines = [line.strip() for line in said.splitlines() if line.startswith("     ")]
    examples = [line.rpartition("| ")[2] for line in lines if " lpom " in f" {line}"]
    assert len(examples) >= 2
    for example in examples:
        lpom_, command, *words = shlex.split(example)
        assert (lpom_, command) == ("lpom", name)
        _loaded(name).make_context(name, words)  # raises for an option or argument it has not


def completed(*words):
    """What the shell offers for the last word."""
    env = {
        "_LPOM_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(("lpom", *words)),
        "COMP_CWORD": str(len(words)),
    }
    return CliRunner().invoke(app, [], env=env, prog_name="lpom").stdout.split()


def test_commands_options_and_names_are_completed():
    assert completed("tr") == ["train"]
    assert completed("train", "--ta") == ["--target", "--task"]
    assert completed("train", "di") == ["digits", "diabetes"]
    assert completed("tune", "flats.csv", "--method", "adm") == ["admm", "admm-hashing"]


def test_a_kind_of_weights_is_set_along_with_what_is_in_it():
    options = ("--set", "weights.ridge=0.25", "--set", "weights=exact")
    said = call("train", "iris", *FAST, *options, "--out", "run")
    assert "weights.ridge=0.25" in said
    assert Run.read(Path("run")).settings["method"]["weights"]["exact"]["ridge"] == 0.25
    shown = " ".join(call("info", "run").split())
    assert "states.max_sweeps=1" in shown and "weights=exact, " in shown and "{" not in shown


def test_what_is_said_of_a_run_that_is_no_better_than_the_majority():
    same = {"accuracy": 0.9, "balanced accuracy": 0.5, "answer": "always 'no'"}
    test = {"accuracy": 0.9, "balanced accuracy": 0.8, "AUC": 0.9, "baseline": same}

    def told(class_weight=None):
        metrics = {"metric": "accuracy", "results": {"test": test}}
        return no_better(SimpleNamespace(metrics=metrics, settings={"class_weight": class_weight}))

    assert re.search(r"told apart \(AUC 0.90\): --class-weight balanced", told())
    assert told("balanced") == ""  # which costs accuracy
    test["AUC"], test["balanced accuracy"] = 0.5, 0.5
    assert "more rows" in told() and "more rows" in told("balanced")
    test["accuracy"] = 0.91
    assert told() == ""


def test_the_epoch_of_the_weights_that_were_kept_is_said():
    said = call("train", "iris", "--early-stopping", "--epochs", 12, "--out", "run")
    losses = Run.read(Path("run")).history.column("validation_loss")
    told = f"{len(losses)} epochs; the weights are those of epoch {1 + losses.index(min(losses))},"
    assert told in said and told in call("info", "run")
    assert "the weights are those" not in call("train", "iris", *FAST)


def test_numbers_are_predicted_with_the_digits_that_they_have(tmp_path):
    call("train", "diabetes", *FAST, "--out", "run", "--quiet")
    frame = load_diabetes(as_frame=True).data[:5].astype(np.float32)
    frame.to_csv("new.csv", index=False)
    said = call("predict", "run", "new.csv").splitlines()[1:]
    assert all(len(text.strip("-").replace(".", "")) <= 9 for text in said)
    known = lpom.load("run").predict(frame)
    np.testing.assert_allclose(np.array(said, float), known, rtol=3e-7)  # two units of float32


def test_standard_input_and_output():
    text = people().drop(columns="name").to_csv(index=False)
    options = ["train", "-", "--target", "drink", *FAST, "--out", "run", "--quiet"]
    assert CliRunner().invoke(app, options, input=text).exit_code == 0
    assert Run.read(Path("run")).settings["data"]["sha256"] is None
    Path("new.csv").write_text(text)
    piped = CliRunner().invoke(app, ["predict", "run", "-"], input=text)
    assert piped.stdout == call("predict", "run", "new.csv")


def test_several_targets_give_several_outputs():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(150, 2)), columns=["a", "b"])
    frame["far"], frame["near"] = 1e4 + 500 * frame["a"], frame["b"] - frame["a"]
    frame["up"], frame["left"] = np.where(frame["a"] > 0, "u", "d"), frame["b"] < 0
    frame.to_csv("t.csv", index=False)
    both = ("--target", "far", "--target", "near", "--ignore", "up", "--ignore", "left")
    call("train", "t.csv", *both, "--epochs", 60, "--learning-rate", 0.01, "--out", "numbers")
    answers = pd.read_csv(io.StringIO(call("predict", "numbers", "t.csv")))
    assert r2_score(frame[["far", "near"]], answers) > 0.95
    assert list(answers.columns) == ["prediction_far", "prediction_near"]
    labels = ("--target", "up", "--target", "left", "--ignore", "far", "--ignore", "near")
    call("train", "t.csv", *labels, "--epochs", 60, "--learning-rate", 0.01, "--out", "labels")
    answers = pd.read_csv(io.StringIO(call("predict", "labels", "t.csv", "--proba")))
    assert (answers["prediction_up"] == frame["up"]).mean() > 0.9
    assert (answers["prediction_left"] == frame["left"]).mean() > 0.9
    assert ((answers["probability_left_True"] > 0.5) == answers["prediction_left"]).all()
    sentence = fail("train", "t.csv", "--target", "far", "--target", "up")
    assert "'far' is a number, 'up' is one of 2 classes" in sentence


def test_balanced_classes_from_the_shell():
    rng = np.random.default_rng(0)
    rare = np.arange(400) % 20 == 0
    frame = pd.DataFrame(rng.normal(size=(400, 3)) + 1.2 * rare[:, None], columns=list("abc"))
    frame.assign(sick=np.where(rare, "yes", "no")).to_csv("t.csv", index=False)
    options = ("t.csv", "--target", "sick", "--quiet", "--test-fraction", 0.3)
    call("train", *options, "--out", "plain")
    call("train", *options, "--out", "balanced", "--class-weight", "balanced")
    plain, balanced = (Run.read(Path(run)).metrics["results"] for run in ("plain", "balanced"))
    name = "balanced accuracy"
    assert balanced["train"][name] > plain["train"][name] + 0.1
    assert plain["test"]["baseline"] == {
        "answer": "always 'no'", "accuracy": 0.95, name: 0.5, "F1": pytest.approx(0.487, abs=1e-3),
        "AUC": 0.5,
    }  # fmt: skip
    sentence = fail("train", *options, "--class-weight", "yse=3")
    assert "unknown class of 'sick' 'yse'; did you mean 'yes'" in sentence


def test_an_array_without_names_is_taken_in_order():
    call("train", "iris", *FAST, "--out", "run", "--quiet")
    iris = load_iris(as_frame=True).data.astype(np.float32)
    iris.to_csv("named.csv", index=False)
    np.savez("rows.npz", X=iris.to_numpy())
    assert call("predict", "run", "rows.npz") == call("predict", "run", "named.csv")
    np.savez("few.npz", X=iris.to_numpy()[:, :3])
    assert "lacks 'sepal length (cm)'" in fail("predict", "run", "few.npz")


def test_info_tells_what_a_run_is(trained):
    shown = " ".join(call("info", trained / "run").split())
    for part in ("people.csv", "-8-1, relu", "lpom (", "30 of 30 epochs", "finished"):
        assert part in shown
    assert "from 4 of 5 columns" in shown and "drink: classification, 2 classes" in shown
    assert "name │ dropped │ as asked for" in shown and "always 'coffee'" in shown


def test_lists_name_everything_there_is():
    shown = call("methods")
    assert all(name in shown for name in methods.names())
    shown = call("activations")
    assert all(name in shown for name in activations.names() + activations.vector_names())
    assert f"lpom {lpom.__version__}" in call("--version")


def test_an_interrupted_run_is_kept(table, monkeypatch):
    ends = iter([None, None, None])  # the first is that of the rehearsal

    def stop(self, problem, batch, state):
        if next(ends, "now") == "now":
            raise KeyboardInterrupt

    monkeypatch.setattr(LPOM, "end_epoch", stop)
    shown = call("train", *table, "--hidden", "8", "--epochs", 50, "--out", "run", code=130)
    assert "interrupted after 2 epochs" in shown
    run = Run.read(Path("run"))
    assert run.metrics["status"] == "interrupted" and len(run.history) == 2
    call("predict", "run", "people.csv")


def test_interrupted_before_the_first_epoch_ended(table, monkeypatch):
    step, begun = LPOM.step, iter([None])  # the first is that of the rehearsal

    def stop(*given):
        if next(begun, "now") == "now":
            raise KeyboardInterrupt
        return step(*given)

    monkeypatch.setattr(LPOM, "step", stop)
    call("train", *table, "--hidden", "8", "--out", "run", code=130)
    assert len(Run.read(Path("run")).history) == 0
    call("info", "run")


def test_interrupted_before_training_leaves_no_folder(table, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(LPOM, "step", stop)
    result = CliRunner().invoke(app, ["train", *table, "--out", "run"])
    assert result.exit_code == 130 and result.stderr == "interrupted\n"
    assert not Path("run").exists()


def test_a_warning_is_a_line(trained):
    people().drop(columns="drink").assign(colour="pink").to_csv("new.csv", index=False)
    with warnings.catch_warnings(action="default"):
        result = CliRunner().invoke(app, ["predict", str(trained / "run"), "new.csv"])
    assert result.exit_code == 0 and "warning: " in result.stderr and "pink" in result.stderr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("digist",), "unknown data set 'digist'; did you mean 'digits'.*ends in .csv"),
        (("iris", "--target", "x"), "'iris' brings its own columns.*--target is for files"),
        (("iris", "--test-fraction", 0.5), "--test-fraction is for files"),
        (("iris", "--method", "lpon"), "unknown method 'lpon'; did you mean 'lpom'"),
        (("iris", "--activation", "rleu"), "unknown activation 'rleu'; did you mean 'relu'"),
        (("iris", "--loss", "sqared"), "unknown loss 'sqared'; did you mean 'squared'"),
        (
            ("iris", "--set", "states.order=topdown"),
            "unknown order 'topdown'; did you mean 'top-down'",
        ),
        (("iris", "--set", "mu"), "--set takes NAME=VALUE, e.g. states.max_sweeps=3, got 'mu'"),
        (("iris", "--hidden", "8,x"), "--hidden takes comma-separated integers.*got '8,x'"),
        (("iris", "--hidden", "0"), "integers above 0.*got"),
        (("iris", "--mu", "1,2,3"), "mu.*2.*got 3"),
        (("iris", "--mu", "-1"), "mu must be positive.*got -1"),
        (("iris", "--mu", "many"), "--mu takes comma-separated numbers, got 'many'"),
        (("iris", "--set", "states.max_sweeps=0"), "max_sweeps.*above 0, got 0"),
        (("iris", "--method", "sgd", "--mu", 3), "SGD has no setting 'mu'; it has learning_rate"),
        (("iris", "--learning-rate", "-1"), "learning_rate must be a number above 0, got -1"),
        (("iris", "--epochs", "0"), "epochs must be an integer above 0, got 0"),
        (("iris", "--batch-size", 0), "batch_size must be an integer above 0, got 0"),
        (("iris", "--alpha", -1), "alpha.*-1"),
        (("iris", "--class-weight", "fair"), "--class-weight takes.*or balanced, got 'fair'"),
        (("iris", "--class-weight", "a=-1"), "--class-weight takes weights from 0 on, got a=-1"),
        (("iris", "--set", "most=3"), "LPOM has no setting 'most'; it has mu.* states.max_sweeps,"),
        (("iris", "--set", "weights.ridge=1"), "Adaptive has no setting 'ridge'; it has optimizer"),
        (("diabetes", "--class-weight", "balanced"), "class weights are for one column of classes"),
        (("iris", "--device", "abacus"), "there is no device 'abacus' here"),
        (("diabetes", "--loss", "cross-entropy"), "loss='cross-entropy' is for classes"),
    ],
)
def test_settings_that_make_no_sense(options, sentence):
    assert re.search(sentence, fail("train", *options))


TABLES = {
    "empty.csv": "",
    "names.csv": "a,b,y\n",
    "one-class.csv": "a,y\n" + "1,x\n2,x\n" * 5,
    "missing-y.csv": "a,y\n1,\n2,\n3,\n",
    "two-ways.csv": "a,b,y\n" + '"1,200",01/02/2024,x\n"3,456",03/04/2024,z\n' * 5,
    "no-number.csv": "a,y\n" + "1,2.5\n2,3.5\n" * 20 + "3,oh\n",
    "short.csv": "a,y\n1,x\n2,z\n",
    "same.csv": "a,y\n" + "1,x\n1,z\n" * 5,
    "ragged.csv": "a,y\n1,x\n2,z,7\n",
    "good.csv": "a,label\n" + "1,x\n2,z\n" * 5,
    "text.docx": "words",
}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("empty.csv", "should start with a line of column names, but is empty"),
        ("names.csv", "should hold rows of data, got none"),
        ("one-class.csv", "the target 'y' has one class only, 'x'; at least two are needed"),
        ("missing-y.csv", "the target 'y' has no value in any row"),
        ("two-ways.csv", "'1,200'.*1200 or 1.200: say --thousands.*'b' .* --date-order dmy or mdy"),
        ("no-number.csv", "the target 'y' holds 'oh' in row 41"),
        ("short.csv", "has 2 rows: 0 to test and 2 to train on"),
        ("same.csv", "no column to learn from.*'a': "),
        ("ragged.csv", "cannot be read"),
        ("good.csv", "unknown column to predict 'y'. Known: a, label"),
        ("text.docx", "should end in .csv, .tsv"),
        ("absent.csv", "There is no file absent.csv"),
    ],
)
def test_tables_that_cannot_be_trained_on(name, sentence):
    for file, text in TABLES.items():
        Path(file).write_text(text)
    assert re.search(sentence, fail("train", name, "--target", "y"))


@pytest.mark.parametrize("name", ["cut.parquet", "cut.npz", "cut.csv.gz"])
def test_a_file_cut_off(name):
    whole = Path(name.replace("cut", "whole"))
    if whole.suffix == ".npz":
        np.savez(whole, X=np.arange(40).reshape(10, 4), y=np.arange(10) % 2)
    else:
        (people().to_parquet if whole.suffix == ".parquet" else people().to_csv)(whole)
    Path(name).write_bytes(whole.read_bytes()[:-50])
    assert "cut off" in fail("train", name, "--target", "drink")


def test_a_file_without_a_target_and_a_wrong_fraction(table):
    assert re.search("which column.*--target.*'age', 'height'", fail("train", "people.csv"))
    assert "between 0 and 1, got 1.5" in fail("train", *table, "--test-fraction", 1.5)
    sentence = fail("train", *table[:3], "--ignore", "nam", "--as", "age=nmber")
    assert "unknown column 'nam'; did you mean 'name'" in sentence
    assert "unknown kind of column 'nmber'; did you mean 'number'" in sentence
    sentence = fail("train", *table, "--task", "regression")
    assert re.search("the target 'drink' holds '(tea|coffee)' in row 1", sentence)
    assert "did you mean 'regression'" in fail("train", *table, "--task", "regresion")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.drop(columns="age"), "the table lacks 'age'; the columns expected are 'age'"),
        (lambda t: t[:0], "should hold rows of data, got none"),
    ],
)
def test_tables_that_do_not_fit_a_model(trained, change, sentence):
    change(people(5)).to_csv("new.csv", index=False)
    Path("old.csv").write_text("kept")
    command = ("predict", trained / "run", "new.csv", "--out", "old.csv", "--force")
    assert re.search(sentence, fail(*command))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.assign(colour="mauve"), "column 'colour' holds 'mauve'"),
        (lambda t: t.assign(age="old"), "'age' holds 'old' in row 1, which is no number (5 such)"),
        (lambda t: t.assign(height=np.nan), "column 'height' has no value in 5 rows"),
    ],
)
def test_what_is_unlike_training_is_a_warning(trained, change, sentence):
    change(people(5)).to_csv("new.csv", index=False)
    with warnings.catch_warnings(action="default"):
        result = CliRunner().invoke(app, ["predict", str(trained / "run"), "new.csv"])
    assert result.exit_code == 0 and result.stdout.count("\n") == 6
    assert f"warning: unlike in training: {sentence}" in result.stderr.replace(
        "column 'age'", "'age'"
    )


def test_a_run_that_was_tampered_with(trained):
    run = Path("run")
    run.mkdir()
    for name in FILES:
        (run / name).write_bytes((trained / "run" / name).read_bytes())
    content = (run / "model.safetensors").read_bytes()
    table = trained / "people.csv"
    for command in (("predict", run, table), ("info", run)):
        (run / "model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert "checksum does not match" in fail(*command)
        (run / "model.safetensors").write_bytes(content[:-9])
        assert "is cut off or damaged" in fail(*command)
        (run / "model.safetensors").unlink()
        assert "has no model.safetensors in it" in fail(*command)
    (run / "model.safetensors").write_bytes(content)
    settings = (run / "settings.json").read_text()
    (run / "settings.json").write_text("{")
    assert "missing or damaged" in fail("info", run)
    (run / "settings.json").write_text(settings)
    other = json.loads((run / "metrics.json").read_text()) | {"sha256": "of another"}
    (run / "metrics.json").write_text(json.dumps(other))
    assert "files of two runs" in fail("info", run)
    assert "does not exist; expected the folder of a run" in fail("info", "nowhere")


def test_a_model_of_something_else_is_named(trained):
    shutil.copytree(trained / "run", "run")
    lpom.save(lpom.mlp([6, 2], seed=0), "run/model.safetensors")
    assert "no pipeline" in fail("predict", "run", trained / "people.csv")


def test_a_traceback_is_there_for_who_asks(monkeypatch):
    monkeypatch.setenv("LPOM_DEBUG", "1")
    result = CliRunner().invoke(app, ["train", "digist"])
    assert isinstance(result.exception, ValueError)


def test_the_command_itself(trained):
    """In a process of its own: exit code, both streams, no traceback."""
    command = [sys.executable, "-c", "from lpom.cli import main; main()"]
    done = subprocess.run(
        [*command, "predict", str(trained / "run"), "absent.csv"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(lpom.__file__).parents[1])},
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: There is no file absent.csv")
    assert done.stderr.count("\n") == 1


def test_columns_named_like_those_of_an_array_go_by_their_names():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.standard_normal((200, 2)), columns=["X1", "X0"])
    frame["y"] = np.where(frame["X1"] > 0, "p", "q")
    frame.to_csv("one.csv", index=False)
    frame[["X0", "X1"]].to_csv("other.csv", index=False)
    call("train", "one.csv", "--target", "y", *FAST, "--out", "run", "--quiet")
    assert call("predict", "run", "one.csv") == call("predict", "run", "other.csv")


def test_texts_that_look_like_numbers_are_still_texts():
    codes = ["007", "A12", "1.50", "true"] * 20
    frame = pd.DataFrame({"code": codes, "y": np.arange(80) % 4 < 2})
    frame.to_csv("codes.csv", index=False)
    call("train", "codes.csv", "--target", "y", *FAST, "--out", "run", "--quiet")
    together = pd.read_csv(io.StringIO(call("predict", "run", "codes.csv")))["prediction"]
    for k in range(4):
        pd.DataFrame({"code": codes[k : k + 1] * 3}).to_csv("new.csv", index=False)
        answers = pd.read_csv(io.StringIO(call("predict", "run", "new.csv")))["prediction"]
        assert set(answers) == {together[k]}


def test_what_is_not_needed_may_be_missing(trained):
    frame = people()
    frame.loc[::2, "name"] = None
    frame.to_csv("gaps.csv", index=False)
    call("train", "gaps.csv", "--target", "drink", "--ignore", "name", *FAST, "--quiet")
    expected = call("predict", trained / "run", trained / "people.csv")
    frame["drink"] = None
    frame.to_csv("gaps.csv", index=False)
    assert call("predict", trained / "run", "gaps.csv") == expected


def test_a_folder_that_cannot_be_written_to_is_noticed_before_training(table, monkeypatch):
    def refuse(*args, dir, **kwargs):
        raise PermissionError(13, "Permission denied", f"{dir}/tmpxyz")

    Path("shut").mkdir()
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    monkeypatch.setattr("lpom.cli.run.train", None)
    assert fail("train", *table, *FAST, "--out", "shut") == "shut: Permission denied.\n"


def test_a_failed_run_leaves_the_old_one_and_its_report(table):
    call("train", *table, *FAST, "--out", "run", "--quiet")
    Path("run/report.html").write_text("a report")
    fail("train", *table, *FAST, "--out", "run", "--force", "--learning-rate", "1e38")
    assert Path("run/report.html").exists()
    call("train", *table, *FAST, "--out", "run", "--force", "--quiet")
    assert not Path("run/report.html").exists()


@pytest.mark.filterwarnings("ignore")
def test_a_network_whose_answers_are_infinite_is_not_kept():
    wild = ("--learning-rate", "1e9", "--method", "adam", "--epochs", 1, "--no-early-stopping")
    said = fail("train", "diabetes", *wild, "--out", "run")
    assert re.search(r"after training, although all weights are finite.*smaller learning", said)
    assert not Path("run").exists()


def test_a_run_that_diverges_keeps_the_epochs_before(monkeypatch):
    step, steps = LPOM.step, []

    def spoiled(self, problem, batch, state):
        outputs = step(self, problem, batch, state)
        steps.append(len(batch))
        if len(problem.graph.parameters[0]) == 8 and sum(steps) > 300:
            problem.graph.parameters[0].data.fill_(torch.nan)
        return outputs

    settings = ("--hidden", 8, "--epochs", 9, "--batch-size", 10, "--no-early-stopping")
    with monkeypatch.context() as patch:
        patch.setattr(LPOM, "step", spoiled)
        result = CliRunner().invoke(app, [*map(str, ("train", "iris", *settings, "--out", "run"))])
    assert result.exit_code == 2
    assert re.search(r"error: weights became NaN.* were restored", result.stderr)
    config = json.loads(Path("run/metrics.json").read_text())
    assert config["status"] == "diverged" and config["results"]["test"]["loss"] < 10
    assert 0 < len(Path("run/history.jsonl").read_text().splitlines()) < 9
    call("report", "run")
    assert "diverged" in call("info", "run")


@pytest.fixture(scope="module")
def formulas(tmp_path_factory):
    """A run on a table whose classes a spreadsheet would take for formulas."""
    folder = tmp_path_factory.mktemp("formulas")
    x = np.linspace(-1, 1, 60)
    names = np.where(x < -0.3, "=cmd()", np.where(x < 0.3, "-1", "plain"))
    pd.DataFrame({"x": x, "kind": names}).to_csv(folder / "table.csv", index=False)
    arguments = ("--target", "kind", "--task", "classification", "--out", folder / "run", *FAST)
    call("train", folder / "table.csv", *arguments)
    return folder


def test_predictions_are_no_formulas(formulas):
    call("predict", formulas / "run", formulas / "table.csv", "--out", formulas / "p.csv")
    answers = pd.read_csv(formulas / "p.csv", dtype=str)["prediction"]
    assert set(answers) <= {"'=cmd()", "-1", "plain"}


def test_a_config_has_no_path_of_the_machine(formulas):
    text = (formulas / "run" / "settings.json").read_text()
    assert str(formulas) not in text
    assert json.loads(text)["data"]["source"]["data"] == "../table.csv"
    assert Run.read(formulas / "run").settings["data"]["source"]["data"] == str(
        formulas / "table.csv"
    )


@pytest.mark.parametrize("text", ["null", "[]", "3", "[" * 100_000, '{"data": 3}'])
def test_a_config_that_is_none_is_named(formulas, tmp_path, text):
    for name in FILES:
        (tmp_path / name).write_bytes((formulas / "run" / name).read_bytes())
    for name in ("settings.json", "metrics.json"):
        content = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text)
        for command in ("info", "report"):
            assert name in fail(command, tmp_path)
        (tmp_path / name).write_text(content)


def test_a_seed_below_zero_is_refused_in_words(tmp_path):
    said = fail("train", "iris", "--seed", -1, "--out", tmp_path / "run")
    assert "--seed" in said


@pytest.mark.parametrize(
    "typed, offered", [("lpom tu", "tune"), ("lpom train --hid", "--hidden")], ids=str
)
def test_a_shell_completes_commands_and_their_options(typed, offered):
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    env = {"_LPOM_COMPLETE": "complete_bash", "_TYPER_COMPLETE_TESTING": "True", **words}
    result = CliRunner().invoke(app, [], env=env, prog_name="lpom")
    assert result.stdout.split() == [offered]


class TestTargetsOfOtherFiles:
    """What a file to predict says of its rows, and how it is written there."""

    def trained(self, answers):
        rng = np.random.default_rng(0)
        frame = pd.DataFrame({"a": rng.normal(size=80), "b": rng.normal(size=80)})
        frame["y"] = np.where(frame["a"] > 0, *answers)
        frame.to_csv("t.csv", index=False)
        call("train", "t.csv", "--target", "y", "--out", "run", "--quiet", *FAST)
        return frame

    def said(self, frame):
        frame.to_csv("new.csv", index=False)
        command = ["predict", "run", "new.csv", "--out", "p.csv"]
        return CliRunner().invoke(app, command).stderr

    def test_numbers_of_classes_beside_a_missing_one(self):
        frame = self.trained((1, 0)).astype({"y": float})  # as pandas writes them then
        frame.loc[0, "y"] = np.nan
        assert "on the 79 rows that have y" in self.said(frame)

    def test_classes_that_training_never_met(self):
        frame = self.trained(("high", "low"))
        frame.loc[:29, "y"] = "mid"
        said = self.said(frame)
        assert "on the 50 rows with a known y" in said
        assert "30 rows have a y that training never met or that can't be read" in said
        assert "'mid', for example" in said

    def test_whole_numbers_are_classes_with_and_without_a_point(self):
        frame = self.trained((1, 0)).astype({"y": str})
        frame.loc[::2, "y"] += ".0"
        frame.to_csv("mixed.csv", index=False)
        call("train", "mixed.csv", "--target", "y", "--out", "again", "--quiet", *FAST)
        assert list(lpom.load("again").classes_) == [0, 1]


def test_row_numbers_without_a_name_are_no_input():
    """pandas writes the index of a table into a first column without a name."""
    frame = people().drop(columns="name").sample(frac=1, random_state=0)
    frame.to_csv("shuffled.csv")
    plan = call("train", "shuffled.csv", "--target", "drink", "--out", "run", *FAST)
    assert re.search(r"column 1\s+│\s+dropped", plan)
    frame.reset_index(drop=True).to_csv("counted.csv")
    call("predict", "run", "counted.csv", "--out", "counted-p.csv")
    frame.to_csv("plain.csv", index=False)
    call("predict", "run", "plain.csv", "--out", "plain-p.csv")
    assert Path("counted-p.csv").read_text() == Path("plain-p.csv").read_text()


def test_the_rate_that_was_given_is_shown(table):
    call(
        "train", "people.csv", "--target", "drink", "--learning-rate", "0.5", "--out", "run", *FAST
    )
    assert "learning_rate=0.5" in call("info", "run")


def test_classes_of_one_row_each_are_refused_before_training():
    Path("s.csv").write_text("a,y\n1,a\n2,b\n3,c\n4,d\n5,e\n6,f\n")
    said = fail("train", "s.csv", "--target", "y", "--epochs", "2", "--out", "run")
    assert "no row to test has a class of 'y'" in said and "6 classes in 6 rows" in said


def test_predictions_far_from_zero_are_written_with_what_differs():
    a = np.random.default_rng(0).normal(size=200)
    pd.DataFrame({"a": a, "y": (1_700_000_000 + 300 * a).round(3)}).to_csv("t.csv", index=False)
    call("train", "t.csv", "--target", "y", "--out", "run", "--quiet", "--epochs", "20")
    call("predict", "run", "t.csv", "--out", "p.csv")
    assert pd.read_csv("p.csv")["prediction"].nunique() == 200
