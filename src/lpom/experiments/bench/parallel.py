"""What two ranks are worth on this machine, beside the usual ways; and more ranks in a model.

Machines are noisy, so all contenders take turns in one run, some steps at a time. Each rank has one
thread and stays on a core of its own, but for the contender that has two.
"""

from __future__ import annotations

import copy
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass, replace
from itertools import chain, pairwise, repeat

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lpom import losses
from lpom.experiments import schedules
from lpom.experiments.schedules import SCHEDULES, Part, Wire
from lpom.graph import Graph
from lpom.methods import LPOM, Batch, Problem
from lpom.methods.lpom import LPOMState
from lpom.parallel import Parallel, Pipeline, Ranks
from lpom.parallel.stages import Plan, Stage, crossing, cut, plan
from lpom.training.fit import keep_freed_memory
from lpom.training.interface import Interface

MICRO_BATCHES = 4
#: Each rank has the whole network, and batches of its own: what the cores are good for.
_APART = "LPOM, two that share nothing"
_RATE = 1e-3
Steps = Callable[[int], None]


@dataclass(frozen=True)
class Measured:
    """Median seconds of a step, how many times as fast as one rank, and what the model says."""

    name: str
    ranks: int
    seconds: float
    speed: float
    predicted: float | None = None


@dataclass(frozen=True)
class Predicted:
    """Speed per rank, relative to one rank, by schedule; rows are shared beyond ``layers``."""

    ranks: int
    layers: int
    efficiency: dict[str, float]


