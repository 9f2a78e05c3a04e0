"""Messages in memory that two processes see."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from lpom import Parallel
from lpom.exceptions import LostRankError
from lpom.parallel import Ranks, boxes
from lpom.parallel.boxes import Box, Process


def shares_memory():
    box = Box.make(1, 1)
    if box is not None:
        box.hide()
    return box is not None and Process.this() is not None


pytestmark = pytest.mark.skipif(not shares_memory(), reason="this system shares no such memory")


def pair(slots=3, numbers=10):
    """Both ends of a box for so many numbers in each message."""
    made = Box.make(slots, 8 * numbers)
    opened = Box.open(*made.address)
    made.hide()
    return made, opened


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_messages_are_read_as_they_were_written(dtype):
    writer, reader = pair()
    generator = torch.Generator().manual_seed(0)
    waiting = []
    for turn in range(20):  # one or two are under way all the time
        a = torch.randn(2, 3, dtype=dtype, generator=generator)
        b = torch.randn(turn % 4, dtype=dtype, generator=generator)
        assert writer.has_room and writer.write([a, b])
        waiting.append(torch.cat([a.flatten(), b]))
        if len(waiting) == 2:
            expected = waiting.pop(0)
            message = torch.empty_like(expected)
            number = reader.expect()
            assert reader.has(number) and reader.read(number, message)
            assert torch.equal(message, expected)


def test_there_is_room_again_when_a_message_was_read():
    writer, reader = pair(slots=2)
    assert not reader.has(0)
    for k in (1, 2):
        assert writer.has_room
        writer.write([torch.full((10,), float(k))])
    assert not writer.has_room
    read = []
    for k in (3, 4):
        message = torch.empty(10)
        reader.read(reader.expect(), message)
        read.append(message[0].item())
        assert writer.has_room
        writer.write([torch.full((10,), float(k))])
        assert not writer.has_room
    assert read == [1.0, 2.0]


def test_messages_may_be_read_in_another_order_than_they_are_expected():
    writer, reader = pair(slots=2)
    first, second = reader.expect(), reader.expect()
    for k in (1, 2):
        writer.write([torch.full((10,), float(k))])
    message = torch.empty(10)
    assert reader.read(second, message) and message[0] == 2
    assert not writer.has_room  # the first one stands there still
    assert reader.read(first, message) and message[0] == 1
    for k in (3, 4):
        assert writer.has_room
        writer.write([torch.full((10,), float(k))])
    assert reader.read(reader.expect(), message) and message[0] == 3


def test_a_message_that_does_not_fit_comes_another_way():
    writer, reader = pair(numbers=64)
    message = torch.full((65,), 7.0, dtype=torch.float64)
    assert not writer.write([torch.zeros(65, dtype=torch.float64)])
    assert reader.has(0) and not reader.read(reader.expect(), message)
    assert (message == 7).all() and not reader.has(1)
    assert writer.write([torch.zeros(64, dtype=torch.float64)])


def test_a_message_of_another_size_than_expected_is_an_error():
    writer, reader = pair()
    writer.write([torch.zeros(3)])
    with pytest.raises(RuntimeError, match="expected a message of 16 bytes, got 12"):
        reader.read(reader.expect(), torch.zeros(4))


def test_another_process_reads_it():
    box = Box.make(2, 40)
    box.write([torch.full((10,), 3.0)])
    program = f"""
import torch
from lpom.parallel.boxes import Box
message = torch.empty(10)
Box.open(*{box.address}).read(0, message)
print(message.sum().item())
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    box.hide()
    assert said.stdout.strip() == "30.0", said.stderr
    assert box._counts[boxes._READ] == 1


def test_no_file_is_left_behind(monkeypatch):
    before = set(boxes._FOLDER.iterdir())
    pair()
    assert Box.make(1, boxes._MOST) is None
    monkeypatch.setattr(boxes, "_MOST", 1 << 60)
    assert Box.make(1, 1 << 50) is None  # more memory than there is
    assert not {path for path in set(boxes._FOLDER.iterdir()) - before if "lpom" in path.name}


def test_files_of_others_are_not_taken_for_boxes(monkeypatch):
    box = Box.make(2, 64)
    path, slots, size, token = box.address
    assert Box.open(path, slots, size, token + 1) is None
    assert Box.open(path, slots + 1, size, token) is None
    box.hide()
    assert Box.open(path, slots, size, token) is None
    monkeypatch.setattr(boxes, "_FOLDER", Path("/nowhere"))
    assert Box.make(2, 64) is None


def test_a_process_is_alive_until_it_has_ended():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    begun = boxes._stat(child.pid)[1]
    process = Process.this()._replace(number=child.pid, begun=begun)
    assert process.alive and Process.this().alive
    assert not process._replace(begun=begun + 1).alive  # another one of the same number
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, but nobody has asked yet
    assert not process.alive
    child.wait()
    assert not process.alive


@dataclass
class Waiting:
    """As much of a rank as waits for another one."""

    processes: list[Process]
    parallel: Parallel

    def __post_init__(self):
        self._processes = self.processes

    def _at(self, layer):
        return layer

    def _lost(self, layer):
        return f"rank {layer} was lost"


def test_who_waits_for_a_process_that_has_ended_or_hangs_says_so(monkeypatch):
    monkeypatch.setattr("lpom.parallel.ranks._LOOK_AFTER", 0.01)
    gone = Process.this()._replace(begun=0)
    with pytest.raises(LostRankError, match="rank 0 was lost"):
        Ranks._wait_until(Waiting([gone], Parallel()), lambda: False, 0)
    with pytest.raises(LostRankError, match="rank 0 was lost"):
        Ranks._wait_until(Waiting([Process.this()], Parallel(timeout=0.1)), lambda: False, 0)
    answers = iter([False] * 200 + [True])
    Ranks._wait_until(Waiting([Process.this()], Parallel()), lambda: next(answers), 0)
