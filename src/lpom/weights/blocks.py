r"""Blocks of weights that are solved for at once, and least squares on them.

A block is the parameters of one layer, weight and bias, with all its uses: the nodes in whose edges
they stand. In each use the edge is affine in them, :math:`Z_u(W) = Z_u + J_u \Delta`, so with
residuals :math:`R_u` everything is least squares on the stacked :math:`J_u`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpom.graph import Graph, Node, Switches
from lpom.weights.gram import Gram, gram


@dataclass(frozen=True, eq=False)
class Block:
    """Parameters that are solved for together, and the indices of the nodes that use them.

    ``layer`` is the whole edge in every use, where there is such a one.
    """

    parameters: tuple[nn.Parameter, ...]
    names: tuple[str, ...]
    uses: tuple[int, ...]
    layer: nn.Module | None
    alone: bool  # in every edge where it stands


@dataclass(frozen=True, eq=False)
class Use:
    """One use of a block in a batch: the states below, and the state above that it should give.

    ``Z`` is the edge's value if the weights have not moved since; ``weight`` is what each sample
    counts for in this use (none: one for all).
    """

    node: Node
    sources: tuple[Tensor, ...]
    goal: Tensor
    switches: Switches | None = None
    weight: Tensor | None = None
    known: Tensor | None = None

    @cached_property
    def value(self) -> Tensor:
        """``Z`` with autograd's graph of the edge."""
        with torch.enable_grad():
            return self.node.edge([source.detach() for source in self.sources], self.switches)

    @cached_property
    def Z(self) -> Tensor:
        return self.value.detach() if self.known is None else self.known

    def counting(self) -> Use:
        """The same without the samples that count for nothing; of a plain layer."""
        if self.weight is None or bool((self.weight > 0).all()):
            return self
        kept = self.weight > 0
        return replace(
            self,
            sources=tuple(source[kept] for source in self.sources),
            goal=self.goal[kept],
            weight=self.weight[kept],
            known=None if self.known is None else self.known[kept],
        )


def blocks(graph: Graph) -> list[Block]:
    """All weights that may move, in blocks; raises where an edge is not affine in them."""
    found: dict[tuple[str, ...], list[nn.Parameter]] = {}
    names = graph.parameter_names
    for parameter in graph.parameters:
        owner = names[parameter].rpartition(".")[0]
        shared = tuple(node.name for node in graph.uses[parameter])
        found.setdefault((owner, *shared), []).append(parameter)
    made = []
    for parameters in found.values():
        free = [parameter.requires_grad for parameter in parameters]
        if not any(free):
            continue
        if not all(free):
            raise ValueError(
                f"{' and '.join(names[p] for p in parameters)} are solved for at once, but only "
                "some of them are frozen. Freeze all or none, or use adaptive weights."
            )
        uses = graph.uses[parameters[0]]
        for node in uses:
            if not node.edge.affine:
                raise ValueError(
                    f"the exact weight step needs an edge that is affine in its weights, and the "
                    f"one below {node.name} is not, by {node.edge.obstacle}. Use adaptive weights."
                )
        layers = {node.edge.layer for node in uses}
        alone = all(len(node.edge.parameters) == len(parameters) for node in uses)
        made.append(
            Block(
                tuple(parameters),
                tuple(names[p] for p in parameters),
                tuple(node.index for node in uses),
                layers.pop() if alone and len(layers) == 1 else None,
                alone,
            )
        )
    return made


class LeastSquares(ABC):
    r"""Coefficients ``C`` stand for a change of the weights: solved for, applied, written.

    .. math:: \min_\Delta \sum_u \|J_u \Delta - R_u\|^2 + \lambda \|\Delta\|^2
    """

    deficient: bool = False

    @abstractmethod
    def solve(self, residuals: Sequence[Tensor]) -> Tensor:
        """Coefficients of the solution for right-hand sides shaped as the ``Z`` of each use."""

    @abstractmethod
    def apply(self, C: Tensor) -> list[Tensor]:
        """What the coefficients do to the ``Z`` of each use."""

    @abstractmethod
    def add(self, C: Tensor) -> None:
        """Change the weights in place."""


