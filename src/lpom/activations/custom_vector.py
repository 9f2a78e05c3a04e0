"""A user's own function of slices, known by nothing but phi and its Lipschitz constant."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn, final

import torch
from numpy.polynomial.legendre import leggauss
from torch import Tensor

from lpom.activations.base import Activation, Parameter

_PANELS, _ORDER = 32, 8  # of the quadrature along a segment
_STEPS = 3000  # of the search for a point where phi takes a value
_FOUND = 1e-6  # the relative error that counts as found
_LENGTH = 12  # of the slices that a function is checked with
_LINES = 64  # that it is checked along, at each of three scales


@final
@dataclass(frozen=True)
class CustomVector(Activation):
    r"""A function of slices along ``dim``, made by `from_function`.

    The primitive is the integral along the ray from 0,
    :math:`\Phi(z) = \int_0^1 \langle \phi(t z), z \rangle dt`, by Gauss-Legendre quadrature of
    order 8 on 32 panels: to about 1e-10 for smooth functions and slices up to a norm of 30, 1e-4
    with kinks. The conjugate takes a :math:`p` with :math:`\phi(p) = x`, found by accelerated
    ascent on :math:`\langle x, p \rangle - \Phi(p)`; it is refused where none is found to a
    relative 1e-6, as on the boundary of the range. The gap starts that search from :math:`z`
    and integrates from there,

    .. math:: D(x, z) = \int_0^1 \langle x - \phi(z + t (p - z)), p - z \rangle dt,

    which is a lower bound where the search has not ended.
    """

    function: Callable[[Tensor], Tensor] = field(repr=False)
    constant: float
    dim: int = -1
    name: str = "custom"

    elementwise = False
    lower = -math.inf
    upper = math.inf

    @property
    def lipschitz(self) -> float:
        return self.constant

    def phi(self, z: Tensor) -> Tensor:
        return self.function(z)

    def primitive(self, z: Tensor) -> Tensor:
        return -self._rise(torch.zeros_like(z), torch.zeros_like(z), z)

    def conjugate(self, x: Tensor) -> Tensor:
        origin = torch.zeros_like(x)
        p = self._search(x.detach(), origin)
        missed = self._norm(self.function(p) - x.detach())
        if bool((missed > self._tolerance(x)).any()):
            raise ValueError(
                f"the conjugate of {self.name!r} cannot be had at this x: no z with phi(z) = x "
                f"was found, the nearest is {float(missed.max()):.2g} away. Give values that phi "
                "takes, or ask for the gap, which needs none."
            )
        return self._rise(x, origin, p)

    def gap(self, x: Tensor, z: Tensor) -> Tensor:
        p = self._search(x.detach(), z.detach())
        return self._rise(x, z, p)

    def _rise(self, x: Tensor, start: Tensor, stop: Tensor) -> Tensor:
        """Rise of ``<x, z> - primitive(z)`` along the segment between two points."""
        way = stop - start
        total = torch.zeros_like(way)
        for panel in range(_PANELS):
            for node, weight in zip(*leggauss(_ORDER), strict=True):
                t = (panel + (1 + float(node)) / 2) / _PANELS
                total = total + float(weight) / 2 / _PANELS * (x - self.function(start + t * way))
        return (total * way).sum(self.dim, keepdim=True)

    def _search(self, x: Tensor, start: Tensor) -> Tensor:
        """``p`` with ``phi(p) = x``: Nesterov's ascent from ``start``, restarted slice by slice."""
        with torch.no_grad():
            old = ahead = start
            momentum = torch.ones_like(start.sum(self.dim, keepdim=True))
            for _ in range(_STEPS):
                slope = x - self.function(ahead)
                if bool((self._norm(slope) <= 1e-3 * self._tolerance(x)).all()):
                    break
                new = ahead + slope / self.constant
                back = (slope * (new - old)).sum(self.dim, keepdim=True) < 0
                momentum = torch.where(back, 1.0, momentum)
                following = (1 + torch.sqrt(1 + 4 * momentum**2)) / 2
                ahead = new + (momentum - 1) / following * (new - old)
                old, momentum = new, following
            return ahead

    def _norm(self, z: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(z, dim=self.dim, keepdim=True)
        return norm

    def _tolerance(self, x: Tensor) -> Tensor:
        return max(_FOUND, 8 * torch.finfo(x.dtype).eps) * (1 + self._norm(x.detach()))

    def params(self) -> dict[str, Parameter]:
        return refuse_to_save(self.name)

    def checked(self) -> CustomVector:
        """Itself, if it keeps shapes, never turns back, is no steeper than told, and a gradient."""
        with torch.no_grad():
            a, b, u, v = self._lines()
            self._check_shape(a)
            x, y = self.function(a), self.function(b)
            away, rise = self._norm(a - b), self._norm(x - y)
            product = ((x - y) * (a - b)).sum(self.dim)
            if bool((product < -1e-12 * (1 + away * rise).squeeze(self.dim)).any()):
                raise ValueError(
                    f"{self.name!r} is not monotone: along a random line from b to a, "
                    f"<phi(a) - phi(b), a - b> is {float(product.min()):g}. LPOM needs the "
                    "gradient of a convex function, for which that is never below 0."
                )
            if bool((rise > self.constant * (1 + 1e-9) * away + 1e-12).any()):
                raise ValueError(
                    f"{self.name!r} is steeper than lipschitz={self.constant!r} allows: on a "
                    f"random line its slope is {float((rise / away).max()):.6g}. Pass at least the "
                    "largest norm of its Jacobian."
                )
            self._check_symmetry(a, u, v)
        return self

    def _lines(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Points in pairs, near and far, and two directions at each; slices along ``dim``."""
        generator = torch.Generator().manual_seed(0)
        shape = (3, _LINES, 1, _LENGTH)
        a, b, u, v = torch.randn(4, *shape, generator=generator, dtype=torch.float64)
        scale = torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64).reshape(3, 1, 1, 1)
        a, b = scale * a, scale * b
        b[:, ::2] = a[:, ::2] + 1e-3 * u[:, ::2]  # half of the pairs close together
        one = torch.eye(_LENGTH, dtype=a.dtype)[torch.arange(_LINES // 4) % _LENGTH]
        b[:, 1::4] = a[:, 1::4] + 0.3 * scale * u[:, 1::4] * one[:, None]  # apart in one element
        dims = max(4, self.dim + 1, -self.dim)
        made = [t.reshape(*[1] * (dims - 4), *shape).movedim(-1, self.dim) for t in (a, b, u, v)]
        return made[0], made[1], made[2], made[3]

    def _check_shape(self, z: Tensor) -> None:
        x = checked_call(self.function, z, self.name)
        if not bool(torch.isfinite(x).all()):
            raise ValueError(f"{self.name!r} must be finite everywhere, but is not.")
        rows = z.movedim(self.dim, -1).flatten(0, -2)
        alone = torch.stack(
            [self.function(row.reshape(self._one(z))).flatten() for row in rows[: _LINES // 4]]
        )
        together = x.movedim(self.dim, -1).flatten(0, -2)[: _LINES // 4]
        if not torch.allclose(alone, together, rtol=1e-9, atol=1e-12):
            raise ValueError(
                f"{self.name!r} must map every slice along dim={self.dim} by itself, but a slice "
                "alone and the same slice among others give different values."
            )

    def _one(self, z: Tensor) -> list[int]:
        """The shape of a single slice with as many dimensions as ``z``."""
        shape = [1] * z.ndim
        shape[self.dim] = _LENGTH
        return shape

    def _check_symmetry(self, z: Tensor, u: Tensor, v: Tensor) -> None:
        """The circulation around a small square, ``<u, J v> - <v, J u>``, has to vanish."""
        h = 1e-5

        def change(way: Tensor) -> Tensor:
            return (self.function(z + h * way) - self.function(z - h * way)) / (2 * h)

        by_u, by_v = change(u), change(v)
        circulation = ((u * by_v).sum(self.dim) - (v * by_u).sum(self.dim)).abs()
        size = (self._norm(u) * self._norm(by_v) + self._norm(v) * self._norm(by_u)).squeeze(
            self.dim
        )
        turning = circulation > 1e-5 * size + 1e-8 * self.constant
        if float(turning.double().mean()) > 0.1:  # squares across a kink may seem to turn
            raise ValueError(
                f"{self.name!r} is the gradient of no function: its Jacobian is not symmetric, so "
                "the sum along a closed path is not 0, and there is no primitive. LPOM needs the "
                "gradient of a convex function."
            )


def checked_call(phi: Callable[[Tensor], Tensor], z: Tensor, name: str) -> Tensor:
    """``phi(z)``; raises unless it keeps shape and dtype, of float32 too, and leaves z alone."""
    before = z.clone()
    x = phi(z)
    if not torch.equal(z, before):
        raise ValueError(
            f"{name!r} writes over what it is given, which others still need: write it without "
            "operations in place, clamp and not clamp_."
        )
    if not isinstance(x, Tensor) or x.shape != z.shape:
        raise ValueError(f"{name!r} must map a tensor to a tensor of the same shape.")
    for given in (z, z.float()):
        made = phi(given).dtype
        if made != given.dtype:
            raise ValueError(f"{name!r} must keep the dtype: it made {made} of {given.dtype}.")
    return x


def refuse_to_save(name: str) -> NoReturn:
    """Raise: a function of the user's own has no parameters that a file could hold."""
    raise TypeError(
        f"the activation {name!r} was made by from_function and cannot be saved by name; "
        "save the weights and build the network again with the same function."
    )
