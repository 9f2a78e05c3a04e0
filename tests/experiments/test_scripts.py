"""The scripts in experiments/, on data that takes a second."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import lpom
from lpom import datasets, methods
from lpom.experiments.paper import rate_of
from lpom.experiments.records import Store
from lpom.methods import Batch


def script(name):
    path = Path(__file__).parents[2] / "experiments" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for annotations
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


@pytest.fixture(scope="module")
def choices():
    yield from script("choices")


@pytest.fixture(scope="module")
def explore():
    yield from script("explore")


@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [("widths", "VARIANTS", "ACTIVATIONS"), ("mu", "METHODS", "NETWORKS")],
)
def test_a_table_is_held_out_and_goes_into_its_page(name, rows, columns, tmp_path, monkeypatch):
    (found,) = script(name)
    labels, others = list(getattr(found, rows)), list(getattr(found, columns))
    trials = [t for label in labels for t in found.trials(label, others[0], 1, [0])]
    assert len({trial.key for trial in trials}) == len(labels)
    monkeypatch.setattr(found, rows, {label: getattr(found, rows)[label] for label in labels[2:4]})
    chosen = getattr(found, columns)
    few = chosen[:1] if isinstance(chosen, tuple) else {others[0]: chosen[others[0]]}
    monkeypatch.setattr(found, columns, few)
    page = tmp_path / "page.md"
    page.write_text(
        f"before\n<!-- table of experiments/{name}.py -->\nold\n<!-- end of table -->\nafter\n"
    )
    iris = datasets.load("iris")
    monkeypatch.setattr(found.datasets, "load", lambda name: iris)
    monkeypatch.setattr(found, "HERE", tmp_path)
    monkeypatch.setattr(found, "PAGE", page)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--epochs", "1", "--seeds", "0"])
    found.main()
    lines = page.read_text().splitlines()
    assert lines[0] == "before" and lines[-1] == "after" and "old" not in lines
    assert [line.split("|")[1].strip() for line in lines if line.startswith("| ")][1:] == labels[
        2:4
    ]
    (results,) = (tmp_path / "results").glob("*.jsonl")
    assert all(record["part"] == "validation" for record in Store(results))


@pytest.fixture(scope="module")
def cosine():
    yield from script("cosine")


def test_the_two_steps_meet_as_mu_grows(cosine):
    model = lpom.mlp([8, 12, 6, 3], "tanh", seed=0, dtype=torch.float64)
    X = torch.randn(20, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    target = torch.eye(3, dtype=torch.float64)[torch.arange(20) % 3]
    before = [p.clone() for p in model.parameters()]
    angles = [1 - cosine.cosine(model, Batch(X, target), mu) for mu in (1.0, 10.0, 100.0, 1000.0)]
    assert all(map(torch.equal, before, model.parameters()))
    # the direction is off by a multiple of 1 / mu, the cosine by one of its square
    assert [a / b for a, b in pairwise(angles)] == pytest.approx([100] * 3, rel=0.5)


def test_every_variant_is_held_out_and_takes_known_parameters(choices):
    for choice in choices.CHOICES:
        keys = set()
        for label in choice.variants:
            for trial in choices.trials(choice, label, 1, [0]):
                assert trial.part == "validation"
                methods.get(trial.method, **trial.params)
                keys.add(trial.key)
        assert len(keys) == len(choice.variants), f"{choice.title}: two variants are the same"


def test_a_table_has_a_row_per_variant(choices, tmp_path):
    choice = choices.CHOICES[3]
    small = replace(choice, base=replace(choice.base, dataset="iris", hidden=(8,)))
    text = choices.table(small, 1, [0, 1], datasets.load("iris"), Store(tmp_path / "c.jsonl"))
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(choice.variants)
    assert all("±" in row for row in rows[1:])


def test_what_is_explored_is_listed_once_and_without_the_test_set(
    explore, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(explore, "RESULTS", tmp_path)
    tiny = replace(explore.EXPERIMENTS["table3"], dataset="iris")
    monkeypatch.setitem(explore.EXPERIMENTS, "table3", tiny)
    arguments = [
        "table3",
        "--hidden",
        "8,4",
        "--epochs",
        "1",
        "weights={'exact': {'ridge': [0.1, 1.0]}}",
    ]
    monkeypatch.setattr(sys, "argv", ["explore.py", *arguments])
    explore.main()
    explore.main()
    assert "held out" in capsys.readouterr().out
    (record,) = Store(tmp_path / "tried.jsonl")
    assert (record["experiment"], record["part"]) == ("table3", "validation")
    assert record["params"] == {"weights": {"exact": {"ridge": [0.1, 1.0]}}}


def test_a_search_gives_each_method_the_same_candidates_and_keeps_the_better_third(
    tmp_path, monkeypatch, capsys
):
    (search,) = script("search")
    drawn = {column: search.candidates(column, 27, search.SPACE) for column in search.PAST.columns}
    for column, helps in drawn.items():
        assert len(set(helps)) == 27
        places = [search.RATES[column].index(help.rate) for help in helps]
        assert [replace(help, rate=0) for help in helps] == [
            replace(help, rate=0) for help in drawn["lpom"]
        ]
        assert places == [search.RATES["lpom"].index(help.rate) for help in drawn["lpom"]]
        trials = [search.trial(search.PAST.rows[1], column, help, 4) for help in helps]
        assert len({trial.key for trial in trials}) == 27
        assert all((trial.part, trial.method) == ("validation", column) for trial in trials)
        assert [rate_of(asdict(trial)) for trial in trials] == [help.rate for help in helps]
    monkeypatch.setattr(search, "RESULTS", tmp_path)
    digits = datasets.load("digits")
    monkeypatch.setattr(search.datasets, "load", lambda name: digits)
    arguments = ["300", "--columns", "adam", "--candidates", "9", "--epochs", "6"]
    monkeypatch.setattr(sys, "argv", ["search.py", *arguments])
    search.main()
    lines = capsys.readouterr().out.splitlines()
    records = list(Store(tmp_path / "tried.jsonl"))
    assert [record["epochs"] for record in records] == [2] * 9 + [6] * 3
    longer = {json.dumps(record["options"] | record["params"]) for record in records[9:]}
    better = sorted(records[:9], key=lambda record: -record["score"])[:3]
    assert {json.dumps(record["options"] | record["params"]) for record in better} == longer
    assert len(lines) == 9 + 3 + 1 and lines[-1].startswith("adam: Help(rate=")
    search.main()  # nothing is run again
    assert len(list(Store(tmp_path / "tried.jsonl"))) == 12


def test_the_adding_problem_is_measured_on_other_sequences_and_kept(tmp_path, monkeypatch, capsys):
    (adding,) = script("adding")
    for name, value in {"STEPS": 6, "ROWS": 200, "TEST_ROWS": 50}.items():
        monkeypatch.setattr(adding, name, value)
    X, y = adding.sequences(40, seed=0)
    assert X.shape == (40, 6, 2) and bool((X[:, :3, 1].sum(1) == 1).all())
    assert bool((X[..., 1].sum(1) == 2).all())
    torch.testing.assert_close(y, (X[..., 0] * X[..., 1]).sum(1, keepdim=True))
    out = tmp_path / "adding.jsonl"
    monkeypatch.setattr(
        sys, "argv", ["adding.py", "--seeds", "0", "--epochs", "1", "--out", str(out)]
    )
    adding.main()
    first = capsys.readouterr().out
    assert "lpom: mean squared error" in first and len(out.read_text().splitlines()) == 2
    adding.main()  # both are there
    assert capsys.readouterr().out.splitlines() == [
        line for line in first.splitlines() if "mean squared error" in line
    ]


def test_rates_for_sequences_are_tried_on_held_out_rows_by_both_methods(monkeypatch):
    (sequences,) = script("sequences")
    given = {"rates": "0.001,0.002", "schedules": "linear,cosine", "epochs": 1, "seed": 0}
    options = sequences.argparse.Namespace(network="rnn", widths="", **given)
    trials = list(sequences.trials(options))
    assert len({trial.key for trial in trials}) == 8
    assert all(trial.part == "validation" for trial in trials)
    assert [trial.method for trial in trials] == ["lpom", "adam"] * 4
    options = sequences.argparse.Namespace(network="transformer", widths="1,2", **given)
    hard = list(sequences.trials(options))
    assert len({trial.key for trial in hard}) == 8
    assert all(trial.part == "validation" for trial in hard)
    assert all(trial.options == {"attention": "one_hot"} for trial in hard)
    assert [trial.method for trial in hard] == ["lpom", "straight-through"] * 4


def test_the_page_of_costs_is_what_its_files_make_of_it(monkeypatch, tmp_path):
    """Nothing between its marks was typed."""
    (performance,) = script("performance")
    page = performance.PAGE.read_text()
    copy = tmp_path / "performance.md"
    copy.write_text(page)
    monkeypatch.setattr(performance, "PAGE", copy)
    performance.main()
    assert copy.read_text() == page
