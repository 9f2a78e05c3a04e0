"""Experiments: tuned on held-out rows, each run once, resumed where they were cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import data
import networks
import studies
import trials
from beyond import TABLES, Help, Row, Table
from experiments import EXPERIMENTS, Experiment, Role
from paper import run_experiment, run_table
from records import RESULTS, Trial
from search import candidates, halving, space_of
from trials import Runner

TINY = Experiment(
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


def scores(runner: Runner, **fields: object) -> list[tuple[object, float]]:
    return [(r.get("rate"), r["score"]) for r in runner.store.select(**fields)]


def test_everything_is_run_once(folder: Path) -> None:
    runner = Runner("tiny", folder, quiet=True)
    first = run_experiment(TINY, runner, seeds=(0, 1))
    assert len(first) == 2 * 2 * 2
    assert len(list(runner.store)) == 8 + 2  # and one tuning run per learning rate
    again = run_experiment(TINY, runner, seeds=(0, 1))
    assert [r["id"] for r in again] == [r["id"] for r in first]
    assert not (folder / "unfinished").exists()


def test_tuning_never_sees_the_test_set(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With test rows blanked out, the learning rate that is chosen stays the same."""
    plain, spoiled = (Runner(name, folder, quiet=True) for name in ("plain", "spoiled"))
    run_experiment(TINY, plain, seeds=(0,), columns=["best"])
    iris = data.load("iris")
    blank = replace(iris, x_test=0 * iris.x_test)
    monkeypatch.setitem(data.LOADERS, "iris", lambda: blank)
    run_experiment(TINY, spoiled, seeds=(0,), columns=["best"])
    assert scores(plain, kind="tuning") == scores(spoiled, kind="tuning")
    finals = [runner.store.select(kind="final") for runner in (plain, spoiled)]
    assert finals[0][0]["settings"] == finals[1][0]["settings"]
    assert finals[0][0]["loss_value"] != finals[1][0]["loss_value"]


