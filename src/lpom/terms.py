"""What `lpom.inversion` adds up: the gap to the outputs, and what is known of the inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor

from lpom.activations import Activation, get
from lpom.checks import check_number, require
from lpom.penalties import Penalty

RAMP = 0.25  # beside the distance of two jumps


class Prior(Protocol):
    """A function of each row, and its proximal operator."""

    def value(self, x: Tensor) -> Tensor:
        """One number per row."""

    def prox(self, x: Tensor, step: Tensor) -> Tensor:
        """For each row the minimiser of ``value(v) + |v - x|**2 / (2 step)``."""


@final
class Gap:
    r"""The gap :math:`D(y, z)` of an activation as a function of z with a Lipschitz gradient.

    Where the activation jumps its ramps stand for it, as wide as ``RAMP`` times the narrowest
    distance between two jumps: then the gap is zero only somewhat inside of the cell of y.
    """

    def __init__(self, activation: Activation) -> None:
        if activation.jumps:
            jumps = torch.tensor(activation.kinks or (0.0,), dtype=torch.float64)
            width = float(jumps.diff().min()) if len(jumps) > 1 else 1.0
            activation = activation.smoothed(RAMP * width)
        self.activation = activation
        self.lipschitz = activation.lipschitz

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        """One number per row; of a y out of phi's range up to a constant."""
        y, z = y.double(), z.double()
        constant = self.activation.conjugate(y)
        constant = constant.masked_fill(constant.isinf(), 0.0)
        parts = (constant, self.activation.primitive(z), -y * z)
        return sum((part.flatten(1).sum(1) for part in parts), y.new_zeros(len(y)))

    def gradient(self, z: Tensor, y: Tensor) -> Tensor:
        return self.activation.phi(z) - y


@final
@dataclass(frozen=True)
class Elementwise:
    """A penalty of `lpom.penalties` that acts on each number by itself: L1, Box."""

    penalty: Penalty

    def value(self, x: Tensor) -> Tensor:
        values = torch.stack([self.penalty.value(row) for row in x]).double()
        return self.penalty.strength_at(1.0) * values

    def prox(self, x: Tensor, step: Tensor) -> Tensor:
        return self.penalty.prox(x, self.penalty.strength_at(1.0) * by_row(step, x).expand_as(x))


@final
@dataclass(frozen=True)
class Gaussian:
    """``strength / 2 * |x - mean|**2``."""

    strength: float = 1e-3
    mean: float | Tensor = 0.0

    def value(self, x: Tensor) -> Tensor:
        return self.strength / 2 * ((x - self.mean).double() ** 2).flatten(1).sum(1)

    def prox(self, x: Tensor, step: Tensor) -> Tensor:
        weight = by_row(self.strength * step, x)
        return (x + weight * self.mean) / (1 + weight)


@final
@dataclass(frozen=True)
class TotalVariation:
    r"""``strength`` times the sum of the lengths of a picture's gradient, within [low, high].

    Pictures are the last two dimensions, or rows of ``shape``. The prox is Beck and Teboulle's
    accelerated projected gradient on the dual (2009).
    """

    strength: float = 1e-2
    shape: tuple[int, int] | None = None
    low: float = -torch.inf
    high: float = torch.inf
    iterations: int = 30

    def __post_init__(self) -> None:
        check_number("strength", self.strength)
        check_number("iterations", self.iterations, whole=True)

    def value(self, x: Tensor) -> Tensor:
        gradient = _gradient(self._picture(x).double())
        lengths: Tensor = gradient.norm(dim=0)
        return self.strength * lengths.flatten(1).sum(1)

    def prox(self, x: Tensor, step: Tensor) -> Tensor:
        picture = self._picture(x)
        weight = by_row(self.strength * step, picture)
        dual = point = torch.zeros(2, *picture.shape, dtype=x.dtype, device=x.device)
        t = 1.0
        for _ in range(self.iterations):
            at = (picture - weight * _adjoint(point)).clamp(self.low, self.high)
            new = point + _gradient(at) / (8 * weight)
            new = new / new.norm(dim=0).clamp_min(1)
            ahead = (1 + (1 + 4 * t**2) ** 0.5) / 2
            point, dual, t = new + (t - 1) / ahead * (new - dual), new, ahead
        return (picture - weight * _adjoint(dual)).clamp(self.low, self.high).reshape(x.shape)

    def _picture(self, x: Tensor) -> Tensor:
        return x if self.shape is None else x.reshape(len(x), *self.shape)


@final
@dataclass(frozen=True)
class Sparse:
    """At most ``count`` numbers of a row are not zero and, if given, its norm is ``norm``.

    Not convex: the guarantees of a convex prior are lost. For signs, which do not tell a norm.
    """

    count: int
    norm: float | None = None

    def value(self, x: Tensor) -> Tensor:
        return torch.zeros(len(x), dtype=torch.float64, device=x.device)

    def prox(self, x: Tensor, step: Tensor) -> Tensor:
        least = x.abs().topk(self.count, dim=1).values[:, -1:]
        kept = torch.where(x.abs() >= least, x, 0.0)
        if self.norm is None:
            return kept
        norms: Tensor = kept.norm(dim=1, keepdim=True)
        return self.norm * kept / norms.clamp_min(1e-30)


def FenchelYoung(activation: str | Activation) -> Any:  # noqa: N802
    """The gap as a data term of deepinv, for measurements ``activation(physics.A(x))``.

    The physics given to deepinv's iterators is the linear part alone.
    """
    optim = require("deepinv.optim", "a data term for deepinv", "deepinv")
    gap = Gap(get(activation))

    class Data(optim.DataFidelity):  # type: ignore[misc, name-defined]
        def fn(self, x: Tensor, y: Tensor, physics: Any, *_: Any, **__: Any) -> Tensor:
            return gap.value(physics.A(x), y).to(x.dtype)

        def grad(self, x: Tensor, y: Tensor, physics: Any, *_: Any, **__: Any) -> Tensor:
            pull: Tensor = physics.A_vjp(x, gap.gradient(physics.A(x), y))
            return pull

    return Data()


def _gradient(x: Tensor) -> Tensor:
    """Differences to the pixel below and to the right, zero at the border."""
    found = torch.zeros(2, *x.shape, dtype=x.dtype, device=x.device)
    found[0, ..., :-1, :] = x.diff(dim=-2)
    found[1, ..., :-1] = x.diff(dim=-1)
    return found


def _adjoint(g: Tensor) -> Tensor:
    x = torch.zeros_like(g[0])
    x[..., :-1, :] -= g[0, ..., :-1, :]
    x[..., 1:, :] += g[0, ..., :-1, :]
    x[..., :-1] -= g[1, ..., :-1]
    x[..., 1:] += g[1, ..., :-1]
    return x


def by_row(numbers: Tensor, like: Tensor) -> Tensor:
    """Numbers per row in the dimensions of the rows."""
    numbers = numbers.to(like.dtype) if numbers.is_floating_point() else numbers
    return numbers.view(-1, *[1] * (like.ndim - 1))


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).flatten(1).sum(1)


def size(x: Tensor) -> Tensor:
    found: Tensor = x.flatten(1).double().norm(dim=1)
    return found
