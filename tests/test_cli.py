"""The shell command: what it trains, writes and prints, and how it answers mistakes."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import lpom
from lpom import activations, datasets, methods, plots, saving
from lpom.cli import app
from lpom.folders import FILES
from lpom.methods import LPOM
from lpom.runs import Run, read_predictor
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
        "--out", folder / "run", "--hidden", "8", "--epochs", "30",
    )  # fmt: skip
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LPOM_DEBUG", raising=False)
    # drawing takes longer than these trainings; `trained` draws, and tests/test_plots.py looks
    monkeypatch.setattr(plots, "curves", lambda history, path: Path(path).touch())


@pytest.fixture
def table():
    people().to_csv("people.csv", index=False)
    return ("people.csv", "--target", "drink", "--ignore", "name")


def test_digits_with_the_defaults_reach_96_percent():
    shown = call("train")
    assert "network  60-300-100-10" in shown and "run: runs/digits-1" in shown
    config = json.loads(Path("runs/digits-1/config.json").read_text())
    assert config["results"]["test"]["score"] >= 0.96
    accuracy = re.search(r"test *│ *360 │ *[\d.]+ │ *([\d.]+) %", shown)
    assert float(accuracy[1]) == pytest.approx(100 * config["results"]["test"]["score"], abs=0.01)
    assert f"{config['timing']['samples_per_second']:,.0f} samples/s" in shown


def test_a_run_folder_holds_the_whole_run(trained):
    assert sorted(path.name for path in (trained / "run").iterdir()) == sorted(FILES)
    run = Run.read(trained / "run")
    assert len(run.history) == run.config["epochs"] == 30
    assert run.history.metric == "accuracy" and run.history[-1].validation_score is not None
    assert run.config["method"] == {"name": "lpom", **LPOM().get_params()}
    assert run.config["status"] == "finished" and run.config["seed"] == 0
    assert run.config["versions"]["lpom"] == lpom.__version__
    assert run.config["data"]["rows"] == {"train": 43, "validation": 5, "test": 12}
    assert (trained / "run" / "curves.png").read_bytes()[1:4] == b"PNG"
    # age, height, member, and three colours
    assert run.config["network"]["sizes"] == [6, 8, 2]


def test_the_same_seed_trains_the_same_model(table):
    call("train", *table, *FAST, "--quiet", "--out", "a")
    call("train", *table, *FAST, "--quiet", "--out", "b")
    call("train", *table, *FAST, "--quiet", "--out", "c", "--seed", 1)
    models = [Path(run, "model.safetensors").read_bytes() for run in "abc"]
    assert models[0] == models[1] != models[2]


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
        "--mu", "3,2,1", "--order", "top-down", "--sweeps", 2, "--weights", "exact", "--loss",
        "squared", "--epochs", 2, "--batch-size", 16, "--seed", 5, "--device", "cpu",
        "--test-fraction", 0.5, "--out", "run",
    )  # fmt: skip
    assert "network  6-7-5-2, tanh, elu output" in shown and "mu=[3.0, 2.0, 1.0]" in shown
    config = Run.read(Path("run")).config
    assert config["network"]["sizes"] == [6, 7, 5, 2] and config["loss"]["name"] == "squared"
    assert config["method"]["mu"] == [3, 2, 1] and config["method"]["sweeps"] == 2
    assert config["method"]["order"] == "top-down" and config["method"]["weights"] == "exact"
    assert (config["epochs"], config["batch_size"], config["seed"]) == (2, 16, 5)
    assert config["data"]["rows"]["test"] == 30


@pytest.mark.parametrize("name", ["iris", "wine", "breast-cancer", "diabetes"])
def test_every_bundled_table_trains(name):
    call("train", name, "--hidden", "50", "--epochs", 30, "--learning-rate", 0.01, "--out", "run")
    config = Run.read(Path("run")).config
    result = config["results"]["test"]["score"]
    assert result > (0.2 if name == "diabetes" else 0.9)
    assert config["metric"] == ("r2" if name == "diabetes" else "accuracy")


@pytest.mark.parametrize("method", methods.names())
def test_every_method_trains_from_the_shell(method):
    call("train", "iris", *FAST, "--method", method, "--out", "run", "--quiet")
    assert Run.read(Path("run")).config["method"]["name"] == method


def test_no_hidden_layer():
    call("train", "iris", "--hidden", "none", "--epochs", 2, "--out", "run", "--quiet")
    assert Run.read(Path("run")).config["network"]["sizes"] == [4, 3]


@pytest.mark.parametrize("ending", ["csv", "parquet", "npz"])
def test_a_regression_from_every_kind_of_file(ending):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 3))
    y = 1000 + 50 * (X @ [1.0, -2.0, 0.5])
    if ending == "npz":
        np.savez("data.npz", X=X, y=y)
        options = ("data.npz",)
    else:
        frame = pd.DataFrame(X, columns=["a", "b", "c"]).assign(price=y)
        write = frame.to_csv if ending == "csv" else frame.to_parquet
        write(f"data.{ending}", index=False)
        options = (f"data.{ending}", "--target", "price")
    shown = call("train", *options, "--hidden", "50", "--learning-rate", 0.01, "--out", "run")
    assert "regression" in shown and "R²" in shown
    assert Run.read(Path("run")).config["results"]["test"]["score"] > 0.9
    answers = pd.read_csv(io.StringIO(call("predict", "run", f"data.{ending}")))
    assert np.corrcoef(answers["prediction"], y)[0, 1] > 0.95
    assert abs(answers["prediction"].mean() - y.mean()) < 20
    assert "probabilities belong to classes" in fail("predict", "run", f"data.{ending}", "--proba")


def test_predictions_are_names_on_stdout_or_in_a_file(trained):
    people(9).to_csv("new.csv", index=False)
    people(9).drop(columns=["drink", "name"]).to_csv("bare.csv", index=False)
    shown = call("predict", trained / "run", "new.csv")
    rows = list(csv.DictReader(io.StringIO(shown)))
    assert len(rows) == 9 and {row["prediction"] for row in rows} <= {"tea", "coffee"}
    assert call("predict", trained / "run", "bare.csv") == shown  # the target is not looked at
    assert call("predict", trained / "run" / "model.safetensors", "new.csv") == shown
    assert call("predict", trained / "run", "new.csv", "--out", "answers.csv") == ""
    assert Path("answers.csv").read_text() == shown
    assert "--out names the table to predict" in fail(
        "predict", trained / "run", "new.csv", "--out", "new.csv"
    )


def test_predictions_are_those_of_a_plain_forward_pass(trained):
    predictor = read_predictor(trained / "run")
    frame = people().drop(columns=["drink", "name"])
    shown = call("predict", trained / "run", trained / "people.csv", "--proba")
    answers = pd.read_csv(io.StringIO(shown))
    model, _ = saving.load(trained / "run" / "model.safetensors")
    outputs = model(torch.from_numpy(predictor.features.encode(frame)))
    shares = outputs.softmax(1).detach().numpy()
    columns = ["probability_coffee", "probability_tea"]
    np.testing.assert_allclose(answers[columns], shares, atol=1e-6)
    assert list(answers["prediction"]) == [("coffee", "tea")[k] for k in shares.argmax(1)]


def test_an_array_without_names_is_taken_in_order():
    call("train", "iris", *FAST, "--out", "run", "--quiet")
    iris = datasets.load("iris")
    pd.DataFrame(iris.x_test, columns=iris.feature_names).to_csv("named.csv", index=False)
    np.savez("rows.npz", X=iris.x_test)
    assert call("predict", "run", "rows.npz") == call("predict", "run", "named.csv")
    np.savez("few.npz", X=iris.x_test[:, :3])
    assert "lacks 'sepal length (cm)'" in fail("predict", "run", "few.npz")


def test_info_tells_what_a_run_is(trained):
    shown = " ".join(call("info", trained / "run").split())
    for part in ("people.csv", "6-8-2, relu", "lpom (", "mu=20.0", "30 of 30 epochs", "finished"):
        assert part in shown
    assert "from 4 of 5 columns" in shown and "drink: classification" in shown


def test_lists_name_everything_there_is():
    shown = call("methods")
    assert all(name in shown for name in methods.names())
    shown = call("activations")
    assert all(name in shown for name in activations.names() + activations.vector_names())
    assert f"lpom {lpom.__version__}" in call("--version")


def test_an_interrupted_run_is_kept(table, monkeypatch):
    ends = iter([None, None])

    def stop(self, problem, batch, state):
        if next(ends, "now") == "now":
            raise KeyboardInterrupt

    monkeypatch.setattr(LPOM, "end_epoch", stop)
    shown = call("train", *table, "--hidden", "8", "--epochs", 50, "--out", "run", code=130)
    assert "interrupted after 2 epochs" in shown
    run = Run.read(Path("run"))
    assert run.config["status"] == "interrupted" and len(run.history) == 2
    call("predict", "run", "people.csv")


def test_interrupted_before_the_first_epoch_ended(table, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(LPOM, "step", stop)
    call("train", *table, "--hidden", "8", "--out", "run", code=130)
    assert len(Run.read(Path("run")).history) == 0
    call("info", "run")


def test_a_failed_run_leaves_no_folder(table, monkeypatch):
    def fill(self, path):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("lpom.predictor.Predictor.save", fill)
    assert "No space left on device" in fail("train", *table, *FAST)


def test_a_warning_is_a_line(table, monkeypatch):
    monkeypatch.setattr(
        plots, "curves", lambda *_: warnings.warn("the curves\nare dull", stacklevel=1)
    )
    with warnings.catch_warnings(action="default"):
        result = CliRunner().invoke(app, ["train", *table, *FAST, "--out", "run"])
    assert result.exit_code == 0 and "warning: the curves are dull\n" in result.stderr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("digist",), "unknown data set 'digist'; did you mean 'digits'.*ends in .csv"),
        (("iris", "--target", "x"), "'iris' brings its own columns.*option target is for files"),
        (("iris", "--test-fraction", 0.5), "option test fraction is for files"),
        (("iris", "--method", "lpon"), "unknown method 'lpon'; did you mean 'lpom'"),
        (("iris", "--activation", "rleu"), "unknown activation 'rleu'; did you mean 'relu'"),
        (("iris", "--activation", "gelu"), "gelu is not monotone"),
        (("iris", "--loss", "sqared"), "unknown loss 'sqared'; did you mean 'squared'"),
        (("iris", "--order", "topdown"), "unknown order 'topdown'; did you mean 'top-down'"),
        (("iris", "--weights", "exakt"), "unknown weights 'exakt'; did you mean 'exact'"),
        (("iris", "--hidden", "8,x"), "--hidden takes comma-separated integers.*got '8,x'"),
        (("iris", "--hidden", "0"), "each an integer of at least 1.*got"),
        (("iris", "--mu", "1,2"), "mu.*3.*got 2"),
        (("iris", "--mu", "-1"), "mu must be positive.*got -1"),
        (("iris", "--mu", "many"), "--mu takes comma-separated numbers, got 'many'"),
        (("iris", "--sweeps", "0"), "sweeps must be an integer above 0, got 0"),
        (("iris", "--method", "sgd", "--mu", 3), "'sgd' has no setting 'mu'; it has learning_rate"),
        (("iris", "--learning-rate", "-1"), "learning_rate must be a number above 0, got -1"),
        (("iris", "--epochs", "0"), "epochs must be an integer above 0, got 0"),
        (("iris", "--batch-size", 1000), "batch_size must lie between 1 and .*108; got 1000"),
        (("iris", "--device", "abacus"), "there is no device 'abacus' here"),
        (("diabetes", "--loss", "cross-entropy"), "'cross-entropy' is for classes"),
    ],
)
def test_settings_that_make_no_sense(options, sentence):
    assert re.search(sentence, fail("train", *options))


TABLES = {
    "empty.csv": "",
    "names.csv": "a,b,y\n",
    "one-class.csv": "a,y\n" + "1,x\n2,x\n" * 5,
    "missing-x.csv": "a,y\n1,x\n,z\n3,x\n",
    "missing-y.csv": "a,y\n1,x\n2,\n3,x\n",
    "infinite.csv": "a,y\n1,0.5\ninf,2.5\n3,1.5\n",
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
        ("missing-x.csv", "values are missing, NaN or infinite in column 'a', row 2"),
        ("missing-y.csv", "values are missing, NaN or infinite in column 'y', row 2"),
        ("infinite.csv", "values are missing, NaN or infinite in column 'a', row 2"),
        ("short.csv", "has 2 rows: 0 to test and 2 to train on"),
        ("same.csv", "no column differs from row to row"),
        ("ragged.csv", "cannot be read"),
        ("good.csv", "has no column 'y' to predict.*Its columns are 'a', 'label'"),
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
    sentence = fail("train", "people.csv", "--target", "drink")
    assert re.search("'name' holds 60 different texts.*--ignore name", sentence)
    sentence = fail("train", *table[:3], "--ignore", "nam")
    assert "unknown column to ignore 'nam'; did you mean 'name'" in sentence
    sentence = fail("train", *table, "--task", "regression")
    assert re.search("column 'drink' holds '(tea|coffee)' in row 1; expected a number", sentence)
    assert "did you mean 'regression'" in fail("train", *table, "--task", "regresion")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.drop(columns="age"), "the table lacks 'age'; the columns expected are 'age'"),
        (lambda t: t.assign(shoe=42), "the table has 'shoe', which training never saw"),
        (
            lambda t: t.assign(colour=["mauve"] * len(t)),
            "column 'colour' holds 'mauve' in row 1.*expected one of 'blue', 'green', 'red'",
        ),
        (lambda t: t.assign(age="old"), "column 'age' holds 'old' in row 1; expected a number"),
        (lambda t: t.assign(height=np.nan), "missing, NaN or infinite in column 'height'"),
        (lambda t: t[:0], "should hold rows of data, got none"),
    ],
)
def test_tables_that_do_not_fit_a_model(trained, change, sentence):
    change(people(5)).to_csv("new.csv", index=False)
    Path("old.csv").write_text("kept")
    assert re.search(sentence, fail("predict", trained / "run", "new.csv", "--out", "old.csv"))


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
    (run / "config.json").write_text("{")
    assert "config.json or history.jsonl is missing or damaged" in fail("info", run)
    (run / "config.json").write_text("{}")
    assert "config.json lacks what `lpom train` writes" in fail("info", run)
    assert "does not exist; expected the folder of a run" in fail("info", "nowhere")


def test_a_model_without_a_table_cannot_predict_one(trained):
    saving.save("model.safetensors", lpom.mlp([6, 2], seed=0))
    sentence = fail("predict", "model.safetensors", trained / "people.csv")
    assert "not what `lpom train` keeps beside it" in sentence
    _, metadata = saving.load(trained / "run" / "model.safetensors")
    saving.save("model.safetensors", lpom.mlp([5, 2], seed=0), metadata=metadata)
    sentence = fail("predict", "model.safetensors", trained / "people.csv")
    assert "a network with 5 inputs and 2 outputs for a table that makes 6 and 2" in sentence


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
    frame.loc[3, "age"] = None
    frame.to_csv("gaps.csv", index=False)
    assert "infinite in column 'age', row 4" in fail("predict", trained / "run", "gaps.csv")


def test_a_folder_that_cannot_be_written_to_is_noticed_before_training(table, monkeypatch):
    def refuse(*args, dir, **kwargs):
        raise PermissionError(13, "Permission denied", f"{dir}/tmpxyz")

    Path("shut").mkdir()
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    monkeypatch.setattr("lpom.runs.train", None)
    assert fail("train", *table, *FAST, "--out", "shut") == "shut: Permission denied.\n"


def test_a_failed_run_leaves_the_old_one_and_its_report(table):
    call("train", *table, *FAST, "--out", "run", "--quiet")
    Path("run/report.html").write_text("a report")
    fail("train", *table, *FAST, "--out", "run", "--force", "--learning-rate", "1e38")
    assert Path("run/report.html").exists()
    call("train", *table, *FAST, "--out", "run", "--force", "--quiet")
    assert not Path("run/report.html").exists()


def test_a_run_that_is_terminated_leaves_nothing_behind(table):
    command = [sys.executable, "-c", "from lpom.cli import main; main()"]
    command += ["train", *map(str, table), "--epochs", "1000000", "--out", "deep/run"]
    with subprocess.Popen(command) as process:
        while not Path("deep/run").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait(60) != 0
    assert not Path("deep").exists()
