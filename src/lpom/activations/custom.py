"""A function of your own, elementwise or of slices, known by its values alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn, final

import torch
from torch import Tensor

from lpom.activations.base import Activation, Parameter
from lpom.activations.numerical import Numerical, gauss_legendre, grid, limits

Function = Callable[[Tensor], Tensor]
_STEPS = 3000  # of the search for a point where phi takes a value
_FOUND = 1e-6  # the relative error at which the search ends
_LENGTH = 12  # of the slices that a function is checked with
_LINES = 64  # that it is checked along, at each of three scales


class _Own(Activation):
    """What the two have in common."""

    function: Function
    constant: float

    @property
    def lipschitz(self) -> float:
        return self.constant

    def phi(self, z: Tensor) -> Tensor:
        return self.function(z)

    def params(self) -> dict[str, Parameter]:
        refuse_to_save(self.name)


@final
@dataclass(frozen=True)
class Custom(_Own, Numerical):
    """An elementwise function, made by `from_function`."""

    function: Function = field(repr=False)
    constant: float
    slope_bound: float = field(default=0.0, repr=False)
    name: str = "custom"
    _range: tuple[float, float] = field(default=(-math.inf, math.inf), repr=False, compare=False)

    @property
    def lower(self) -> float:
        return self._range[0]

    @property
    def upper(self) -> float:
        return self._range[1]


@final
@dataclass(frozen=True)
class CustomVector(_Own):
    r"""A function of slices along ``dim``, made by `from_function`.

    The primitive is the integral along the ray from 0,
    :math:`\Phi(z) = \int_0^1 \langle \phi(t z), z \rangle dt`, by Gauss-Legendre quadrature of
    order 8 on 32 panels: to about 1e-10 for smooth functions and slices up to a norm of 30, 1e-4
    with kinks. The conjugate takes a :math:`p` with :math:`\phi(p) = x`, found by accelerated
    ascent on :math:`\langle x, p \rangle - \Phi(p)`; it is refused where none is found to a
    relative 1e-6, as on the boundary of the range. The gap starts that search from :math:`z`
    and integrates from there, which is a lower bound where the search has not ended.
    """

    function: Function = field(repr=False)
    constant: float
    slope_bound: float = field(default=0.0, repr=False)
    dim: int = -1
    name: str = "custom"

    elementwise = False
    lower, upper = -math.inf, math.inf

    def primitive(self, z: Tensor) -> Tensor:
        return -self._rise(torch.zeros_like(z), torch.zeros_like(z), z)

    def conjugate(self, x: Tensor) -> Tensor:
        origin = torch.zeros_like(x)
        p = self._search(x.detach(), origin)
        missed = self._norm(self.function(p) - x.detach())
        if bool((missed > self._tolerance(x)).any()):
            raise ValueError(
                f"the conjugate of {self.name!r} cannot be computed at this x: no z with "
                f"phi(z) = x was found, the nearest is {float(missed.max()):.2g} away. Give "
                "values that phi takes, or ask for the gap, which needs none."
            )
        return self._rise(x, origin, p)

    def gap(self, x: Tensor, z: Tensor) -> Tensor:
        return self._rise(x, z, self._search(x.detach(), z.detach()))

    def _rise(self, x: Tensor, start: Tensor, stop: Tensor) -> Tensor:
        """Rise of ``<x, z> - primitive(z)`` along the segment between two points."""
        way, total = stop - start, torch.zeros_like(start)
        for panel in range(32):
            for node, weight in gauss_legendre(8):
                point = start + (panel + node) / 32 * way
                total = total + weight / 32 * (x - self.function(point))
        return (total * way).sum(self.dim, keepdim=True)

    @torch.no_grad()
    def _search(self, x: Tensor, start: Tensor) -> Tensor:
        """``p`` with ``phi(p) = x``: Nesterov's ascent from ``start``, restarted slice by slice."""
        if self.slope_bound > 0:
            raise ValueError(f"{self.name!r} is not monotone, so it has no conjugate and no gap.")
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


