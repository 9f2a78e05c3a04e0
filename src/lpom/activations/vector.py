r"""Gradients of convex functions of whole slices: what all share; softmax, sparsemax, top-k.

Each is written for rows, slices along the last dimension, by its gap in a form whose terms are
all at least zero, so that nothing cancels.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from lpom.activations.base import Activation, at_hand, check_width, infinite


class Vector(Activation):
    """A function of slices: what is common to all, in terms of rows ``(..., d)``."""

    elementwise = False

    def primitive(self, z: Tensor) -> Tensor:
        return self._values(self._primitive(self._rows(z)), z)

    def conjugate(self, x: Tensor) -> Tensor:
        rows = self._rows(x)
        outside = self._excess(rows) > _rounding(rows)
        return self._values(infinite(outside, self._conjugate(rows)), x)

    def gap(self, x: Tensor, z: Tensor) -> Tensor:
        rows, below = self._rows(x), self._rows(z)
        outside = self._excess(rows) > _rounding(rows) * self._condition(below)
        return self._values(infinite(outside, self._gap(rows, below)), z)

    @abstractmethod
    def _rows(self, z: Tensor) -> Tensor:
        """``z`` with each slice as a row."""

    @abstractmethod
    def _values(self, values: Tensor, like: Tensor) -> Tensor:
        """One value per row, ``(..., 1)``, as one value per slice of ``like``."""

    @abstractmethod
    def _primitive(self, z: Tensor) -> Tensor: ...

    @abstractmethod
    def _conjugate(self, x: Tensor) -> Tensor:
        """The conjugate of rows within its domain."""

    @abstractmethod
    def _gap(self, x: Tensor, z: Tensor) -> Tensor:
        """The gap of rows ``x`` within the domain of the conjugate."""

    @abstractmethod
    def _excess(self, x: Tensor) -> Tensor:
        """How far, relative to its size, each row is outside the domain of the conjugate."""

    def _condition(self, z: Tensor) -> Tensor | float:
        """By how much :math:`\\phi` at rows ``z`` multiplies rounding errors."""
        return 1.0


class Along(Vector):
    """A function of slices along the dimension ``dim``."""

    dim: int

    def _rows(self, z: Tensor) -> Tensor:
        return z.movedim(self.dim, -1)

    def _values(self, values: Tensor, like: Tensor) -> Tensor:
        return values.movedim(-1, self.dim)


@final
@dataclass(frozen=True)
class Softmax(Along):
    r""":math:`e^{z_j} / \sum_k e^{z_k}`, the gradient of log-sum-exp.

    The conjugate is :math:`\sum_j x_j \log x_j` on the simplex, and the gap the Kullback-Leibler
    divergence of :math:`x` from :math:`\phi(z)`.
    """

    dim: int = -1

    name = "softmax"
    formula = "exp(z) / sum of exp(z) along dim"
    lipschitz = 0.5
    lower = 0.0
    upper = 1.0
    subtracts: ClassVar[bool] = True

    def phi(self, z: Tensor) -> Tensor:
        return torch.softmax(z, self.dim)

    def response(
        self,
        z: Tensor,
        pull: Tensor,
        out: Tensor | None = None,
        said: Tensor | None = None,
        spare: Tensor | None = None,
    ) -> Tensor:
        r"""Of :math:`x = \phi(z)`, since :math:`\phi(z - g)` is :math:`x e^{-g}` over its sum.

        That takes half the time of another softmax: exp2 is torch's fastest exponential here.
        Where the sum is small, elements of :math:`x` may count that were too small for a number.
        """
        if said is None or not at_hand(said):
            return super().response(z, pull, out=out, said=said)
        moved = torch.mul(pull, -1 / math.log(2)).exp2_().mul_(said)
        total = moved.sum(self.dim, keepdim=True)
        if not 0.5 <= float(total.min()) <= float(total.max()) < math.inf:
            return super().response(z, pull, out=out, said=said)
        return torch.addcdiv(said, moved, total, value=-1, out=out)

    def _primitive(self, z: Tensor) -> Tensor:
        return torch.logsumexp(z, -1, keepdim=True)

    def _conjugate(self, x: Tensor) -> Tensor:
        return torch.xlogy(x, x.clamp(min=0)).sum(-1, keepdim=True)

    def _gap(self, x: Tensor, z: Tensor) -> Tensor:
        log = torch.log_softmax(z, -1)
        divergence = torch.where(x > 0, x * (torch.log(x.clamp(min=tiny(x))) - log), 0)
        return (divergence - x + log.exp()).sum(-1, keepdim=True)

    def _excess(self, x: Tensor) -> Tensor:
        return worst((x.sum(-1, keepdim=True) - 1).abs(), -x)

    def to_module(self) -> nn.Module:
        return nn.Softmax(self.dim)


class _CappedSimplex(Along):
    r"""The projection of :math:`z / w` on :math:`\{0 \le x \le 1, \sum_j x_j = k\}`.

    That is :math:`v = (z - \ell) / w` clipped to [0, 1], with the level :math:`\ell` that makes
    the sum :math:`k`; as :math:`w \to 0` the mask of the k largest. Then
    :math:`\Phi^*(x) = w \|x\|^2 / 2` on the set, and with :math:`r = z - \ell - w v`, which is
    negative only where :math:`v = 0` and positive only where :math:`v = 1`,

    .. math:: \Phi(z) = k \ell + \sum_j w v_j^2 / 2 + v_j r_j, \qquad
        D(x, z) = \sum_j w (x_j - v_j)^2 / 2 + (v_j - x_j) r_j.
    """

    lower = 0.0
    upper = 1.0

    @property
    @abstractmethod
    def _count(self) -> int:
        """k"""

    @property
    @abstractmethod
    def _width(self) -> float:
        """w"""

    @property
    def lipschitz(self) -> float:
        return 1 / self._width if self._width > 0 else math.inf

    def phi(self, z: Tensor) -> Tensor:
        return self._project(self._rows(z))[0].movedim(-1, self.dim)

    def _project(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The projection v, the rest r and the level."""
        k, w = self._count, self._width
        top, index = z.max(-1, keepdim=True) if k == 1 else z.topk(k, -1)
        kth = top[..., -1:]
        if w == 0:
            mask = torch.zeros_like(z).scatter(-1, index, 1.0)
            return mask, z - kth, kth
        above = (z - kth) / w
        fixed = torch.compiler.is_compiling() or torch.compiler.is_exporting()  # no loop by values
        level = _simplex_level(above) if k == 1 and not fixed else _level(above, k)
        v = (above - level).clamp(0, 1)
        level = kth + w * level
        return v, z - level - w * v, level

    def _primitive(self, z: Tensor) -> Tensor:
        v, rest, level = self._project(z)
        terms = self._width / 2 * v**2 + v * rest
        return self._count * level + terms.sum(-1, keepdim=True)

    def _conjugate(self, x: Tensor) -> Tensor:
        return self._width / 2 * (x**2).sum(-1, keepdim=True)

    def _gap(self, x: Tensor, z: Tensor) -> Tensor:
        v, rest, _ = self._project(z)
        terms = self._width / 2 * (x - v) ** 2 + (v - x) * rest
        return terms.sum(-1, keepdim=True)

    def _excess(self, x: Tensor) -> Tensor:
        return worst((x.sum(-1, keepdim=True) / self._count - 1).abs(), -x, x - 1)


