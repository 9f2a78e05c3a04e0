"""History goes to a dictionary, to JSON lines and back; files are whole or not there."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lpom.files import write_atomically
from lpom.training.callbacks import epoch_lines
from lpom.training.history import Epoch, History


def history():
    epochs = [
        Epoch(k, 0.5, 200.0, 1.5 / k, 1.0 / k, 0.5, 2.0 / k, 0.4, (0.1, 0.2), (1.5, 0.05))
        for k in (1, 2)
    ]
    return History("r2", epochs)


def test_json_lines_bring_everything_back(tmp_path):
    history().to_jsonl(tmp_path / "h.jsonl")
    assert History.from_jsonl(tmp_path / "h.jsonl") == history()


def test_columns():
    assert history().column("loss") == [1.0, 0.5]
    assert history().to_dict()["gaps"] == [(0.1, 0.2), (0.1, 0.2)]
    with pytest.raises(ValueError, match="no column 'los'"):
        history().column("los")


def test_a_frame_has_a_row_per_epoch_and_a_column_per_layer():
    frame = history().to_frame()
    assert list(frame.index) == [1, 2] and frame["loss"].tolist() == [1.0, 0.5]
    assert frame[["gap 1", "gap 2", "rate 1", "rate 2"]].iloc[0].tolist() == [0.1, 0.2, 1.5, 0.05]
    assert History("r2").to_frame().empty


def test_epochs_without_diagnostics_stand_beside_others():
    first, second = history()
    plain = replace(first, objective=None, gaps=(), rates=())
    mixed = History("r2", [plain, second])
    assert mixed.by_layer("gaps") == [[None, 0.1], [None, 0.2]]
    assert mixed.to_frame()["rate 2"].tolist()[1] == 0.05
    assert list(History("r2", [plain]).to_frame().filter(like="gap")) == []


def test_printed_it_is_a_line_and_not_all_epochs():
    assert repr(History("r2")) == "<History: 0 epochs>"
    told = "<History: 2 epochs, loss 0.5, r2 0.5, validation loss 1, validation r2 0.4>"
    assert repr(history()) == told


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "disk full")))
        with pytest.raises(OSError, match="disk full"):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_numbers_that_json_lacks_come_back(tmp_path):
    path = tmp_path / "h.jsonl"
    odd = History("r2", [Epoch(1, 2.0, 3.0, math.inf, -math.inf, 0.5, rates=(math.inf, 0.5))])
    odd.to_jsonl(path)
    assert "Infinity" not in path.read_text()
    assert History.from_jsonl(path) == odd


def test_epochs_as_lines_where_no_bar_is_drawn(capsys):
    now, seldom = epoch_lines(every=0.0), epoch_lines(every=1000.0)
    for epoch in history():
        now(epoch)
        seldom(epoch)
    assert capsys.readouterr().err.splitlines() == [
        "epoch 1: loss 1, score 0.5000, validation score 0.4000",
        "epoch 2: loss 0.5, score 0.5000, validation score 0.4000",
    ]
