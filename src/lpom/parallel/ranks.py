"""The processes of a run: who they are, how they talk, and what they say when one is lost."""

from __future__ import annotations

import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from lpom.checks import check_choice, check_number
from lpom.exceptions import LostRankError
from lpom.parallel.boxes import Box, Process
from lpom.settings import Settings
from lpom.weights.blocks import Share

#: Seconds that a rank waits for what the others say before it names those who said nothing.
_LISTEN = 5.0
#: For a message in memory a rank looks so often before it sleeps, so many seconds each time; after
#: some it looks whether the other one still lives.
_LOOKS, _NAP, _LOOK_AFTER = 100, 5e-5, 0.2
_runs = count()

T = TypeVar("T")


@final
@dataclass(frozen=True)
class Parallel(Settings):
    """How a run is spread over ``layers * data`` processes, the ranks of ``torch.distributed``.

    Parameters
    ----------
    layers : int
        Ranks that share the nodes of the network, some consecutive ones each; two neighbours
        may share units of a layer, or rows of the first ones, where that makes the work even.
    data : int
        Ranks that share the rows of each batch. Gradients, or the Gram matrices and cross products
        of exact weights, are added up: the step is that of the whole batch.
    delay : {"pipelined", "none"}
        Between layers. None: a rank waits for the ones above it, and the step is that of one rank,
        for checking. Pipelined: it goes on with the next batches meanwhile, and moves its states
        and weights when the pull from above arrives; no rank waits, and of K ranks the one at
        place k (from 0) feeds forward with weights that lack the last K - 1 - k batches.
    threads : int
        Of each rank.
    timeout : float
        Seconds after which a rank that does not answer counts as lost. One that dies is noticed at
        once.
    """

    layers: int = 1
    data: int = 1
    delay: str = "pipelined"
    threads: int = 1
    timeout: float = 300.0

    def __post_init__(self) -> None:
        check_number("layers", self.layers, whole=True)
        check_number("data", self.data, whole=True)
        check_choice("delay", self.delay, ("pipelined", "none"))
        check_number("threads", self.threads, whole=True)
        check_number("timeout", self.timeout)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.layers * self.data


