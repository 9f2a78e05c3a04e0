"""Checkpoints: what is in the file, when one is written, what is refused."""

from __future__ import annotations

import math
import threading
import time
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import lpom
from lpom import LPOM, Adaptive, Checkpoint, CheckpointError, EarlyStopping
from lpom.methods import Adam, Method, State
from lpom.training import checkpoint as room
from lpom.training.checkpoint import RunFolder, decode, encode, read


def net():
    return lpom.mlp([5, 6, 3], seed=0)


def fitted(folder, blobs, model=None, **options):
    settings = {"epochs": 4, "batch_size": 10, "seed": 0, "progress": False} | options
    return lpom.fit(model or net(), *blobs, checkpoint=folder, **settings)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def test_what_is_written_is_read_to_the_bit_and_the_layout():
    base = torch.randn(4, 6)
    run = {
        "plain": [None, True, 3, 2.5, "text", [], {}],
        "odd": [math.inf, -math.inf, math.nan, 5e-324],
        "twice": [base, base],
        "views": [base.T, base[1:3], base[:, 2], base.reshape(2, 3, 4).permute(2, 0, 1)],
        "kinds": [torch.tensor(7), torch.randn(3).bfloat16(), torch.zeros(0), torch.tensor([True])],
    }
    found = decode(encode(run))
    run["views"][1], run["views"][2] = base[1:3].clone(), base[:, 2].clone()
    assert same(found, run)


def test_only_tensors_and_plain_values_can_be_written():
    with pytest.raises(TypeError, match="tensors and plain values, got set"):
        encode({"a": {1, 2}})


def test_a_state_that_can_not_be_written_is_found_before_training(blobs, tmp_path):
    class Odd(Adam):
        def init(self, problem):
            state = super().init(problem)
            state.remarks = {"a": object()}
            return state

    model = net()
    with pytest.raises(TypeError, match="tensors and plain values, got object"):
        fitted(tmp_path, blobs, model, method=Odd())
    assert all(
        torch.equal(a, b) for a, b in zip(net().parameters(), model.parameters(), strict=True)
    )


def test_the_file_is_one_of_torch_with_its_checksum_in_its_name(blobs, tmp_path):
    model = net()
    fitted(tmp_path, blobs, model)
    (path,) = tmp_path.glob("*.pt")
    run = read(path)
    assert same(torch.load(path, weights_only=True), run)
    assert torch.equal(run["model"]["0.weight"], model[0].weight.detach())
    assert run["status"] == "finished" and len(run["history"]) == 4
    with pytest.raises(CheckpointError, match="does not have the checksum"):
        read(path.rename(path.with_name("00000001-0123.pt")))


def test_a_finished_run_gives_its_result_again(blobs, tmp_path, monkeypatch):
    X, y = blobs
    options = {"validation_data": (X, y), "early_stopping": EarlyStopping(patience=9)}
    model = net()
    first = fitted(tmp_path, blobs, model, **options)
    monkeypatch.setattr(LPOM, "step", None)
    other = lpom.mlp([5, 6, 3], seed=7)
    again = fitted(tmp_path, blobs, other, **options)
    assert again.status == "finished" and again.history == first.history
    assert again.training_seconds == first.training_seconds <= again.seconds <= first.seconds
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


WHEN = {
    "every step": ({"every_minutes": 0}, 20 + 3 + 1),
    "every epoch": ({"every_minutes": None, "every_epochs": 1}, 3 + 1),
    "every second epoch": ({"every_minutes": None, "every_epochs": 2}, 1 + 1),
    "every hour": ({"every_minutes": 60}, 1),
    "at the end": ({"every_minutes": None}, 1),
}


@pytest.mark.parametrize("name", WHEN)
def test_checkpoints_are_written_when_they_are_due(name, blobs, tmp_path, monkeypatch):
    settings, expected = WHEN[name]
    written, write = [], RunFolder.write
    monkeypatch.setattr(RunFolder, "write", lambda *a: written.append(a) or write(*a))
    fitted(Checkpoint(tmp_path, keep=3, **settings), blobs)
    assert len(written) == expected
    assert len(list(tmp_path.glob("*.pt"))) == min(3, expected)


