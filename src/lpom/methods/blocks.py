"""State blocks that several methods share, and what they are made of.

All are pure. Rows are samples and every block falls apart into them, so a weight per sample does
not matter here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lpom.activations import Activation, Identity, ReLU
from lpom.methods.chains import Chain, Dense
from lpom.objectives import matrix_norm, start_vector
from lpom.weights.gram import inverse


def ridge_states(map_: Dense, V: Tensor, goal: Tensor, ratio: float) -> Tensor:
    r""":math:`\arg\min_X \|X - V\|_F^2 + ratio \|goal - A(X)\|_F^2`, on the smaller side of W."""
    W = map_.weight
    R = goal - map_.apply(V)
    if len(W) < W.shape[1]:
        solve, _ = inverse(ratio * W @ W.T, 1.0)
        return V + ratio * solve(R.T).T @ W
    solve, _ = inverse(ratio * W.T @ W, 1.0)
    return V + ratio * solve((R @ W).T).T


def estimated_norm(map_: Dense) -> Tensor:
    """The spectral norm, from below, by twenty power iterations."""
    return matrix_norm(map_.weight, start_vector(map_.weight[:1]), iterations=20)[0]


def better(cost: Callable[[Tensor], Tensor], old: Tensor, new: Tensor) -> Tensor:
    """``new`` where its cost is lower, else ``old``; a cost per row decides for the row."""
    lower = cost(new) < cost(old)
    return torch.where(lower if lower.shape == new.shape else lower[:, None], new, old)


def accelerated(
    gradient: Callable[[Tensor], Tensor],
    X: Tensor,
    *,
    smoothness: float | Tensor,
    convexity: float | Tensor,
    iterations: int,
    lower: float,
) -> Tensor:
    r"""Projected gradient steps with the momentum for strong convexity, :math:`X \ge lower`.

    The error falls by :math:`1 - \sqrt{convexity / smoothness}` an iteration.
    """
    root = (torch.as_tensor(convexity) / torch.as_tensor(smoothness)) ** 0.5
    momentum = ((1 - root) / (1 + root)).to(X)
    Y = X
    for _ in range(iterations):
        X_old, X = X, (Y - gradient(Y) / smoothness).clamp(min=lower)
        Y = X + momentum * (X - X_old)
    return X


def nonnegative_states(
    map_: Dense,
    X: Tensor,
    V: Tensor,
    goal: Tensor,
    ratio: float,
    *,
    norm: Tensor,
    iterations: int,
) -> Tensor:
    r""":math:`\arg\min_{X \ge 0} \|X - V\|_F^2 + ratio \|goal - A(X)\|_F^2`, from a feasible X.

    A fixed number of accelerated projected gradient steps. The norm of the map may come from
    below, as power iteration sees it: a sample whose cost rose keeps its old row.
    """

    def gradient(x: Tensor) -> Tensor:
        return x - V + ratio * map_.adjoint(map_.apply(x) - goal)

    def cost(x: Tensor) -> Tensor:
        return (x - V).square().sum(1) + ratio * (map_.apply(x) - goal).square().sum(1)

    smoothness = 1 + 1.05 * ratio * norm**2
    new = accelerated(
        gradient, X, smoothness=smoothness, convexity=1.0, iterations=iterations, lower=0.0
    )
    return better(cost, X, new)


def require_relu(network: Chain, name: str) -> None:
    """Raise unless hidden layers have a ReLU and the output a ReLU or nothing."""
    for i, layer in enumerate(network):
        allowed = (ReLU(), Identity()) if i == len(network) - 1 else (ReLU(),)
        if layer.activation not in allowed:
            raise ValueError(
                f"{name} writes a ReLU as the constraint X >= 0, so hidden layers need 'relu' and "
                f"the output 'relu' or 'identity'; layer {i + 1} has {layer.activation.name!r}. "
                "Use method='lpom', which trains any activation that never decreases."
            )


def slope(activation: Activation, z: Tensor) -> Tensor:
    """The derivative of phi, by autograd."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        (derivative,) = torch.autograd.grad(activation.phi(z).sum(), z)
    return derivative


def half_square(values: Tensor) -> Tensor:
    return values.square() / 2


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
