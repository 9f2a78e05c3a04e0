"""What the commands of the shell do: arguments, exit codes, files. Nothing of how."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

SHORT = ("--hidden", "8", "--epochs", "3")
COMMANDS = (
    "train",
    "predict",
    "report",
    "compare",
    "tune",
    "export",
    "info",
    "methods",
    "activations",
)


def test_help_lists_every_command(lpom_command):
    shown = lpom_command("--help").out
    assert all(f" {name} " in shown for name in COMMANDS)


def test_every_command_has_help(lpom_command):
    for name in COMMANDS:
        assert f"Usage: lpom {name}" in lpom_command(name, "--help").out


def test_version(lpom_command):
    assert lpom_command("--version").out.startswith("lpom ")


def test_no_command_is_an_answer_too(lpom_command):
    outcome = lpom_command(code=2)
    assert "train" in outcome.out + outcome.err


def test_an_unknown_command_or_option_is_refused(lpom_command):
    assert "trian" in lpom_command("trian", code=2).err
    assert "--epoch" in lpom_command("train", "digits", "--epoch", 3, code=2).err


# -- train ---------------------------------------------------------------------------------------


def test_train_digits(lpom_command):
    outcome = lpom_command("train", "digits", "--epochs", 3)
    assert Path("runs/digits-1").is_dir() and "runs/digits-1" in outcome.out
    assert "test" in outcome.out and "%" in outcome.out and "predict" in outcome.out


def test_train_on_a_table_says_what_each_column_is(table, lpom_command):
    shown = lpom_command("train", table, "--target", "drink", *SHORT).out
    assert all(kind in shown for kind in ("number", "category", "date", "yes/no"))
    assert "runs/people-1" in shown


def test_quiet_prints_the_folder_alone(table, lpom_command):
    outcome = lpom_command("train", table, "--target", "drink", *SHORT, "--quiet")
    assert outcome.out == "runs/people-1\n"


def test_folders_are_numbered(trained, table, lpom_command):
    lpom_command("train", table, "--target", "drink", *SHORT, "--quiet")
    assert Path("runs/people-2").is_dir()


def test_a_number_as_target_is_regression(table, lpom_command):
    shown = lpom_command("train", table, "--target", "cups", "--ignore", "drink", *SHORT).out
    assert "regression" in shown and "R²" in shown and "MAE" in shown


def test_the_same_seed_trains_the_same_model(table, lpom_command):
    for out, seed in (("a", 0), ("b", 0), ("c", 1)):
        lpom_command("train", table, "--target", "drink", *SHORT, "--out", out, "--seed", seed)
    for run in "abc":
        lpom_command("predict", run, table, "--proba", "--out", f"{run}.csv")
    a, b, c = (Path(f"{run}.csv").read_text() for run in "abc")
    assert a == b != c


def test_a_run_is_not_overwritten_unless_asked(table, lpom_command):
    call = ("train", table, "--target", "drink", *SHORT, "--out", "run")
    lpom_command(*call)
    assert "--force" in lpom_command(*call, code=2).err
    lpom_command(*call, "--force")


def test_settings_of_training(table, lpom_command):
    lpom_command(
        "train", table, "--target", "drink", "--ignore", "cups", "--as", "age=number",
        "--hidden", "8,4", "--activation", "tanh", "--method", "lpom", "--mu", "10",
        "--learning-rate", "0.01", "--alpha", "0.01", "--class-weight", "balanced",
        "--epochs", "2", "--batch-size", "16", "--seed", "3", "--device", "cpu",
        "--test-fraction", "0.3", "--out", "run",
    )  # fmt: skip
    shown = lpom_command("info", "run").out
    assert "tanh" in shown and "16" in shown and "cpu" in shown


def test_reading_of_a_file(lpom_command):
    lines = [f"{k},5;{k % 7};{'ja' if k % 2 else 'nein'}" for k in range(40)]
    Path("t.csv").write_text("größe;b;c\n" + "\n".join(lines), encoding="cp1252")
    reading = ("--encoding", "cp1252", "--separator", ";", "--decimal", ",")
    shown = lpom_command("train", "t.csv", "--target", "c", *reading, *SHORT).out
    assert "größe" in shown


def test_a_table_from_standard_input(table):
    command = (sys.executable, "-m", "lpom", "train", "-", "--target", "drink")
    done = subprocess.run(
        [*command, *SHORT, "--quiet", "--out", "run"],
        input=table.read_bytes(),
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"run\n"


def test_arrays_and_parquet_are_tables_too(table, lpom_command):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 4)).astype(np.float32)
    np.savez("arrays.npz", X=X, y=(X[:, 0] > 0).astype(int))
    lpom_command("train", "arrays.npz", *SHORT, "--out", "a")
    pytest.importorskip("pyarrow")
    pd.read_csv(table).to_parquet("people.parquet")
    lpom_command("train", "people.parquet", "--target", "drink", *SHORT, "--out", "b")


# -- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("people.csv",), ("--target", "drink")),
        (("people.csv", "--target", "drnk"), ("drnk", "drink")),
        (("digts",), ("digts", "digits")),
        (("nothing.csv", "--target", "drink"), ("nothing.csv",)),
        (("people.csv", "--target", "drink", "--activation", "rleu"), ("rleu", "relu")),
        (("people.csv", "--target", "drink", "--method", "lpmo"), ("lpmo", "lpom")),
        (("people.csv", "--target", "drink", "--loss", "sqared"), ("sqared", "squared")),
        (("people.csv", "--target", "drink", "--hidden", "a"), ("--hidden",)),
        (("people.csv", "--target", "drink", "--as", "age=colour"), ("colour", "number")),
        (("people.csv", "--target", "drink", "--ignore", "agee"), ("agee", "age")),
        (("digits", "--target", "drink"), ("target",)),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(arguments, words, table, lpom_command):
    outcome = lpom_command("train", *arguments, code=2)
    assert outcome.err.startswith("error: ") and outcome.err.count("\n") == 1
    assert all(word in outcome.err for word in words)
    assert not Path("runs").exists()


def test_what_is_no_run_is_refused_by_every_command(here, lpom_command):
    for call in (("info", "x"), ("predict", "x", "y.csv"), ("report", "x"), ("export", "x")):
        assert "x" in lpom_command(*call, code=2).err


# -- resume --------------------------------------------------------------------------------------


def test_a_finished_run_is_not_resumed(trained, lpom_command):
    assert str(trained) in lpom_command("train", "--resume", trained, code=2).err


# -- predict -------------------------------------------------------------------------------------


def rows(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_predict_prints_a_column_of_predictions(trained, table, lpom_command):
    outcome = lpom_command("predict", trained, table)
    answers = rows(outcome.out)
    assert len(answers) == 80 and {row["prediction"] for row in answers} <= {"tea", "coffee"}
    assert "accuracy" in outcome.err  # as the target is there


def test_predict_writes_files_with_probabilities_and_columns(trained, table, lpom_command):
    lpom_command("predict", trained, table, "--proba", "--keep", "age", "--out", "p.csv")
    written = pd.read_csv("p.csv")
    assert {"prediction", "age"} <= set(written)
    shares = written.drop(columns=["prediction", "age"])
    assert shares.shape == (80, 2) and np.allclose(shares.sum(axis=1), 1, atol=1e-5)
    assert "--force" in lpom_command("predict", trained, table, "--out", "p.csv", code=2).err


def test_predict_takes_rows_without_target_and_with_new_categories(trained, lpom_command):
    frame = pd.DataFrame(
        {"age": [30, None], "colour": ["purple", "red"], "since": ["2021-02-03", None]}
    ).assign(member=["yes", None])
    frame.to_csv("new.csv", index=False)
    outcome = lpom_command("predict", trained, "new.csv")
    assert len(rows(outcome.out)) == 2 and "purple" in outcome.err


def test_predict_misses_a_column_by_name(trained, table, lpom_command):
    pd.read_csv(table).drop(columns="colour").to_csv("less.csv", index=False)
    assert "colour" in lpom_command("predict", trained, "less.csv", code=2).err


# -- report, info, export ------------------------------------------------------------------------


def test_report_is_one_file_that_fetches_nothing(trained, lpom_command):
    outcome = lpom_command("report", trained)
    page = (trained / "report.html").read_text(encoding="utf-8")
    assert "report.html" in outcome.out and page.lstrip().lower().startswith("<!doctype html")
    assert "drink" in page
    for address in re.findall(r"(?:src|href)=[\"']?([^\"'> ]*)", page):
        assert not address.startswith(("http", "//", "/")), address


def test_report_of_several_runs(trained, table, lpom_command):
    lpom_command("train", table, "--target", "drink", *SHORT, "--quiet")
    lpom_command("report", trained, "runs/people-2", "--out", "both.html")
    page = Path("both.html").read_text(encoding="utf-8")
    assert "people-1" in page and "people-2" in page
    assert "--force" in lpom_command("report", trained, "--out", "both.html", code=2).err


def test_report_takes_the_newest_run(trained, lpom_command):
    lpom_command("report")
    assert (trained / "report.html").is_file()


def test_info_shows_data_network_method_and_results(trained, lpom_command):
    shown = lpom_command("info", trained).out
    assert all(word in shown for word in ("people.csv", "drink", "relu", "lpom", "accuracy"))


def test_export_writes_onnx_that_says_the_same(trained, lpom_command):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    assert "model.onnx" in lpom_command("export", trained).out
    session = runtime.InferenceSession(str(trained / "model.onnx"))
    assert len(session.get_inputs()) == len(session.get_outputs()) == 1
    assert "--force" in lpom_command("export", trained, code=2).err
    assert "onnx" in lpom_command("export", trained, "--to", "onx", code=2).err


# -- compare, tune -------------------------------------------------------------------------------


def test_compare_trains_by_several_methods(table, lpom_command):
    shown = lpom_command(
        "compare", table, "--target", "drink", "--methods", "lpom,adam", "--seeds", "0,1",
        "--hidden", "8", "--epochs", "2", "--out", "both",
    ).out  # fmt: skip
    assert "lpom" in shown and "adam" in shown
    lines = [json.loads(line) for line in Path("both/results.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    assert "lpom" in Path("both/table.md").read_text(encoding="utf-8")


def test_compare_refuses_what_is_no_method(table, lpom_command):
    call = ("compare", table, "--target", "drink", "--methods", "lpom,adm")
    assert "adm" in lpom_command(*call, code=2).err


def test_tune_ends_with_the_command_that_trains(table, lpom_command):
    shown = lpom_command(
        "tune", table, "--target", "drink", "--candidates", "3", "--epochs", "3",
        "--vary", "alpha=0.01/1",
    ).out  # fmt: skip
    assert "lpom train people.csv" in shown and "--alpha" in shown


# -- lists ---------------------------------------------------------------------------------------


def test_methods_and_activations_are_listed(lpom_command):
    shown = lpom_command("methods").out
    assert all(name in shown for name in ("lpom", "adam", "sgd", "mac", "bcd", "admm"))
    shown = lpom_command("activations").out
    assert all(name in shown for name in ("relu", "tanh", "step", "sign", "softmax"))