class Ranks:
    """What the processes of a run say to each other; this one is at ``layer`` and ``row``.

    Those of one row hold the network together, those of one layer the rows of a batch.
    """

    def __init__(self, parallel: Parallel, device: torch.device) -> None:
        _join(parallel, device)
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        self.parallel, self.rank, self.size = parallel, dist.get_rank(), dist.get_world_size()
        self.row, self.layer = divmod(self.rank, parallel.layers)
        self._begun: list[dist.Work] = []
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        self._outgoing: dict[int, Box] = {}  # by layer
        self._incoming: dict[int, Box] = {}
        self._processes: list[Process | None] = []
        self._store = PrefixStore(f"lpom {next(_runs)}", _get_default_store())
        self.names = [f"rank {r}" for r in range(self.size)]
        places = torch.arange(self.size).view(parallel.data, parallel.layers)
        self._of_row = self._groups(places)[self.row]
        self._of_layer = self._groups(places.T)[self.layer]
        self.names = self.gather(f"rank {self.rank} (process {os.getpid()} on {_host()})")

    def _groups(self, places: Tensor) -> list[Any]:
        """A group of ranks for each row of their places; every rank makes them all.

        None for a rank by itself: every group has a thread, which wakes up again and again.
        """
        if places.shape[1] == 1:
            return [None] * len(places)
        limit = timedelta(seconds=self.parallel.timeout)
        with self._talking():
            return [dist.new_group(ranks.tolist(), timeout=limit) for ranks in places]

    def close(self) -> None:
        """Part, at the end of a run; the processes can meet again."""
        self._outgoing, self._incoming = {}, {}
        for group in (self._of_row, self._of_layer):
            if group is not None:
                dist.destroy_process_group(group)

    @property
    def first(self) -> bool:
        """Whether this is the rank that measures, writes and calls back for all."""
        return self.rank == 0

    # Values

    def gather(self, value: T) -> list[T]:
        """The value that each rank has, by rank."""
        found: list[Any] = [None] * self.size
        with self._talking():
            dist.all_gather_object(found, value)
        return found

    def of_first(self, value: T) -> T:
        """The value that the first rank has."""
        held: list[Any] = [value]
        with self._talking():
            dist.broadcast_object_list(held, 0)
        value = held[0]
        return value

    # Sums over the rows of a batch

    def share(self, rows: list[int], total: float | Tensor) -> Share | None:
        """This rank's share of a batch of which each row of ranks has so many rows."""
        if self.parallel.data == 1:
            return None
        first = sum(rows[: self.row])
        return Share(first, sum(rows), total, self.add, self.begin, self.finish)

    def of_rows(self, value: Tensor) -> list[Tensor]:
        """The value of each rank that has rows for this layer, by row."""
        if self._of_layer is None:
            return [value]
        found = [torch.empty_like(value) for _ in range(self.parallel.data)]
        with self._talking():
            dist.all_gather(found, value, self._of_layer)
        return found

    def add(self, tensor: Tensor) -> Tensor:
        """Add up over the ranks that have rows, in place."""
        if self._of_layer is not None:
            with self._talking():
                dist.all_reduce(tensor, group=self._of_layer)
        return tensor

    def begin(self, tensor: Tensor) -> None:
        """Begin to :meth:`add`."""
        with self._talking():
            work = dist.all_reduce(tensor, group=self._of_layer, async_op=True)
        assert work is not None
        self._begun.append(work)

    def finish(self) -> None:
        """Wait until all that was begun is there."""
        with self._talking():
            while self._begun:
                self._begun.pop().wait()

    # States and pulls between layers

    def share_memory(self, sizes: Mapping[int, int], messages: int) -> None:
        """Let messages to layers on this machine go through memory that both see; all call it.

        ``sizes`` are the bytes of the largest one to each layer, of which ``messages`` may be
        under way.
        """
        this = Process.this()
        made = {layer: Box.make(messages, size) for layer, size in sizes.items() if this}
        own = {layer: box for layer, box in made.items() if box is not None}
        told = self.gather((this, {self._at(layer): box.address for layer, box in own.items()}))
        near = [this is not None and this.shares_numbers_with(process) for process, _ in told]
        here = {
            r: Box.open(*boxes[self.rank])
            for r, (_, boxes) in enumerate(told)
            if self.rank in boxes and near[r]
        }
        seen = self.gather({r for r, box in here.items() if box is not None})
        for box in own.values():
            box.hide()
        self._processes = [process for process, _ in told]
        self._outgoing = {k: box for k, box in own.items() if self.rank in seen[self._at(k)]}
        self._incoming = {r % self.parallel.layers: box for r, box in here.items() if box}

    def send(self, tensors: Sequence[Tensor], layer: int) -> None:
        """Send to a layer of the same row in one message, without waiting."""
        parts = [_as_sent(tensor.detach()) for tensor in tensors]
        box = self._outgoing.get(layer)
        if box is not None:
            self._wait_until(lambda: box.has_room, layer)
            if box.write(parts):
                return
        message = parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
        with self._talking():
            work = dist.isend(message, self._at(layer), group=self._of_row)
            assert work is not None
            self._sent.append((work, message))

    def receive(
        self, shapes: Sequence[tuple[int, ...]], like: Tensor, layer: int
    ) -> Callable[[], list[Tensor]]:
        """Begin to receive what a layer sends next; the function waits for it."""
        sizes = [math.prod(shape) for shape in shapes]
        message, box = like.new_empty(sum(sizes)), self._incoming.get(layer)
        begun = self._begin_to_receive(message, layer) if box is None else None
        number = 0 if box is None else box.expect()

        def wait() -> list[Tensor]:
            work = begun
            if box is not None:
                self._wait_until(lambda: box.has(number), layer)
                if not box.read(number, message):
                    work = self._begin_to_receive(message, layer)
            if work is not None:
                with self._talking(layer):
                    work.wait()
            parts = zip(torch.split(message, sizes), shapes, strict=True)
            return [_as_received(part, shape) for part, shape in parts]

        return wait

    def _begin_to_receive(self, message: Tensor, layer: int) -> dist.Work:
        with self._talking(layer):
            work = dist.irecv(message, self._at(layer), group=self._of_row)
        assert work is not None
        return work

    def _wait_until(self, ready: Callable[[], bool], layer: int) -> None:
        """Look again and again, first at once; now and then also whether the other still lives."""
        for _ in range(_LOOKS):
            if ready():
                return
        process, begun = self._processes[self._at(layer)], time.monotonic()
        look = begun + _LOOK_AFTER
        while not ready():
            time.sleep(_NAP)
            now = time.monotonic()
            if now > look:
                look = now + _LOOK_AFTER
                gone = process is None or not process.alive
                if (gone or now > begun + self.parallel.timeout) and not ready():
                    raise LostRankError(self._lost(layer))

    def from_layer(self, tensor: Tensor, layer: int) -> None:
        """Let all layers of this row have what one of them has."""
        held = tensor.detach().contiguous()
        with self._talking():
            dist.broadcast(held, self._at(layer), group=self._of_row)
        tensor.detach().copy_(held)

    def wait_for_sent(self, but: int = 0) -> None:
        """Until all that was sent has arrived, but for the last so many messages."""
        with self._talking():
            while len(self._sent) > but:
                self._sent.popleft()[0].wait()

    def _at(self, layer: int) -> int:
        return self.row * self.parallel.layers + layer

    # Faults

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Others hear what ended this rank."""
        try:
            yield
        except LostRankError:
            raise
        except BaseException as error:
            self._say(f"ended with {type(error).__name__}: {error}")
            raise

    @contextmanager
    def _talking(self, layer: int | None = None) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # what torch raises when a peer is gone or silent
            raise LostRankError(self._lost(layer)) from error

    def _say(self, text: str) -> None:
        try:
            self._store.set(str(self.rank), text)
        except RuntimeError:  # the meeting point is gone as well
            return

    def _lost(self, layer: int | None) -> str:
        """Who is lost: those that ended by themselves, else those that say nothing any more."""
        self._say("")
        end = time.monotonic() + _LISTEN
        silent: list[int] = []
        ended: list[str] = []
        try:
            while time.monotonic() < end:
                time.sleep(0.1)
                heard = {r for r in range(self.size) if self._store.check([str(r)])}
                said = {r: self._store.get(str(r)).decode() for r in heard}
                ended = [f"{self.names[r]} {text}" for r, text in said.items() if text]
                silent = [r for r in range(self.size) if r not in heard]
                if ended or not silent:
                    break
        except RuntimeError:  # on the machine of the first rank, and gone with it
            silent = [0]
        if not ended and silent:
            ended = [f"{self.names[r]} does not answer any more" for r in silent]
        if not ended:
            ended = (
                ["the connection broke"]
                if layer is None
                else [f"{self.names[self._at(layer)]} was lost"]
            )
        return f"{'; '.join(ended)}. Start the run again: with a checkpoint it goes on."


@contextmanager
def own_cores(threads: int) -> Iterator[None]:
    """Each process of a machine stays on cores of its own, where there are enough.

    Else two of them meet on one core again and again while another has nothing to do.
    """
    local, processes = os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE")
    if local is None or processes is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    if len(allowed) < int(processes) * threads:
        yield
        return
    first = int(local) * threads
    os.sched_setaffinity(0, sorted(allowed)[first : first + threads])
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def _join(parallel: Parallel, device: torch.device) -> None:
    """Meet the other processes, unless that has been done."""
    if not dist.is_available():
        raise ValueError("parallel= needs a torch with torch.distributed, which this one lacks.")
    if not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise ValueError(
                f"parallel= needs {parallel.size} processes that run this same program, and this "
                "one was started alone. Start it with torchrun --nproc-per-node "
                f"{parallel.size} PROGRAM, or use lpom train --parallel."
            )
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=parallel.timeout))
    if dist.get_world_size() != parallel.size:
        raise ValueError(
            f"layers={parallel.layers} times data={parallel.data} is {parallel.size} ranks, but "
            f"{dist.get_world_size()} processes were started. Change one or the other."
        )


def _host() -> str:
    return socket.gethostname()


def _as_sent(tensor: Tensor) -> Tensor:
    """Pictures travel in the layout in which they are fast, channels last."""
    return (tensor.movedim(1, -1) if tensor.ndim == 4 else tensor).contiguous()


def _as_received(part: Tensor, shape: tuple[int, ...]) -> Tensor:
    if len(shape) != 4:
        return part.view(shape)
    samples, channels, *sides = shape
    return part.view(samples, *sides, channels).movedim(-1, 1)