def least_squares(
    block: Block,
    uses: Sequence[Use],
    ridge: float,
    rtol: float = 0.0,
) -> LeastSquares:
    """By a Gram matrix where the edge is a Linear or a Conv2d, else by conjugate gradients."""
    layer = block.layer
    if isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and _unfolds(layer)):
        return ByGram(layer, uses, ridge, rtol)
    return ByConjugateGradients(block, uses, ridge)


def _unfolds(layer: nn.Conv2d) -> bool:
    return (
        layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    )


@final
class ByGram(LeastSquares):
    """The rows that the weights multiply, of all uses under each other, and their Gram matrix."""

    def __init__(
        self,
        layer: nn.Linear | nn.Conv2d,
        uses: Sequence[Use],
        ridge: float,
        rtol: float = 0.0,
    ) -> None:
        self.layer, self.uses = layer, uses
        A = _one([design(layer, use.sources[0].detach()) for use in uses])
        self.scale: Tensor | None = None
        if any(use.weight is not None for use in uses):
            self.scale = torch.cat([self._per_row(use) for use in uses]).sqrt()[:, None]
        weight = None if self.scale is None else self.scale[:, 0].square()
        self.gram: Gram = gram(A, ridge, weight, rtol)
        self.deficient = self.gram.deficient

    def _per_row(self, use: Use) -> Tensor:
        """The weights of samples, which are one row or a block of rows each."""
        rows = len(self._rows(use.Z))
        if use.weight is None:
            return use.Z.new_ones(rows)
        return use.weight.repeat_interleave(rows // max(1, len(use.weight)))

    def solve(self, residuals: Sequence[Tensor]) -> Tensor:
        return self.gram.solve(self._stacked(residuals))

    def apply(self, C: Tensor) -> list[Tensor]:
        return self._parted(self.gram.apply(C))

    def adjoint(self, residuals: Sequence[Tensor]) -> Tensor:
        """The gradient that residuals make, as a matrix (inputs and bias, outputs)."""
        return self.gram.adjoint(self._stacked(residuals))

    def apply_matrix(self, D: Tensor) -> list[Tensor]:
        """What a change of the matrix does to the ``Z`` of each use."""
        return self._parted(self.gram.A @ D)

    def matrix(self) -> Tensor:
        """The weights, and below them the bias, with a column for each output."""
        rows = [self.layer.weight.detach().flatten(1).T]
        if self.layer.bias is not None:
            rows.append(self.layer.bias.detach()[None])
        return torch.cat(rows)

    def parts(self, matrix: Tensor) -> dict[nn.Parameter, Tensor]:
        """What a matrix has for each parameter, in its shape."""
        weight, bias = self.layer.weight, self.layer.bias
        width = weight[0].numel()
        assert isinstance(weight, nn.Parameter)
        found: dict[nn.Parameter, Tensor] = {weight: matrix[:width].T.reshape(weight.shape)}
        if bias is not None:
            assert isinstance(bias, nn.Parameter)
            found[bias] = matrix[width]
        return found

    def _stacked(self, residuals: Sequence[Tensor]) -> Tensor:
        R = _one([self._rows(residual) for residual in residuals])
        return R if self.scale is None else self.scale * R

    def _parted(self, rows: Tensor) -> list[Tensor]:
        if self.scale is not None:
            rows = rows / self.scale
        counts = [len(self._rows(use.Z)) for use in self.uses]
        parts = torch.split(rows, counts)
        return [self._unrows(part, use.Z) for part, use in zip(parts, self.uses, strict=True)]

    def add(self, C: Tensor) -> None:
        weight, bias = self.layer.weight.detach(), self.layer.bias
        matrix = weight.flatten(1)  # a view, but of kernels with their channels last
        self.gram.add(C, matrix, *([] if bias is None else [bias.detach()[:, None]]))
        if matrix.data_ptr() != weight.data_ptr():
            weight.copy_(matrix.view(weight.shape))

    def _rows(self, Z: Tensor) -> Tensor:
        """``Z`` as rows of outputs: (samples and places, outputs)."""
        if isinstance(self.layer, nn.Conv2d):
            Z = Z.movedim(1, -1)
        return Z.reshape(-1, Z.shape[-1])

    def _unrows(self, rows: Tensor, like: Tensor) -> Tensor:
        if isinstance(self.layer, nn.Conv2d):
            m, c, h, w = like.shape
            return rows.reshape(m, h, w, c).movedim(-1, 1)
        return rows.reshape(like.shape)


def _one(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def design(layer: nn.Linear | nn.Conv2d, X: Tensor) -> Tensor:
    """The rows that a layer's weights multiply, a column of ones for the bias included."""
    if isinstance(layer, nn.Conv2d):
        assert not isinstance(layer.padding, str)
        patches = F.unfold(X, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        rows = patches.movedim(1, -1).reshape(-1, patches.shape[1])
    else:
        rows = X.reshape(-1, X.shape[-1])
    if layer.bias is None:
        return rows
    return torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)


@final
class ByConjugateGradients(LeastSquares):
    r"""Products with :math:`J` and :math:`J^T` alone, by autograd on the edge.

    ``C`` is the change of all the block's parameters, one after the other. The ridge is relative to
    :math:`\|J\|_F^2` over the number of parameters, as in :func:`lpom.weights.gram.gram`, with
    the norm estimated from a few random signs.
    """

    def __init__(self, block: Block, uses: Sequence[Use], ridge: float) -> None:
        self.parameters, self.uses = block.parameters, uses
        self.weights = [
            None if use.weight is None else use.weight.view(-1, *[1] * (use.value.ndim - 1))
            for use in uses
        ]
        self._probes = [torch.zeros_like(use.value).requires_grad_() for use in uses]
        with torch.enable_grad():
            # J^T v as a function of v, whose derivative in v is J
            self._backs = [
                torch.autograd.grad(use.value, self.parameters, probe, create_graph=True)
                for use, probe in zip(uses, self._probes, strict=True)
            ]
        self.ridge = 0.0
        if ridge > 0:
            self.ridge = ridge * self._squared_norm() / sum(p.numel() for p in self.parameters)

    def solve(self, residuals: Sequence[Tensor]) -> Tensor:
        b = self._adjoint(residuals)
        x, r = torch.zeros_like(b), b
        p, rr = r, float(r @ r)
        stop = (10 * torch.finfo(b.dtype).eps) ** 2 * rr
        for _ in range(min(2 * len(b), 500)):
            if rr <= stop:
                break
            q = self._adjoint(self.apply(p)) + self.ridge * p
            curvature = float(p @ q)
            if curvature <= 0:  # the null space, where there is no ridge
                break
            x, r = x + rr / curvature * p, r - rr / curvature * q
            rr, old = float(r @ r), rr
            p = r + rr / old * p
        return x

    def apply(self, C: Tensor) -> list[Tensor]:
        changes = self._split(C)
        return [
            torch.autograd.grad(back, probe, changes, retain_graph=True)[0]
            for back, probe in zip(self._backs, self._probes, strict=True)
        ]

    def add(self, C: Tensor) -> None:
        for parameter, change in zip(self.parameters, self._split(C), strict=True):
            parameter.detach().add_(change)

    def _adjoint(self, values: Sequence[Tensor]) -> Tensor:
        """``J^T W values``, summed over uses, W the weights of the samples."""
        total: Tensor | None = None
        for use, value, weight in zip(self.uses, values, self.weights, strict=True):
            weighted = value if weight is None else weight * value
            found = torch.autograd.grad(use.value, self.parameters, weighted, retain_graph=True)
            flat = torch.cat([gradient.flatten() for gradient in found])
            total = flat if total is None else total + flat
        assert total is not None  # a block has a use
        return total

    def _split(self, C: Tensor) -> list[Tensor]:
        parts = torch.split(C, [p.numel() for p in self.parameters])
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def _squared_norm(self, probes: int = 8) -> float:
        generator = torch.Generator().manual_seed(0)
        total = 0.0
        for _ in range(probes):
            signs = []
            for use, weight in zip(self.uses, self.weights, strict=True):
                sign = torch.randint(0, 2, use.value.shape, generator=generator) * 2 - 1
                sign = sign.to(use.value)
                # the adjoint weights once, and the norm is that of the rows times the root
                signs.append(sign if weight is None else sign / weight.sqrt().clamp_min(1e-30))
            total += float(self._adjoint(signs).square().sum()) / probes
        return total
