"""Messages in memory that two processes see."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lpom.parallel import boxes
from lpom.parallel.boxes import NONE, Box

pytestmark = pytest.mark.skipif(
    not boxes._FOLDER.is_dir(), reason="this system has no memory that is a file"
)


def pair(slots=3, numbers=10):
    """Both ends of a box for so many numbers in each slot."""
    made = Box.make(slots, 8 * numbers)
    opened = Box.open(*made.address)
    made.hide()
    return made, opened


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_messages_are_read_as_they_were_written(dtype):
    written, read = pair()
    generator = torch.Generator().manual_seed(0)
    waiting = []
    for turn in range(20):  # one or two are under way all the time
        a = torch.randn(2, 3, dtype=dtype, generator=generator)
        b = torch.randn(turn % 4, dtype=dtype, generator=generator)
        slot = written.write([a, b])
        assert slot != NONE
        waiting.append((slot, torch.cat([a.flatten(), b])))
        if len(waiting) == 2:
            slot, expected = waiting.pop(0)
            message = torch.empty_like(expected)
            read.read_into(message, slot)
            assert torch.equal(message, expected)


def test_a_slot_is_written_again_only_when_it_was_read():
    written, read = pair(slots=2)
    first, second = (written.write([torch.full((10,), float(k))]) for k in (1, 2))
    assert written.write([torch.full((10,), 3.0)]) == NONE
    message = torch.empty(10)
    read.read_into(message, first)
    assert written.write([torch.full((10,), 4.0)]) == first
    read.read_into(message, second)
    assert message.tolist() == [2.0] * 10
    read.read_into(message, first)
    assert message.tolist() == [4.0] * 10


def test_a_message_that_is_too_large_is_left_to_others():
    written, _ = pair(numbers=64)
    assert written.write([torch.zeros(65, dtype=torch.float64)]) == NONE
    assert written.write([torch.zeros(64, dtype=torch.float64)]) != NONE


def test_another_process_reads_it():
    box = Box.make(2, 40)
    slot = box.write([torch.full((10,), 3.0)])
    program = f"""
import torch
from lpom.parallel.boxes import Box
message = torch.empty(10)
Box.open(*{box.address}).read_into(message, {slot})
print(message.sum().item())
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    box.hide()
    assert said.stdout.strip() == "30.0", said.stderr
    assert [box.write([torch.zeros(10)]) for _ in range(3)] == [1, 0, NONE]  # it has counted one


def test_no_file_is_left_behind():
    before = set(boxes._FOLDER.iterdir())
    pair()
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
