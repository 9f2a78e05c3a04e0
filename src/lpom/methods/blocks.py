"""State blocks that several methods share, and what they are made of.

All are pure. Rows are samples and every block falls apart into them, so a weight per sample does
not matter here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Real

import torch
from torch import Tensor

from lpom.activations import Activation, Identity, ReLU
from lpom.graph import Chain, Dense
from lpom.weights.gram import inverse


def ridge_states(map_: Dense, V: Tensor, goal: Tensor, ratio: float) -> Tensor:
    r""":math:`\arg\min_X \|X - V\|_F^2 + ratio \|goal - A(X)\|_F^2`, on the smaller side of W."""
    W = linear_matrix(map_, V.shape[1])
    R = goal - map_.apply(V)
    if len(W) < W.shape[1]:
        solve, _ = inverse(ratio * W @ W.T, 1.0)
        return V + ratio * solve(R.T).T @ W
    solve, _ = inverse(ratio * W.T @ W, 1.0)
    return V + ratio * solve((R @ W).T).T


def estimated_norm(map_: Dense) -> Tensor:
    """The spectral norm, from below, by twenty power iterations."""
    return map_.norm(map_.start_vector(), iterations=20)[0]


def linear_matrix(map_: Dense, width: int) -> Tensor:
    """The weights without the bias, (out, width)."""
    return map_.matrix()[:, :width]


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


def per_layer(
    mu: float | Sequence[float], n_layers: int, output: float | None = None
) -> list[float]:
    """One positive penalty weight per layer from one number, a list, or a number and the last's.

    >>> per_layer(20.0, 3, output=5.0)
    [20.0, 20.0, 5.0]
    """
    if isinstance(mu, str):
        raise TypeError(f"mu must be a number or one number per layer, got the string {mu!r}.")
    values = [float(mu)] * n_layers if isinstance(mu, float | Real) else list(map(float, mu))
    if len(values) != n_layers:
        raise ValueError(
            f"mu needs one value per weight layer: this network has {n_layers}, "
            f"got {len(values)}. Give {n_layers} values or a single one."
        )
    if output is not None:
        values[-1] = float(output)
    bad = [value for value in values if not 0 < value < float("inf")]
    if bad:
        raise ValueError(f"mu must be positive and finite in every layer, got {bad[0]}.")
    return values


def half_square(values: Tensor) -> Tensor:
    return values.square() / 2