def from_function(
    phi: Function,
    *,
    lipschitz: float | None = None,
    lower_slope: float | None = None,
    name: str = "custom",
    dim: int | None = None,
) -> Activation:
    """Make an activation of any Lipschitz function.

    It need not be monotone. With ``dim`` it is a function of slices along that dimension, with
    a symmetric Jacobian. One that is noisy, or different for each unit, is for `measured`.

    Parameters
    ----------
    phi : callable
        Function from tensor to tensor, keeping shape, dtype and device: elementwise, or of each
        slice along ``dim`` by itself.
    lipschitz : float, optional
        A finite bound on its slope, along ``dim`` on the norm of its Jacobian; by default the
        steepest slope that is seen, and one per cent. Training steps by states shrink with it,
        so give the smallest.
    lower_slope : float, optional
        A lower bound on its slope, or on the eigenvalues of its Jacobian: 0 if it never
        decreases. By default the least slope that is seen.
    name : str
        Shown in messages. It is not registered: the activation cannot be saved by name.
    dim : int, optional
        The dimension of the slices; None for an elementwise function.

    Raises
    ------
    ValueError
        If phi changes shape or dtype, is not finite, or steeper than ``lipschitz`` or
        ``lower_slope`` allow. It is looked at in float64 on a grid, dense between -16 and 16 and
        sparse to 1e3; along ``dim`` on random lines, with slices of 12 elements. That is a test
        and not a proof.

    Examples
    --------
    >>> import torch
    >>> wave = from_function(lambda z: torch.sin(z) + z / 2, name="wave")
    >>> wave.phi(torch.tensor([-1.0, 0.0, 3.0]))
    tensor([-1.3415,  0.0000,  1.6411])
    >>> round(wave.lipschitz, 1), round(wave.slope_bound, 1)
    (1.5, 0.5)
    """
    if lipschitz is not None and not (math.isfinite(lipschitz) and lipschitz > 0):
        raise ValueError(
            f"lipschitz of {name!r} must be finite and above 0, got {lipschitz!r}; for a function "
            "that jumps use 'step', 'sign' or 'staircase'."
        )
    slopes = _slopes(phi, name) if dim is None else _vector_slopes(phi, dim, name)
    bounds = _bounds(slopes, lipschitz, lower_slope, name)
    if dim is not None:
        return CustomVector(phi, *bounds, dim, name)
    low, high = limits(Custom(phi, *bounds, name))
    if bounds[1] > 0:  # between the grid's points it may reach a little further
        with torch.no_grad():
            x = phi(grid())
        reach = 1e-3 * (1 + float(x.abs().max()))
        low = low if math.isinf(low) else float(x.min()) - reach
        high = high if math.isinf(high) else float(x.max()) + reach
    return Custom(phi, *bounds, name, (low, high))


def _bounds(
    slopes: tuple[float, float], lipschitz: float | None, lower_slope: float | None, name: str
) -> tuple[float, float]:
    """The Lipschitz constant and the bound on falling slopes, checked or estimated."""
    least, most = slopes
    steepest = max(most, -least)
    if lipschitz is not None and steepest > lipschitz * (1 + 1e-9):
        raise ValueError(
            f"{name!r} is steeper than lipschitz={lipschitz!r} allows: a slope of "
            f"{steepest:.6g} was seen. Pass at least its largest slope."
        )
    if lower_slope is not None and least < lower_slope - 1e-9 * (1 + abs(lower_slope)):
        raise ValueError(
            f"{name!r} falls faster than lower_slope={lower_slope!r} allows: a slope of "
            f"{least:.6g} was seen."
        )
    constant = 1.01 * steepest if lipschitz is None else float(lipschitz)
    falls = -1.01 * least if lower_slope is None else -float(lower_slope)
    return constant, min(max(falls, 0.0), constant)


def _slopes(phi: Function, name: str) -> tuple[float, float]:
    """Least and largest slope on the grid, up to rounding."""
    z = grid()
    with torch.no_grad():
        x = _checked_call(phi, z, name)
        square = _checked_call(phi, z[:6].reshape(2, 3), name)
        half, turned = phi(z[::2].contiguous()), phi(z.flip(0)).flip(0)
    others = torch.cat([x[:6], x[::2], x]), torch.cat([square.flatten(), half, turned])
    if not torch.allclose(*others, rtol=1e-9, atol=1e-12):
        raise ValueError(
            f"{name!r} gives a number another value when others stand beside it: it is not "
            "elementwise. Say along which dimension it works, dim=-1; if it is noisy or differs "
            "from unit to unit, use lpom.activations.measured."
        )
    run = z.diff()
    rounding = 1e-12 * (1 + x.abs()[1:])
    rise = x.diff()
    rise = rise - rise.clamp(-rounding, rounding)
    slopes = rise / run
    return float(slopes.min()), float(slopes.max())