@final
@dataclass(frozen=True)
class Sparsemax(_CappedSimplex):
    """The point of the simplex nearest to ``z``: a softmax that gives zeros."""

    dim: int = -1

    name = "sparsemax"
    formula = "nearest point of the simplex along dim"
    _count = 1
    _width = 1.0


@final
@dataclass(frozen=True)
class TopK(_CappedSimplex):
    """1 for the ``k`` largest along ``dim``, else 0; with a width, ramps around the k-th.

    With a width it is the projection of ``z / width`` on the vectors between 0 and 1 that sum to
    k. Of equal elements `torch.topk` chooses.
    """

    k: int
    dim: int = -1
    width: float = 0.0

    name = "top_k"
    formula = "1 for the k largest along dim, else 0"

    def __post_init__(self) -> None:
        if self.k != int(self.k) or self.k < 1:
            raise ValueError(f"k of top_k must be an integer >= 1, got {self.k!r}.")
        check_width(self.width, self.name)

    @property
    def _count(self) -> int:
        return self.k

    @property
    def _width(self) -> float:
        return self.width

    def smoothed(self, width: float) -> TopK:
        return replace(self, width=width)


@final
@dataclass(frozen=True)
class OneHot(_CappedSimplex):
    """1 for the largest along ``dim``, else 0; with a width, sparsemax of ``z / width``."""

    dim: int = -1
    width: float = 0.0

    name = "one_hot"
    formula = "1 for the largest along dim, else 0"
    _count = 1

    def __post_init__(self) -> None:
        check_width(self.width, self.name)

    @property
    def _width(self) -> float:
        return self.width

    def smoothed(self, width: float) -> OneHot:
        return replace(self, width=width)


