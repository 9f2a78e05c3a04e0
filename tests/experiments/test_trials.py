"""Trials: kept by their settings, cut and taken up again without a trace, refusals with reasons."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from lpom import fit, methods, mlp
from lpom.datasets import adversarial_loader
from lpom.exceptions import CheckpointError, LPOMError
from lpom.experiments import trials
from lpom.experiments.records import Store, Trial
from lpom.experiments.trials import parts, run
from lpom.lifting import Lifted
from lpom.methods import Adam
from lpom.training import evaluate

RESULTS = Path(__file__).parents[2] / "experiments" / "results"
TRIAL = Trial("blobs", (8,), "adam", loss="squared", epochs=4, batch_size=20)


def results(record):
    """What must not depend on how a trial was run; times may."""
    kept = {k: v for k, v in record.items() if k not in ("seconds", "curve", "machine")}
    times = ("seconds", "samples_per_second")
    curve = [{k: v for k, v in epoch.items() if k not in times} for epoch in record["curve"]]
    return json.loads(json.dumps({**kept, "curve": curve}))


def test_the_key_names_settings_and_stays():
    """Long runs are stored by it: a field that is added may not change it."""
    assert TRIAL.key == Trial("blobs", (8,), "adam", loss="squared", epochs=4, batch_size=20).key
    assert TRIAL.key != replace(TRIAL, seed=1).key
    assert Trial("mnist", (300,), "lpom", {"mu": 20.0}, seed=2).key == "ab9dd20ec4e29334"


def test_a_store_passes_over_what_is_no_record_and_says_so(tmp_path, blobs):
    store = Store(tmp_path / "deep" / "results.jsonl")
    whole = run(TRIAL, blobs, store)
    with store.path.open("ab") as file:
        file.write(b'[1, 2]\n{"key": "abc"}\n\xff\n{"key": "b", "sco')
    with pytest.warns(UserWarning) as said:
        assert [record["key"] for record in store] == [whole["key"]]
    assert [str(w.message).split(", ")[1] for w in said] == ["line 2", "line 3", "line 4"]
    store.add({**whole, "key": "c"})
    with pytest.warns(UserWarning, match="is not the record of a run and is passed over"):
        assert [record["key"] for record in store] == [whole["key"], "c"]


def test_a_record_without_its_score_is_run_again(tmp_path, blobs):
    store = Store(tmp_path / "results.jsonl")
    whole = run(TRIAL, blobs, store)
    cut = {key: value for key, value in whole.items() if key != "score"}
    store.path.write_text(json.dumps(cut) + "\n")
    with pytest.warns(UserWarning, match="line 1, is not the record of a run"):
        assert run(TRIAL, blobs, store)["score"] == whole["score"]


def test_a_run_on_data_prepared_otherwise_is_not_taken_for_this_one(tmp_path, blobs):
    store = Store(tmp_path / "results.jsonl")
    run(TRIAL, blobs, store)
    with pytest.raises(LPOMError, match="prepared in another way: Made up"):
        run(TRIAL, replace(blobs, notes="Made up in another way."), store)


def test_a_network_by_name_takes_rows_that_are_no_pictures(tmp_path, blobs):
    trial = Trial("blobs", (), "adam", network="mlp", options={"hidden": [6]}, epochs=1)
    plain = Trial("blobs", (6,), "adam", epochs=1)
    found, expected = (run(t, blobs, Store(tmp_path / "r.jsonl")) for t in (trial, plain))
    assert found["loss_value"] == pytest.approx(expected["loss_value"])


def test_a_finished_trial_is_not_run_again(tmp_path, blobs, monkeypatch):
    store = Store(tmp_path / "results.jsonl")
    first = run(TRIAL, blobs, store)
    monkeypatch.setattr(trials, "fit", None)
    assert results(run(TRIAL, blobs, store)) == results(first)
    assert len(list(store)) == 1


def test_a_trial_is_a_run_of_fit(tmp_path, blobs):
    """The start is ``lpom.mlp`` of the seed, and so are the batches."""
    trial = replace(TRIAL, seed=3)
    record = run(trial, blobs, Store(tmp_path / "results.jsonl"))
    model = mlp([5, 8, 3], seed=3)
    options = {"method": "adam", "loss": "squared", "epochs": 4, "batch_size": 20, "seed": 3}
    fit(model, blobs.x_train, blobs.y_train, **options)
    loss, score = evaluate(model, blobs.x_test, blobs.y_test, loss="squared")
    assert record["score"] == score
    assert record["loss_value"] == loss


SETTINGS = [(name, {}) for name in ("lpom", "adam", "admm")]
SETTINGS += [("lpom", {"states": {"sweeps": {"order": "top-down", "most": 2}}})]
SETTINGS += [("lpom", {"weights": "exact"})]


@pytest.mark.parametrize("step", [3, 17])
@pytest.mark.parametrize(("name", "params"), SETTINGS)
def test_a_cut_trial_goes_on_bit_for_bit(tmp_path, blobs, interrupt, name, params, step):
    trial = replace(TRIAL, method=name, params=params)
    method = methods.METHODS[name]
    whole = run(trial, blobs, Store(tmp_path / "whole.jsonl"))
    store = Store(tmp_path / "cut" / "results.jsonl")
    interrupt(method, 3 if method.full_batch else step)  # 5 steps an epoch, or 1
    with pytest.raises(KeyboardInterrupt):
        run(trial, blobs, store)
    assert not list(store)
    again = run(trial, blobs, store)
    assert results(again) == results(whole)
    assert not list((tmp_path / "cut" / "unfinished").glob("*"))


@pytest.mark.parametrize("name", methods.names())
def test_a_cut_trial_does_not_repeat_its_finished_epochs(tmp_path, blobs, interrupt, name):
    trial, method = replace(TRIAL, method=name), methods.METHODS[name]
    store, seen = Store(tmp_path / "results.jsonl"), []
    interrupt(method, 3 if method.full_batch else 13)  # in the third of four epochs
    with pytest.raises(KeyboardInterrupt):
        run(trial, blobs, store)
    run(trial, blobs, store, on_epoch=lambda epoch: seen.append(epoch.epoch))
    assert seen == [3, 4]


def test_a_cut_trial_keeps_what_was_said_before_the_cut(tmp_path, blobs, interrupt, monkeypatch):
    init, asked = Adam.init, []

    def init_and_say(self, problem):
        state = init(self, problem)
        if not asked:  # the run that goes on has nothing to say of its own
            state.remark("start", "a poor start")
        asked.append(problem)
        return state

    monkeypatch.setattr(Adam, "init", init_and_say)
    interrupt(Adam, 13)
    store = Store(tmp_path / "results.jsonl")
    with pytest.raises(KeyboardInterrupt):
        run(TRIAL, blobs, store)
    assert run(TRIAL, blobs, store)["remarks"] == ["a poor start"]


def test_short_epochs_are_not_kept_one_by_one(tmp_path, blobs, interrupt, monkeypatch):
    monkeypatch.setattr(trials, "CUT_SECONDS", 60.0)
    interrupt(Adam, 13)
    with pytest.raises(KeyboardInterrupt):
        run(TRIAL, blobs, Store(tmp_path / "results.jsonl"))
    assert not list((tmp_path / "unfinished").glob("*/*.safetensors"))


def test_a_damaged_checkpoint_is_no_fault_of_the_method(tmp_path, blobs):
    folder, store = tmp_path / "unfinished" / TRIAL.key, Store(tmp_path / "results.jsonl")
    folder.mkdir(parents=True)
    (folder / "00000001-abc.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match="is damaged"):
        run(TRIAL, blobs, store)
    assert not list(store)


def test_how_jumps_are_met_says_nothing_of_a_network_without(tmp_path, blobs):
    store, smooth = Store(tmp_path / "results.jsonl"), replace(TRIAL, method="lpom", epochs=1)
    for trial in (smooth, replace(smooth, activation="step")):
        record = run(trial, blobs, store)
        store.path.write_text(
            json.dumps({**record, "settings": {**record["settings"], "jumps": {}}})
        )
        if trial is smooth:
            assert run(trial, blobs, store)["score"] == record["score"]
        else:
            with pytest.raises(LPOMError, match="other defaults"):
                run(trial, blobs, store)


@pytest.mark.parametrize("name", ["table2", "table3", "figure1-mnist", "figure1-cifar", "past"])
def test_the_runs_of_the_page_are_found_by_its_own_command(name):
    """With other defaults than today's they would be refused."""
    known = {field.name for field in fields(Trial)}
    records = list(Store(RESULTS / f"{name}.jsonl"))
    assert records
    for record in records:
        made = Trial(**{key: value for key, value in record.items() if key in known})
        trial = replace(made, hidden=tuple(made.hidden))
        assert trial.key == record["key"]
        settings = trials._settings(trial)
        assert trials._read(record.get("settings", settings), trial) == trials._read(
            settings, trial
        )


