"""Ramps as wide as a layer's pre-activations want them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lpom.graph import Graph, Node
from lpom.weights.blocks import Share

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
    def measure(
        self, graph: Graph, Z: Callable[[Node], Tensor], share: Share | None = None
    ) -> None:
        """See the pre-activations ``Z`` of a batch, of which other ranks may have a share."""
        found = [1.0] * (len(graph) + 1)
        for node in graph:
            if node.activation.jumps:
                spread = _deviation(Z(node).detach(), share)
                found[node.index] = spread if 0 < spread < float("inf") else 1.0
        if not self.values:
            self.values = found
        mixed = zip(self.values, found, strict=True)
        self.values = [old + NEWEST * (new - old) for old, new in mixed]


def _deviation(z: Tensor, share: Share | None) -> float:
    """The standard deviation of all numbers, those of other ranks too; 0 of none."""
    if share is None:
        return float(z.std(correction=0)) if z.numel() else 0.0
    total, count = share.add(torch.stack([z.sum(), z.new_tensor(float(z.numel()))]))
    return float((share.add((z - total / count).square().sum()) / count).sqrt())
