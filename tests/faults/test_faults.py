"""Runs that are killed, stopped, out of room or damaged end as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

import lpom
from lpom.methods import METHODS
from lpom.training.checkpoint import Checkpoint, RunFolder

from . import worker

pytestmark = pytest.mark.faults

EPOCHS = {True: 12, False: 4}  # of methods that take all rows at once, and of the others
CASES = [(name, "arrays") for name in METHODS]
CASES += [(name, "loader") for name in METHODS if not METHODS[name].full_batch]
SHORT = [("lpom", "arrays"), ("adam", "loader"), ("mac", "arrays"), ("admm", "arrays")]


class Worker:
    """A process that trains on demand, in children that may be killed."""

    def __init__(self, log):
        command = [sys.executable, str(Path(worker.__file__))]
        self.log = log.open("wb")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
        )

    def start(self, **order):
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def end(self):
        """The exit code of the child, or minus the signal that ended it."""
        return int(self.process.stdout.readline())

    def run(self, **order):
        self.start(**order)
        return self.end()

    def kill_after(self, steps, **order):
        """Kill a run while it is in the step after these."""
        child = self.start(**order, hold=[steps, str(Path(order["folder"]) / "never")])
        wait_for(order["folder"], steps)
        os.kill(child, signal.SIGKILL)
        assert self.end() == -signal.SIGKILL

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.log.close()


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    made = Worker(tmp_path_factory.mktemp("worker") / "log")
    yield made
    made.close()


@pytest.fixture(scope="module")
def undisturbed(trainer, tmp_path_factory):
    """Outcome, and seconds with checkpoints, of runs that nobody disturbs; each is made once."""
    known = {}

    def outcome(name, source):
        if (name, source) not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            order = {"method": name, "source": source, "epochs": epochs(name)}
            assert trainer.run(out=str(folder / "out"), **order) == 0
            start = time.monotonic()
            order |= {"folder": str(folder / "run"), "out": str(folder / "again")}
            assert trainer.run(**order) == 0
            known[name, source] = result(folder / "out"), time.monotonic() - start
            assert result(folder / "again") == known[name, source][0]
        return known[name, source]

    return outcome


def epochs(name):
    return EPOCHS[METHODS[name].full_batch]


def result(path):
    outcome = json.loads(path.read_text())
    outcome.pop("said")
    return outcome


def place(folder):
    """How far the newest whole checkpoint in a folder is: epochs and batches."""
    with warnings.catch_warnings(), RunFolder(Checkpoint(folder)) as kept:
        warnings.simplefilter("error")  # none is damaged
        found = kept.newest()
    return (0, 0) if found is None else (len(found["history"]), found["batches done"])


def wait_for(folder, steps):
    """Until as many checkpoints were written; all but the last two are gone again."""
    while max((p.name for p in Path(folder).glob("0*.pt")), default="") < f"{steps:08d}":
        time.sleep(0.001)


def kills(request):
    """(method, source, seed, how often it is killed before it may finish)."""
    if request.config.getoption("--long"):
        return [(*case, seed, 4) for seed in range(2) for case in CASES]
    return [(*case, 0, 2) for case in SHORT]


def test_killed_at_any_moment_a_run_ends_as_if_it_had_not_been(
    trainer, undisturbed, tmp_path, request
):
    killed = 0
    for name, source, seed, times in kills(request):
        expected, seconds = undisturbed(name, source)
        folder, out = tmp_path / f"{name}-{source}-{seed}", tmp_path / "out"
        order = {"method": name, "source": source, "epochs": epochs(name)}
        order |= {"folder": str(folder), "out": str(out)}
        draw = random.Random(f"{name} {source} {seed}")
        reached = (0, 0)
        for _ in range(times):
            child = trainer.start(**order)
            time.sleep(draw.uniform(0, 0.9 * seconds / times))
            os.kill(child, signal.SIGKILL)  # a zombie, at worst: its parent has not waited yet
            killed += trainer.end() == -signal.SIGKILL
            if folder.exists():
                before, reached = reached, place(folder)
                assert reached >= before
        assert trainer.run(**order) == 0
        assert result(out) == expected, (name, source)
    print(f"{killed} runs killed")
    assert killed >= (100 if request.config.getoption("--long") else 4)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_step_end_and_keeps_the_run(number, trainer, undisturbed, tmp_path):
    expected, _ = undisturbed("lpom", "arrays")
    folder, out = tmp_path / "run", tmp_path / "out"
    order = {"method": "lpom", "source": "arrays", "epochs": epochs("lpom")}
    order |= {"folder": str(folder), "out": str(out)}
    child = trainer.start(**order, hold=[2, str(tmp_path / "go")])
    wait_for(folder, 2)
    os.kill(child, number)
    (tmp_path / "go").touch()
    code = trainer.end()
    if number == signal.SIGTERM:
        assert code == 143 and not out.exists()
    else:
        assert code == 0
        outcome = json.loads(out.read_text())
        assert outcome["status"] == "interrupted"
        assert f"Call fit again with checkpoint='{folder}' to go on" in outcome["said"][-1]
    assert place(folder) == (0, 3)  # the step was finished
    assert trainer.run(**order) == 0
    assert result(out) == expected


def test_without_room_the_old_checkpoint_stays(trainer, undisturbed, tmp_path, request):
    """Writing fails as on a full disk: a limit on the size of files lets only a part through."""
    long = request.config.getoption("--long")
    cases = CASES if long else SHORT[1:3]
    for name, source in cases:
        expected, _ = undisturbed(name, source)
        folder, out = tmp_path / f"{name}-{source}", tmp_path / "out"
        order = {"method": name, "source": source, "epochs": epochs(name)}
        order |= {"folder": str(folder), "out": str(out)}
        trainer.kill_after(2, **order)
        before, names = place(folder), {path.name for path in folder.glob("*.pt")}
        assert trainer.run(largest_file=3000, **order) == 2  # trains to its end, keeps nothing
        assert {path.name for path in folder.glob("*.pt")} == names
        assert place(folder) == before
        assert not list(folder.glob(".*.part"))
        assert trainer.run(**order) == 0
        assert result(out) == expected, (name, source)
    assert len(cases) >= (20 if long else 2)


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device", str(path))

    X, y = worker.data()
    plan = Checkpoint(tmp_path / "run", every_minutes=None, every_epochs=1)
    options = {"epochs": 2, "seed": 0, "checkpoint": plan, "progress": False}
    monkeypatch.setattr("lpom.training.checkpoint.write_atomically", full)
    with pytest.warns(UserWarning, match=r"run \(No space left on device\); there is none yet"):
        outcome = lpom.fit(lpom.mlp([5, 3], seed=0), X, y, **options)
    assert outcome.status == "finished"


def damaged(content, kind, draw):
    if kind == "cut":
        return content[: draw.randrange(len(content))]
    if kind == "flipped":
        changed = bytearray(content)
        changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        return bytes(changed)
    if kind == "longer":
        return content + draw.randbytes(draw.randrange(1, 100))
    return draw.randbytes(len(content))


def test_a_damaged_checkpoint_is_passed_over_and_that_is_said(
    trainer, undisturbed, tmp_path, request
):
    """The one before it serves, and the run ends the same; with none left it is refused."""
    rounds = 13 if request.config.getoption("--long") else 1
    name, source, draw = "lpom", "arrays", random.Random(0)
    expected, _ = undisturbed(name, source)
    for kind in ("cut", "flipped", "longer", "other"):
        for i in range(rounds):
            folder, out = tmp_path / f"{kind}{i}", tmp_path / "out"
            order = {"method": name, "source": source, "epochs": epochs(name)}
            order |= {"folder": str(folder), "out": str(out)}
            trainer.kill_after(2 + i % 2, **order)
            newest, *older = sorted(folder.glob("*.pt"), reverse=True)
            newest.write_bytes(damaged(newest.read_bytes(), kind, draw))
            assert trainer.run(**order) == 0
            said = json.loads(out.read_text())["said"][0]
            assert f"{newest.name} is damaged" in said
            assert f"goes on from {older[0].name}" in said
            assert result(out) == expected
            for path in folder.glob("*.pt"):
                path.write_bytes(damaged(path.read_bytes(), kind, draw))
            with pytest.raises(lpom.CheckpointError, match="no checkpoint in .* is whole"):
                with RunFolder(Checkpoint(folder)) as kept:
                    kept.newest()