def test_a_record_has_every_setting_and_others_are_not_passed_off_as_ours(tmp_path, blobs):
    store = Store(tmp_path / "results.jsonl")
    record = run(TRIAL, blobs, store)
    assert record["settings"] == methods.get("adam").get_params(deep=False)
    changed = {**record, "settings": {**record["settings"], "learning_rate": 0.5}}
    store.path.write_text(json.dumps(changed))
    with pytest.raises(LPOMError, match="other defaults"):
        run(TRIAL, blobs, store)


def test_a_method_that_can_not_leaves_its_reason(tmp_path, blobs):
    store = Store(tmp_path / "results.jsonl")
    record = run(replace(TRIAL, params={"learning_rate": -1.0}), blobs, store)
    assert "learning_rate must be a number above 0" in record["reason"]
    assert "score" not in record
    assert [kept["reason"] for kept in store] == [record["reason"]]


def test_divergence_is_a_reason_that_names_the_epoch_of_the_trial(tmp_path, blobs, monkeypatch):
    whole, steps = Adam.step, 0

    def step(self, problem, batch, state):
        nonlocal steps
        steps += 1
        outputs = whole(self, problem, batch, state)
        if steps == 12:  # in the third epoch
            with torch.no_grad():
                problem.graph.parameters[0].fill_(float("nan"))
        return outputs

    monkeypatch.setattr(Adam, "step", step)
    record = run(TRIAL, blobs, Store(tmp_path / "results.jsonl"))
    assert record["reason"].startswith("weights became NaN or infinite in epoch 3;")
    assert record["reason"].endswith("Try a smaller learning_rate.")
    assert not list((tmp_path / "unfinished").glob("*"))


