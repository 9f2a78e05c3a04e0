"""A user's own activation, known by nothing but phi and its Lipschitz constant."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

import torch
from numpy.polynomial.legendre import leggauss
from torch import Tensor

from lpom.activations.base import Activation, Parameter, infinite
from lpom.activations.custom_vector import CustomVector, checked_call, refuse_to_save

_NODES = [((1 + float(t)) / 2, float(w) / 2) for t, w in zip(*leggauss(8), strict=True)]


@final
@dataclass(frozen=True)
class Custom(Activation):
    r"""An activation made by `from_function`.

    The primitive is integrated by Gauss-Legendre quadrature on a fixed grid of panels, from
    stored values at its knots, so it costs eight evaluations of :math:`\phi`. The conjugate
    solves :math:`\phi(p) = x` by bisection and uses :math:`\Phi^*(x) = x p - \Phi(p)`.

    Two approximations: a function that still creeps up at the end of the grid, 1e3, counts as
    unbounded if it grows as much from 1e6 to 1e9 as from 1e3 to 1e6; and for values only
    reached beyond the grid the conjugate is a lower bound.
    """

    function: Callable[[Tensor], Tensor] = field(repr=False)
    constant: float
    name: str = "custom"
    _range: tuple[float, float] = field(default=(-math.inf, math.inf), repr=False, compare=False)
    _knots: Tensor = field(default_factory=lambda: torch.empty(0), repr=False, compare=False)
    _areas: Tensor = field(default_factory=lambda: torch.empty(0), repr=False, compare=False)

    @property
    def lipschitz(self) -> float:
        return self.constant

    @property
    def lower(self) -> float:
        return self._range[0]

    @property
    def upper(self) -> float:
        return self._range[1]

    def phi(self, z: Tensor) -> Tensor:
        return self.function(z)

    def primitive(self, z: Tensor) -> Tensor:
        knots, areas = self._knots.to(z), self._areas.to(z)
        above = torch.searchsorted(knots, z.detach().contiguous()).clamp(max=len(knots) - 1)
        nearest = torch.where(z > 0, above - 1, above)  # the first knot from z towards 0
        return areas[nearest] + _integral(self.function, knots[nearest], z)

    def conjugate(self, x: Tensor) -> Tensor:
        x, outside = self._within(x)
        p = self._inverse(x.detach())
        return infinite(outside, x * p - self.primitive(p))

    def _inverse(self, x: Tensor) -> Tensor:
        """``p`` with ``phi(p) = x``, or the end of the grid where that is out of reach."""
        knots = self._knots.to(x)
        after = torch.searchsorted(self.function(knots), x.contiguous())
        low = knots[(after - 1).clamp(min=0)]
        high = knots[after.clamp(max=len(knots) - 1)]
        for _ in range(52):
            middle = (low + high) / 2
            below = self.function(middle) < x
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (low + high) / 2

    def params(self) -> dict[str, Parameter]:
        return refuse_to_save(self.name)


def from_function(
    phi: Callable[[Tensor], Tensor],
    *,
    lipschitz: float,
    name: str = "custom",
    dim: int | None = None,
) -> Activation:
    """Make an activation of a function that never decreases.

    With ``dim`` it is a function of slices along that dimension, and has to be the gradient of a
    convex function of each.

    Parameters
    ----------
    phi : callable
        Function from tensor to tensor, keeping shape, dtype and device: elementwise, or of each
        slice along ``dim`` by itself.
    lipschitz : float
        A finite bound on its slope, along ``dim`` on the norm of its Jacobian. Training steps
        shrink with it, so give the smallest.
    name : str
        Shown in messages. It is not registered: the activation cannot be saved by name.
    dim : int, optional
        The dimension of the slices; None for an elementwise function.

    Raises
    ------
    ValueError
        If phi is seen to decrease, to be steeper than ``lipschitz``, not finite, or to change
        shape or dtype. It is checked in float64 on a grid, dense between -16 and 16 and sparse
        to 1e3, which is a test and not a proof. Along ``dim`` it is checked on random lines, with
        slices of 12 elements, and its Jacobian for symmetry.

    Examples
    --------
    >>> import torch
    >>> softsign = from_function(torch.nn.functional.softsign, lipschitz=1.0, name="softsign")
    >>> softsign.phi(torch.tensor([-1.0, 0.0, 3.0]))
    tensor([-0.5000,  0.0000,  0.7500])
    """
    if not (math.isfinite(lipschitz) and lipschitz > 0):
        raise ValueError(
            f"lipschitz of {name!r} must be finite and above 0, got {lipschitz!r}; make the "
            "function continuous, or use 'step', 'sign' or 'staircase', which are trained "
            "through ramps."
        )
    if dim is not None:
        return CustomVector(phi, float(lipschitz), dim, name).checked()
    grid = _grid()
    _check(phi, grid, lipschitz, name)
    lower, upper = -_limit(lambda z: -phi(-z), name), _limit(phi, name)
    far = torch.tensor([1e6], dtype=grid.dtype)
    parts = [-far] * (lower == -math.inf) + [grid] + [far] * (upper == math.inf)
    knots = torch.cat(parts)
    with torch.no_grad():
        panels = _integral(phi, knots[:-1], knots[1:])
    centre = int((knots < 0).sum())
    left, right = -panels[:centre].flip(0).cumsum(0).flip(0), panels[centre:].cumsum(0)
    areas = torch.cat([left, torch.zeros_like(far), right])  # from 0 outwards
    return Custom(phi, float(lipschitz), name, (lower, upper), knots, areas)


def _grid() -> Tensor:
    near = torch.arange(1, 1025, dtype=torch.float64) / 64
    far = torch.logspace(math.log10(16), 3, 129, dtype=torch.float64)[1:]
    right = torch.cat([near, far])
    return torch.cat([-right.flip(0), torch.zeros(1, dtype=torch.float64), right])


def _integral(phi: Callable[[Tensor], Tensor], start: Tensor, stop: Tensor) -> Tensor:
    width = stop - start
    total = torch.zeros_like(width)
    for t, weight in _NODES:
        total = total + weight * phi(start + t * width)
    return width * total


def _check(phi: Callable[[Tensor], Tensor], z: Tensor, lipschitz: float, name: str) -> None:
    with torch.no_grad():
        x = checked_call(phi, z, name)
        square = checked_call(phi, z[:6].reshape(2, 3), name)
    if not bool(torch.isfinite(x).all()):
        at = float(z[~torch.isfinite(x)][0])
        raise ValueError(f"{name!r} must be finite everywhere, but is not at z = {at:g}.")
    with torch.no_grad():
        half, turned = phi(z[::2].contiguous()), phi(z.flip(0)).flip(0)
    others = torch.cat([x[:6], x[::2], x]), torch.cat([square.flatten(), half, turned])
    if not torch.allclose(*others, rtol=1e-9, atol=1e-12):
        raise ValueError(
            f"{name!r} gives a number another value when others stand beside it: it is not "
            "elementwise. Say along which dimension it works, dim=-1."
        )
    rise, run = x.diff(), z.diff()
    rounding = 1e-12 * (1 + x.abs()[1:])
    i = int((rise + rounding).argmin())
    if rise[i] < -rounding[i]:
        raise ValueError(
            f"{name!r} decreases: it is {float(x[i]):g} at z = {float(z[i]):g} but "
            f"{float(x[i + 1]):g} at z = {float(z[i + 1]):g}. LPOM needs a function that never "
            "decreases, because its primitive must be convex."
        )
    i = int(((rise - rounding) / run).argmax())
    if rise[i] - rounding[i] > lipschitz * (1 + 1e-9) * run[i]:
        raise ValueError(
            f"{name!r} is steeper than lipschitz={lipschitz!r} allows: its slope between "
            f"z = {float(z[i]):g} and {float(z[i + 1]):g} is {float(rise[i] / run[i]):.6g}. "
            "Pass at least its largest slope."
        )


def _limit(phi: Callable[[Tensor], Tensor], name: str) -> float:
    """Supremum of phi; infinite unless its growth from 1e6 to 1e9 has all but stopped."""
    with torch.no_grad():
        a, b, c = phi(torch.tensor([1e3, 1e6, 1e9], dtype=torch.float64)).tolist()
    if not math.isfinite(b + c):
        raise ValueError(f"{name!r} must be finite everywhere, but is not at |z| = 1e9.")
    return math.inf if c - b > max((b - a) / 2, 1e-9 * (1 + abs(c))) else c