def test_a_run_that_was_cut_goes_on_bit_for_bit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "CUT_SECONDS", 0.0)
    trial = Trial("iris", (8,), "adam", {"learning_rate": 0.01}, epochs=6, batch_size=20)
    whole = Runner("whole", folder, quiet=True).run(trial, kind="final")
    cut, epochs = Runner("cut", folder), []

    def interrupt(sentence: str) -> None:
        epochs.append(sentence)
        if len(epochs) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(cut, "say", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cut.run(trial, kind="final")
    assert not list(cut.store)
    again = cut.run(trial, kind="final")
    assert (again["loss_value"], again["score"]) == (whole["loss_value"], whole["score"])
    assert len(epochs) < 3 + 6 + 1  # without the epochs that were kept


def test_a_method_that_can_not_leaves_its_reason(folder: Path) -> None:
    trial = Trial("iris", (8,), "adam", {"learning_rate": -1.0})
    record = Runner("x", folder, quiet=True).run(trial, kind="final")
    assert "learning_rate" in record["reason"] and "score" not in record


def test_help_is_put_beside_what_a_trial_has(folder: Path) -> None:
    base = Trial(
        "iris", (), "lpom", network="mlp", options={"hidden": [8]}, loss="cross-entropy", epochs=2
    )
    help = Help(1e-2, dropout=(0.1, 0.0), norm=True, smoothing=0.1, weight_decay=1e-4)
    row = Row("r", "R", base, {"lpom": 1e-2, "adam": 1e-2}, {"lpom": help, "adam": help})
    table = Table("past", "T", {"lpom": "LPOM", "adam": "Adam"}, (row,))
    finals = run_table(table, Runner("past", folder, quiet=True), seeds=(0,))
    assert [r["column"] for r in finals] == ["lpom", "adam"]
    assert all("score" in r for r in finals), finals
    assert finals[0]["network"] == "mlp, hidden 8"
    assert finals[0]["more"].startswith("dropout 0.1-0.0, norm True, label_smoothing 0.1")
    assert "mu 20" in finals[0]["settings"]


@pytest.mark.parametrize("name", [*EXPERIMENTS, *TABLES])
def test_stored_runs_are_those_that_are_described(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is stored is found again; what was never run is all that would be run."""
    ran: list[dict] = []

    def note(self: Runner, trial: Trial, *args: object) -> dict:
        ran.append({"trial": trial})
        return {"score": 0.0, "seconds": 0.0}

    monkeypatch.setattr(Runner, "_train", note)
    runner = Runner(name, RESULTS, quiet=True)
    monkeypatch.setattr(runner.store, "add", dict)
    run = run_table if name in TABLES else run_experiment
    what = TABLES[name] if name in TABLES else EXPERIMENTS[name]
    finals = run(what, runner)  # type: ignore[operator]
    stored = [r for r in finals if "id" in r]
    assert len(stored) == len(runner.store.select(kind="final"))


@pytest.mark.parametrize("name", studies.STUDIES)
def test_studies_are_held_out_and_take_known_parameters(name: str) -> None:
    study = studies.STUDIES[name]
    for _, _, trial in study.cells:
        trials.methods.get(trial.method, **trial.params)
        trials.make_model(trial, (1, 28, 28) if trial.network else (784,), 10)


def test_a_study_is_run_on_held_out_rows(folder: Path) -> None:
    cells = [("a", "b", Trial("iris", (5,), "adam", {"learning_rate": 0.01}))]
    study = studies.Study("", "held out", 1, cells, first=60)
    (record,) = study.run("x", folder, [0], 2)
    assert (record["kind"], record["epochs"], record["row"]) == ("held out", 2, "a")


def test_a_search_gives_each_column_the_same_candidates() -> None:
    row = TABLES["past"].rows[1]
    drawn = [candidates(c, 9, space_of(row, True)) for c in ("lpom", "sgd")]
    assert len(set(drawn[0])) == 9
    plain = [[replace(help, rate=0.0) for help in helps] for helps in drawn]
    assert plain[0] == plain[1]
    assert halving(27, 36) == [(27, 4), (9, 12), (3, 36)]


SHAPES = {"mlp": (1, 8, 8), "char-transformer": (6,), "lenet5": (1, 28, 28)}


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_networks_are_made_from_their_seed_and_keep_the_size_of_signals(name: str) -> None:
    shape = SHAPES.get(name, (3, 32, 32))
    state = torch.random.get_rng_state()
    models = [networks.get(name, shape, 10, seed).eval() for seed in (0, 0, 1)]
    assert torch.equal(torch.random.get_rng_state(), state)
    X = torch.randn(20, *shape, generator=torch.Generator().manual_seed(0))
    X = X.argsort(1) if len(shape) == 1 else X
    with torch.no_grad():
        a, b, c = (model(X) for model in models)
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert a.shape == ((20, 6, 10) if len(shape) == 1 else (20, 10))
    assert 0.1 < float(a.std()) < 20


@pytest.mark.parametrize(
    ("name", "shape", "n_weights"),
    [
        ("lenet5", (1, 28, 28), 61_706),  # LeCun et al.
        ("resnet20", (3, 32, 32), 272_474),  # He et al., with shortcuts that are learnt
    ],
)
def test_networks_have_the_weights_of_the_literature(
    name: str, shape: tuple[int, ...], n_weights: int
) -> None:
    model: nn.Module = networks.get(name, shape)
    assert sum(p.numel() for p in model.parameters()) == n_weights


def test_blobs_are_told_apart_with_every_kind_of_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Augmented, adversarial, whitened: all of them reach `fit` and learn."""
    rng = np.random.default_rng(0)
    y = np.arange(90) % 3
    x = (2 * rng.standard_normal((3, 64))[y] + rng.standard_normal((90, 64))).astype(np.float32)
    blobs = data.Dataset("blobs", x, y, x[::2], y[::2], 3, (8, 8))
    monkeypatch.setitem(data.LOADERS, "blobs", lambda: blobs)
    rate = {"weights": {"adaptive": {"learning_rate": 0.01}}}
    base = Trial("blobs", (), "lpom", rate, network="mlp", options={"hidden": [16]}, epochs=8)
    runner = Runner("x", folder, quiet=True)
    ways = ({"augment": {"flip": False, "crop": 1}}, {"adversarial": 0.5}, {"whiten": 0.1}, {})
    for way in ways:
        record = runner.run(replace(base, batch_size=15, **way), kind="tried", closely=True)
        assert record["score"] > 0.6, record
        assert len(record["curve"]["validation_score"]) == 8


def test_what_penalties_leave_is_measured(folder: Path) -> None:
    """Half of the hidden units are dead, and the compacted network is smaller by these."""
    model = torch.nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 3))
    with torch.no_grad():
        model[0].weight[10:] = 0
        model[0].bias[10:] = 0
    shares = trials.remains(model, torch.rand(50, 8))
    assert shares["nonzero"] == pytest.approx(1 - 80 / 220)
    assert shares["weights"] == pytest.approx(
        (8 * 10 + 10 + 10 * 3 + 3) / (8 * 20 + 20 + 20 * 3 + 3)
    )
    assert 0 < shares["bytes"] and 0 < shares["time"]