def _vector_slopes(phi: Function, dim: int, name: str) -> tuple[float, float]:
    """Least and largest slope along random lines; refuses a Jacobian that is not symmetric."""

    def norm(z: Tensor) -> Tensor:
        size: Tensor = torch.linalg.vector_norm(z, dim=dim)
        return size

    a, b, u, v = _lines(dim)
    with torch.no_grad():
        x, y = _checked_call(phi, a, name), phi(b)
        rows = a.movedim(dim, -1).flatten(0, -2)[: _LINES // 4]
        one = [1] * a.ndim
        one[dim] = _LENGTH
        alone = torch.stack([phi(row.reshape(one)).flatten() for row in rows])
    together = x.movedim(dim, -1).flatten(0, -2)[: _LINES // 4]
    if not torch.allclose(alone, together, rtol=1e-9, atol=1e-12):
        raise ValueError(
            f"{name!r} must map every slice along dim={dim} by itself, but a slice alone and the "
            "same slice among others give different values."
        )
    away = norm(a - b)
    steepest = float(((norm(x - y) - 1e-12).clamp(min=0) / away).max())
    product = ((x - y) * (a - b)).sum(dim)
    product = product - product.clamp(-1e-12 * (1 + away), 1e-12 * (1 + away))
    h = 1e-5
    with torch.no_grad():
        by_u = (phi(a + h * u) - phi(a - h * u)) / (2 * h)
        by_v = (phi(a + h * v) - phi(a - h * v)) / (2 * h)
    # around a small square, <u, J v> - <v, J u> has to vanish
    turning = ((u * by_v).sum(dim) - (v * by_u).sum(dim)).abs()
    size = norm(u) * norm(by_v) + norm(v) * norm(by_u)
    if float((turning > 1e-5 * size + 1e-8 * steepest).double().mean()) > 0.1:  # kinks aside
        raise ValueError(
            f"{name!r} is the gradient of no function: its Jacobian is not symmetric, so LPOM's "
            "rule does not hold for it. Call it as a plain function, which keeps its derivative."
        )
    return float((product / away**2).min()), steepest


def _lines(dim: int) -> tuple[Tensor, ...]:
    """Points in pairs, near and far, and two directions at each; slices along ``dim``."""
    generator = torch.Generator().manual_seed(0)
    shape = (3, _LINES, 1, _LENGTH)
    a, b, u, v = torch.randn(4, *shape, generator=generator, dtype=torch.float64)
    scale = torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64).reshape(3, 1, 1, 1)
    a, b = scale * a, scale * b
    b[:, ::2] = a[:, ::2] + 1e-3 * u[:, ::2]  # half of the pairs close together
    one = torch.eye(_LENGTH, dtype=a.dtype)[torch.arange(_LINES // 4) % _LENGTH]
    b[:, 1::4] = a[:, 1::4] + 0.3 * scale * u[:, 1::4] * one[:, None]  # apart in one element
    dims = max(4, dim + 1, -dim)
    return tuple(t.reshape(*[1] * (dims - 4), *shape).movedim(-1, dim) for t in (a, b, u, v))


def _checked_call(phi: Function, z: Tensor, name: str) -> Tensor:
    """``phi(z)``; raises unless it is finite, keeps shape and dtype, and leaves z alone."""
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
        dtype = phi(given).dtype
        if dtype != given.dtype:
            raise ValueError(f"{name!r} must keep the dtype: it made {dtype} of {given.dtype}.")
    finite = torch.isfinite(x)
    if not bool(finite.all()):
        raise ValueError(
            f"{name!r} must be finite everywhere, but is not at z = {float(z[~finite][0]):g}."
        )
    return x


def refuse_to_save(name: str, advice: str = "") -> NoReturn:
    """Raise: a function of the user's own has no parameters that a file could hold."""
    raise TypeError(
        f"the activation {name!r} was made of a function and cannot be saved by name. "
        + (advice or "Save the weights and build the network again with the same function.")
    )
