"""The paper's experiments as data: tuned on held-out rows, resumed, tabled from the results."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from lpom import datasets
from lpom.cli import app
from lpom.experiments import paper
from lpom.experiments.paper import EXPERIMENTS, Experiment, Long, Role
from lpom.experiments.reproduce import reproduce
from lpom.experiments.summary import section, write_summary
from lpom.training.precision import why_not


@pytest.fixture
def tiny(monkeypatch):
    """An experiment on iris that takes a second."""
    experiment = Experiment(
        name="tiny",
        title="Tiny",
        dataset="iris",
        networks=((8,), (8, 6)),
        mu=20.0,
        paper_epochs=3,
        epochs=3,
        tuning_epochs=2,
        printed={"LPOM": (90.0, 91.0)},
        roles={
            "paper": Role("exact", "lpom", {"weights": "exact"}, loss="squared"),
            "best": Role("best", "lpom", grid=(1e-3, 1e-2)),
        },
    )
    monkeypatch.setitem(EXPERIMENTS, "tiny", experiment)
    return experiment


def lines(folder):
    return [json.loads(line) for line in (folder / "tiny.jsonl").read_text().splitlines()]


def test_roles_networks_and_seeds_are_all_run_and_run_once(tiny, tmp_path):
    said = []
    first = reproduce("tiny", folder=tmp_path, seeds=(0, 1), say=said.append)
    assert len(first) == 2 * 2 * 2
    assert len(lines(tmp_path)) == 8 + 2  # and one tuning run per learning rate
    again = reproduce("tiny", folder=tmp_path, seeds=(0, 1))
    assert [r["key"] for r in again] == [r["key"] for r in first]
    assert len(lines(tmp_path)) == 10
    assert any("chosen on held-out training data" in sentence for sentence in said)


def test_tuning_never_sees_the_test_set(tiny, tmp_path, monkeypatch):
    """With test labels shuffled, the learning rate that is chosen stays the same."""
    reproduce("tiny", folder=tmp_path / "a", seeds=(0,), roles=["best"])
    load = datasets.load

    def spoiled(name, data_dir=None):
        data = load(name, data_dir)
        return replace(data, y_test=data.y_test[::-1].copy(), x_test=0 * data.x_test)

    monkeypatch.setattr(datasets, "load", spoiled)
    reproduce("tiny", folder=tmp_path / "b", seeds=(0,), roles=["best"])
    a, b = ([r for r in lines(tmp_path / k) if r["part"] == "validation"] for k in "ab")
    assert [(r["params"], r["score"]) for r in a] == [(r["params"], r["score"]) for r in b]
    finals = [next(r for r in lines(tmp_path / k) if r["part"] == "test") for k in "ab"]
    assert finals[0]["params"] == finals[1]["params"]
    assert finals[0]["loss_value"] != finals[1]["loss_value"]
    best = max(a, key=lambda r: r["score"])
    assert paper.rate_of(finals[0]) == paper.rate_of(best)


def test_the_table_says_what_the_results_say(tiny, tmp_path):
    folder = tmp_path / "results"
    records = reproduce("tiny", folder=folder, seeds=(0, 1))
    text = section(tiny, folder)
    exact = [100 * r["score"] for r in records if r["params"].get("weights") == "exact"]
    mean = sum(exact[:2]) / 2
    row = next(line for line in text.splitlines() if line.startswith("| 8 |"))
    assert row.split("|")[2].strip() == "90.0"
    assert row.split("|")[3].strip().startswith(f"{mean:.2f} ±")
    assert row.count("(2)") == 2
    assert "The paper's runs have 3 epochs." in text
    path = write_summary(folder)
    assert path == tmp_path / "README.md" and "## Tiny" in path.read_text()


def test_an_experiment_that_was_not_run_has_no_section(tiny, tmp_path):
    assert section(tiny, tmp_path) == ""


def test_the_paper_is_as_printed():
    assert paper.EXPERIMENTS["table2"].printed["LPOM"] == (97.7, 96.9, 97.1, 96.2, 96.1)
    for experiment in paper.EXPERIMENTS.values():
        for numbers in experiment.printed.values():
            assert len(numbers) == len(experiment.networks)
        for role in experiment.roles.values():
            matched = experiment.roles["best"]
            if role.method in ("adam", "sgd"):
                assert (role.loss, role.output) == (matched.loss, matched.output)
                assert len(role.grid) == len(matched.grid)  # the same tuning effort


def test_the_command(tiny, tmp_path):
    out = tmp_path / "results"
    arguments = ["reproduce", "tiny", "--seeds", "0", "--roles", "paper", "--out", str(out)]
    result = CliRunner().invoke(app, [*arguments, "--networks", "8,6"])
    assert result.exit_code == 0, result.output
    assert [r["hidden"] for r in lines(out)] == [[8, 6]]
    for bad, sentence in (
        (["tinny"], "tiny"),
        (["tiny", "--roles", "bset"], "best"),
        (["tiny", "--networks", "8 6"], "8,6"),
        (["tiny", "--networks", ""], "8,6"),
        (["all", "--networks", "300-100"], "300,100"),
        (["tiny", "--epochs", "0"], "greater than"),
    ):
        result = CliRunner().invoke(app, ["reproduce", *bad])
        assert result.exit_code == 2 and sentence in result.output


def test_quick_results_and_tables_stay_apart(tiny, tmp_path):
    out = tmp_path / "results"
    result = CliRunner().invoke(app, ["reproduce", "tiny", "--quick", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert not out.exists() and not (tmp_path / "README.md").exists()
    assert all(r["epochs"] == 1 for r in lines(tmp_path / "quick" / "results"))
    table = (tmp_path / "quick" / "README.md").read_text()
    assert table.count("(1)") == 4 and "exact: 1 epochs" in table
    assert table.count("not finished, 3 epochs are planned") == 2


def test_the_experiments_own_length_goes_before_a_longer_one(tiny, tmp_path):
    reproduce("tiny", folder=tmp_path, seeds=(0,), epochs=5, roles=["best"])
    assert "best: 5 epochs" in section(tiny, tmp_path)
    reproduce("tiny", folder=tmp_path, seeds=(0,), roles=["best"])
    assert "best: 3 epochs" in section(tiny, tmp_path)
    assert "not finished" not in section(tiny, tmp_path)


def test_figures_are_watched_on_held_out_data_and_drawn(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(EXPERIMENTS, "tiny", replace(tiny, curves=True, networks=((8,),)))
    folder = tmp_path / "results"
    reproduce("tiny", folder=folder, seeds=(0, 1))
    watched = [r for r in lines(folder) if (r["part"], r["epochs"]) == ("validation", 3)]
    assert [r["seed"] for r in watched] == [0, 0]
    for record in watched:
        assert record["curve"][-1]["validation_score"] == record["score"]
    text = write_summary(folder).read_text()
    for name in ("training accuracy](tiny-training", "held-out training data](tiny-held-out"):
        assert f"{name}.png)" in text
    for name in ("training", "held-out"):
        assert (tmp_path / f"tiny-{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(bool(why_not()), reason="products in bfloat16 do not run here")
def test_long_runs_until_curves_are_flat_are_drawn_too(tiny, tmp_path, monkeypatch):
    roles = tiny.roles | {"best": replace(tiny.roles["best"], long=Long(5, "bf16"))}
    long = replace(tiny, curves=True, roles=roles, networks=((8,),))
    monkeypatch.setitem(EXPERIMENTS, "tiny", long)
    folder = tmp_path / "results"
    reproduce("tiny", folder=folder, seeds=(0, 1))
    flat = [r for r in lines(folder) if r["epochs"] == 5]
    assert [(r["part"], r["precision"]) for r in flat] == [("validation", "bf16")]  # of the grid's
    assert len(flat[0]["curve"]) == 5 and flat[0]["curve"][-1]["validation_score"] is not None
    text = section(long, folder)
    assert f"with these epochs: {roles['best'].title} 5 (products in bfloat16)." in text
    for name in ("tiny-long-training.png", "tiny-long-held-out.png"):
        assert name in text and (tmp_path / name).exists()


def test_a_watched_run_that_was_a_tuning_run_is_not_drawn(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(EXPERIMENTS, "tiny", replace(tiny, curves=True, networks=((8,),)))
    folder = tmp_path / "results"
    reproduce("tiny", folder=folder, seeds=(0,), epochs=2, roles=["best"])
    assert "tiny-training.png" in write_summary(folder).read_text()
    assert not (tmp_path / "tiny-held-out.png").exists()


def test_a_readme_of_someone_else_is_not_written_over(tiny, tmp_path):
    mine = tmp_path / "README.md"
    mine.write_text("# My project")
    result = CliRunner().invoke(app, ["reproduce", "tiny", "--out", str(tmp_path / "results")])
    assert result.exit_code == 2 and "about something else" in result.output
    assert mine.read_text() == "# My project" and not (tmp_path / "results").exists()


def test_runs_that_came_to_nothing_are_said(tiny, tmp_path):
    """A diverged seed, a diverged rate of the grid, a role with nothing else, and remarks."""
    folder = tmp_path / "results"
    reproduce("tiny", folder=folder, seeds=(0, 1), networks=[(8,)])

    def spoil(record):
        failed = (record["method"], record["seed"]) == ("lpom", 1) or record["part"] != "test"
        exact = record["params"]["weights"] == "exact"
        if exact:
            failed, record["remarks"] = True, []
        if failed and 1e-2 not in (exact or paper.rate_of(record),) or record["seed"] == 1:
            for name in ("score", "seconds", "curve", "train_score"):
                record.pop(name, None)
            record["reason"] = "weights became NaN"
        else:
            record["remarks"] = ["A class is never predicted."]
        return record

    spoiled = [spoil(record) for record in lines(folder)]
    (folder / "tiny.jsonl").write_text("".join(json.dumps(r) + "\n" for r in spoiled))
    text = section(replace(tiny, curves=True), folder)
    assert "failed: weights became NaN" in text
    assert "(1, 1 failed)" in text
    assert "0.001: failed" in text and "0.01 is at the edge of the grid." in text
    assert "A class is never predicted." in text


def test_of_equal_rates_runs_and_table_take_the_same(tiny, tmp_path):
    reproduce("tiny", folder=tmp_path, seeds=(0,), roles=["best"])
    tied = [{**r, "score": 0.9} for r in lines(tmp_path) if r["part"] == "validation"]
    text = "".join(json.dumps(record) + "\n" for record in reversed(tied))
    (tmp_path / "tiny.jsonl").write_text(text)
    reproduce("tiny", folder=tmp_path, seeds=(0,), roles=["best"])
    assert "learning_rate 0.001;" in section(tiny, tmp_path)


def test_what_was_tried_is_listed_best_first_and_never_on_the_test_set(tiny, tmp_path):
    reproduce("tiny", folder=tmp_path, seeds=(0, 1), networks=[(8,)])
    kept = [{**record, "experiment": "tiny", "score": 0.5} for record in lines(tmp_path)]
    (exact, other), final = kept[2:4], kept[0]
    held = [{**exact, "part": "validation"}, {**other, "part": "validation"}]
    held += [{**held[0], "epochs": 9, "score": 0.75}, {**held[0], "experiment": "large"}]
    failed = {**held[0], "epochs": 7, "reason": "it diverged"}
    del failed["score"]
    path = tmp_path / "tried.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in [*held, failed]))
    text = section(tiny, tmp_path)
    rows = text[text.index("<details>") :].splitlines()[4:]
    assert "4 runs" in text
    assert [row.split("|")[1].strip() for row in rows if row.startswith("|")] == [
        "75.00",
        "50.00",
        "50.00",
        "failed",
    ]
    path.write_text(json.dumps({**final, "part": "test"}))
    with pytest.raises(ValueError, match="tried.jsonl has a run on other data"):
        section(tiny, tmp_path)
    path.rename(tmp_path / "others.jsonl")
    assert "Other settings, on the test set: 1 runs" in section(tiny, tmp_path)


def test_tables_are_made_without_data(tiny, tmp_path, monkeypatch):
    folder = tmp_path / "results"
    reproduce("tiny", folder=folder, seeds=(0,), roles=["paper"])
    monkeypatch.setattr(datasets, "load", None)
    result = CliRunner().invoke(app, ["reproduce", "tiny", "--tables", "--out", str(folder)])
    assert result.exit_code == 0 and "Tiny" in (tmp_path / "README.md").read_text()
