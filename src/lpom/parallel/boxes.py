"""Messages between ranks of one machine, in memory that both see.

gloo has the loopback network carry them, and wakes a thread on either side for each: half a
millisecond or more of the time of both. Here the numbers are written once into shared memory, and
the reader looks for them there.
"""

from __future__ import annotations

import os
import platform
import secrets
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

#: Memory that is a file: on Linux. Elsewhere gloo carries all.
_FOLDER = Path("/dev/shm")
#: Processors on which others see what one writes in the order in which it was written.
_ORDERED = {"x86_64", "AMD64"}
#: Bytes of a box that are not too much for what it spares.
_MOST = 1 << 28
#: Bytes of what stands before the slots, and before the numbers in each.
_HEAD = 64
#: Numbers in the head of a box, each written by one side only: messages read; messages written; and
#: what tells the file from others. In the head of a slot: the bytes of the message.
_READ, _WRITTEN, _TOKEN = 0, 1, 2
_ELSEWHERE = -1  # in place of the bytes: gloo brings them


class Process(NamedTuple):
    """A process of this machine, as all that share its numbers know it."""

    namespace: str
    number: int
    begun: int  # numbers are given again to others

    @classmethod
    def this(cls) -> Process | None:
        """None where the system does not tell."""
        with suppress(OSError):
            return cls(os.readlink("/proc/self/ns/pid"), os.getpid(), _stat(os.getpid())[1])
        return None

    def shares_numbers_with(self, other: Process | None) -> bool:
        return other is not None and other.namespace == self.namespace

    @property
    def alive(self) -> bool:
        with suppress(OSError):
            state, begun = _stat(self.number)
            return begun == self.begun and state not in "ZX"
        return False


def _stat(number: int) -> tuple[str, int]:
    """The state of a process, and when it began."""
    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])


class Box:
    """Slots of one size in a file: one rank writes them in turn, another one reads."""

    def __init__(self, path: str, slots: int, size: int) -> None:
        self.path, self.slots, self.size = path, slots, size
        memory = torch.from_file(path, True, _HEAD + slots * size, dtype=torch.uint8)
        self._counts = memory[:_HEAD].numpy().view("int64")
        self._slots = memory[_HEAD:].view(slots, size)
        self._lengths = memory[_HEAD:].numpy().view("int64")[:: size // 8]
        self._expected = 0
        self._read_early: set[int] = set()

    @classmethod
    def make(cls, slots: int, size: int) -> Box | None:
        """A new one for so many messages of so many bytes; None where there is no such memory."""
        size = _HEAD * (1 - (-size // _HEAD))
        if platform.machine() not in _ORDERED or slots * size > _MOST:
            return None
        try:
            file, path = tempfile.mkstemp(prefix="lpom-", dir=_FOLDER)
        except OSError:
            return None
        try:
            # all of it now: a write that finds no memory would end the process
            os.posix_fallocate(file, 0, _HEAD + slots * size)
            box = cls(path, slots, size)
        except OSError:
            os.unlink(path)
            return None
        finally:
            os.close(file)
        box._counts[_TOKEN] = secrets.randbits(62)
        return box

    @property
    def address(self) -> tuple[str, int, int, int]:
        """What another process needs to `open` it."""
        return self.path, self.slots, self.size, int(self._counts[_TOKEN])

    @classmethod
    def open(cls, path: str, slots: int, size: int, token: int) -> Box | None:
        """The one that another process has made; None if that is on another machine."""
        with suppress(OSError):
            if os.stat(path).st_size == _HEAD + slots * size:
                box = cls(path, slots, size)
                return box if box._counts[_TOKEN] == token else None
        return None

    def hide(self) -> None:
        """No file is left whatever happens; who has opened it keeps the memory."""
        os.unlink(self.path)

    @property
    def has_room(self) -> bool:
        return bool(self._counts[_WRITTEN] - self._counts[_READ] < self.slots)

    def expect(self) -> int:
        """The number of the next message that nobody expects yet."""
        self._expected += 1
        return self._expected - 1

    def has(self, message: int) -> bool:
        """Whether the message of this number has been written."""
        return bool(self._counts[_WRITTEN] > message)

    def write(self, parts: Sequence[Tensor]) -> bool:
        """Put tensors of one dtype one after the other into the next slot, where there is room.

        False where they do not fit: the reader is told that they come another way.
        """
        written = self._counts[_WRITTEN]
        slot = int(written) % self.slots
        numbers, like = sum(part.numel() for part in parts), parts[0]
        length = numbers * like.element_size()
        fits = _HEAD + length <= self.size
        if fits:
            place = self._slots[slot, _HEAD : _HEAD + length].view(like.dtype)
            torch.cat([part.reshape(-1) for part in parts], out=place)
        self._lengths[slot] = length if fits else _ELSEWHERE
        self._counts[_WRITTEN] = written + 1  # the last thing: then it may be read
        return fits

    def read(self, message: int, into: Tensor) -> bool:
        """Copy a message that has been written; False if it comes another way."""
        slot = message % self.slots
        length, expected = int(self._lengths[slot]), into.numel() * into.element_size()
        if length not in (expected, _ELSEWHERE):
            raise RuntimeError(f"expected a message of {expected} bytes, got {length}.")
        if length != _ELSEWHERE:
            into.copy_(self._slots[slot, _HEAD : _HEAD + length].view(into.dtype))
        self._read_early.add(message)
        while (read := int(self._counts[_READ])) in self._read_early:
            self._read_early.remove(read)
            self._counts[_READ] = read + 1  # then it may be written over
        return length != _ELSEWHERE
