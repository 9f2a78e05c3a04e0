"""Algorithm 2 of the paper, line by line, with an explicit pseudo-inverse; and its problem."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import assume
from hypothesis import strategies as st
from scipy.optimize import brentq
from torch import Tensor, nn

from lpom.activations import Activation
from lpom.maps import Dense
from lpom.network import Layer

from .strategies import ACTIVATIONS, seeds


@dataclass(frozen=True)
class Fit:
    r"""Minimise :math:`\sum_j w_j (\Phi(z_j) - x_j z_j)`, :math:`Z = A W^T` (eq. 30).

    ``A`` are the states below with a column of ones if there is a bias, ``goal`` those above.
    """

    layer: Layer
    X: Tensor
    goal: Tensor
    weight: Tensor | None

    @property
    def activation(self) -> Activation:
        return self.layer.activation

    @property
    def A(self) -> Tensor:
        bias = len(self.layer.map.parameters()) == 2
        return torch.cat([self.X, torch.ones_like(self.X[:, :1])], 1) if bias else self.X

    @property
    def row_weights(self) -> Tensor:
        return torch.ones(len(self.X), 1).double() if self.weight is None else self.weight[:, None]

    def value(self, W: Tensor) -> Tensor:
        Z = self.A @ W.T
        return (self.row_weights * (self.activation.primitive(Z) - self.goal * Z)).sum()

    def metric(self, ridge: float) -> Tensor:
        """``A^T A + lambda I``, rows weighted, lambda relative to the size of A."""
        weighted = self.row_weights.sqrt() * self.A
        lam = ridge * weighted.square().sum() / weighted.shape[1]
        return weighted.T @ weighted + lam * torch.eye(self.A.shape[1]).double()

    def pseudo_inverse(self, ridge: float) -> Tensor:
        """What takes a residual to the least squares change of the weights, (n, m)."""
        if ridge:
            inverse = torch.linalg.pinv(self.metric(ridge), hermitian=True)  # zero for A = 0
            return inverse @ (self.row_weights * self.A).T
        root = self.row_weights.sqrt()
        return torch.linalg.pinv(root * self.A) * root.T


def thetas(count: int) -> list[float]:
    """``theta_0 = 0``, then each the root of ``1 - t = sqrt(t) (1 - theta_{k-1})``."""
    values = [0.0]
    for _ in range(count):
        before = values[-1]
        values.append(
            brentq(lambda t, c=1 - before: 1 - t - math.sqrt(t) * c, 0.0, 1.0, xtol=1e-16)
        )
    return values


def algorithm_2(fit: Fit, iterations: int, ridge: float) -> list[Tensor]:
    """``[x_0, x_1, ..., x_{K+1}]`` from ``x_0 = x_1``, the weights that the layer has."""
    theta, gamma = thetas(iterations), fit.activation.lipschitz
    inverse = fit.pseudo_inverse(ridge)
    x = [fit.layer.map.matrix(), fit.layer.map.matrix()]
    for k in range(1, iterations + 1):
        y = theta[k] * x[k] - math.sqrt(theta[k]) * (theta[k - 1] * x[k - 1] - x[k])
        residual = fit.activation.phi(fit.A @ y.T) - fit.goal
        x.append(y - 1 / gamma * (inverse @ residual).T)
    return x


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
    fit = Fit(Layer(Dense(linear), act), normal(m, n), act.phi(1.5 * normal(m, n_out)), weight)
    assume(torch.linalg.cond(fit.A) < 1e3)
    return fit
