"""Ramps as wide as a layer's pre-activations want them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lpom.graph import Graph, Node

#: Spreads are measured every so many steps, and a new one counts for this much in the mean.
MEASURE_EVERY, NEWEST = 20, 0.1


@dataclass
class Spreads:
    """Running standard deviations of the pre-activations under every jump, by node.

    They begin with those of the first batch; where nothing jumps they are one and not read.
    """

    values: list[float] = field(default_factory=list)

    def ramps(self, graph: Graph, width: float) -> Graph:
        """The graph with a ramp for each jump, ``width`` of its spreads wide."""
        return graph.smoothed(tuple(width * spread for spread in self.values))

    @torch.no_grad()
    def measure(self, graph: Graph, Z: Callable[[Node], Tensor]) -> None:
        """See the pre-activations ``Z`` of a batch."""
        found = [1.0] * (len(graph) + 1)
        for node in graph:
            if node.activation.jumps:
                z = Z(node)
                spread = float(z.detach().std(correction=0)) if z.numel() else 0.0
                found[node.index] = spread if 0 < spread < float("inf") else 1.0
        if not self.values:
            self.values = found
        mixed = zip(self.values, found, strict=True)
        self.values = [old + NEWEST * (new - old) for old, new in mixed]