def bench_parallel(
    model: nn.Sequential,
    shape: Sequence[int],
    *,
    batch_size: int = 100,
    steps: int = 20,
    rounds: int = 5,
    seed: int = 0,
) -> list[Measured]:
    """Time steps of each way to train, in both processes of a run of two; for both the same."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as fit does
    layers, data = Ranks(Parallel(layers=2), _CPU), Ranks(Parallel(data=2), _CPU)
    generator = torch.Generator().manual_seed(seed)
    X = torch.rand(batch_size, *shape, generator=generator)
    y = torch.randint(10, (batch_size,), generator=generator)
    half = slice(0, batch_size // 2) if layers.first else slice(batch_size // 2, None)
    alone = _alone(model, X, y)
    contenders: dict[str, tuple[int, Steps]] = {
        "LPOM, one rank": (1, alone),
        _APART: (2, alone),
        "LPOM, one rank of two threads": (1, _alone(model, X, y, threads=2)),
        "LPOM, layers, pipelined": (2, _lpom(model, X, y, layers)),
        "LPOM, rows": (2, _lpom(model, X, y, data)),
        "back-propagation, one rank": (1, _backprop(model, X, y)),
        "back-propagation, DDP": (2, _backprop(model, X[half], y[half], ddp=True)),
        "back-propagation, GPipe": (2, _torch_pipeline(model, X, y, layers, "ScheduleGPipe")),
        "back-propagation, 1F1B": (2, _torch_pipeline(model, X, y, layers, "Schedule1F1B")),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(rounds + 1):
        for name, (ranks, run) in contenders.items():
            dist.barrier()
            start = time.perf_counter()
            if ranks == 2 or layers.first:
                run(steps)
            dist.barrier()
            if round_:  # the first one warms up
                batches = 2 * steps if name == _APART else steps
                times[name].append((time.perf_counter() - start) / batches)
    memory, wire, ring = measure_wire(layers, boxes=True), measure_wire(layers), measure_ring(data)
    dist.barrier()
    # both at once: two busy cores are slower than one
    predicted = layers.of_first(_predictions(model, X, y, memory, wire, ring))
    # each against itself
    base = {name: times[f"{name}, one rank"] for name in ("LPOM", "back-propagation")}
    return [
        Measured(
            name,
            ranks,
            statistics.median(times[name]),
            statistics.median(
                a / b for a, b in zip(base[name.partition(",")[0]], times[name], strict=True)
            ),
            predicted.get(name),
        )
        for name, (ranks, _) in contenders.items()
    ]


def predict(
    model: nn.Sequential,
    shape: Sequence[int],
    ranks: Sequence[int],
    wire: Wire,
    *,
    batch_size: int = 100,
) -> list[Predicted]:
    """What so many ranks would do, by the model, with the times of the layers on this machine.

    As many ranks as can share the layers; beyond that each such team has a batch of its own, and
    their gradients are added up.
    """
    torch.set_num_threads(1)
    problem, batch = _problem(model, torch.rand(batch_size, *shape), None)
    nodes = measure_nodes(problem, batch)
    alone = _joined(nodes)
    one = alone.forward + alone.backward + alone.update
    found = []
    for count in ranks:
        layers = max(k for k in range(1, min(count, len(nodes)) + 1) if count % k == 0)
        data = count // layers
        per_batch = {}
        for name, schedule in SCHEDULES.items():
            ends = cut(
                problem.graph,
                [node.forward + node.backward + node.update for node in nodes],
                [0.0] * (len(nodes) + 1),
                layers,
                divides=schedule is schedules.lpom,
            )
            parts = _parts(problem.graph, nodes, ends)
            per_batch[name] = schedules.seconds_per_batch(schedule, parts, wire, data)
        efficiency = {name: one / (layers * seconds) for name, seconds in per_batch.items()}
        # every rank all layers, and a batch of its own
        efficiency["DDP"] = one / schedules.with_sum(alone, wire, count)
        found.append(Predicted(count, layers, efficiency))
    return found


_CPU = torch.device("cpu")


def _problem(model: nn.Module, X: Tensor, y: Tensor | None) -> tuple[Problem, Batch]:
    model = copy.deepcopy(model).train()
    interface = Interface.of(model, X)
    loss = losses.get("cross-entropy")
    labels = torch.zeros(len(X), dtype=torch.long) if y is None else y
    target = loss.encode(labels, interface.n_outputs, interface.n_outputs)
    return Problem(model, loss, interface.example), Batch(interface.inputs(X), target)


def _alone(model: nn.Module, X: Tensor, y: Tensor, threads: int = 1) -> Steps:
    problem, batch = _problem(model, X, y)
    method = LPOM()
    state = method.init(problem)

    def run(steps: int) -> None:
        torch.set_num_threads(threads)
        with _every_core() if threads > 1 else nullcontext():
            for _ in range(steps):
                method.step(problem, batch, state)
        torch.set_num_threads(1)

    return run


@contextmanager
def _every_core() -> Iterator[None]:
    """For one process with several threads, among others that stay on a core each."""
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    if own is not None:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        yield
    finally:
        if own is not None:
            os.sched_setaffinity(0, own)


def _lpom(model: nn.Module, X: Tensor, y: Tensor, ranks: Ranks) -> Steps:
    problem, batch = _problem(model, X, y)
    method = LPOM()
    pipeline = Pipeline(
        method,
        problem,
        method.init(problem),
        ranks,
        batch.inputs[:3],
        len(X) // ranks.parallel.data,
    )
    pipeline.take_own()
    if ranks.parallel.data > 1:
        rows = [len(part) for part in X.tensor_split(2)]
        begin = sum(rows[: ranks.row])
        own = slice(begin, begin + rows[ranks.row])
        share = ranks.share(rows, float(len(X)))
        batch = Batch(batch.inputs[own], batch.target[own], share=share)

    def run(steps: int) -> None:
        for again in pipeline.ahead(repeat(batch, steps)):
            pipeline.step(again)
        pipeline.end_batches()

    return run


def _backprop(model: nn.Module, X: Tensor, y: Tensor, ddp: bool = False) -> Steps:
    problem, batch = _problem(model, X, y)
    model, X = problem.model, batch.inputs  # in the same memory layout as LPOM's
    run_by: nn.Module = nn.parallel.DistributedDataParallel(model) if ddp else model
    optimizer = torch.optim.Adam(model.parameters(), lr=_RATE, fused=True)

    def run(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(run_by(X), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return run


def _torch_pipeline(
    model: nn.Sequential, X: Tensor, y: Tensor, ranks: Ranks, schedule: str
) -> Steps:
    """torch's own pipeline, cut between layers; it can't send pictures with channels last."""
    from torch.distributed import pipelining

    problem, batch = _problem(model, X, y)
    place, _ = _plan(problem, batch).places
    above = {
        id(parameter)
        for node in problem.graph.nodes[int(place) :]
        for parameter in node.edge.parameters
    }
    layers = list(problem.model.children())
    first_above = next(
        i for i, layer in enumerate(layers) if any(id(p) in above for p in layer.parameters())
    )
    own = nn.Sequential(*(layers[:first_above] if ranks.first else layers[first_above:]))
    stage = pipelining.PipelineStage(own, ranks.rank, 2, _CPU)
    made = getattr(pipelining, schedule)(stage, MICRO_BATCHES, loss_fn=F.cross_entropy)
    optimizer = torch.optim.Adam(own.parameters(), lr=_RATE, fused=True)

    def run(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            if ranks.first:
                made.step(X)
            else:
                made.step(target=y)
            optimizer.step()

    return run


@torch.no_grad()
def measure_nodes(problem: Problem, batch: Batch, repeats: int = 7) -> list[Part]:
    """Each node by itself, as a rank that holds it alone would do it; medians.

    They take turns, so that each finds its weights where they are in a step: not in the cache.
    """
    graph, method = problem.graph, LPOM()
    _, X = graph.feed_forward(batch.inputs)
    ends = [node.index for node in graph]
    turns: list[tuple[Stage, Problem, LPOMState, Tensor]] = []
    for layer, node in enumerate(graph):
        stage = Stage.of(graph, ends, layer)
        needed = chain.from_iterable(stage.received.values())
        stage.inbox.update({index: X[index] for index in needed})
        own = Problem.on(stage.graph, problem.loss, problem.model)
        pull = 1e-3 * torch.randn_like(X[node.index])
        turns.append((stage, own, method.init(own), pull))
    seconds: list[list[tuple[float, ...]]] = [[] for _ in graph]
    for _ in range(repeats):
        for found, (stage, own, state, pull) in zip(seconds, turns, strict=True):
            clock = [time.perf_counter()]
            states = method.feed_forward(own, batch, state)
            clock.append(time.perf_counter())
            nodes = [states.graph[index] for index in stage.own]
            states.pull(nodes[-1], pull)
            method.sweep_down(states, nodes, own, batch, state)
            clock.append(time.perf_counter())
            method.update(states, batch, state)
            clock.append(time.perf_counter())
            found.append(tuple(b - a for a, b in pairwise(clock)))
    parts = []
    for node, found in zip(graph, seconds, strict=True):
        forward, backward, update = (
            statistics.median(column) for column in zip(*found, strict=True)
        )
        size = X[node.index].element_size()
        weights = sum(p.numel() for p in node.edge.parameters)
        sent = X[node.index].numel() * size
        parts.append(Part(forward, backward, update, sent, weights * size))
    return parts


def measure_share(problem: Problem, batch: Batch, share: int) -> list[Part]:
    """The same for a batch in so many pieces, measured on one: small ones cost more."""
    rows = len(batch) // share
    part = Batch(batch.inputs[:rows], batch.target[:rows])
    return [
        replace(
            node,
            forward=share * node.forward,
            backward=share * node.backward,
            sent=share * node.sent,
        )
        for node in measure_nodes(problem, part)
    ]


def _joined(nodes: Sequence[Part]) -> Part:
    return Part(
        sum(node.forward for node in nodes),
        sum(node.backward for node in nodes),
        sum(node.update for node in nodes),
        nodes[-1].sent,
        sum(node.weights for node in nodes),
    )


def _parts(graph: Graph, nodes: Sequence[Part], ends: Sequence[float]) -> list[Part]:
    """Nodes joined to parts that end at these places."""
    sizes, parts = [0.0, *(node.sent for node in nodes)], []
    for begin, end in pairwise([0.0, *ends]):
        within = range(int(begin), math.ceil(end))
        shares = [min(end, k + 1) - max(begin, k) for k in within]
        part = _joined([_share(nodes[k], share) for k, share in zip(within, shares, strict=True)])
        parts.append(replace(part, sent=crossing(graph, sizes, end)))
    return parts


def _plan(problem: Problem, batch: Batch, *, even: bool = False) -> Plan:
    """Where two ranks part: between layers, or such that the work is even."""
    return plan(problem.graph, batch.inputs[:3], len(batch), 2, divides=even, lends=even)


def lent(parts: list[Part], share: float) -> list[Part]:
    """The same when the second rank has this share of the rows of the first part."""
    if not share:
        return parts
    first, second, *others = parts
    given, kept = _share(first, share), _share(first, 1 - share)
    first = replace(kept, update=first.update, weights=first.weights)
    second = replace(
        second,
        forward=second.forward + given.forward,
        backward=second.backward + given.backward,
    )
    return [first, second, *others]


def _share(node: Part, share: float) -> Part:
    """So much of a node's units."""
    return Part(*(share * amount for amount in astuple(node)))


