"""Tables beyond the paper as data: run once, taken up again, laid out from the results."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lpom import activations, methods, networks
from lpom.experiments.beyond import TABLES, Help, Row, Table
from lpom.experiments.records import Trial
from lpom.experiments.rows import SHARES, reproduce_rows, rows_section

PLAIN = Trial("digits", (), "lpom", network="mlp", loss="cross-entropy", epochs=2)
BOTH = {"lpom": 2e-3, "straight-through": 4e-3}


@pytest.fixture
def tiny(monkeypatch):
    table = Table(
        "tiny",
        "Tiny",
        {"lpom": "LPOM", "straight-through": "rival"},
        (
            Row(
                "steps",
                "steps, 12",
                replace(PLAIN, options={"hidden": [12], "activation": "step", "norm": True}),
                BOTH,
                least=1.0,
                margin=100.0,
            ),
            Row(
                "few",
                "few, 12",
                replace(PLAIN, options={"hidden": [12]}),
                {"lpom": 2e-3},
                params={"penalties": {"l1": {"keep": 0.1, "lazy": True}}},
                least=100.0,
                published="99 %",
            ),
        ),
    )
    monkeypatch.setitem(TABLES, "tiny", table)
    return table


def lines(folder):
    return [json.loads(line) for line in (folder / "tiny.jsonl").read_text().splitlines()]


def test_rows_columns_and_seeds_are_run_once(tiny, tmp_path):
    first = reproduce_rows("tiny", folder=tmp_path, seeds=(0, 1), rows=["steps"])
    assert [(r["method"], r["seed"]) for r in first] == [
        ("lpom", 0),
        ("lpom", 1),
        ("straight-through", 0),
        ("straight-through", 1),
    ]
    assert [r["settings"].get("learning_rate") for r in first[2:]] == [4e-3, 4e-3]
    again = reproduce_rows("tiny", folder=tmp_path, seeds=(0, 1))
    assert [r["key"] for r in again[:4]] == [r["key"] for r in first]
    assert len(lines(tmp_path)) == 6


def test_the_table_says_what_the_results_say(tiny, tmp_path):
    assert rows_section(tiny, tmp_path) == ""
    records = reproduce_rows("tiny", folder=tmp_path, seeds=(0, 1))
    text = rows_section(tiny, tmp_path)
    own, rival = (100 * (records[k]["score"] + records[k + 1]["score"]) / 2 for k in (0, 2))
    row = [cell.strip() for cell in _row(text, "| steps, 12 |").split("|")[1:-1]]
    assert row[2].startswith(f"{own:.2f} ±") and row[3].startswith(f"{rival:.2f} ±")
    assert row[1] == "1.0" and row[4] == f"yes; {own - rival:+.2f} to the rival"
    few = [cell.strip() for cell in _row(text, "| few, 12 |").split("|")[1:-1]]
    assert few[3:] == ["-", "no", "99 %"]
    left = records[-1]["remains"]
    assert left.keys() >= SHARES.keys() and left["nonzero"] == pytest.approx(0.1, abs=0.002)
    assert f"| few, 12 | {100 * left['nonzero']:.1f} |" in text
    assert "mlp, activation step, hidden 12, norm True; 2 epochs, batch 100" in text


def test_what_was_not_run_is_said(tiny, tmp_path):
    reproduce_rows("tiny", folder=tmp_path, seeds=(0,), epochs=1, rows=["steps"])
    text = rows_section(tiny, tmp_path)
    assert "after 1 epochs only" in _row(text, "| steps, 12 |")
    assert "not run" in _row(text, "| few, 12 |")
    assert "- few, 12: not run; `lpom reproduce tiny --rows few`." in text


def test_a_shorter_run_of_another_row_is_not_taken_for_this_one(tiny, tmp_path, monkeypatch):
    steps = tiny.rows[0]
    longer = replace(steps, name="longer", title="longer, 12", trial=replace(steps.trial, epochs=4))
    monkeypatch.setitem(TABLES, "tiny", replace(tiny, rows=(steps, longer)))
    reproduce_rows("tiny", folder=tmp_path, seeds=(0,), rows=["steps"])
    text = rows_section(TABLES["tiny"], tmp_path)
    assert "yes;" in _row(text, "| steps, 12 |") and "not run" in _row(text, "| longer, 12 |")


def test_help_that_a_run_had_is_told(tiny, tmp_path, monkeypatch):
    helped = replace(
        PLAIN,
        options={"hidden": [12]},
        loss_params={"label_smoothing": 0.1},
        augment={"flip": False, "crop": 0, "turn": 10.0},
        weight_decay=1e-4,
    )
    table = replace(tiny, rows=(Row("helped", "helped, 12", helped, {"lpom": 2e-3}),))
    monkeypatch.setitem(TABLES, "tiny", table)
    reproduce_rows("tiny", folder=tmp_path, seeds=(0,))
    said = (
        "loss cross-entropy, crop 0, flip False, turn 10, label_smoothing 0.1, weight_decay 0.0001;"
    )
    assert said in rows_section(table, tmp_path)


def _row(text, begin):
    return next(line for line in text.splitlines() if line.startswith(begin))


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
def test_every_row_can_be_made(table):
    """Networks, methods and penalties of all settings exist; columns differ in the method, and
    where each had a search of its own in the help that it found, and in nothing else."""
    names = [row.name for row in table.rows]
    assert len(set(names)) == len(names)
    for row in table.rows:
        assert set(row.rates) <= set(table.columns) and "lpom" in row.rates
        shape = (3, 32, 32) if row.trial.dataset == "cifar-10" else (1, 28, 28)
        activations.get(row.trial.options.get("activation", "relu"))
        for column in row.rates:
            (trial,) = row.trials(column, (0,), None)
            networks.get(trial.network, shape, 10, 0, **trial.options)
            methods.get(trial.method, **trial.params)
            helped = row.helps[column].given_to(row.trial) if row.helps else row.trial
            assert replace(trial, method="", params={}) == replace(helped, method="", params={})


def test_help_is_put_beside_what_a_trial_has():
    help = Help(1e-3, (0.1, 0.2), norm=True, smoothing=0.1, weight_decay=1e-4, noise=0.3)
    plain = replace(PLAIN, options={"hidden": [12]})
    options = {"hidden": [12], "dropout": [0.1, 0.2], "norm": True}
    expected = replace(
        plain,
        options=options,
        loss_params={"label_smoothing": 0.1},
        weight_decay=1e-4,
        augment={"flip": False, "crop": 0, "noise": 0.3},
    )
    assert help.given_to(plain) == expected
    assert help.given_to(replace(plain, augment=True)).augment == {"noise": 0.3}
    assert help.given_to(replace(plain, augment={"crop": 2})).augment == {"crop": 2, "noise": 0.3}
    assert Help(1e-3).given_to(replace(plain, augment=True)).augment is True
