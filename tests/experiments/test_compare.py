"""Comparison: the same start for all, tables and pictures from the records, Ctrl-C and after."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from typer.testing import CliRunner

from lpom import LPOM, Sweeps, methods
from lpom.cli import app
from lpom.experiments import compare as module
from lpom.experiments.compare import Comparison, as_dataset, compare
from lpom.experiments.plots import COLORS, spread
from lpom.experiments.records import Store
from lpom.experiments.table import Summary, _ratio
from lpom.methods import Adam
from lpom.preparation import prepare

PLAN = Comparison(("lpom", "adam", "sgd"), hidden=(8,), epochs=3, batch_size=30, seeds=(0, 1))


def cells(text: object) -> dict[str, list[str]]:
    """The rows of a Markdown table, by their first cell."""
    lines = [line for line in str(text).splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row for row in rows[2:]}


def test_the_table_has_means_and_spreads_of_the_records(tmp_path, blobs):
    text = compare(PLAN, blobs, tmp_path)
    table = cells(text)
    assert list(table) != [] and set(table) == {"lpom", "adam", "sgd"}
    records = list(Store(tmp_path / "results.jsonl"))
    for name, row in table.items():
        mine = [record for record in records if record["method"] == name]
        scores = [100 * record["score"] for record in mine]
        assert row[1] == f"{np.mean(scores):.2f} ± {np.std(scores, ddof=1):.2f} %"
        assert row[2] == f"{100 * np.mean([r['train_score'] for r in mine]):.2f} %"
        assert float(row[5]) == pytest.approx(
            np.mean([r["curve"][-1]["objective"] for r in mine]), rel=5e-3
        )
        assert row[6:8] == ["3", "mini"]
        seconds, peak = (row[k].split(" (")[0].split()[0] for k in (3, 4))
        ours = [table["lpom"][k].split(" (")[0].split()[0] for k in (3, 4)]
        for k, (mine, first) in enumerate(zip((seconds, peak), ours, strict=True)):
            ratio = float(row[3 + k].split("(")[1].removesuffix("×)"))
            assert ratio == pytest.approx(float(mine) / float(first), rel=0.07)
    order = [float(row[1].split()[0]) for row in table.values()]
    assert order == sorted(order, reverse=True)
    assert (tmp_path / "table.md").read_text().startswith("# blobs\n\nNetwork 5-8-3, relu")
    assert str(text) in (tmp_path / "table.md").read_text()
    assert not (tmp_path / "unfinished").exists()


def test_large_ratios_are_written_out():
    assert [_ratio(x, 2.0) for x in (1.0, 2.0, 19.0, 260.4, 6000.0)] == [
        *("0.5×", "1×", "9.5×", "130×", "3,000×")
    ]


def test_the_pictures_show_a_line_of_each_method(tmp_path, blobs):
    compare(PLAN, blobs, tmp_path)
    places = [0, 5, 1]  # of lpom, adam, sgd among the mini-batch methods
    for name in ("by-epochs.png", "by-seconds.png"):
        image = imread(tmp_path / name)[..., :3]
        for color in (COLORS[place] for place in places):
            there = (abs(image - to_rgb(color)) < 2 / 255).all(2)
            assert there.any(1).sum() > 10  # rows of pixels
            assert there.any(0).sum() > 50  # columns


def test_methods_of_a_seed_start_alike(tmp_path, blobs, monkeypatch):
    """The first step sees the same weights and rows, whatever the method."""
    first = {}
    for method in (methods.METHODS[name] for name in PLAN.methods):

        def step(self, problem, batch, state, whole=method.step):
            weights = [p.detach().clone() for p in problem.graph.parameters]
            first.setdefault(self.name, []).append((*weights, batch.inputs))
            return whole(self, problem, batch, state)

        monkeypatch.setattr(method, "step", step)
    monkeypatch.setattr("lpom.experiments.trials.peak_bytes", lambda *_: 1)
    compare(replace(PLAN, epochs=1), blobs, tmp_path)
    for seed in range(2):
        starts = [steps[3 * seed] for steps in first.values()]  # three steps an epoch
        for other in starts[1:]:
            for a, b in zip(starts[0], other, strict=True):
                assert a.equal(b)
    assert not first["lpom"][0][0].equal(first["lpom"][3][0])


def test_interrupted_it_keeps_what_is_finished_and_goes_on(tmp_path, blobs, interrupt, monkeypatch):
    whole, cut, seen = tmp_path / "whole", tmp_path / "cut", []
    compare(PLAN, blobs, whole)
    interrupt(Adam, 6)  # two steps for the memory, three an epoch: in the second epoch
    with pytest.raises(KeyboardInterrupt):
        compare(PLAN, blobs, cut)
    assert [record["method"] for record in Store(cut / "results.jsonl")] == ["lpom"]
    assert "1 of 2 seeds run so far." in cells((cut / "table.md").read_text())["lpom"][-1]
    compare(PLAN, blobs, cut, on_epoch=lambda t, e: seen.append((t.method, t.seed, e.epoch)))
    assert seen[:3] == [("adam", 0, 2), ("adam", 0, 3), ("sgd", 0, 1)]
    kept, expected = (
        {
            r["key"]: (r["score"], r["loss_value"], r["peak_bytes"])
            for r in Store(f / "results.jsonl")
        }
        for f in (cut, whole)
    )
    assert kept == expected
    monkeypatch.setattr("lpom.experiments.trials.fit", None)  # all is there: nothing is run
    compare(PLAN, blobs, cut)


def test_none_is_a_setting_like_others():
    plan = replace(PLAN, methods=("bcd",), settings={"bcd": {"mu_output": None}})
    assert plan.trials("blobs")[0].params["mu_output"] is None


def test_what_can_not_be_done_is_listed(tmp_path, blobs, monkeypatch):
    plan = replace(PLAN, seeds=(0,), settings={"sgd": {"learning_rate": -1.0}})

    def out_of_memory(self, problem):
        raise RuntimeError("can't allocate\nmemory")

    with monkeypatch.context() as patch:
        patch.setattr(Adam, "init", out_of_memory)
        table = cells(compare(plan, blobs, tmp_path))
    assert list(table)[0] == "lpom"
    assert "learning_rate must be a number above 0" in table["sgd"][-1]
    assert table["adam"][1:] == [*["–"] * 6, "mini", "can't allocate memory."]
    # a refusal is final; what this machine could not do is tried again
    again = cells(compare(plan, blobs, tmp_path))
    assert again["sgd"] == table["sgd"]
    assert re.fullmatch(r"\d+\.\d\d %", again["adam"][1])


def test_other_settings_are_other_trials(tmp_path, blobs):
    compare(replace(PLAN, seeds=(0,)), blobs, tmp_path)
    plan = replace(
        PLAN, seeds=(0,), settings={"adam": {"learning_rate": 0.01}}, epochs_of={"lpom": 5}
    )
    table = cells(compare(plan, blobs, tmp_path))
    assert len(list(Store(tmp_path / "results.jsonl"))) == 5
    assert [table[name][6] for name in PLAN.methods] == ["5", "3", "3"]


def test_other_defaults_are_other_trials(monkeypatch):
    """A result from before a default changed is not taken for one of today."""
    before = PLAN.trials("blobs")[1]
    monkeypatch.setattr(Adam.__init__, "__defaults__", (0.5, "linear"))
    after = PLAN.trials("blobs")[1]
    assert after.params["learning_rate"] == 0.5
    assert after.key != before.key


def test_a_regression_is_scored_by_r2(tmp_path):
    data = as_dataset(prepare("diabetes"), "diabetes")
    assert len(data.x_train) == 353  # all of it, the rows to watch too
    assert data.notes.endswith("Inputs standardised.")
    settings = {"lpom": {"weights": {"adaptive": {"learning_rate": 0.01}}}}
    plan = replace(PLAN, methods=("lpom",), epochs=15, settings=settings)
    text = compare(plan, data, tmp_path)
    assert "test R²" in str(text)
    assert 0.1 < float(cells(text)["lpom"][1].split()[0]) < 0.6


def test_a_file_is_known_by_its_content(tmp_path):
    path = tmp_path / "points.csv"
    names = []
    for step in (3, 5):
        rows = [f"{k},{k % step},{'ab'[k % 2]}" for k in range(40)]
        path.write_text("\n".join(["u,v,kind", *rows]))
        names.append(as_dataset(prepare(str(path), target="kind"), str(path)).name)
    assert names[0] != names[1]
    assert all(name.startswith("points.csv-") for name in names)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ("lpom", "admn")}, "unknown method 'admn'"),
        ({"methods": ("lpom", "lpom")}, "methods must be one or more, each once"),
        ({"seeds": ()}, "seeds must be one or more"),
        ({"settings": {"adam": {"lr": 1}}}, "method 'adam' has no setting 'lr'"),
        ({"epochs_of": {"bcd": 5}}, "'bcd' is set but not compared"),
        ({"epochs": 0}, "epochs must be an integer above 0"),
        ({"hidden": (8, 0)}, "a hidden layer's width must be an integer above 0"),
        ({"activation": "gelu"}, "gelu"),
        ({"loss": "square"}, "did you mean 'squared'"),
    ],
)
def test_mistakes_are_told_before_anything_runs(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(PLAN, **changes)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ([1.0, 5.0, 9.0], [1.0, 5.0, 9.0]),
        ([5.0, 5.0, 5.0], [3.0, 5.0, 7.0]),
        ([9.5, 9.6, 9.7], [6.0, 8.0, 10.0]),
        ([4.0, 5.0, 6.5], [3.17, 5.17, 7.17]),
    ],
)
def test_names_are_spread_apart(wanted, expected):
    assert spread(wanted, 2.0, 0.0, 10.0) == pytest.approx(expected, abs=0.01)


class TestCommand:
    arguments = ["compare", "iris", "--methods", "lpom,adam", "--hidden", "5", "--epochs", "2"]

    def test_writes_its_files_and_prints_the_table(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        settings = ["--seeds", "0,3", "--set", "adam.learning_rate=3e-3", "--set-epochs", "lpom=3"]
        settings += ["--set", "lpom.mu=[20, 10]", "--set", "lpom.jumps=continuation"]
        settings += ["--set", "lpom.states.rule=plain"]
        result = CliRunner().invoke(app, [*self.arguments, *settings])
        assert result.exit_code == 0, result.output
        (folder,) = Path("comparisons").glob("iris-*")
        assert "[4/4] adam, seed 3: test 0." in result.stderr
        page = (folder / "table.md").read_text()
        assert "cross-entropy loss" in page and "cross-entropy loss" in result.stdout
        assert "| lpom" in page and "│ lpom" in result.stdout
        assert "In brackets: times that of lpom." in page
        records = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
        assert [(r["method"], r["seed"], r["epochs"]) for r in records] == [
            ("lpom", 0, 3),
            ("adam", 0, 2),
            ("lpom", 3, 3),
            ("adam", 3, 2),
        ]
        adam = methods.get("adam").get_params()
        assert records[1]["params"] == adam | {"learning_rate": 3e-3}
        given = LPOM(mu=[20, 10], states=Sweeps(rule="plain"), jumps="continuation")
        assert records[0]["params"] == given.plain()
        assert "- adam: learning_rate=0.003, schedule=linear" in result.stdout

    def test_every_setting_has_its_own_folder(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for more in ([], ["--activation", "tanh"], []):
            run = CliRunner().invoke(app, [*self.arguments, "--seeds", "0", *more])
            assert run.exit_code == 0, run.output
        assert len(list(Path("comparisons").iterdir())) == 2

    def test_several_columns_are_predicted_and_read_as_train_reads_them(self, tmp_path):
        rows = [f"{k % 7},{k};{2 * k},{k % 3};{-k}" for k in range(40)]
        path = tmp_path / "table.csv"
        path.write_text("\n".join(["a;b;c", *rows]))
        arguments = ["compare", str(path), *self.arguments[2:], "--seeds", "0"]
        arguments += ["--out", str(tmp_path / "out"), "--target", "b", "--target", "c"]
        run = CliRunner().invoke(app, [*arguments, "--decimal", ",", "--separator", ";"])
        assert run.exit_code == 0, run.output
        assert "Network 1-5-2" in run.stdout and "test R²" in run.stdout

    def test_columns_are_not_for_networks_of_pictures(self):
        arguments = ["compare", "mnist", "--network", "lenet5", "--target", "y"]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2
        assert "--target is for tables" in result.stderr

    def test_ctrl_c_says_how_to_go_on(self, tmp_path, interrupt):
        arguments = [*self.arguments, "--seeds", "0", "--out", str(tmp_path)]
        interrupt(Adam, 4)
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 130
        assert "1 of 2 runs are finished and kept" in result.stderr
        assert "The same command continues" in result.stderr
        assert CliRunner().invoke(app, arguments).exit_code == 0

    def test_all_are_all_methods(self, tmp_path, monkeypatch):
        chosen = []

        def pretend(plan, *args, **options):
            chosen.extend(plan.methods)
            return Summary("", ["method"] * 6, [], "")

        monkeypatch.setattr("lpom.commands.compare.run_comparison", pretend)
        arguments = ["compare", "iris", "--methods", "all", "--out", str(tmp_path)]
        assert CliRunner().invoke(app, arguments).exit_code == 0
        assert chosen == methods.names()

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            (["--set", "adam=1"], "--set takes METHOD.SETTING=VALUE"),
            (["--set-epochs", "adam=many"], "--set-epochs takes METHOD=EPOCHS"),
            (["--seeds", "a"], "--seeds takes comma-separated integers"),
        ],
    )
    def test_mistakes_are_one_line(self, option, message):
        result = CliRunner().invoke(app, [*self.arguments, *option])
        assert result.exit_code == 2
        assert message in result.stderr


def test_the_files_are_those_that_are_documented():
    names = (module.RESULTS, module.TABLE, module.BY_EPOCH, module.BY_SECOND)
    assert names == ("results.jsonl", "table.md", "by-epochs.png", "by-seconds.png")
