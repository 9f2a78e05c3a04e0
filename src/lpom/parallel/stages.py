"""Where a graph is cut, and the part of it that one rank holds.

A part is a graph by itself. The states that it reads of other parts are nodes of it too, whose edge
gives what has been received: their pulls are what is sent back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lpom.activations import Identity
from lpom.graph import Graph, Node
from lpom.graph.edges import BatchNormOverRanks, Edge, Step
from lpom.parallel.dividing import shares
from lpom.parallel.lending import lendable, lent_rows

#: What a node costs by itself, and numbers that pass through memory in a step: of what an operation
#: makes, of a weight, on the wire; of a state with units on two ranks, which is put together and
#: taken apart. In multiplications and additions, as measured on one core.
_NODE, _MADE, _WEIGHT, _WIRE, _JOINED = 3e7, 200.0, 200.0, 100.0, 600.0


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the numbers that operations make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not func.is_view:
                self.numbers += tensor.numel()
        return made


@torch.no_grad()
def work(graph: Graph, inputs: Tensor, rows: int) -> list[float]:
    """What a step on so many rows costs for each node, in multiplications, counted on ``inputs``.

    Counted and not timed, so that the same network is always cut in the same way.
    """
    from torch.utils.flop_counter import FlopCounterMode

    X, costs = [inputs], []
    for node in graph:
        with FlopCounterMode(display=False) as counter, _Made() as made:
            X.append(node.activation.phi(node.edge([X[s] for s in node.sources], {})))
        products = counter.get_total_flops() * (3 if any(node.sources) else 2)
        per_row = (products + _MADE * made.numbers) / len(inputs)
        weights = sum(parameter.numel() for parameter in node.edge.parameters)
        calls = 2 * _NODE if node.index == graph.output else _NODE  # the loss is one more
        costs.append(calls + per_row * rows + _WEIGHT * weights)
    return costs


def crossing(graph: Graph, sizes: Sequence[float], place: float) -> float:
    """How many numbers of states would have to be sent if the graph were cut at a place.

    ``sizes`` are those of each node's state, by index. At 2.25 a quarter of the third node's units
    are below: their states are sent, and so is what the units above read.
    """
    whole = int(place)
    sent = sum(
        sizes[node.index]
        for node in graph.nodes[:whole]
        if any(reader.index > whole for reader in graph.consumers[node.index])
    )
    return sent + (place - whole) * sizes[whole + 1] if place > whole else sent


@dataclass(frozen=True)
class Plan:
    """Where parts end, see `cut`, and the share of the first one's rows on the second rank."""

    places: list[float]
    lent: float = 0.0


@torch.no_grad()
def plan(
    graph: Graph, example: Tensor, rows: int, parts: int, *, divides: bool, lends: bool
) -> Plan:
    """How the work of a step on so many rows becomes even; ``example`` has a few.

    If one ``divides``, the units of a node may be on several ranks; if one ``lends``, rows of the
    first part, where their states are large and its weights are few.
    """
    with torch.random.fork_rng(devices=[]):
        _, X = graph.feed_forward(example)
        costs = work(graph, example, rows)
    sizes = [rows * x.numel() / len(example) for x in X]
    chosen = Plan(cut(graph, costs, sizes, parts, divides=divides))
    if not lends or parts == 1:
        return chosen
    whole = cut(graph, costs, sizes, parts)
    first, second, *others = loads(graph, costs, sizes, whole)
    end = int(whole[0])
    readers = [reader.index for node in graph.nodes[:end] for reader in graph.consumers[node.index]]
    alike = all(len(x) == len(example) for x in X[: end + 1])
    if max(readers) > whole[1] or not alike or not lendable(graph, end):
        return chosen
    weights = sum(p.numel() for node in graph.nodes[:end] for p in node.parameters)
    # the second rank calls the nodes too, and puts the rows of what it reads together
    second += _NODE * end + _MADE * crossing(graph, sizes, end)
    even, share = (first + second) / 2 + _WIRE * weights, (first - second) / (2 * first)
    better = max([even, *others]) < max(loads(graph, costs, sizes, chosen.places))
    return Plan(whole, share) if better and lent_rows(share, rows) > 0 else chosen


def loads(
    graph: Graph, costs: Sequence[float], sizes: Sequence[float], places: Sequence[float]
) -> list[float]:
    """What each part costs, with what it sends and receives."""
    ends = [0.0, *places]
    own = [_until(costs, end) - _until(costs, begin) for begin, end in pairwise(ends)]
    wire = [_WIRE * crossing(graph, sizes, end) for end in ends]
    joined = [_joining(sizes, end) for end in ends]
    return [
        cost + below + above + join
        for cost, (below, above), join in zip(own, pairwise(wire), joined, strict=False)
    ]


def _joining(sizes: Sequence[float], place: float) -> float:
    """What it costs the part above a place if units of one state are on both sides of it."""
    return _JOINED * sizes[math.ceil(place)] if place > int(place) else 0.0


def _until(costs: Sequence[float], place: float) -> float:
    """What all below a place cost."""
    whole = int(place)
    return sum(costs[:whole]) + ((place - whole) * costs[whole] if place > whole else 0.0)


