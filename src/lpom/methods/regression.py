"""The weights of a layer by least squares, for the methods that keep a target for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from lpom.graph import Dense
from lpom.weights.gram import gram, inverse


@final
class Regression:
    r"""Least squares of a layer's weights on the states ``X`` below it, chunk by chunk.

    .. math:: \min_W \|U - A(X; W)\|_F^2 + \lambda \|W - W_{old}\|_F^2

    With more samples than columns only the sums :math:`X^T X` and :math:`X^T (U - Z)` over chunks
    of rows are formed (transpose reduction), so results do not depend on the chunk; otherwise
    the Gram matrix is that of the rows. The ridge is relative as in
    :func:`lpom.weights.gram.gram`, and
    pulls towards the old weights: it moves no fixed point and the objective cannot rise.
    """

    def __init__(
        self,
        map_: Dense,
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
        self.rows = None if rows > columns else gram(map_.design(X), ridge, weight)
        if self.rows is None:
            total = first.new_zeros(columns, columns)
            for part in self._parts():
                A = self._design(part)
                total.addmm_(A.T, A)
            strength = ridge * total.diagonal().sum() / columns
            self.inverse, _ = inverse(total, strength)

    def step(self, map_: Dense, R: Tensor) -> None:
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
