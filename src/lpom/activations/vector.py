r"""Functions of whole slices: softmax, sparsemax, top-k, one-hot, and norms.

Each is written for rows, slices along the last dimension, by its primitive and conjugate.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpom.activations.base import Activation, Ramped, double, infinite


class Vector(Activation):
    """A function of slices: what is common to all, in terms of rows ``(..., d)``."""

    elementwise = False
    invariant = True  # whether a number added to a whole row leaves phi as it is

    def primitive(self, z: Tensor) -> Tensor:
        return self._values(self._primitive(self._rows(z)), z)

    def conjugate(self, x: Tensor) -> Tensor:
        rows = self._rows(x)
        outside = self._excess(rows) > _rounding(rows)
        return self._values(infinite(outside, self._conjugate(rows)), x)

    def gap(self, x: Tensor, z: Tensor) -> Tensor:
        rows, below = self._rows(x), self._rows(z)
        outside = self._excess(rows) > _rounding(rows) * self._condition(below)
        rows, below = double(rows), double(below)
        if self.invariant:  # so that a large one does not multiply the rounding of x
            below = below - below.mean(-1, keepdim=True)
        product = (rows * below).sum(-1, keepdim=True)
        total = self._conjugate(rows) + self._primitive(below) - product
        return self._values(infinite(outside, total.to(x.dtype)), z)

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

    name, module, formula = "softmax", nn.Softmax, "exp(z) / sum of exp(z) along dim"
    lipschitz, lower, upper = 0.5, 0.0, 1.0

    def phi(self, z: Tensor) -> Tensor:
        return torch.softmax(z, self.dim)

    def _primitive(self, z: Tensor) -> Tensor:
        return torch.logsumexp(z, -1, keepdim=True)

    def _conjugate(self, x: Tensor) -> Tensor:
        return torch.xlogy(x, x.clamp(min=0)).sum(-1, keepdim=True)

    def _excess(self, x: Tensor) -> Tensor:
        return _worst((x.sum(-1, keepdim=True) - 1).abs(), -x)


class _CappedSimplex(Along):
    r"""The projection of :math:`z / w` on :math:`\{0 \le x \le 1, \sum_j x_j = k\}`.

    That is :math:`v = (z - \ell) / w` clipped to [0, 1], with the level :math:`\ell` that makes
    the sum :math:`k`; as :math:`w \to 0` the mask of the k largest. Then
    :math:`\Phi^*(x) = w \|x\|^2 / 2` on the set, and
    :math:`\Phi(z) = \langle v, z \rangle - \Phi^*(v)`.
    """

    k = 1
    width: float
    lower, upper = 0.0, 1.0

    @property
    def lipschitz(self) -> float:
        return 1 / self.width if self.width > 0 else math.inf

    def phi(self, z: Tensor) -> Tensor:
        return self._project(self._rows(z)).movedim(-1, self.dim)

    def _project(self, z: Tensor) -> Tensor:
        k, w = self.k, self.width
        top, index = z.max(-1, keepdim=True) if k == 1 else z.topk(k, -1)
        kth = top[..., -1:]
        if w == 0:
            return torch.zeros_like(z).scatter(-1, index, 1.0)
        above = (z - kth) / w
        return (above - _level(above, k)).clamp(0, 1)

    def _primitive(self, z: Tensor) -> Tensor:
        v = self._project(z)
        return (v * z).sum(-1, keepdim=True) - self._conjugate(v)

    def _conjugate(self, x: Tensor) -> Tensor:
        return self.width / 2 * (x**2).sum(-1, keepdim=True)

    def _excess(self, x: Tensor) -> Tensor:
        return _worst((x.sum(-1, keepdim=True) / self.k - 1).abs(), -x, x - 1)


@final
@dataclass(frozen=True)
class Sparsemax(_CappedSimplex):
    """The point of the simplex nearest to ``z``: a softmax that gives zeros."""

    dim: int = -1

    name, formula = "sparsemax", "nearest point of the simplex along dim"
    width = 1.0


@final
@dataclass(frozen=True)
class TopK(Ramped, _CappedSimplex):
    """1 for the ``k`` largest along ``dim``, else 0; with a width, ramps around the k-th.

    With a width it is the projection of ``z / width`` on the vectors between 0 and 1 that sum to
    k. Of equal elements `torch.topk` chooses.
    """

    k: int
    dim: int = -1
    width: float = 0.0

    name, formula = "top_k", "1 for the k largest along dim, else 0"


@final
@dataclass(frozen=True)
class OneHot(Ramped, _CappedSimplex):
    """1 for the largest along ``dim``, else 0; with a width, sparsemax of ``z / width``."""

    dim: int = -1
    width: float = 0.0

    name, formula = "one_hot", "1 for the largest along dim, else 0"


@final
@dataclass(frozen=True)
class L2Normalize(Along):
    r""":math:`z / \max(\|z\|, \epsilon)`, as `torch.nn.functional.normalize`.

    The projection of :math:`z / \epsilon` on the unit ball: :math:`\Phi(z)` is
    :math:`\|z\| - \epsilon / 2`, within :math:`\epsilon` of 0 :math:`\|z\|^2 / (2 \epsilon)`, and
    :math:`\Phi^*(x) = \epsilon \|x\|^2 / 2` on the ball.
    """

    dim: int = -1
    eps: float = 1e-12

    name, formula = "l2_normalize", "z / max(norm of z along dim, eps)"
    invariant = False
    lower, upper = -1.0, 1.0

    @property
    def lipschitz(self) -> float:
        return 1 / self.eps

    def phi(self, z: Tensor) -> Tensor:
        return F.normalize(z, dim=self.dim, eps=self.eps)

    def _primitive(self, z: Tensor) -> Tensor:
        x = F.normalize(z, dim=-1, eps=self.eps)
        return (x * z).sum(-1, keepdim=True) - self._conjugate(x)

    def _conjugate(self, x: Tensor) -> Tensor:
        return self.eps / 2 * (x**2).sum(-1, keepdim=True)

    def _excess(self, x: Tensor) -> Tensor:
        return (x**2).sum(-1, keepdim=True) - 1


class _Norm(Vector):
    r"""Rows of length :math:`d` over their root mean square, with :math:`\epsilon` inside.

    With :math:`R = \sqrt d`, :math:`c = \sqrt{d \epsilon}` and :math:`N = \sqrt{\|z\|^2 + c^2}`,

    .. math:: \phi(z) = R z / N, \quad \Phi(z) = R N, \quad
        \Phi^*(x) = -c h, \; h = \sqrt{R^2 - \|x\|^2}, \; \|x\| \le R.

    An invariant one first subtracts the mean, and its conjugate is infinite unless :math:`x` has
    mean 0. The Lipschitz constant :math:`1 / \sqrt \epsilon` is that at 0; at :math:`z` it is
    :math:`R / N`.
    """

    eps: float | None

    @property
    def lipschitz(self) -> float:
        return 1 / math.sqrt(self._epsilon(torch.empty(0, dtype=torch.float64)))

    def _epsilon(self, z: Tensor) -> float:
        return torch.finfo(z.dtype).eps if self.eps is None else self.eps

    def _sizes(self, z: Tensor) -> tuple[float, float]:
        """R and c."""
        d = z.shape[-1]
        return math.sqrt(d), math.sqrt(d * self._epsilon(z))

    def _centre(self, z: Tensor) -> Tensor:
        return z - z.mean(-1, keepdim=True) if self.invariant else z

    def _primitive(self, z: Tensor) -> Tensor:
        R, c = self._sizes(z)
        return R * _hypot(_norm(self._centre(z)), c)

    def _conjugate(self, x: Tensor) -> Tensor:
        return -self._sizes(x)[1] * self._height(x)

    def response(self, z: Tensor, pull: Tensor) -> Tensor:
        # R / M (p + z (M - N) / N) with M the norm of z - p, and M^2 - N^2 = <p, p - 2 z>
        rows, p = self._centre(self._rows(z)), self._centre(self._rows(pull))
        R, c = self._sizes(rows)
        N, M = _hypot(_norm(rows), c), _hypot(_norm(rows - p), c)
        growth = (p * (p - 2 * rows)).sum(-1, keepdim=True) / (N * (N + M))
        return (R / M * (p + growth * rows)).reshape(z.shape)

    def _height(self, x: Tensor) -> Tensor:
        missing = x.shape[-1] - (x**2).sum(-1, keepdim=True)
        return missing.clamp(min=torch.finfo(x.dtype).tiny).sqrt()

    def _excess(self, x: Tensor) -> Tensor:
        outside = (x**2).mean(-1, keepdim=True) - 1
        return _worst(outside, x.mean(-1, keepdim=True).abs()) if self.invariant else outside

    def _condition(self, z: Tensor) -> Tensor | float:
        if not self.invariant:
            return 1.0
        spread = (self._centre(z) ** 2).mean(-1, keepdim=True) + self._epsilon(z)
        return 1 + z.abs().amax(-1, keepdim=True) / spread.sqrt()


class _LastDimensions(_Norm):
    """A norm over the last dimensions, whose sizes are ``shape``."""

    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        given = (self.shape,) if isinstance(self.shape, int) else self.shape
        object.__setattr__(self, "shape", tuple(map(int, given)))
        if not self.shape or min(self.shape) < 1:
            raise ValueError(
                f"shape of {self.name} must be the sizes of the last dimensions, got {given!r}."
            )

    @property
    def upper(self) -> float:
        return math.sqrt(math.prod(self.shape))

    @property
    def lower(self) -> float:
        return -self.upper

    def _rows(self, z: Tensor) -> Tensor:
        return z.flatten(-len(self.shape))

    def _values(self, values: Tensor, like: Tensor) -> Tensor:
        n = len(self.shape)
        return values.reshape(*like.shape[:-n], *[1] * n)


@final
@dataclass(frozen=True)
class RMSNorm(_LastDimensions):
    """``z`` over its root mean square, as `torch.nn.functional.rms_norm` without weight.

    ``eps=None`` means the rounding unit of the dtype; the Lipschitz constant is then that of
    float64.
    """

    shape: tuple[int, ...]
    eps: float | None = None

    name, formula = "rms_norm", "z / sqrt(mean of z^2 + eps)"
    invariant = False

    def phi(self, z: Tensor) -> Tensor:
        return F.rms_norm(z, self.shape, eps=self.eps)

    def gap(self, x: Tensor, z: Tensor) -> Tensor:
        if self.eps is None:  # that of the dtype as it is now
            return replace(self, eps=self._epsilon(z)).gap(x, z)
        return super().gap(x, z)

    def to_module(self) -> nn.Module:
        return nn.RMSNorm(self.shape, self.eps, elementwise_affine=False)


@final
@dataclass(frozen=True)
class LayerNorm(_LastDimensions):
    """``z`` less its mean, over its deviation: `torch.nn.functional.layer_norm` without weights."""

    shape: tuple[int, ...]
    eps: float = 1e-5

    name, formula = "layer_norm", "(z - mean) / sqrt(variance + eps)"

    def phi(self, z: Tensor) -> Tensor:
        return F.layer_norm(z, self.shape, eps=self.eps)

    def to_module(self) -> nn.Module:
        return nn.LayerNorm(self.shape, self.eps, elementwise_affine=False)


@final
@dataclass(frozen=True)
class GroupNorm(_Norm):
    """As `LayerNorm`, over each of ``groups`` groups of channels (dimension 1) by itself."""

    groups: int
    eps: float = 1e-5

    name, formula = "group_norm", "(z - mean) / sqrt(variance + eps) per group of channels"
    lower, upper = -math.inf, math.inf

    def phi(self, z: Tensor) -> Tensor:
        return F.group_norm(z, self.groups, eps=self.eps)

    def _rows(self, z: Tensor) -> Tensor:
        return z.reshape(len(z), self.groups, -1)

    def _values(self, values: Tensor, like: Tensor) -> Tensor:
        return values.reshape(len(like), self.groups, *[1] * (like.ndim - 2))


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


def _worst(first: Tensor, *elements: Tensor) -> Tensor:
    """The largest of one value per row and of all elements of the row."""
    for element in elements:
        first = torch.maximum(first, element.amax(-1, keepdim=True))
    return first


def _rounding(x: Tensor) -> float:
    """What rounding may add, relatively, to a sum over a row."""
    return 8 * torch.finfo(x.dtype).eps * (8 + math.sqrt(x.shape[-1]))


def _norm(z: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    return norm


def _hypot(norm: Tensor, c: float) -> Tensor:
    return torch.hypot(norm, norm.new_tensor(c))
