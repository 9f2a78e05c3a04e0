"""Where a graph is cut, and the part of it that one rank holds.

A part is a graph by itself. The states that it reads of other parts are nodes of it too, whose edge
gives what has been received: their pulls are what is sent back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lpom.activations import Identity
from lpom.graph import Graph, Node
from lpom.graph.edges import BatchNormOverRanks, Edge, Step

#: A number that passes through memory in a step, of a state, a weight or on the wire, in products.
_STATE, _WEIGHT, _WIRE = 200.0, 200.0, 100.0


@torch.no_grad()
def work(graph: Graph, inputs: Tensor, rows: int) -> list[float]:
    """What a step on so many rows costs for each node, in multiplications, counted on ``inputs``.

    Counted and not timed, so that the same network is always cut in the same way.
    """
    from torch.utils.flop_counter import FlopCounterMode

    X, costs = [inputs], []
    for node in graph:
        with FlopCounterMode(display=False) as counter:
            X.append(node.activation.phi(node.edge([X[s] for s in node.sources], {})))
        products = counter.get_total_flops() * (3 if any(node.sources) else 2)
        per_row = (products + _STATE * X[-1].numel()) / len(inputs)
        weights = sum(parameter.numel() for parameter in node.edge.parameters)
        costs.append(per_row * rows + _WEIGHT * weights)
    return costs


def cut(graph: Graph, costs: Sequence[float], crossing: Sequence[float], parts: int) -> list[int]:
    """The index of the last node of each part, such that the largest cost is as small as can be.

    ``crossing`` are the numbers of each node's state, by index, that would have to be sent. Weights
    that several nodes use stay in one part.
    """
    n = graph.output
    wire = [0.0] * (n + 1)
    closed: set[int] = set()
    for node in graph:
        readers = [reader.index for reader in graph.consumers[node.index]]
        for place in range(node.index, max(readers, default=node.index)):
            wire[place] += _WIRE * crossing[node.index]
    for uses in graph.uses.values():
        closed.update(range(uses[0].index, uses[-1].index))
    places = [place for place in range(1, n) if place not in closed]
    if len(places) < parts - 1:
        raise ValueError(
            f"layers={parts} ranks were asked for, but this network can be cut at "
            f"{len(places)} places only (weights that are used several times stay on one rank). "
            f"Take layers={len(places) + 1} or fewer, and data= for the other ranks."
        )
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    ends = [*places, n]
    # best[e]: the cut of nodes 1..e into the parts so far
    best: dict[int, tuple[float, list[int]]] = {e: (sums[e] + wire[e], [e]) for e in ends}
    for _ in range(parts - 1):
        further: dict[int, tuple[float, list[int]]] = {}
        for e in ends:
            found = [
                (max(most, sums[e] - sums[b] + wire[b] + wire[e]), [*cuts, e])
                for b, (most, cuts) in best.items()
                if b < e
            ]
            if found:
                further[e] = min(found)
        best = further
    chosen = best[n][1]
    return [*chosen[:-1], len(graph)]


@dataclass(frozen=True, eq=False)
class Stage:
    """The part of a graph that a rank holds.

    Attributes
    ----------
    graph : with a node for every state that is received, before the rank's own
    own : indices of the rank's own nodes in it
    numbers : the index in it of each state of the whole graph that it has
    received : states of the whole graph that it reads of others, each with the layer it is of
    sent : its own states that others read, each with the layers that do
    inbox : where the edges of received states look for them, by their index in the whole graph
    """

    graph: Graph
    own: tuple[int, ...]
    numbers: dict[int, int]
    received: list[tuple[int, int]]
    sent: list[tuple[int, list[int]]]
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
        sent = []
        for node in own:
            readers = {_layer_of(r.index, ends) for r in graph.consumers[node.index]} - {layer}
            if readers:
                sent.append((node.index, sorted(readers)))
        top = graph.output if graph.output in numbers else sent[0][0] if sent else own[-1].index
        return cls(
            Graph(tuple(nodes), numbers[top]),
            tuple(numbers[node.index] for node in own),
            numbers,
            [(s, _layer_of(s, ends)) for s in needed],
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
