r"""Blocks that several methods share: weights and states by least squares, U in closed form.

All are pure but :meth:`Regression.step`, which writes the weights. Rows are samples and every
state block falls apart into them, so a weight per sample matters to the weights alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import final

import torch
from torch import Tensor

from lpom.activations import (
    Activation,
    Hardsigmoid,
    Hardtanh,
    Identity,
    LeakyReLU,
    ReLU,
    ReLU6,
    Sign,
    Staircase,
    Step,
)
from lpom.gram import inverse
from lpom.maps import LinearMap
from lpom.network import Lifted

#: Points between which an activation is affine; one that is curved has no entry.
_KINKS: dict[type[Activation], Callable[..., list[float]]] = {
    Identity: lambda a: [],
    ReLU: lambda a: [0.0],
    LeakyReLU: lambda a: [0.0],
    Hardtanh: lambda a: [a.min_val, a.max_val],
    Hardsigmoid: lambda a: [-3.0, 3.0],
    ReLU6: lambda a: [0.0, 6.0],
    Step: lambda a: _ends([0.0], a.width),
    Sign: lambda a: _ends([0.0], a.width),
    Staircase: lambda a: _ends([(k + 0.5) * a.step for k in range(a.levels)], a.width),
}

# Search on a curve: cells of the first grid, which must tell its valleys apart, of those that
# follow around the lowest point, and how many follow.
_FIRST, _NEXT, _ROUNDS = 32, 8, 10


@final
class Regression:
    r"""Least squares of a layer's weights on the states ``X`` below it, chunk by chunk.

    .. math:: \min_W \|U - A(X; W)\|_F^2 + \lambda \|W - W_{old}\|_F^2

    With more samples than columns only the sums :math:`X^T X` and :math:`X^T (U - Z)` over chunks
    of rows are formed (transpose reduction), so results do not depend on the chunk; otherwise
    the Gram matrix is that of the rows. The ridge is relative as in :func:`lpom.gram.gram`, and
    pulls towards the old weights: it moves no fixed point and the objective cannot rise.
    """

    def __init__(
        self,
        map_: LinearMap,
        X: Tensor,
        *,
        ridge: float,
        weight: Tensor | None = None,
        chunk: int = 8192,
    ) -> None:
        self.map, self.X, self.ridge, self.chunk = map_, X, ridge, chunk
        self.scale = None if weight is None else weight.sqrt()[:, None]
        first = map_.design(X[:1])
        columns, rows = first.shape[1], len(first) * len(X)
        self.rows = None if rows > columns else map_.gram(X, ridge, weight)
        if self.rows is None:
            total = first.new_zeros(columns, columns)
            for part in self._parts():
                A = self._design(part)
                total.addmm_(A.T, A)
            strength = ridge * total.diagonal().sum() / columns
            self.inverse, self.deficient = inverse(total, strength)
        else:
            self.deficient = self.rows.deficient

    def step(self, map_: LinearMap, R: Tensor) -> None:
        """Move the weights by the solution for ``R = U - A(X; W_old)``, unless they are frozen."""
        if map_.free:
            map_.add_matrix(self.solve(R).T)

    def solve(self, R: Tensor) -> Tensor:
        """The change of the weights that the residual asks for, one column per output."""
        if self.rows is not None:
            R = self.map.as_rows(R if self.scale is None else self.scale * R)
            return self.rows.weights(self.rows.solve(R)).T
        total: Tensor | None = None
        for part in self._parts():
            rows = self.map.as_rows(R[part] if self.scale is None else self.scale[part] * R[part])
            product = self._design(part).T @ rows
            total = product if total is None else total.add_(product)
        assert total is not None  # there is at least one row
        return self.inverse(total)

    def apply(self, change: Tensor) -> Tensor:
        """What a change of the weights, as :meth:`solve` gives it, does to the outputs."""
        return torch.cat([self.map.design(self.X[part]) @ change for part in self._parts()])

    def _parts(self) -> Iterator[slice]:
        for start in range(0, len(self.X), self.chunk):
            yield slice(start, start + self.chunk)

    def _design(self, part: slice) -> Tensor:
        A = self.map.design(self.X[part])
        return A if self.scale is None else self.scale[part] * A


def ridge_states(map_: LinearMap, V: Tensor, goal: Tensor, ratio: float) -> Tensor:
    r""":math:`\arg\min_X \|X - V\|_F^2 + ratio \|goal - A(X)\|_F^2`, on the smaller side of W."""
    W = linear_matrix(map_, V.shape[1])
    R = goal - map_.apply(V)
    eye = torch.eye(min(W.shape), dtype=W.dtype, device=W.device)
    if len(W) < W.shape[1]:
        factor = torch.linalg.cholesky(eye + ratio * W @ W.T)
        return V + ratio * torch.cholesky_solve(R.T, factor).T @ W
    factor = torch.linalg.cholesky(eye + ratio * W.T @ W)
    return V + ratio * torch.cholesky_solve((R @ W).T, factor).T


def estimated_norm(map_: LinearMap) -> Tensor:
    """The spectral norm, from below, by twenty power iterations."""
    return map_.norm(map_.start_vector(), iterations=20)[0]


def linear_matrix(map_: LinearMap, width: int) -> Tensor:
    """The weights without the bias, (out, width)."""
    return map_.matrix()[:, :width]


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

    kinks = _KINKS.get(type(activation))
    if kinks is None:
        return better(cost, old, _search(cost, z, z + ratio**0.5 * (x - activation.phi(z))))
    best: Tensor | None = None
    for low, high in _pieces(kinks(activation)):
        slope, offset = _line(activation, low, high, like=z)
        u = (z + ratio * slope * (x - offset)) / (1 + ratio * slope**2)
        u = u.clamp(low, high)
        if activation.jumps and high < float("inf"):  # the upper value is taken at a jump
            u = u.clamp(max=float(torch.nextafter(z.new_tensor(high), z.new_tensor(low))))
        best = u if best is None else better(cost, best, u)
    assert best is not None  # there is at least one piece
    return best


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
    map_: LinearMap,
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


def require_relu(network: Lifted, name: str) -> None:
    """Raise unless hidden layers have a ReLU and the output a ReLU or nothing."""
    for i, layer in enumerate(network):
        allowed = (ReLU(), Identity()) if i == len(network) - 1 else (ReLU(),)
        if layer.activation not in allowed:
            raise ValueError(
                f"{name} writes a ReLU as the constraint X >= 0, so hidden layers need 'relu' and "
                f"the output 'relu' or 'identity'; layer {i} has {layer.activation.name!r}. "
                "Take method='lpom', which trains any activation that never decreases."
            )


def slope(activation: Activation, z: Tensor) -> Tensor:
    """The derivative of phi, by autograd."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        (derivative,) = torch.autograd.grad(activation.phi(z).sum(), z)
    return derivative


def half_square(values: Tensor) -> Tensor:
    return values.square() / 2


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


def _pieces(kinks: list[float]) -> list[tuple[float, float]]:
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


def _ends(centres: list[float], width: float) -> list[float]:
    """Where the ramps around these centres begin and end; jumps where they have no width."""
    if width == 0:
        return centres
    ends = [end for c in centres for end in (c - width / 2, c + width / 2)]
    return sorted(set(ends))
