r"""A node whose units are on several ranks: as many nodes, each with its rows of the weights.

Units answer one by one. With :math:`X = [X_a, X_b]` and the rows :math:`W_a, W_b` of one matrix

.. math:: X_a = \phi(X_s W_a^T + b_a), \qquad X_b = \phi(X_s W_b^T + b_b)

are two states, which those who read :math:`X` read side by side; the channels of a convolution
alike. The rows are views of the module's own weights.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import torch
from torch import fx, nn

from lpom.graph import Graph, Node
from lpom.graph.edges import Edge, Step
from lpom.graph.operations import MODULES, VIEWS, call_name, module_name

#: Units are divided at multiples of this, with which kernels are fast; a node in so many pieces.
_UNITS, _PIECES = 16, 64
_POOLS = frozenset(name for name in MODULES.values() if "pool" in name)
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

L = TypeVar("L", bound=nn.Module)


@dataclass(frozen=True, eq=False)
class Divided:
    """A graph, the last node of each part of it, and of which node of the whole each one is.

    ``rows`` are the weights of which nodes have some rows, each with the views that are moved in
    its place, from the first row to the last.
    """

    graph: Graph
    ends: list[int]
    origins: list[int]
    rows: dict[nn.Parameter, list[nn.Parameter]]


def shares(graph: Graph, node: Node) -> list[float]:
    """Where the units of a node can be divided, as shares of them; empty if they can't."""
    layer = _layer(node)
    alone = all(len(graph.uses[parameter]) == 1 for parameter in node.edge.parameters)
    if layer is None or not alone or node.index == graph.output:
        return []
    units = len(layer.weight)
    apart = _UNITS * -(-units // (_UNITS * _PIECES))
    return [begin / units for begin in range(apart, units, apart)]


def divide(graph: Graph, places: Sequence[float]) -> Divided:
    """Divide the nodes in which places are: at 2.25 a quarter of the third node is below."""
    numbers: dict[int, list[int]] = {0: [0]}  # of each node of the whole, those of its pieces
    origins, nodes = [0], list[Node]()
    ends: dict[float, int] = {}
    dims = {node.index: _dim(_layer(node)) for node in graph}
    rows: dict[nn.Parameter, list[nn.Parameter]] = {}
    for node in graph:
        edge, below = joined(node.edge, numbers, dims), node.index - 1
        within = [place for place in places if below < place < node.index]
        found = [replace(node, edge=edge)]
        if within:
            layer = _layer(node)
            assert layer is not None  # else it is not cut
            found = _in_pieces(found[0], layer, [place - below for place in within])
            for piece in found:
                for parameter, view in zip(edge.parameters, piece.edge.parameters, strict=True):
                    rows.setdefault(parameter, []).append(view)
        numbers[node.index] = list(range(len(origins), len(origins) + len(found)))
        ends.update(zip([*within, float(node.index)], numbers[node.index], strict=True))
        nodes += [replace(n, index=i) for n, i in zip(found, numbers[node.index], strict=True)]
        origins += [node.index] * len(found)
    whole = Graph(tuple(nodes), numbers[graph.output][0])
    return Divided(whole, [ends[place] for place in places], origins, rows)


def _layer(node: Node) -> nn.Linear | nn.Conv2d | None:
    """The layer whose units are those of the state, where each is answered by itself.

    Before it the state below is viewed in another shape at most; after it channels are pooled at
    most.
    """
    found: nn.Linear | nn.Conv2d | None = None
    if not node.activation.elementwise or node.layer is not None or len(node.sources) != 1:
        return None
    for step in node.edge.steps:
        call = step.call
        name = module_name(call) if isinstance(call, nn.Module) else call_name(step.out.target)
        if found is None and type(call) in _LAYERS:
            found = call  # type: ignore[assignment]
        elif name not in (VIEWS if found is None else _POOLS) or type(found) is nn.Linear:
            return None
    if found is None or getattr(found, "groups", 1) > 1:
        return None
    hooked = found._forward_hooks or found._forward_pre_hooks
    own = {id(parameter) for parameter in found._parameters.values()}
    return None if hooked or any(id(p) not in own for p in node.edge.parameters) else found


def _dim(layer: nn.Module | None) -> int:
    """Where the units of a layer stand in its values."""
    return -1 if isinstance(layer, nn.Linear) else 1


def _in_pieces(node: Node, layer: nn.Linear | nn.Conv2d, shares: Sequence[float]) -> list[Node]:
    units = len(layer.weight)
    bounds = [0, *(round(share * units) for share in shares), units]
    return [_piece(node, layer, a, b) for a, b in pairwise(bounds)]


def _piece(node: Node, layer: nn.Module, begin: int, end: int) -> Node:
    part, edge = _rows(layer, begin, end), node.edge
    views = dict(zip(layer.parameters(), part.parameters(), strict=True))
    steps = [replace(step, call=part) if step.call is layer else step for step in edge.steps]
    edge = replace(
        edge,
        parameters=tuple(views[p] for p in edge.parameters),
        names=tuple(f"{name}[{begin}:{end}]" for name in edge.names),
        steps=tuple(steps),
        layer=part if edge.layer is layer else None,
    )
    return replace(node, name=f"{node.name}[{begin}:{end}]", edge=edge)


def _rows(layer: L, begin: int, end: int) -> L:
    """The layer of some of the units; its weights are views of the layer's."""
    part = copy.copy(layer)
    part._parameters = {
        name: None if p is None else nn.Parameter(p.detach()[begin:end], p.requires_grad)
        for name, p in layer._parameters.items()
    }
    return part


def joined(edge: Edge, numbers: Mapping[int, Sequence[int]], dims: Mapping[int, int]) -> Edge:
    """The same edge; sources that are in pieces are put together first, along these dimensions.

    ``numbers`` are the indices of the pieces of each source.
    """
    if all(len(numbers[s]) == 1 for s in edge.sources):
        return replace(edge, sources=tuple(numbers[s][0] for s in edge.sources))
    made, sources, inputs = fx.Graph(), list[int](), list[fx.Node]()
    steps, whole = list[Step](), dict[fx.Node, fx.Node]()
    for source, x in zip(edge.sources, edge.inputs, strict=True):
        sources += numbers[source]
        if len(numbers[source]) == 1:
            inputs.append(x)
            continue
        parts = [made.placeholder(f"piece{len(inputs) + k}") for k in range(len(numbers[source]))]
        whole[x] = made.call_function(torch.cat, (parts, dims[source]))
        inputs += parts
        steps.append(Step(whole[x], torch.cat, (parts, dims[source]), {}))
    return replace(
        edge,
        sources=tuple(sources),
        steps=(*steps, *(step.reading(whole) for step in edge.steps)),
        inputs=tuple(inputs),
        result=whole.get(edge.result, edge.result),
        layer=None,
    )
