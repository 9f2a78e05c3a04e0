"""The block of a pre-activation: between what comes in and what should come out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lpom.activations import Activation
from lpom.methods.blocks import better

# Search on a curve: cells of the first grid, which must tell its valleys apart, of those that
# follow around the lowest point, and how many follow.
_FIRST, _NEXT, _ROUNDS = 32, 8, 10


def preactivation(
    activation: Activation, x: Tensor, z: Tensor, old: Tensor, ratio: float = 1.0
) -> Tensor:
    r""":math:`\arg\min_u (u - z)^2 + ratio (x - \phi(u))^2`, elementwise, never above ``old``.

    In closed form where :math:`\phi` is affine piece by piece: the best of the clipped minima of
    all pieces. On a curve by a search on the interval from :math:`z` towards
    :math:`z + \sqrt{ratio} (x - \phi(z))`, which holds the minimum since :math:`\phi` never
    decreases: a grid, narrowed round by round. No derivative is asked for.
    """

    def cost(u: Tensor) -> Tensor:
        return (u - z).square() + ratio * (x - activation.phi(u)).square()

    if activation.kinks is None:
        return better(cost, old, _search(cost, z, z + ratio**0.5 * (x - activation.phi(z))))
    best: Tensor | None = None
    for low, high in _pieces(activation.kinks):
        slope, offset = _line(activation, low, high, like=z)
        u = (z + ratio * slope * (x - offset)) / (1 + ratio * slope**2)
        if activation.jumps:  # at its ends phi may take the value of the next piece
            ends = z.new_tensor([low, high])
            low, high = torch.nextafter(ends, ends.flip(0)).tolist()
        u = u.clamp(low, high)
        best = u if best is None else better(cost, best, u)
    assert best is not None  # there is at least one piece
    return best


def _search(cost: Callable[[Tensor], Tensor], start: Tensor, end: Tensor) -> Tensor:
    """The lowest point of a grid between two bounds, the grid then drawn around it, and again."""
    low, high = torch.minimum(start, end), torch.maximum(start, end)
    best, lowest = start, cost(start)
    for cells in [_FIRST, *[_NEXT] * _ROUNDS]:
        width = (high - low) / cells
        for k in range(cells + 1):
            point = low + k * width
            value = cost(point)
            best = torch.where(value < lowest, point, best)
            lowest = torch.minimum(value, lowest)
        low, high = torch.maximum(low, best - width), torch.minimum(high, best + width)
    return best


def _pieces(kinks: tuple[float, ...]) -> list[tuple[float, float]]:
    ends = [-float("inf"), *kinks, float("inf")]
    return list(zip(ends[:-1], ends[1:], strict=True))


def _line(activation: Activation, low: float, high: float, like: Tensor) -> tuple[float, float]:
    """Slope and offset of phi on a piece, from two points within it."""
    if low == -float("inf"):
        low = high - 4.0 if high < float("inf") else -2.0
    high = min(high, low + 4.0)
    points = torch.tensor([0.75 * low + 0.25 * high, 0.25 * low + 0.75 * high], dtype=torch.float64)
    first, second = activation.phi(points).tolist()
    incline = (second - first) / float(points[1] - points[0])
    return incline, first - incline * float(points[0])