def _simplex_level(y: Tensor) -> Tensor:
    r""":math:`t` with :math:`\sum_j (y_j - t)_+ = 1`, for rows whose largest element is 0.

    The mean of those that may be above t, less one over their number, is never above t: what lies
    below it is not above t either. A few rounds without sorting find those that are.
    """
    with torch.no_grad():
        above, count = y > -1, -1
        while int(above.sum()) != count:
            count = int(above.sum())
            above &= y > _level_of(above, y)  # rounding may not bring one back: it would not end
    return _level_of(above, y)


def _level_of(above: Tensor, y: Tensor) -> Tensor:
    count = above.sum(-1, keepdim=True).clamp(min=1)
    return (torch.where(above, y, 0).sum(-1, keepdim=True) - 1) / count


def _level(y: Tensor, k: int) -> Tensor:
    r""":math:`t` with :math:`\sum_j \min(1, (y_j - t)_+) = k`, for rows whose k-th largest is 0.

    The sum is a piecewise linear function of t with corners at every :math:`y_j` and
    :math:`y_j - 1`; t lies between -1 and 0, so what is outside [-2, 2] need not be told apart.
    The corners say which elements are strictly between 0 and 1, and these give t with its
    derivative.
    """
    with torch.no_grad():
        near = y.clamp(-2, 2)
        corners, order = torch.cat([near, near - 1], -1).sort(-1, descending=True)
        slope = torch.where(order < y.shape[-1], 1.0, -1.0).to(y.dtype).cumsum(-1)
        rise = (slope[..., :-1] * -corners.diff(dim=-1)).cumsum(-1)
        filled = torch.cat([torch.zeros_like(rise[..., :1]), rise], -1)  # the sum at each corner
        last = (filled < k).sum(-1, keepdim=True) - 1  # t lies below this corner
        climb = (k - filled.gather(-1, last)) / slope.gather(-1, last).clamp(min=1)
        level = corners.gather(-1, last) - climb
        between = (near > level) & (near < level + 1)
        count = between.sum(-1, keepdim=True)
        full = (near >= level + 1).sum(-1, keepdim=True)
    exact = (torch.where(between, y, 0).sum(-1, keepdim=True) - (k - full)) / count.clamp(min=1)
    return torch.where(count > 0, exact, level)


def worst(first: Tensor, *elements: Tensor) -> Tensor:
    """The largest of one value per row and of all elements of the row."""
    for element in elements:
        first = torch.maximum(first, element.amax(-1, keepdim=True))
    return first


def tiny(x: Tensor) -> float:
    return torch.finfo(x.dtype).tiny


def _rounding(x: Tensor) -> float:
    """What rounding may add, relatively, to a sum over a row."""
    return 8 * torch.finfo(x.dtype).eps * (8 + math.sqrt(x.shape[-1]))