def test_minutes_are_counted_from_the_last_one(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(room.time, "monotonic", lambda: now[0])
    with RunFolder(Checkpoint(tmp_path, every_minutes=2)) as folder:
        for seconds, due in ((60, False), (60, True), (119, False), (1, True)):
            now[0] += seconds
            assert folder.due(1, False) is due
            if due:
                folder.write({})


DIFFERENT = {
    "epochs": ({"epochs": 5}, "epochs 4 there, 5 here"),
    "seed": ({"seed": 1}, "seed 0 there, 1 here"),
    "method": ({"method": "adam"}, r"method lpom\(.* there, adam\("),
    "settings": ({"method": LPOM(mu=3.0)}, "'mu': None.* there, .*'mu': 3.0"),
    "loss": ({"loss": "squared"}, r"loss CrossEntropy\(.*\) there, Squared\(\) here"),
    "batch": ({"batch_size": 5}, "'batch_size': 10.*there, .*'batch_size': 5"),
    "stopping": ({"early_stopping": True}, "early stopping None there, EarlyStopping"),
    "network": (
        {"model": lpom.mlp([5, 7, 3])},
        r"'float32 \[6, 5\]'.* there, .*\[7, 5\]",
    ),
    "numbers": ({"model": lpom.mlp([5, 6, 3]).double()}, "float32 .* there, .*float64"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_another_run_is_refused_with_what_differs(name, blobs, tmp_path):
    fitted(tmp_path, blobs)
    changed, sentence = DIFFERENT[name]
    with pytest.raises(CheckpointError, match=f"this is not the run that was begun: .*{sentence}"):
        fitted(tmp_path, blobs, **changed)
    with pytest.raises(CheckpointError, match="'rows': 50.* there, .*'rows': 49"):
        fitted(tmp_path, (blobs[0][1:], blobs[1][1:]))
    for other in ((2 * blobs[0], blobs[1]), (blobs[0], 2 - blobs[1])):
        with pytest.raises(CheckpointError, match="'content': .* there, .*'content'"):
            fitted(tmp_path, other)
    assert fitted(tmp_path, blobs).status == "finished"


def test_another_optimiser_of_the_same_name_is_refused(blobs, tmp_path):
    def of_rate(rate):
        return LPOM(weights=Adaptive(lambda parameters: torch.optim.SGD(parameters, lr=rate)))

    fitted(tmp_path, blobs, method=of_rate(0.1))
    with pytest.raises(CheckpointError, match=r"SGD\(\{'lr': 0.1.* there, .*SGD\(\{'lr': 0.5"):
        fitted(tmp_path, blobs, method=of_rate(0.5))
    assert fitted(tmp_path, blobs, method=of_rate(0.1)).status == "finished"


def test_a_loader_of_other_rows_is_said(blobs, tmp_path):
    def run(X, y):
        loader = DataLoader(TensorDataset(X, y), batch_size=10, shuffle=True)
        return lpom.fit(lpom.mlp([5, 6, 3]), loader, epochs=2, seed=0, checkpoint=tmp_path)

    X, y = map(torch.as_tensor, blobs)
    run(X, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(X, y).status == "finished"
    with pytest.warns(UserWarning, match="begins with other targets"):
        run(X, 2 - y)


def test_functions_among_the_settings_are_the_same_in_another_process(blobs, tmp_path):
    def factory(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    fitted(tmp_path, blobs, method=LPOM(weights=Adaptive(factory)))
    (path,) = tmp_path.glob("*.pt")
    assert "factory" in read(path)["run"]["method"] and "0x" not in read(path)["run"]["method"]


def test_a_second_run_in_the_same_folder_is_refused(blobs, tmp_path):
    with RunFolder(Checkpoint(tmp_path)):
        with pytest.raises(CheckpointError, match="another process is training in"):
            fitted(tmp_path, blobs)
    assert fitted(tmp_path, blobs).status == "finished"


def test_a_folder_that_can_not_be_written_is_found_before_training(blobs, tmp_path):
    (tmp_path / "file").write_text("")
    model = net()
    with pytest.raises(CheckpointError, match="no checkpoint can be written to .*file"):
        fitted(tmp_path / "file" / "run", blobs, model)
    assert all(
        torch.equal(a, b) for a, b in zip(net().parameters(), model.parameters(), strict=True)
    )


@pytest.mark.parametrize("value", [{"every_minutes": -1}, {"every_epochs": 0}, {"keep": 0}])
def test_settings_that_make_no_sense_get_a_sentence(value, tmp_path):
    with pytest.raises(ValueError, match=f"{next(iter(value))} must be"):
        Checkpoint(tmp_path, **value)


def test_what_a_killed_process_left_half_written_is_removed(blobs, tmp_path):
    (tmp_path / ".0123456789abcdef.part").write_bytes(b"half")
    fitted(tmp_path, blobs)
    assert not list(tmp_path.glob(".*.part"))


def test_in_another_thread_signals_are_left_alone(blobs, tmp_path):
    statuses = []
    thread = threading.Thread(target=lambda: statuses.append(fitted(tmp_path, blobs).status))
    thread.start()
    thread.join()
    assert statuses == ["finished"]


def test_times_go_on(blobs, tmp_path, cut_at):
    slept = []

    @dataclass(frozen=True)
    class Slow(Method[State]):
        name, equation, costs = "slow", "", ""

        def init(self, problem):
            return State()

        def step(self, problem, batch, state):
            slept.append(time.sleep(0.01))

        def objective(self, problem, batch, state):
            return lpom.objective(net(), batch.inputs, batch.target)

    cut_at(Slow, 8)
    plan = Checkpoint(tmp_path, every_minutes=0)
    with pytest.warns(UserWarning, match="interrupted"):
        fitted(plan, blobs, method=Slow(), epochs=2)
    result = fitted(plan, blobs, method=Slow(), epochs=2)
    assert len(slept) == 10
    assert result.seconds >= result.training_seconds >= 10 * 0.01
    assert sum(epoch.seconds for epoch in result.history) == pytest.approx(result.training_seconds)


@pytest.mark.parametrize(
    "once",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4),
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3]),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    ],
    ids=["one cycle", "cosine", "steps", "a function"],
)
def test_schedulers_of_torch_go_on_from_where_they_were(once, blobs, tmp_path):
    """OneCycleLR moves Adam's betas too: they are no other settings for that."""
    X, y = blobs

    def run(folder, stops=None):
        model = lpom.mlp([X.shape[1], 8, 3], seed=0)
        method = LPOM(weights=Adaptive(schedule=once))
        plan = Checkpoint(tmp_path / folder, every_epochs=1)
        options = {"checkpoint": plan, "epochs": 4, "seed": 0, "progress": False}
        lpom.fit(model, X, y, method=method, callbacks=stops or (), **options)
        return [parameter.detach() for parameter in model.parameters()]

    def crash(epoch):
        if epoch.epoch == 2:
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        run("cut", crash)
    for gone_on, whole in zip(run("cut"), run("whole"), strict=True):
        assert torch.equal(gone_on, whole)
