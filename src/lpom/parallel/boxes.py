"""Messages between ranks of one machine, in memory that both see.

gloo has the loopback network carry them: about a millisecond for a megabyte, of the time of both.
Here the numbers are written once into shared memory, and gloo says where they stand. So a message
still comes in its turn, and a rank that is lost is noticed as ever.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

#: Memory that is a file: on Linux. Elsewhere gloo carries all.
_FOLDER = Path("/dev/shm")
#: Bytes before the slots: how many messages were read, and what tells the file from others.
_HEAD = 64
#: What is said in place of a slot where a message does not fit, or no slot is free.
NONE = -1


class Box:
    """Slots of one size in a file: one rank writes them in turn, another one reads."""

    def __init__(self, path: str, slots: int, size: int) -> None:
        self.path, self.slots, self.size = path, slots, size
        memory = torch.from_file(path, True, _HEAD + slots * size, dtype=torch.uint8)
        head = memory[:_HEAD].view(torch.int64)
        self._read, self._token, self._memory = head[0], head[1], memory[_HEAD:]
        self._written = 0

    @classmethod
    def make(cls, slots: int, size: int) -> Box | None:
        """A new one of so many slots and bytes in each; None where there is no such memory."""
        size = -(-size // _HEAD) * _HEAD
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
        box._token.fill_(secrets.randbits(62))
        return box

    @property
    def address(self) -> tuple[str, int, int, int]:
        """What another process needs to `open` it."""
        return self.path, self.slots, self.size, int(self._token)

    @classmethod
    def open(cls, path: str, slots: int, size: int, token: int) -> Box | None:
        """The one that another process has made; None if that is on another machine."""
        with suppress(OSError):
            if os.stat(path).st_size == _HEAD + slots * size:
                box = cls(path, slots, size)
                return box if int(box._token) == token else None
        return None

    def hide(self) -> None:
        """No file is left whatever happens; who has opened it keeps the memory."""
        os.unlink(self.path)

    def write(self, parts: Sequence[Tensor]) -> int:
        """Put tensors of one dtype one after the other into the next slot; its number, or `NONE`.

        The reader counts what it has read after it has copied it: then the slot is free.
        """
        numbers = sum(part.numel() for part in parts)
        free = self._written - int(self._read) < self.slots
        if not free or numbers * parts[0].element_size() > self.size:
            return NONE
        slot = self._written % self.slots
        self._written += 1
        torch.cat([part.reshape(-1) for part in parts], out=self._slot(slot, numbers, parts[0]))
        return slot

    def read_into(self, message: Tensor, slot: int) -> None:
        """Copy what stands in a slot, which is free then."""
        message.copy_(self._slot(slot, message.numel(), message))
        self._read.add_(1)

    def _slot(self, slot: int, numbers: int, like: Tensor) -> Tensor:
        begin = slot * self.size
        return self._memory[begin : begin + numbers * like.element_size()].view(like.dtype)
