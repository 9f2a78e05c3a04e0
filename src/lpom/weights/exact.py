r"""The weight block of the lifted objective, solved by Algorithm 2 of the paper.

.. math:: \min_W \sum_u \mu_u \sum \Phi_u(Z_u) - \langle X_u, Z_u \rangle, \qquad Z_u = A_u(X; W)

over the uses u of the weights: convex, with gradient :math:`\sum_u \mu_u J_u^T (\phi(Z_u) - X_u)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lpom.checks import check_number, check_pair
from lpom.settings import Settings, geometric
from lpom.weights.blocks import Block, ByGram, Use, least_squares
from lpom.weights.penalised import Penalised


@final
@dataclass(frozen=True)
class Exact(Settings):
    """Solve each weight problem by Algorithm 2.

    Parameters
    ----------
    iterations : int
        Iterations of Algorithm 2 in a step.
    ridge : float or (float, float)
        Relative to the size of the states. Of a pair the ridge grows over the run, geometrically
        from the first to the second number: it holds the weights to the old ones, so the last
        steps average over many batches.
    rtol : float
        Singular values of the states below ``rtol`` times the largest count as zero in their
        pseudo-inverse.
    """

    iterations: int = 1
    ridge: float | tuple[float, float] = 0.1
    rtol: float = 0.0

    def __post_init__(self) -> None:
        check_number("iterations", self.iterations, whole=True)
        check_number("rtol", self.rtol, strict=False)
        self.ridge_at(0.0)

    def ridge_at(self, progress: float) -> float:
        """The ridge at this share of the run."""
        if isinstance(self.ridge, Sequence):
            return geometric(check_pair("ridge", self.ridge), progress)
        check_number("ridge", self.ridge, strict=False)
        return self.ridge


@torch.no_grad()
def exact_step(
    block: Block,
    uses: Sequence[Use],
    *,
    iterations: int = 1,
    ridge: float = 0.1,
    rtol: float = 0.0,
) -> bool:
    r"""Algorithm 2 in the metric of the states, in place; returns whether they were deficient.

    :math:`W_{k+1} = Y_k - \frac{1}{\gamma} X^+ (\phi(A(X; Y_k)) - X_{next})` (eq. 35) with the
    accelerated sequence :math:`Y_k`, for all uses at once, :math:`\gamma` the largest of theirs.
    The pseudo-inverse is never formed: every iterate is the old weights plus what coefficients
    :math:`C` stand for. With a ridge :math:`X^T X + \lambda I` still majorises and Theorem 4 holds
    in that metric.
    """
    if block.layer is not None:
        uses = _counting(uses)
    if not uses:
        return False
    squares = least_squares(block, uses, ridge, rtol)
    phis = [use.node.activation.phi for use in uses]
    gamma = max(use.node.activation.lipschitz for use in uses)

    def gradient(C: Tensor | None) -> Tensor:
        Z = [use.Z for use in uses]
        if C is not None:
            Z = [z + move for z, move in zip(Z, squares.apply(C), strict=True)]
        return squares.solve([phi(z) - use.goal for phi, z, use in zip(phis, Z, uses, strict=True)])

    C = gradient(None) * (-1 / gamma)  # Y_0 = 0
    C_old, theta_old = torch.zeros_like(C), next_theta(0.0)
    for _ in range(iterations - 1):
        theta = next_theta(theta_old)
        root = math.sqrt(theta)  # Y = theta C - root (theta_old C_old - C)
        Y = ((theta + root) * C).sub_(C_old, alpha=root * theta_old)
        C_old, C = C, torch.sub(Y, gradient(Y), alpha=1 / gamma)
        theta_old = theta
    squares.add(C)
    return squares.deficient


@torch.no_grad()
def penalised_step(
    block: Block,
    uses: Sequence[Use],
    penalised: Penalised,
    *,
    weight: float,
    iterations: int = 1,
    ridge: float = 0.1,
    inner: int = 10,
) -> None:
    r"""Algorithm 2 with penalties, in place. Each iteration has the subproblem

    .. math:: \min_E \langle \nabla, E \rangle + \frac{\gamma}{2} \|A E\|^2
              + \frac{\gamma \lambda}{2} \|E\|^2 + \kappa\, h(Y_k + E), \qquad E = W - Y_k,

    for which there is no closed form. It is split: E = P with a multiplier U, and the penalty and
    the ridge on P. With :math:`\gamma \lambda` as the weight of the splitting too, the step in E
    needs the factor of :math:`A^T A + \lambda I` that is there already, and the step in P is a
    proximal one of length :math:`\kappa / (2 \gamma \lambda)`. ``inner`` such steps are taken; they
    go on from the multiplier of the iteration before and, if h is convex, of the batch before, so
    few are enough. The weights end as P, which has the zeros and the levels.

    ``weight`` is :math:`\kappa`, that of h beside the sum over the samples of the uses. The
    iterations are accelerated as in `exact_step`, and Theorem 4 holds with h as far as the
    subproblems are solved.
    """
    if not ridge > 0:
        raise ValueError(f"exact weights with penalties need a ridge above 0, got {ridge!r}.")
    uses = _counting(uses)
    if not uses:
        return
    squares = least_squares(block, uses, ridge)
    if not isinstance(squares, ByGram):
        raise ValueError(
            f"exact weights with penalties are for Linear and Conv2d layers, and {block.names[0]} "
            "stands in another edge. Use adaptive weights there."
        )
    gamma = max(use.node.activation.lipschitz for use in uses)
    strength = gamma * float(squares.gram.ridge)
    start = squares.matrix()  # (inputs and bias, outputs)

    def gradient(W: Tensor) -> Tensor:
        moved = zip(uses, squares.apply_matrix(W - start), strict=True)
        return squares.adjoint(
            [use.node.activation.phi(use.Z + move) - use.goal for use, move in moved]
        )

    def prox(W: Tensor) -> Tensor:
        parts = [
            penalised.prox(parameter, part, weight / (2 * strength)).reshape(W.shape[1], -1).T
            for parameter, part in squares.parts(W).items()
        ]
        return torch.cat(parts)

    W = W_old = start
    U = penalised.multipliers.get(block.names[0], torch.zeros_like(start)) / strength
    theta_old = 0.0
    for k in range(iterations):
        theta = next_theta(theta_old)
        Y = W if k == 0 else theta * W - math.sqrt(theta) * (theta_old * W_old - W)
        slope, V = gradient(Y), W
        for _ in range(inner):
            E = squares.gram.invert((strength * (V - Y - U) - slope) / gamma)
            V = prox(Y + (E + U) / 2)
            U = U + E - (V - Y)
        W_old, W, theta_old = W, V, theta
    if penalised.convex(block.parameters):
        penalised.multipliers[block.names[0]] = strength * U
    for parameter, part in squares.parts(W).items():
        parameter.detach().copy_(part)


def _counting(uses: Sequence[Use]) -> list[Use]:
    """Uses without the samples that count for nothing, if any are left."""
    kept = [use.counting() for use in uses]
    return [use for use in kept if len(use.goal)]


def next_theta(theta: float) -> float:
    r"""The root in (0, 1) of :math:`1 - \theta_k = \sqrt{\theta_k} (1 - \theta_{k-1})`.

    A quadratic in :math:`\sqrt{\theta_k}`.
    """
    c = 1.0 - theta
    root = (-c + math.sqrt(c * c + 4.0)) / 2.0
    return root * root
