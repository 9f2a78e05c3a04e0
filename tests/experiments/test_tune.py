"""``lpom tune``: the rounds, what it may look at, how it goes on, and the command it ends with."""

from __future__ import annotations

import io
import json
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from typer.testing import CliRunner

from lpom import runs
from lpom.cli import app
from lpom.commands.tune import _drawn
from lpom.exceptions import DivergenceError
from lpom.experiments import tune as tuning
from lpom.experiments.tune import Search, space_for, tune
from lpom.preparation import prepare
from lpom.runs import Settings

QUICK = {"hidden": ((4,), (8,)), "learning_rate": (0.001, 0.01), "mu": (5.0, 20.0)}


def search(n=5, epochs=6, space=QUICK, **settings):
    return Search(Settings(epochs=epochs, early_stopping=False, **settings), space, n)


@pytest.fixture(scope="module")
def iris():
    return prepare("iris")


@pytest.fixture(scope="module")
def whole(iris, tmp_path_factory):
    """A search that ran to its end, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    return tune(search(), iris, folder), folder


@pytest.mark.parametrize(
    "n, rounds",
    [(1, [(1, 90)]), (3, [(3, 90)]), (4, [(4, 30), (2, 90)]), (9, [(9, 30), (3, 90)]),
     (27, [(27, 10), (9, 30), (3, 90)])],
)  # fmt: skip
def test_candidates_are_divided_and_epochs_multiplied_by_three(n, rounds):
    assert search(n, space={"alpha": range(50)}).rounds(90) == rounds


def test_candidates_are_different_points_of_the_space_and_the_defaults():
    first, *others = search(20).candidates()
    assert first == {} and len(others) == 8  # all there are
    assert len({tuple(map(str, c.items())) for c in others}) == 8
    assert all(c[name] in QUICK[name] for c in others for name in QUICK)
    assert search(4).candidates() == search(4).candidates()
    assert search(4).candidates() != search(4, seed=1).candidates()


def test_settings_of_training_and_of_the_method_find_their_places():
    made = search().with_candidate({"hidden": (8,), "alpha": 2.0, "states.max_sweeps": 3}, 11)
    assert (made.hidden, made.alpha, made.epochs) == ((8,), 2.0, 11)
    assert made.method_settings == {"states__max_sweeps": 3}


@pytest.mark.parametrize("method", ["lpom", "adam", "bcd"])
def test_every_method_has_a_space_of_settings_that_it_has(iris, method):
    settings = Settings(method=method)
    for name, values in space_for(settings).items():
        for value in values:
            chosen = Search(settings, {}).with_candidate({name: value})
            chosen.planned(100)
            chosen.estimator(iris)


def test_the_better_third_goes_on_and_the_best_of_the_last_round_wins(whole):
    ranked, folder = whole
    trials = json.loads((folder / tuning.SEARCH).read_text())["trials"]
    rounds = {epochs: [t for t in trials if t["epochs"] == epochs] for epochs in (2, 6)}
    assert [len(trials) for trials in rounds.values()] == [5, 2]
    best = sorted(rounds[2], key=lambda trial: trial["loss"])[:2]
    assert {t["candidate"] for t in best} == {t["candidate"] for t in rounds[6]}
    assert ranked[0]["loss"] == min(t["loss"] for t in rounds[6])
    assert sorted(t["candidate"] for t in ranked) == list(range(5))
    assert not (folder / "unfinished").exists()


def test_a_trial_is_what_training_on_the_other_rows_gives(iris, whole):
    trial = whole[0][0]
    chosen = search().with_candidate(trial["settings"], trial["epochs"])
    run = runs.train(tuning.for_tuning(iris), chosen, progress=False)
    assert run.config["results"]["test"]["loss"] == trial["loss"]


def test_test_rows_are_never_looked_at(iris, whole, tmp_path):
    X, y = iris.test
    spoiled = replace(iris, test=(np.full_like(X, np.nan), y[::-1]))
    ranked = tune(search(), spoiled, tmp_path)
    assert [(t["candidate"], t["loss"]) for t in ranked] == [
        (t["candidate"], t["loss"]) for t in whole[0]
    ]
    held, kept = tuning.for_tuning(iris).test[0], tuning.for_tuning(iris).train[0]
    rows = {row.tobytes() for row in iris.train[0]}
    assert len(held) + len(kept) == len(iris.train[0])
    assert all(row.tobytes() in rows for row in (*held, *kept))


def test_an_interrupted_search_goes_on_to_the_same_end(iris, whole, tmp_path, monkeypatch):
    train, calls = runs.train, []

    def cut(*args, **kwargs):
        calls.append(kwargs)
        run = train(*args, **kwargs)
        if len(calls) == 3:
            run.config["status"] = "interrupted"
        return run

    monkeypatch.setattr(runs, "train", cut)
    with pytest.raises(KeyboardInterrupt):
        tune(search(), iris, tmp_path)
    kept = json.loads((tmp_path / tuning.SEARCH).read_text())["trials"]
    assert len(kept) == 2
    again = tune(search(), iris, tmp_path)
    assert len(calls) == 3 + 7 - 2  # what was finished is not run again
    assert [t["loss"] for t in again] == [t["loss"] for t in whole[0]]


def test_another_search_is_not_mixed_in(iris, whole):
    with pytest.raises(ValueError, match="another search: another seed.*--force"):
        tune(search(seed=1), iris, whole[1])
    (whole[1].parent / "damaged").mkdir()
    (whole[1].parent / "damaged" / tuning.SEARCH).write_text("{")
    with pytest.raises(Exception, match="is damaged .*--force"):
        tune(search(), iris, whole[1].parent / "damaged")


def test_a_candidate_that_diverges_comes_last_with_its_reason(iris, tmp_path, monkeypatch):
    train = runs.train

    def diverging(data, settings, **kwargs):
        if settings.hidden == (8,):
            raise DivergenceError("weights became NaN")
        return train(data, settings, **kwargs)

    monkeypatch.setattr(runs, "train", diverging)
    ranked = tune(search(9, epochs=3), iris, tmp_path)
    assert ranked[-1]["reason"] == "weights became NaN" and ranked[0]["loss"] < 2
    lines = tuning.table(QUICK, ranked, "accuracy")
    assert lines[-1][-2:] == ["weights became NaN", "–"]


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_the_command_prints_its_space_and_ends_with_one_that_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(90, 3)), columns=["a b", "c", "d"])
    frame.assign(y=np.where(frame["c"] > 0, "yes", "no")).to_csv("t.csv", index=False)
    words = ["tune", "t.csv", "--target", "y", "--ignore", "a b", "--candidates", 4, "--epochs", 3]
    vary = ["--vary", "hidden=4/4,3", "--vary", "alpha=0.5", "--vary", "states.max_sweeps=1"]
    done = invoke(*words, *vary)
    assert done.exit_code == 0, done.output
    assert "hidden         4 / 4,3" in done.stdout and "alpha          0.5\n" in done.stdout
    assert "4 for 1 epochs, then 2 for 3 epochs; 58 rows to train on, 14 to judge by" in done.stdout
    assert "[6/6]" in done.stderr
    assert Path("tuning/t/tuning.md").read_text().count("\n| ") == 6
    (last,) = [line for line in done.stdout.splitlines() if line.startswith("next: ")]
    command = shlex.split(last.removeprefix("next: "))
    assert command[:7] == ["lpom", "train", "t.csv", "--target", "y", "--ignore", "a b"]
    assert f"```sh\n{last.removeprefix('next: ')}\n```" in Path("tuning/t/tuning.md").read_text()
    trained = invoke(*command[1:], "--quiet")
    assert trained.exit_code == 0, trained.output
    again = invoke(*words, *vary)
    assert again.stdout == done.stdout  # nothing is run twice


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--vary", "activation=rleu"], "did you mean 'relu'"),
        (["--vary", "states.mots=1"], "no setting 'mots'"),
        (["--vary", "alpha"], "--vary takes NAME=VALUE"),
        (["--candidates", "0"], "number of candidates"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(words, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = invoke("tune", "iris", *words)
    assert done.exit_code == 2 and sentence in done.stderr, done.output
    assert not list(tmp_path.iterdir())


def test_the_table_fits_a_narrow_terminal_with_all_of_its_values():
    names = "hidden activation learning_rate alpha batch_size mu epochs loss accuracy".split()
    values = ["300,100", "relu", "0.0005", "0.1", "100", "100", "100", "0.2491", "85.71 %"]
    console = Console(width=80, file=io.StringIO())
    console.print(_drawn([["", *names], ["1", *values]]))
    drawn = console.file.getvalue()
    assert all(value in drawn for value in values)
