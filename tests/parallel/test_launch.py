"""The processes of one machine, started from here."""

from __future__ import annotations

import os
import re
import signal

import pytest

from lpom.parallel import own_cores
from lpom.parallel.launch import launch

CODE = """
import os, sys
open(f"{sys.argv[-1]}/{os.environ['RANK']} of {os.environ['WORLD_SIZE']}", "w").close()
"""

KILLED = """
import os, signal, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("RANK", raising=False)


def test_every_process_knows_its_place(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "rank_program.py").write_text(CODE)
    before = signal.getsignal(signal.SIGTERM)
    assert launch("rank_program", [str(tmp_path)], 2) == 0
    assert signal.getsignal(signal.SIGTERM) is before
    assert {path.name for path in tmp_path.glob("* of *")} == {"0 of 2", "1 of 2"}


def test_the_exit_code_is_that_of_the_first_to_fail(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "rank_program.py").write_text("raise SystemExit(2)")
    assert launch("rank_program", [], 2) == 2


def test_a_process_that_is_killed_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "rank_program.py").write_text(KILLED)
    assert launch("rank_program", [], 2) == 128 + signal.SIGKILL
    said = capsys.readouterr().err
    assert re.search(r"error: rank 1 \(process \d+\) was ended by SIGKILL, and the others", said)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinities")
def test_processes_stay_on_cores_of_their_own(monkeypatch):
    before = os.sched_getaffinity(0)
    for local in range(len(before)):
        monkeypatch.setenv("LOCAL_RANK", str(local))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(len(before)))
        with own_cores(1):
            assert os.sched_getaffinity(0) == {sorted(before)[local]}
        assert os.sched_getaffinity(0) == before
    with own_cores(2):  # there are not enough
        assert os.sched_getaffinity(0) == before
    monkeypatch.delenv("LOCAL_RANK")
    with own_cores(1):
        assert os.sched_getaffinity(0) == before
