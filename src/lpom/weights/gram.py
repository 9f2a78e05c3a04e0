r"""Least squares in the metric of the states, without a pseudo-inverse.

The exact weight step solves, again and again and for the same rows :math:`A` (m, n),

.. math:: \min_{\Delta} \|A \Delta - R\|_F^2 + \lambda \|\Delta\|_F^2 .

All its iterates stay in a space of :math:`\min(m, n)` rows of coefficients: three choices of that
space, one interface. The only factorisation is that of the smaller Gram matrix: Cholesky's, or by
eigenvectors where it is singular.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import final

import torch
from torch import Tensor


class Gram(ABC):
    r"""Coefficients C stand for the weight change ``weights(C)`` and the change ``apply(C)`` of Z.

    ``deficient`` says that the Gram matrix was singular and its pseudo-inverse was taken;
    ``A`` are the rows and ``ridge`` is the :math:`\lambda` of the formula.
    """

    deficient: bool = False
    A: Tensor
    ridge: Tensor

    @abstractmethod
    def solve(self, R: Tensor) -> Tensor:
        """Coefficients of the solution for the right-hand side ``R`` (m, out)."""

    @abstractmethod
    def apply(self, C: Tensor) -> Tensor:
        """What the coefficients do to the outputs: ``A @ weights(C).T``, (m, out)."""

    @abstractmethod
    def weights(self, C: Tensor) -> Tensor:
        """The weight change they stand for, one row per output as in a map's matrix, (out, n)."""

    def add(self, C: Tensor, *columns: Tensor) -> None:
        """Add the weight change in place to a matrix (out, n), given as parts side by side."""
        for part, change in zip(columns, _parted(self.weights(C), columns), strict=True):
            part.add_(change)

    def adjoint(self, R: Tensor) -> Tensor:
        """``A^T R``."""
        return self.A.T @ R

    @abstractmethod
    def invert(self, B: Tensor) -> Tensor:
        """``(A^T A + lambda I)^-1 B`` for any ``B`` (n, out), by the same factor."""


@final
class Columns(Gram):
    """More rows than columns: the coefficients are the weights, the matrix is ``A^T A``."""

    def __init__(self, A: Tensor, ridge: Tensor, rtol: float = 0.0) -> None:
        self.A, self.ridge = A, ridge
        self._inverse, self.deficient = inverse(A.T @ A, ridge, rtol)

    def solve(self, R: Tensor) -> Tensor:
        return self._inverse(self.adjoint(R))

    def apply(self, C: Tensor) -> Tensor:
        return self.A @ C

    def weights(self, C: Tensor) -> Tensor:
        return C.T

    def invert(self, B: Tensor) -> Tensor:
        return self._inverse(B)


@final
class Rows(Gram):
    r"""More columns than rows: with ``G = A A^T``, weights are :math:`C^T (G + \lambda)^{-1} A`.

    The coefficients are right-hand sides, so an iteration makes one product of O(m^2 out), with
    :math:`(G + \lambda)^{-1} G`, instead of two of O(m n out).
    """

    def __init__(self, A: Tensor, ridge: Tensor, rtol: float = 0.0) -> None:
        self.A, self.ridge = A, ridge
        self.G = A @ A.T
        self.inverse, self.deficient = inverse(self.G, ridge, rtol)

    @cached_property
    def _reached(self) -> Tensor:
        """The share of a right-hand side that the weights can say."""
        return self.inverse(self.G)

    def solve(self, R: Tensor) -> Tensor:
        return R

    def apply(self, C: Tensor) -> Tensor:
        return self._reached @ C

    def weights(self, C: Tensor) -> Tensor:
        return self.inverse(C).T @ self.A

    def add(self, C: Tensor, *columns: Tensor) -> None:
        left = self.inverse(C).T
        for part, A in zip(columns, _parted(self.A, columns), strict=True):
            part.addmm_(left, A)

    def invert(self, B: Tensor) -> Tensor:
        # Woodbury's identity
        return (B - self.A.T @ self.inverse(self.A @ B)) / self.ridge


