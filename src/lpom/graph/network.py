"""A network as a graph of states, joined by affine edges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lpom.activations import Activation
from lpom.graph.edges import Edge, Switches


@dataclass(frozen=True, eq=False)
class Node:
    r"""``X[index] = activation.phi(Z)``, ``Z = edge(X[s] for s in edge.sources)``.

    The data is ``X[0]``, so indices begin at one; sources have smaller ones.
    """

    index: int
    name: str
    activation: Activation
    edge: Edge

    @cached_property
    def sources(self) -> tuple[int, ...]:
        return self.edge.sources

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return self.edge.parameters


@dataclass(frozen=True, eq=False)
class Graph:
    """All nodes in topological order, and which of them is the output.

    The graph owns nothing: weights and buffers belong to the module it was traced from.
    """

    nodes: tuple[Node, ...]
    output: int
    _smoothed: dict[str, Any] = field(default_factory=dict, repr=False)  # the last that was asked

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __getitem__(self, index: int) -> Node:
        """The node of a state; negative indices count from the end."""
        return self.nodes[index - 1 if index > 0 else index]

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """Every weight once, frozen ones too."""
        return list(dict.fromkeys(p for node in self for p in node.parameters))

    @cached_property
    def parameter_names(self) -> dict[nn.Parameter, str]:
        """The name of each weight in the module."""
        names: dict[nn.Parameter, str] = {}
        for node in self:
            for parameter, name in zip(node.edge.parameters, node.edge.names, strict=True):
                names.setdefault(parameter, name)
        return names

    @cached_property
    def consumers(self) -> list[list[Node]]:
        """The nodes whose edges read a state, by its index."""
        found: list[list[Node]] = [[] for _ in range(len(self) + 1)]
        for node in self:
            for source in node.sources:
                found[source].append(node)
        return found

    @cached_property
    def uses(self) -> dict[nn.Parameter, list[Node]]:
        """The nodes in whose edges a weight stands."""
        found: dict[nn.Parameter, list[Node]] = {}
        for node in self:
            for parameter in node.edge.parameters:
                found.setdefault(parameter, []).append(node)
        return found

    @property
    def output_activation(self) -> Activation:
        return self[self.output].activation

    @cached_property
    def jumps(self) -> bool:
        """Whether an activation is discontinuous."""
        return any(node.activation.jumps for node in self)

    def smoothed(self, width: float | tuple[float, ...]) -> Graph:
        """The same edges; every jump of an activation replaced by a ramp of this width.

        Widths may be given by the index of the nodes, the first, of the data, not being read.
        """
        if self._smoothed.get("width") != width:
            widths = width if isinstance(width, tuple) else (width,) * (len(self) + 1)
            nodes = [
                replace(node, activation=node.activation.smoothed(widths[node.index]))
                if node.activation.jumps
                else node
                for node in self
            ]
            self._smoothed.update(width=width, graph=Graph(tuple(nodes), self.output))
        made: Graph = self._smoothed["graph"]
        return made

    @torch.no_grad()
    def feed_forward(
        self, inputs: Tensor, switches: Switches | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """``Z`` and ``X`` of every node, lists that begin with the data (``Z[0]`` is ``X[0]``)."""
        Z, X = [inputs], [inputs]
        for node in self:
            Z.append(node.edge([X[s] for s in node.sources], switches))
            X.append(node.activation.phi(Z[-1]))
        return Z, X
