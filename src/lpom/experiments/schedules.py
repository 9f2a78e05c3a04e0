"""A small model of parallel training: what each rank does in which order, and what it waits for.

Every rank has a program, a list of operations that it does one after the other; an operation begins
when the rank is free and when all that it needs has arrived. That is all there is to it: schedules
are programs. Times of the layers are measured, those of the wire are given.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Operation:
    """Takes so many seconds, and needs others that are done, each so many seconds before it."""

    name: Hashable
    seconds: float
    needs: tuple[tuple[Hashable, float], ...] = ()


Program = list[Operation]


@dataclass(frozen=True)
class Part:
    """What a rank holds: seconds of its forward pass, of its way back and of its weights' update.

    ``sent`` are the bytes of the states that it sends upwards for a batch; ``weights`` those of
    its gradients.
    """

    forward: float
    backward: float
    update: float
    sent: float
    weights: float


@dataclass(frozen=True)
class Wire:
    """Seconds until a message begins to arrive, and bytes per second from then on.

    ``busy``: nobody but the ranks themselves carries messages, as between processes of one machine
    whose cores all compute. A message then costs both its ends their time, and hides behind
    nothing.
    """

    latency: float
    bandwidth: float
    busy: bool = False

    def seconds(self, size: float) -> float:
        return self.latency + size / self.bandwidth

    def own(self, size: float) -> float:
        """Seconds that a message takes of a rank's own time."""
        return size / self.bandwidth if self.busy else 0.0

    def ring(self, size: float, ranks: int) -> float:
        """To add up a tensor over ranks that stand in a ring."""
        if ranks == 1:
            return 0.0
        return 2 * (ranks - 1) * self.seconds(size / ranks)


def simulate(programs: Sequence[Program]) -> dict[Hashable, float]:
    """When each operation ends."""
    ended: dict[Hashable, float] = {}
    free, place = [0.0] * len(programs), [0] * len(programs)
    waiting = set(range(len(programs)))
    while waiting:
        moved = False
        for rank in sorted(waiting):
            program = programs[rank]
            while place[rank] < len(program):
                operation = program[place[rank]]
                if any(name not in ended for name, _ in operation.needs):
                    break
                ready = [ended[name] + after for name, after in operation.needs]
                free[rank] = max([free[rank], *ready]) + operation.seconds
                ended[operation.name] = free[rank]
                place[rank] += 1
                moved = True
            if place[rank] == len(program):
                waiting.discard(rank)
        if not moved:
            raise ValueError("the ranks wait for each other: this schedule never ends.")
    return ended


def _forward(k: int, t: Hashable, parts: Sequence[Part], wire: Wire, share: float) -> Operation:
    needs = ((("F", k - 1, t), wire.seconds(parts[k - 1].sent * share)),) if k else ()
    seconds = (parts[k].forward + wire.own(_crossing(k, parts))) * share
    return Operation(("F", k, t), seconds, needs)


def _backward(k: int, t: Hashable, parts: Sequence[Part], wire: Wire, share: float) -> Operation:
    last = k == len(parts) - 1
    needs = () if last else ((("B", k + 1, t), wire.seconds(parts[k].sent * share)),)
    seconds = (parts[k].backward + wire.own(_crossing(k, parts))) * share
    return Operation(("B", k, t), seconds, needs)


def _crossing(k: int, parts: Sequence[Part]) -> float:
    """Bytes that a rank sends and receives for a batch on one way, up or down."""
    below = parts[k - 1].sent if k else 0.0
    return below + (parts[k].sent if k < len(parts) - 1 else 0.0)


def _update(k: int, t: int, parts: Sequence[Part], wire: Wire, data: int) -> Operation:
    """With the sum over ranks that have other rows; half of the sweep hides it, if anything."""
    part = parts[k]
    hidden = 0.0 if wire.busy else part.backward / 2
    added = max(wire.ring(part.weights, data) - hidden, 0.0)
    return Operation(("U", k, t), part.update + added)


def lpom(parts: Sequence[Part], wire: Wire, batches: int, data: int = 1) -> list[Program]:
    """Pipelined: a rank feeds batches forward while the pulls of earlier ones are on their way."""
    programs = []
    for k in range(len(parts)):
        lag, program = len(parts) - 1 - k, []
        for t in range(batches + lag):
            if t < batches:
                program.append(_forward(k, t, parts, wire, 1.0))
            if t >= lag:
                program.append(_backward(k, t - lag, parts, wire, 1.0))
                program.append(_update(k, t - lag, parts, wire, data))
        programs.append(program)
    return programs


def gpipe(
    parts: Sequence[Part], wire: Wire, batches: int, data: int = 1, micro: int = 4
) -> list[Program]:
    """All micro-batches of a batch forward, then all of them back, then the weights."""
    programs = []
    for k in range(len(parts)):
        program = []
        for t in range(batches):
            program += [_forward(k, (t, i), parts, wire, 1 / micro) for i in range(micro)]
            program += [_backward(k, (t, i), parts, wire, 1 / micro) for i in range(micro)]
            program.append(_update(k, t, parts, wire, data))
        programs.append(program)
    return programs


def one_forward_one_back(
    parts: Sequence[Part], wire: Wire, batches: int, data: int = 1, micro: int = 4
) -> list[Program]:
    """1F1B: a micro-batch goes back as soon as it can; the weights wait for all of them."""
    programs = []
    for k in range(len(parts)):
        program, early = [], min(len(parts) - 1 - k, micro)
        for t in range(batches):
            for i in range(micro + early):
                if i < micro:
                    program.append(_forward(k, (t, i), parts, wire, 1 / micro))
                if i >= early:
                    program.append(_backward(k, (t, i - early), parts, wire, 1 / micro))
            program.append(_update(k, t, parts, wire, data))
        programs.append(program)
    return programs


SCHEDULES: dict[str, Callable[..., list[Program]]] = {
    "LPOM, pipelined": lpom,
    "GPipe": gpipe,
    "1F1B": one_forward_one_back,
}


def seconds_per_batch(
    schedule: Callable[..., list[Program]], parts: Sequence[Part], wire: Wire, data: int = 1
) -> float:
    """In the long run: of many batches those in the middle, when the pipeline is full."""
    first, last = 2 * len(parts), 4 * len(parts) + 4
    ends = simulate(schedule(parts, wire, last + 2 * len(parts), data))
    done = [max(ends["U", k, t] for k in range(len(parts))) for t in (first, last)]
    return (done[1] - done[0]) / (last - first)


def rows_apart(whole: Part, wire: Wire, data: int) -> float:
    """Seconds of a batch whose rows are shared by so many ranks: all wait for the sum."""
    shared = Part(whole.forward / data, whole.backward / data, whole.update, 0.0, whole.weights)
    return with_sum(shared, wire, data)


def with_sum(part: Part, wire: Wire, data: int) -> float:
    """Seconds of a batch of its own, with the sum of gradients over so many ranks."""
    return part.forward + part.backward + _update(0, 0, [part], wire, data).seconds
