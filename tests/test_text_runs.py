"""``lpom train text.txt --network char-transformer``: runs on texts from the shell."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from typer.testing import CliRunner

from lpom.cli import app
from lpom.experiments.text import Text, TextModel, by_frequency, train_text
from lpom.folders import CHECKPOINT, FILES, begin, begun
from lpom.runs import Settings
from lpom.training.history import History

NETWORK = ("--network", "char-transformer")
SMALL = {"width": 16, "blocks": 1, "heads": 2, "length": 16}
OPTIONS = [
    part for name, value in SMALL.items() for part in ("--network-option", f"{name}={value}")
]


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "poem.txt").write_text("abcabd\n" * 400, encoding="utf-8")


def train(*more, code=0):
    return call(
        "train", "poem.txt", *NETWORK, *OPTIONS, "--epochs", 2, "--batch-size", 8, *more, code=code
    )


def test_a_run_on_a_text_has_the_files_of_a_run(tmp_path):
    shown = train("--seed", 3).stdout
    assert "2,800 characters, 5 different" in shown and "bits per character" in shown
    folder = tmp_path / "runs" / "poem-1"
    assert {path.name for path in folder.iterdir()} == {*FILES, "samples.txt"}
    config = json.loads((folder / "config.json").read_text())
    assert config["status"] == "finished" and config["network"]["length"] == 16
    assert len(History.from_jsonl(folder / "history.jsonl", "accuracy")) == 2
    kept = TextModel.load(folder / "model.safetensors")
    assert kept.bits == config["results"]["bits per character"] < kept.baseline
    drawn = (folder / "samples.txt").read_text()
    assert kept.sample(300, seed=0) in drawn and set(drawn) <= set("abcd\n")
    # as from Python, weight by weight
    options = {name: value for name, value in SMALL.items() if name != "length"}
    how = {"epochs": 2, "length": 16, "batch_size": 8, "seed": 3, "options": options}
    again = train_text("poem.txt", progress=False, **how)
    assert again.bits == kept.bits and again.sample(50) == kept.sample(50)
    assert "bits per character" in call("info", folder).stdout


def test_a_run_on_a_text_has_no_table_to_predict_or_report_on():
    train("--seed", 3)
    for command in (["report", "runs/poem-1"], ["predict", "runs/poem-1", "poem.txt"]):
        assert "no model of a table" in call(*command, code=2).output


def test_a_run_that_was_stopped_goes_on(tmp_path):
    """The same folder and bits as one that was not."""
    train("--out", "whole")
    whole = json.loads((tmp_path / "whole" / "config.json").read_text())

    train("--out", "part", "--quiet")  # its notes, as a process that was killed leaves them
    part = tmp_path / "part"
    notes = {
        "text": str(tmp_path / "poem.txt"),
        "settings": settings(),
        "config": whole | {"status": "running"},
        "files": {},
        "tensorboard": False,
    }
    for file in part.iterdir():
        file.unlink()
    (part / CHECKPOINT).mkdir()
    begin(part, notes)
    assert begun(part)
    assert "char-transformer" in call("info", "part").stdout
    refused = call("train", "--resume", "part", "--parallel", "layers=1", code=2)
    assert "by one process" in refused.stderr
    call("train", "--resume", "part")
    config = json.loads((part / "config.json").read_text())
    assert config["results"] == whole["results"] and not begun(part)


def settings():
    return asdict(
        Settings(network="char-transformer", network_options=SMALL, epochs=2, batch_size=8)
    )


def test_what_is_not_for_texts_is_refused(tmp_path):
    assert "--target is not for texts" in train("--target", "a", code=2).stderr
    assert "--loss is not for texts" in train("--loss", "hinge", code=2).stderr
    assert "no file" in call("train", "gone.txt", *NETWORK, code=2).stderr
    (tmp_path / "bytes.txt").write_bytes(b"ab\xff\xfe" * 900)
    assert "not a text in UTF-8" in call("train", "bytes.txt", *NETWORK, code=2).stderr
    assert not (tmp_path / "runs").exists()


def test_bits_by_frequency():
    """Half of all are a, a quarter b, a quarter c; counted once more each they hardly change."""
    text = Text.of("aabc" * 2500)
    bits = by_frequency(text.indices[:9000], text.indices[9000:], 3)
    assert bits == pytest.approx(1.5, abs=1e-3)
