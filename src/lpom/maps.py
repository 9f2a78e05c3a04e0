"""Linear maps: what sits between two layers of states, and all that solvers ask of it.

A solver never looks at a weight matrix. It asks the map to apply itself, to carry a residual
back, for the gradient of its weights, for a Gram solve, for its norm. A new kind of layer is a
new map.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from lpom.gram import Gram, gram


class LinearMap(ABC):
    r"""An affine map :math:`Z = A(X) + b`, linear in its weights too.

    For the exact weight step it can be written as a product of rows,
    ``as_rows(apply(X)) = design(X) @ matrix().T``.
    """

    @property
    @abstractmethod
    def n_inputs(self) -> int:
        """Numbers in one input."""

    @property
    @abstractmethod
    def n_outputs(self) -> int:
        """Numbers in one output."""

    @abstractmethod
    def parameters(self) -> list[nn.Parameter]:
        """Trainable parameters, in the order of :meth:`weight_gradient`."""

    @abstractmethod
    def apply(self, X: Tensor) -> Tensor:
        """The map's outputs; the weights are constants to autograd."""

    @abstractmethod
    def forward(self, X: Tensor) -> Tensor:
        """:meth:`apply`, with the weights in autograd's graph."""

    @property
    def free(self) -> bool:
        """Whether a solver of the whole map may move it: not if it is frozen.

        Raises
        ------
        ValueError
            If only some of its parameters are frozen.
        """
        free = [parameter.requires_grad for parameter in self.parameters()]
        if any(free) and not all(free):
            raise ValueError(
                "a layer has its weight frozen and its bias not, or the other way round, but this "
                "method solves for both at once. Freeze both or neither."
            )
        return all(free)

    @abstractmethod
    def linear(self, X: Tensor) -> Tensor:
        """:meth:`apply` without the bias."""

    @abstractmethod
    def adjoint(self, R: Tensor) -> Tensor:
        """The transpose of :meth:`linear`: ``<linear(X), R> = <X, adjoint(R)>``."""

    @abstractmethod
    def weight_gradient(
        self, R: Tensor, X: Tensor, out: Sequence[Tensor | None] | None = None
    ) -> list[Tensor]:
        """Gradient of ``<apply(X), R>`` with respect to each of :meth:`parameters`.

        Where ``out`` has a tensor, it is written there: large tensors that are made anew in every
        step cost the time in which the system hands out their pages.
        """

    @abstractmethod
    def design(self, X: Tensor) -> Tensor:
        """The rows that the weights multiply, a column of ones for the bias included."""

    @abstractmethod
    def as_rows(self, Z: Tensor) -> Tensor:
        """Outputs laid out as the rows of :meth:`design`."""

    @abstractmethod
    def matrix(self) -> Tensor:
        """Weights and bias as one matrix, one row per output, a copy."""

    @abstractmethod
    def set_matrix(self, matrix: Tensor) -> None:
        """Write weights and bias in place."""

    @abstractmethod
    def add_matrix(self, change: Tensor) -> None:
        """Add to weights and bias in place, without a copy of them."""

    @abstractmethod
    def start_vector(self) -> Tensor:
        """An input of norm one from which power iteration starts."""

    @abstractmethod
    def input_like(self, vector: Tensor) -> Tensor:
        """``vector`` shaped as a batch of one input."""

    @abstractmethod
    def absolute_bound(self) -> Tensor:
        r"""The factor :math:`\||W^T||W|\|_1` of Theorem 2 (equal to its infinity norm)."""

    def gram(self, X: Tensor, ridge: float, weight: Tensor | None) -> Gram:
        """Least squares in the metric of ``X``: see :func:`lpom.gram.gram`."""
        return gram(self.design(X), ridge, weight)

    def norm(self, vector: Tensor, iterations: int = 1) -> tuple[Tensor, Tensor]:
        r"""Spectral norm of the linear part by power iteration, and the vector to go on from.

        The estimate comes from below and gets closer as the vector is kept between calls.
        """
        norm = vector.new_zeros(())
        for _ in range(iterations):
            image = self.linear(self.input_like(vector))
            norm = torch.linalg.vector_norm(image)
            back = self.adjoint(image)
            size = torch.linalg.vector_norm(back)
            # a zero map, or a vector in its null space, keeps the vector it has
            vector = torch.where(size > 0, back.reshape(vector.shape) / size, vector)
        return norm, vector


@final
class Dense(LinearMap):
    """A fully connected layer: ``Z = X @ W.T + b``, a view of a :class:`torch.nn.Linear`."""

    def __init__(self, module: nn.Linear) -> None:
        self.module = module

    @property
    def n_inputs(self) -> int:
        return self.module.in_features

    @property
    def n_outputs(self) -> int:
        return self.module.out_features

    @property
    def weight(self) -> Tensor:
        return self.module.weight.detach()

    @property
    def bias(self) -> Tensor | None:
        return None if self.module.bias is None else self.module.bias.detach()

    def parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())

    def apply(self, X: Tensor) -> Tensor:
        return nn.functional.linear(X, self.weight, self.bias)

    def forward(self, X: Tensor) -> Tensor:
        return nn.functional.linear(X, self.module.weight, self.module.bias)

    def linear(self, X: Tensor) -> Tensor:
        return X @ self.weight.T

    def adjoint(self, R: Tensor) -> Tensor:
        return R @ self.weight

    def weight_gradient(
        self, R: Tensor, X: Tensor, out: Sequence[Tensor | None] | None = None
    ) -> list[Tensor]:
        places = out or [None, None]
        gradients = [torch.mm(R.T, X, out=places[0])]
        if self.bias is not None:
            gradients.append(torch.sum(R, 0, out=places[1]))
        return gradients

    def design(self, X: Tensor) -> Tensor:
        return X if self.bias is None else torch.cat([X, X.new_ones(len(X), 1)], dim=1)

    def as_rows(self, Z: Tensor) -> Tensor:
        return Z

    def matrix(self) -> Tensor:
        if self.bias is None:
            return self.weight.clone()
        return torch.cat([self.weight, self.bias[:, None]], dim=1)

    def set_matrix(self, matrix: Tensor) -> None:
        width = self.module.in_features
        self.weight.copy_(matrix[:, :width])
        if self.bias is not None:
            self.bias.copy_(matrix[:, width])

    def add_matrix(self, change: Tensor) -> None:
        width = self.module.in_features
        self.weight.add_(change[:, :width])
        if self.bias is not None:
            self.bias.add_(change[:, width])

    def start_vector(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.module.in_features)
        vector = torch.randn(self.module.in_features, generator=generator, dtype=torch.float64)
        unit: Tensor = (vector / torch.linalg.vector_norm(vector)).to(self.weight)
        return unit

    def input_like(self, vector: Tensor) -> Tensor:
        return vector[None]

    def absolute_bound(self) -> Tensor:
        # |W^T||W| is symmetric: both norms are its largest row sum, found by two products
        absolute = self.weight.abs()
        return (absolute.sum(1) @ absolute).max()