def test_what_a_method_says_is_kept(tmp_path, blobs):
    record = run(replace(TRIAL, activation="step"), blobs, Store(tmp_path / "results.jsonl"))
    assert len(record["remarks"]) == 1
    assert "only the last layer learns" in record["remarks"][0]


def test_watched_closely_it_trains_the_same(tmp_path, blobs):
    plain = run(TRIAL, blobs, Store(tmp_path / "plain.jsonl"))
    close = run(TRIAL, blobs, Store(tmp_path / "close.jsonl"), closely=True)
    assert close["score"] == plain["score"]
    assert close["loss_value"] == plain["loss_value"]
    assert [epoch["validation_score"] for epoch in plain["curve"]] == [None] * 4
    assert close["curve"][-1]["validation_score"] == close["score"]
    # gradient and Adam's two means, 75 numbers each, and a little more
    assert 3 * 4 * 75 < close["peak_bytes"] < 3 * 4 * 75 + 10_000


def test_tuning_never_sees_the_test_data(blobs):
    (X, y), (X_held, y_held) = parts(blobs, "validation")
    assert (len(X), len(X_held)) == (75, 15)
    rows = torch.cat([X, X_held])
    order = [int((rows == torch.from_numpy(row)).all(1).nonzero()) for row in blobs.x_train]
    assert sorted(order) == list(range(90))
    assert torch.equal(torch.cat([y, y_held])[order], torch.from_numpy(blobs.y_train))


@pytest.mark.parametrize(("method", "lifted"), [("lpom", True), ("adam", False)])
def test_adversarial_rows_are_moved_in_the_methods_own_direction(
    tmp_path, blobs, monkeypatch, method, lifted
):
    seen = []

    def loader(model, *args, **kwargs):
        seen.append((isinstance(model, Lifted), kwargs["size"]))
        return adversarial_loader(model, *args, **kwargs)

    monkeypatch.setattr("lpom.experiments.trials.adversarial_loader", loader)
    trial = Trial(blobs.name, (8,), method, epochs=2, batch_size=16)
    plain = run(trial, blobs, Store(tmp_path / "runs.jsonl"))
    moved = run(replace(trial, adversarial=0.5), blobs, Store(tmp_path / "runs.jsonl"))
    assert seen == [(lifted, 0.5)]
    assert moved["key"] != plain["key"] and moved["curve"][-1]["loss"] > plain["curve"][-1]["loss"]
    both = run(replace(trial, adversarial=0.5, augment=True), blobs, Store(tmp_path / "runs.jsonl"))
    assert "not both" in both["reason"]