@final
class IndependentRows(Gram):
    """Independent rows, no ridge: any change of Z can be had, so the change of Z is C itself.

    No product inside the iteration at all, one solve at its end.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows, self.A, self.ridge = rows, rows.A, rows.ridge

    def solve(self, R: Tensor) -> Tensor:
        return R

    def apply(self, C: Tensor) -> Tensor:
        return C

    def weights(self, C: Tensor) -> Tensor:
        return self.rows.weights(C)

    def add(self, C: Tensor, *columns: Tensor) -> None:
        self.rows.add(C, *columns)

    def invert(self, B: Tensor) -> Tensor:
        # without a ridge there is but the pseudo-inverse of A^T A
        inverse = self.rows.inverse
        return self.A.T @ inverse(inverse(self.A @ B))


def gram(
    A: Tensor,
    ridge: float = 0.0,
    weight: Tensor | None = None,
    rtol: float = 0.0,
) -> Gram:
    r"""Choose the cheapest exact form for rows ``A`` (m, n), optionally weighted per row.

    The ridge is relative, :math:`\lambda = ridge \cdot \|A\|_F^2 / n`, so one default serves layers
    of every scale, and a row that stands twice counts as one with weight two. Row weights are
    folded into ``A`` as their square roots, and the caller scales its right-hand sides alike.
    """
    if weight is not None:
        A = weight.sqrt()[:, None] * A
    strength = ridge * A.square().sum() / A.shape[1]
    if len(A) > A.shape[1]:
        return Columns(A, strength, rtol)
    rows = Rows(A, strength, rtol)
    exact = ridge == 0 and rtol == 0 and not rows.deficient
    return IndependentRows(rows) if exact else rows


def inverse(
    matrix: Tensor, ridge: Tensor | float, rtol: float = 0.0
) -> tuple[Callable[[Tensor], Tensor], bool]:
    """Multiplication by the inverse of ``matrix + ridge * I``, and whether it was deficient.

    With ``rtol`` it is always the pseudo-inverse, without the eigenvalues below ``rtol ** 2``
    times the largest: the squares of the singular values below ``rtol`` times theirs.

    By Cholesky's factor where no pivot is small. Otherwise by eigenvectors, without those whose
    eigenvalue is but rounding: a pivot cannot tell, and the least ridge that makes a factor
    possible would not do, since residuals outside the range, divided by it, grow from iteration
    to iteration until rounding lets them into the weights.
    """
    if matrix.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"linear systems are solved in float32 or float64, and the model is in "
            f"{str(matrix.dtype).removeprefix('torch.')}. Use model.float(), or a method without "
            "exact weights."
        )
    eps = torch.finfo(matrix.dtype).eps
    scale = matrix.diagonal().max()
    if rtol == 0 or not bool(scale.isfinite()):  # NaN and infinity pass through
        eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        factor, info = torch.linalg.cholesky_ex(matrix + ridge * eye)
        sound = (info == 0) & (factor.diagonal().min().square() > math.sqrt(eps) * scale)
        if bool(sound | ~scale.isfinite()):
            return _ByFactor(factor), False
    values, vectors = torch.linalg.eigh(matrix)
    least = max(rtol**2, 50 * math.sqrt(len(matrix)) * eps)
    kept = values + ridge > least * values.max()
    reciprocals = torch.where(kept, 1 / (values + ridge), 0)
    deficient = rtol == 0 and not bool(kept.all())
    return partial(_by_eigenvectors, vectors, reciprocals), deficient


class _ByFactor:
    """By Cholesky's factor; by the inverse where there are as many columns as it has rows.

    A product takes a fifth of the time of two triangular solves, and the iterations of Algorithm 2
    make one each.
    """

    def __init__(self, factor: Tensor) -> None:
        self.factor = factor
        self._inverse: Tensor | None = None

    def __call__(self, R: Tensor) -> Tensor:
        if R.shape[1] < len(self.factor):
            return torch.cholesky_solve(R, self.factor)
        if self._inverse is None:
            self._inverse = torch.cholesky_inverse(self.factor)
        return self._inverse @ R


def _parted(matrix: Tensor, columns: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """A matrix in parts as wide as these."""
    parts: tuple[Tensor, ...] = torch.split(matrix, [part.shape[1] for part in columns], dim=1)
    return parts


def _by_eigenvectors(vectors: Tensor, reciprocals: Tensor, R: Tensor) -> Tensor:
    return vectors @ (reciprocals[:, None] * (vectors.T @ R))
