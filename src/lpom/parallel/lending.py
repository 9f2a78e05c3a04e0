r"""Some rows of the first part on the second rank, where that evens the work.

The first layers of a convolutional network have large states and few weights, so a few rows of
each batch are easier to move than units are. In the graph their states are nodes of their own,

.. math:: X = \begin{bmatrix} X_a \\ X_b \end{bmatrix}, \qquad
    X_a = \phi(A(X_{s,a}; W)), \quad X_b = \phi(A(X_{s,b}; W)),

with the same weights. The second rank gives back its part of their gradient, and gets the weights
when they have been moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, fx, nn

from lpom.graph import Graph, Node
from lpom.graph.edges import Step
from lpom.parallel.dividing import joined


@dataclass(frozen=True, eq=False)
class Lent:
    """A graph with the lent rows as nodes of their own, after those of the first part.

    Attributes
    ----------
    graph, ends : the last node of each part
    origins : the node of the graph before that each one is of
    parameters : those that two ranks use; the first of them moves them
    share : of the rows that are lent
    own : how many nodes the first part has
    """

    graph: Graph
    ends: list[int]
    origins: list[int]
    parameters: list[nn.Parameter]
    share: float
    own: int

    def rows(self, index: int, rows: int) -> int:
        """How many of so many rows the state of a node has."""
        kept = rows - lent_rows(self.share, rows)
        if not self.share or index > 2 * self.own:
            return rows
        return kept if index <= self.own else rows - kept


def lent_rows(share: float, rows: int) -> int:
    """How many of the rows of a batch the second rank has."""
    return round(share * rows)


def lendable(graph: Graph, end: int) -> bool:
    """Whether the rows of the nodes up to this one know nothing of each other."""
    switches = {step.switch for node in graph.nodes[:end] for step in node.edge.steps}
    return all("pool" in switch or switch in ("", "amax") for switch in switches)


def lend(graph: Graph, ends: Sequence[int], share: float) -> Lent:
    """Let the second part have a share of the rows of the first."""
    if not share:
        return Lent(graph, list(ends), list(range(len(graph) + 1)), [], 0.0, ends[0])
    own, last = ends[0], graph.nodes[: ends[0]]
    trained = [p for node in last for p in node.parameters if p.requires_grad]
    nodes = [_rows(node, 0, lambda x: x[: len(x) - lent_rows(share, len(x))]) for node in last]
    nodes += [_rows(node, own, lambda x: x[len(x) - lent_rows(share, len(x)) :]) for node in last]
    numbers = {k: [k, k + own] for k in range(1, own + 1)} | {0: [0]}
    for node in graph.nodes[own:]:
        numbers[node.index] = [node.index + own]
        edge = joined(node.edge, numbers, dict.fromkeys(range(1, own + 1), 0))
        nodes.append(replace(node, index=node.index + own, edge=edge))
    origins = [*range(own + 1), *range(1, own + 1), *range(own + 1, len(graph) + 1)]
    whole = Graph(tuple(nodes), graph.output + own)
    shifted = [own, *(end + own for end in ends[1:])]
    return Lent(whole, shifted, origins, list(dict.fromkeys(trained)), share, own)


def _rows(node: Node, shift: int, of: Callable[[Tensor], Tensor]) -> Node:
    """The node for some rows: its sources are theirs, and of the data it takes them."""
    edge = node.edge
    sources = tuple(s + shift if s else 0 for s in edge.sources)
    if 0 not in sources:
        return replace(node, index=node.index + shift, edge=replace(edge, sources=sources))
    made, x = fx.Graph(), edge.inputs[sources.index(0)]
    data = made.placeholder("data")
    part = made.call_function(of, (data,))
    swaps = {x: part}
    steps = [Step(part, of, (data,), {}), *(step.reading(swaps) for step in edge.steps)]
    inputs = tuple(data if i is x else i for i in edge.inputs)
    taken = replace(
        edge,
        sources=sources,
        inputs=inputs,
        steps=tuple(steps),
        result=swaps.get(edge.result, edge.result),
        layer=None,
    )
    return replace(node, index=node.index + shift, edge=taken)
