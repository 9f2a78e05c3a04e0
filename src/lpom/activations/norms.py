"""Slices divided by their size: L2 normalisation, RMSNorm, LayerNorm, GroupNorm."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpom.activations.base import positive
from lpom.activations.vector import Along, Vector, tiny, worst


@final
@dataclass(frozen=True)
class L2Normalize(Along):
    r""":math:`z / \max(\|z\|, \epsilon)`, as `torch.nn.functional.normalize`.

    The projection of :math:`z / \epsilon` on the unit ball: :math:`\Phi(z)` is
    :math:`\|z\| - \epsilon / 2`, within :math:`\epsilon` of 0 :math:`\|z\|^2 / (2 \epsilon)`, and
    :math:`\Phi^*(x) = \epsilon \|x\|^2 / 2` on the ball. With :math:`v = \phi(z)` and
    :math:`m = \max(\|z\|, \epsilon)`

    .. math:: D(x, z) = m \|x - v\|^2 / 2 + (m - \epsilon) (1 - \|x\|^2) / 2.
    """

    dim: int = -1
    eps: float = 1e-12

    name = "l2_normalize"
    formula = "z / max(norm of z along dim, eps)"
    lower = -1.0
    upper = 1.0

    def __post_init__(self) -> None:
        positive(self.eps, "eps of l2_normalize")

    @property
    def lipschitz(self) -> float:
        return 1 / self.eps

    def phi(self, z: Tensor) -> Tensor:
        return F.normalize(z, dim=self.dim, eps=self.eps)

    def _primitive(self, z: Tensor) -> Tensor:
        norm = _norm(z)
        inner = norm.clamp(max=self.eps)
        return inner**2 / (2 * self.eps) + (norm - inner)

    def _conjugate(self, x: Tensor) -> Tensor:
        return self.eps / 2 * (x**2).sum(-1, keepdim=True)

    def _gap(self, x: Tensor, z: Tensor) -> Tensor:
        size = _norm(z).clamp(min=self.eps)
        missing = (1 - (x**2).sum(-1, keepdim=True)).clamp(min=0)
        apart = ((x - z / size) ** 2).sum(-1, keepdim=True)
        return (size * apart + (size - self.eps) * missing) / 2

    def _excess(self, x: Tensor) -> Tensor:
        return (x**2).sum(-1, keepdim=True) - 1


class _Norm(Vector):
    r"""Rows of length :math:`d` over their root mean square, with :math:`\epsilon` inside.

    With :math:`R = \sqrt d`, :math:`c = \sqrt{d \epsilon}` and :math:`N = \sqrt{\|z\|^2 + c^2}`,

    .. math:: \phi(z) = R z / N, \quad \Phi(z) = R N, \quad
        \Phi^*(x) = -c h, \; h = \sqrt{R^2 - \|x\|^2}, \; \|x\| \le R.

    Since :math:`(x, h)` has norm :math:`R` and :math:`(z, c)` has norm :math:`N`,

    .. math:: D(x, z) = \frac{N}{2 R} (\|x - R z / N\|^2 + (h - R c / N)^2).

    A centred one first subtracts the mean, and its conjugate is infinite unless :math:`x` has
    mean 0. The Lipschitz constant :math:`1 / \sqrt \epsilon` is that at 0; at :math:`z` it is
    :math:`R / N`.
    """

    centred = True

    @abstractmethod
    def _epsilon(self, z: Tensor) -> float: ...

    def _sizes(self, z: Tensor) -> tuple[float, float]:
        """R and c."""
        d = z.shape[-1]
        return math.sqrt(d), math.sqrt(d * self._epsilon(z))

    def _centre(self, z: Tensor) -> Tensor:
        return z - z.mean(-1, keepdim=True) if self.centred else z

    def _primitive(self, z: Tensor) -> Tensor:
        R, c = self._sizes(z)
        return R * _hypot(_norm(self._centre(z)), c)

    def _conjugate(self, x: Tensor) -> Tensor:
        return -self._sizes(x)[1] * self._height(x)

    def _gap(self, x: Tensor, z: Tensor) -> Tensor:
        R, c = self._sizes(z)
        z = self._centre(z)
        N = _hypot(_norm(z), c)
        apart = ((x - R * z / N) ** 2).sum(-1, keepdim=True)
        return N / (2 * R) * (apart + (self._height(x) - R * c / N) ** 2)

    def _height(self, x: Tensor) -> Tensor:
        missing = x.shape[-1] - (x**2).sum(-1, keepdim=True)
        return missing.clamp(min=tiny(x)).sqrt()

    def _excess(self, x: Tensor) -> Tensor:
        outside = (x**2).mean(-1, keepdim=True) - 1
        return worst(outside, x.mean(-1, keepdim=True).abs()) if self.centred else outside

    def _condition(self, z: Tensor) -> Tensor | float:
        if not self.centred:
            return 1.0
        spread = (self._centre(z) ** 2).mean(-1, keepdim=True) + self._epsilon(z)
        return 1 + z.abs().amax(-1, keepdim=True) / spread.sqrt()


class _LastDimensions(_Norm):
    """A norm over the last dimensions, whose sizes are ``shape``."""

    shape: tuple[int, ...]

    def __post_init__(self) -> None:
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

    name = "rms_norm"
    formula = "z / sqrt(mean of z^2 + eps)"
    centred = False
    subtracts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self._epsilon(torch.empty(0)), "eps of rms_norm")

    @property
    def lipschitz(self) -> float:
        return 1 / math.sqrt(self._epsilon(torch.empty(0, dtype=torch.float64)))

    def phi(self, z: Tensor) -> Tensor:
        return F.rms_norm(z, self.shape, eps=self.eps)

    def response(
        self,
        z: Tensor,
        pull: Tensor,
        out: Tensor | None = None,
        said: Tensor | None = None,
        spare: Tensor | None = None,
    ) -> Tensor:
        x = self.phi(z) if said is None else said
        moved = torch.sub(z, pull, out=out)
        dims, d = tuple(range(-len(self.shape), 0)), math.prod(self.shape)
        rate = torch.linalg.vector_norm(moved, dim=dims, keepdim=True).square_()
        rate.add_(d * self._epsilon(z)).rsqrt_()
        return torch.addcmul(x, moved, rate, value=-math.sqrt(d), out=moved)

    def _epsilon(self, z: Tensor) -> float:
        return torch.finfo(z.dtype).eps if self.eps is None else self.eps

    def to_module(self) -> nn.Module:
        return nn.RMSNorm(self.shape, self.eps, elementwise_affine=False)


@final
@dataclass(frozen=True)
class LayerNorm(_LastDimensions):
    """``z`` less its mean, over its deviation: `torch.nn.functional.layer_norm` without weights."""

    shape: tuple[int, ...]
    eps: float = 1e-5

    name = "layer_norm"
    formula = "(z - mean) / sqrt(variance + eps)"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self.eps, "eps of layer_norm")

    @property
    def lipschitz(self) -> float:
        return 1 / math.sqrt(self.eps)

    def phi(self, z: Tensor) -> Tensor:
        return F.layer_norm(z, self.shape, eps=self.eps)

    def _epsilon(self, z: Tensor) -> float:
        return self.eps

    def to_module(self) -> nn.Module:
        return nn.LayerNorm(self.shape, self.eps, elementwise_affine=False)


@final
@dataclass(frozen=True)
class GroupNorm(_Norm):
    """As `LayerNorm`, over each of ``groups`` groups of channels (dimension 1) by itself."""

    groups: int
    eps: float = 1e-5

    name = "group_norm"
    formula = "(z - mean) / sqrt(variance + eps) per group of channels"
    lower = -math.inf
    upper = math.inf

    def __post_init__(self) -> None:
        if self.groups != int(self.groups) or self.groups < 1:
            raise ValueError(f"groups of group_norm must be an integer >= 1, got {self.groups!r}.")
        positive(self.eps, "eps of group_norm")

    @property
    def lipschitz(self) -> float:
        return 1 / math.sqrt(self.eps)

    def phi(self, z: Tensor) -> Tensor:
        return F.group_norm(z, self.groups, eps=self.eps)

    def _epsilon(self, z: Tensor) -> float:
        return self.eps

    def _rows(self, z: Tensor) -> Tensor:
        return z.reshape(len(z), self.groups, -1)

    def _values(self, values: Tensor, like: Tensor) -> Tensor:
        return values.reshape(len(like), self.groups, *[1] * (like.ndim - 2))


def _norm(z: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    return norm


def _hypot(norm: Tensor, c: float) -> Tensor:
    return torch.hypot(norm, norm.new_tensor(c))
