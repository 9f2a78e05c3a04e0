"""The processes of a run: who they are, how they talk, and what they say when one is lost."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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
from lpom.methods.base import Share
from lpom.settings import Settings

#: Seconds that a rank waits for what the others say before it names those who said nothing.
_LISTEN = 5.0
_runs = count()

T = TypeVar("T")


@final
@dataclass(frozen=True)
class Parallel(Settings):
    """How a run is spread over ``layers * data`` processes, the ranks of ``torch.distributed``.

    Parameters
    ----------
    layers : int
        Ranks that share the modules of an ``nn.Sequential``, some consecutive ones each.
    data : int
        Ranks that share the rows of each batch. Their gradients are added up.
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
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
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
        return None if self.parallel.data == 1 else Share(sum(rows), total)

    def of_rows(self, value: Tensor) -> list[Tensor]:
        """The value of each rank that has rows for this layer, by row."""
        if self._of_layer is None:
            return [value]
        found = [torch.empty_like(value) for _ in range(self.parallel.data)]
        with self._talking():
            dist.all_gather(found, value, self._of_layer)
        return found

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Add tensors up over the ranks that have rows, in place and in one message."""
        if self._of_layer is None or not tensors:
            return
        message = torch.cat([tensor.reshape(-1) for tensor in tensors])
        with self._talking():
            dist.all_reduce(message, group=self._of_layer)
        for tensor, part in zip(tensors, message.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def from_first_row(self, tensor: Tensor) -> None:
        """Let all ranks of this layer have what the one of the first rows has."""
        if self._of_layer is not None:
            self._broadcast(tensor, self.layer, self._of_layer)

    # States and pulls between layers

    def send(self, tensor: Tensor, layer: int) -> None:
        """Send to a layer of the same row, without waiting."""
        message = tensor.detach().contiguous()
        with self._talking(layer):
            work = dist.isend(message, self._at(layer), group=self._of_row)
        assert work is not None
        self._sent.append((work, message))

    def receive(self, shape: tuple[int, ...], like: Tensor, layer: int) -> Callable[[], Tensor]:
        """Begin to receive what a layer sends next; the function waits for it."""
        message = like.new_empty(shape)
        with self._talking(layer):
            work = dist.irecv(message, self._at(layer), group=self._of_row)
        assert work is not None

        def wait() -> Tensor:
            with self._talking(layer):
                work.wait()
            return message

        return wait

    def from_layer(self, tensor: Tensor, layer: int) -> None:
        """Let all layers of this row have what one of them has."""
        if self._of_row is not None:
            self._broadcast(tensor, self._at(layer), self._of_row)

    def _broadcast(self, tensor: Tensor, rank: int, group: Any) -> None:
        message = tensor.detach().contiguous()
        with self._talking():
            dist.broadcast(message, rank, group=group)
        tensor.detach().copy_(message)

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
        return f"{'; '.join(ended)}. Start the run again: with a checkpoint it resumes."


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
                f"one was started alone. Start it with torchrun --nproc-per-node {parallel.size} "
                "PROGRAM."
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
