"""Algorithm 2 of the paper, line by line, with an explicit pseudo-inverse; and its problem."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from hypothesis import assume
from hypothesis import strategies as st
from scipy.optimize import brentq
from torch import Tensor, nn

from lpom.activations import Activation
from lpom.graph import trace
from lpom.weights.blocks import Block, Use, blocks, least_squares

from .strategies import ACTIVATIONS, Case, seeds


@dataclass(frozen=True, eq=False)
class Fit:
    r"""Minimise :math:`\sum_u \sum_j w_{uj} (\Phi_u(z_j) - \langle x_j, z_j \rangle)` (eq. 30).

    ``Z_u`` is affine in the weights ``W``, all parameters of the block one after the other:
    :math:`Z_u(W) = Z_u(W_0) + J_u (W - W_0)`, with ``J`` a dense matrix.
    """

    block: Block
    uses: tuple[Use, ...]

    @classmethod
    def of(
        cls,
        case: Case,
        block: Block,
        X: Sequence[Tensor],
        goals: Sequence[Tensor],
        shares: Sequence[float],
        weight: Tensor | None = None,
    ) -> Fit:
        """A block of a graph, each use counted by its share of mu; from the highest use down."""
        made = []
        for v, share in reversed(list(zip(block.uses, shares, strict=True))):
            node = case.graph[v]
            each = torch.ones(len(X[0]), dtype=torch.float64) if weight is None else weight
            sources = tuple(X[s].detach() for s in node.sources)
            made.append(Use(node, sources, goals[v].detach(), case.switches, share * each))
        return cls(block, tuple(made))

    def weights(self) -> Tensor:
        """``W`` as the module has it now."""
        return torch.cat([p.detach().flatten() for p in self.block.parameters])

    def write(self, W: Tensor) -> None:
        """Put ``W`` into the module."""
        sizes = [p.numel() for p in self.block.parameters]
        for parameter, part in zip(self.block.parameters, W.split(sizes), strict=True):
            parameter.detach().copy_(part.reshape(parameter.shape))

    @cached_property
    def start(self) -> Tensor:
        return self.weights()

    @cached_property
    def Z(self) -> list[Tensor]:
        return [self.value(use).detach() for use in self.uses]

    @staticmethod
    def value(use: Use) -> Tensor:
        with torch.enable_grad():
            return use.node.edge(use.sources, use.switches)

    @cached_property
    def J(self) -> list[Tensor]:
        """One row per output of each use, one column per weight."""
        found = []
        for use in self.uses:
            rows = []
            for entry in self.value(use).flatten():
                row = torch.autograd.grad(entry, self.block.parameters, retain_graph=True)
                rows.append(torch.cat([part.flatten() for part in row]))
            found.append(torch.stack(rows))
        return found

    @property
    def gamma(self) -> float:
        return max(use.node.activation.lipschitz for use in self.uses)

    def row_weights(self, use: Use) -> Tensor:
        """What each output of a use counts for, as a column."""
        each = torch.ones(len(use.goal), dtype=torch.float64) if use.weight is None else use.weight
        return each.repeat_interleave(use.goal[0].numel())[:, None]

    @cached_property
    def A(self) -> Tensor:
        """All rows of all uses, each times the root of what it counts for."""
        pairs = zip(self.uses, self.J, strict=True)
        return torch.cat([self.row_weights(use).sqrt() * J for use, J in pairs])

    def at(self, W: Tensor) -> list[Tensor]:
        return [
            Z + (J @ (W - self.start)).reshape(Z.shape) for Z, J in zip(self.Z, self.J, strict=True)
        ]

    def F(self, W: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for use, Z in zip(self.uses, self.at(W), strict=True):
            values = use.node.activation.primitive(Z).flatten(1).sum(1)
            values = values - (use.goal * Z).flatten(1).sum(1)
            total = total + (values if use.weight is None else use.weight * values).sum()
        return total

    def residual(self, W: Tensor) -> Tensor:
        """``phi(Z) - X`` of all uses, one after the other, each times its root weight."""
        parts = [
            self.row_weights(use).sqrt()[:, 0] * (use.node.activation.phi(Z) - use.goal).flatten()
            for use, Z in zip(self.uses, self.at(W), strict=True)
        ]
        return torch.cat(parts)

    def strength(self, ridge: float) -> float:
        """lambda, relative to the size of A."""
        return ridge * float(self.A.square().sum()) / self.A.shape[1]

    def metric(self, strength: float) -> Tensor:
        """``A^T A + lambda I``."""
        return self.A.T @ self.A + strength * torch.eye(self.A.shape[1]).double()

    def pseudo_inverse(self, strength: float) -> Tensor:
        """What takes a residual to the least squares change of the weights."""
        if strength:
            return torch.linalg.pinv(self.metric(strength), hermitian=True) @ self.A.T
        return torch.linalg.pinv(self.A)

    def strength_of_the_library(self, ridge: float) -> float:
        """Conjugate gradients only estimate the size of A: theirs where they serve."""
        squares = least_squares(self.block, self.uses, ridge)
        return float(getattr(squares, "ridge", self.strength(ridge)))


def thetas(count: int) -> list[float]:
    """``theta_0 = 0``, then each the root of ``1 - t = sqrt(t) (1 - theta_{k-1})``."""
    values = [0.0]
    for _ in range(count):
        before = values[-1]
        values.append(
            brentq(lambda t, c=1 - before: 1 - t - math.sqrt(t) * c, 0.0, 1.0, xtol=1e-16)
        )
    return values


def algorithm_2(fit: Fit, iterations: int, strength: float) -> list[Tensor]:
    """``[x_0, x_1, ..., x_{K+1}]`` from ``x_0 = x_1``, the weights that the block has."""
    theta, inverse = thetas(iterations), fit.pseudo_inverse(strength)
    x = [fit.start, fit.start]
    for k in range(1, iterations + 1):
        y = theta[k] * x[k] - math.sqrt(theta[k]) * (theta[k - 1] * x[k - 1] - x[k])
        x.append(y - 1 / fit.gamma * (inverse @ fit.residual(y)))
    return x


def one_layer(
    linear: nn.Linear, act: Activation, X: Tensor, goal: Tensor, weight: Tensor | None = None
) -> Fit:
    graph = trace(nn.Sequential(linear, act.to_module()))
    (block,) = blocks(graph)
    return Fit(block, (Use(graph[1], (X,), goal, None, weight),))


@st.composite
def fits(draw: st.DrawFn, *, tall: bool | None = None, weighted: bool | None = None) -> Fit:
    """One layer; ``tall`` with more rows than columns, else with fewer; full rank."""
    n, n_out = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    bias = draw(st.booleans())
    columns = n + bias
    if tall is None:
        tall = draw(st.booleans())
    m = draw(st.integers(columns + 1, columns + 8) if tall else st.integers(1, columns))
    act = draw(st.sampled_from(ACTIVATIONS))
    generator = torch.Generator().manual_seed(draw(seeds))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    linear = nn.Linear(n, n_out, bias=bias, dtype=torch.float64)
    for parameter in linear.parameters():
        nn.init.normal_(parameter, generator=generator)
    if weighted is None:
        weighted = draw(st.booleans())
    weight = torch.rand(m, generator=generator, dtype=torch.float64) + 0.2 if weighted else None
    X = normal(m, n)
    rows = torch.cat([X, torch.ones(m, 1).double()], 1) if bias else X
    assume(torch.linalg.cond(rows) < 1e3)
    return one_layer(linear, act, X, act.phi(1.5 * normal(m, n_out)), weight)
