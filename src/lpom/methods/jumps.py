"""How activations that jump are trained, and how wide the ramps are that stand for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from lpom.checks import check_number, check_pair
from lpom.graph import Graph, Node
from lpom.settings import Settings

#: Spreads are measured every so many steps, and a new one counts for this much in the mean.
MEASURE_EVERY, NEWEST = 20, 0.1
#: A ramp as wide as a spread is never wider than this, in units of the jump's own argument.
WIDEST = 2.0


@final
@dataclass(frozen=True)
class StraightThrough(Settings):
    """Jumps stay jumps in the network; states move as if they were ramps.

    Parameters
    ----------
    width : float
        The ramps are as wide as one running standard deviation of each node's pre-activations, and
        at most as wide as this.
    relative : bool
        False: they have this very width.
    """

    width: float = 2.0
    relative: bool = True

    def __post_init__(self) -> None:
        check_number("width", self.width)


@final
@dataclass(frozen=True)
class Continuation(Settings):
    """The network is trained with ramps whose width shrinks geometrically over the run."""

    first: float = 1.0
    last: float = 0.1

    def __post_init__(self) -> None:
        check_pair("width", (self.first, self.last))


@dataclass
class Spreads:
    """Running standard deviations of the pre-activations under every jump, by node.

    They begin with those of the first batch; where nothing jumps they are one and not read.
    """

    values: list[float] = field(default_factory=list)

    def ramps(self, graph: Graph, width: float, most: float = WIDEST) -> Graph:
        """The graph with a ramp for each jump, ``width`` of its spreads and at ``most`` so wide."""
        return graph.smoothed(tuple(min(width * spread, most) for spread in self.values))

    @torch.no_grad()
    def measure(self, graph: Graph, Z: Callable[[Node], Tensor]) -> None:
        """See the pre-activations ``Z`` of a batch."""
        spreads = [1.0] * (len(graph) + 1)
        for node in graph:
            if node.activation.jumps:
                z = Z(node).detach()
                spread = float(z.std(correction=0)) if z.numel() else 0.0
                spreads[node.index] = spread if 0 < spread < float("inf") else 1.0
        if not self.values:
            self.values = spreads
        pairs = zip(self.values, spreads, strict=True)
        self.values = [old + NEWEST * (new - old) for old, new in pairs]