def cut(
    graph: Graph,
    costs: Sequence[float],
    sizes: Sequence[float],
    parts: int,
    *,
    divides: bool = False,
) -> list[float]:
    """The place where each part ends, such that the largest cost is as small as can be.

    ``sizes`` are the numbers of each node's state, by index, that are sent where it crosses.
    Weights that several nodes use stay in one part. A place is the index of the last node of a
    part; if one ``divides`` nodes, at 2.25 it also has a quarter of the units of the third.
    """
    n = graph.output
    closed: set[int] = set()
    for uses in graph.uses.values():
        closed.update(range(uses[0].index, uses[-1].index))
    found: list[float] = [place for place in range(1, n) if place not in closed]
    if divides and parts > 1:
        for node in graph:
            if node.index - 1 not in closed:
                found += [node.index - 1 + share for share in shares(graph, node)]
    if len(found) < parts - 1:
        raise ValueError(
            f"layers={parts} ranks were asked for, but this network can be cut at "
            f"{len(found)} places only (weights that are used several times stay on one rank). "
            f"Take layers={len(found) + 1} or fewer, and data= for the other ranks."
        )
    ends = [0.0, *sorted(found), float(n)]
    until = [_until(costs, e) for e in ends]
    wire = [_WIRE * crossing(graph, sizes, e) for e in ends]
    joined = [_joining(sizes, e) for e in ends]
    # the largest cost of the parts below each end, and where the last of them begins
    best = [0.0] + [math.inf] * (len(ends) - 1)
    begins: list[list[int]] = []
    for _ in range(parts):
        further, begin = [math.inf] * len(ends), [0] * len(ends)
        for e in range(1, len(ends)):
            for b in reversed(range(e)):
                own = until[e] - until[b]
                if own > further[e]:  # and more so for all before it
                    break
                most = max(best[b], own + wire[b] + wire[e] + joined[b])
                if most < further[e]:
                    further[e], begin[e] = most, b
        best = further
        begins.append(begin)
    e, chosen = len(ends) - 1, [float(len(graph))]
    for begin in reversed(begins[1:]):
        e = begin[e]
        chosen.append(ends[e])
    return chosen[::-1]


@dataclass(frozen=True, eq=False)
class Stage:
    """The part of a graph that a rank holds.

    Attributes
    ----------
    graph : with a node for every state that is received, before the rank's own
    own : indices of the rank's own nodes in it
    numbers : the index in it of each state of the whole graph that it has
    received : states of the whole graph that it reads of others, by the layer they are of
    sent : its own states that others read, by the layer that does
    inbox : where the edges of received states look for them, by their index in the whole graph
    """

    graph: Graph
    own: tuple[int, ...]
    numbers: dict[int, int]
    received: dict[int, list[int]]
    sent: dict[int, list[int]]
    inbox: dict[int, Tensor]

    @classmethod
    def of(cls, graph: Graph, ends: Sequence[int], layer: int) -> Stage:
        """The part up to and with ``ends[layer]``."""
        begin, end = ([0, *ends])[layer], ends[layer]
        own = graph.nodes[begin:end]
        needed = sorted({s for node in own for s in node.sources if 0 < s <= begin})
        numbers = {s: i for i, s in enumerate([0, *needed, *(node.index for node in own)])}
        inbox: dict[int, Tensor] = {}
        nodes = [_received(graph[s], numbers[s], inbox) for s in needed]
        nodes += [_renumbered(node, numbers) for node in own]
        received: dict[int, list[int]] = {}
        for s in needed:
            received.setdefault(_layer_of(s, ends), []).append(s)
        sent: dict[int, list[int]] = {}
        for node in own:
            readers = {_layer_of(r.index, ends) for r in graph.consumers[node.index]}
            for reader in sorted(readers - {layer}):
                sent.setdefault(reader, []).append(node.index)
        read = [min(indices) for indices in sent.values()]
        top = graph.output if graph.output in numbers else min(read, default=own[-1].index)
        return cls(
            Graph(tuple(nodes), numbers[top]),
            tuple(numbers[node.index] for node in own),
            numbers,
            received,
            sent,
            inbox,
        )

    def mu(self, whole: Sequence[float]) -> list[float]:
        """The weights of the gaps of its nodes, from those of the whole graph."""
        return [whole[index] for index in self.numbers]


def _layer_of(index: int, ends: Sequence[int]) -> int:
    return next(layer for layer, end in enumerate(ends) if index <= end)


def _received(node: Node, index: int, inbox: dict[int, Tensor]) -> Node:
    def look() -> Tensor:
        return inbox[node.index]

    out = node.edge.result
    edge = Edge((), (), (Step(out, look, (), {}),), (), out)
    return replace(node, index=index, activation=Identity(), edge=edge)


def _renumbered(node: Node, numbers: dict[int, int]) -> Node:
    edge = replace(node.edge, sources=tuple(numbers[s] for s in node.sources))
    return replace(node, index=numbers[node.index], edge=edge)


def with_batch_norm_over_ranks(graph: Graph, add: Callable[[Tensor], Tensor]) -> Graph:
    """The same graph; batch norm takes the statistics of all ranks' rows."""
    nodes = tuple(_over_ranks(node, add) for node in graph)
    return replace(graph, nodes=nodes, swept=None, _smoothed={})


def _over_ranks(node: Node, add: Callable[[Tensor], Tensor]) -> Node:
    steps = []
    for step in node.edge.steps:
        call: Any = step.call
        if step.switch == "batch_norm":
            if not isinstance(call, nn.modules.batchnorm._BatchNorm):
                raise ValueError(
                    f"the edge below {node.name} calls torch's function for batch norm, whose "
                    "statistics can't be added up over ranks. Use a layer, nn.BatchNorm1d or "
                    "nn.BatchNorm2d, or data=1."
                )
            call = BatchNormOverRanks(call, add)
        steps.append(replace(step, call=call))
    return replace(node, edge=replace(node.edge, steps=tuple(steps)))