def _predictions(
    model: nn.Module, X: Tensor, y: Tensor, memory: Wire, wire: Wire, ring: Wire
) -> dict[str, float]:
    """Seconds of a step that the model says for each contender with two ranks.

    LPOM's messages go through the memory of the machine, those of torch's pipelines over the wire.
    """
    problem, batch = _problem(model, X, y)
    graph, micro = problem.graph, measure_share(problem, batch, MICRO_BATCHES)
    found = _plan(problem, batch, even=True)
    parts = lent(_parts(graph, measure_nodes(problem, batch), found.places), found.lent)
    whole = _parts(graph, micro, _plan(problem, batch).places)
    rows = schedules.rows_apart(_joined(measure_share(problem, batch, 2)), ring, 2)
    return {
        "LPOM, layers, pipelined": schedules.seconds_per_batch(schedules.lpom, parts, memory),
        "LPOM, rows": rows,
        "back-propagation, DDP": rows,
        "back-propagation, GPipe": schedules.seconds_per_batch(schedules.gpipe, whole, wire),
        "back-propagation, 1F1B": schedules.seconds_per_batch(
            schedules.one_forward_one_back, whole, wire
        ),
    }


def measure_wire(ranks: Ranks, repeats: int = 20, *, boxes: bool = False) -> Wire:
    """Between two ranks: a small and a large message, there and back; in memory, or by gloo."""
    other, halves, sizes = 1 - ranks.layer, list[float](), (1, 1 << 18)
    ranks.share_memory({other: 4 * max(sizes)} if boxes else {}, messages=2)
    for size in sizes:
        message, seconds = torch.zeros(size), []
        for _ in range(repeats):
            start = time.perf_counter()
            if ranks.first:
                ranks.send([message], other)
                ranks.receive([(size,)], message, other)()
            else:
                ranks.receive([(size,)], message, other)()
                ranks.send([message], other)
            seconds.append((time.perf_counter() - start) / 2)
        halves.append(statistics.median(seconds))
    ranks.wait_for_sent()
    small, large = halves
    return Wire(small, 4 * (1 << 18) / max(large - small, 1e-9), busy=True)


def measure_ring(ranks: Ranks, repeats: int = 7) -> Wire:
    """The same where tensors are added up."""
    found = []
    for size in (1, 1 << 21):
        tensor, seconds = torch.zeros(size), []
        for _ in range(repeats):
            start = time.perf_counter()
            ranks.add(tensor)
            seconds.append(time.perf_counter() - start)
        found.append(statistics.median(seconds))
    small, large = found
    return Wire(small / 2, 4 * (1 << 21) / max(large - small, 1e-9), busy=True)
