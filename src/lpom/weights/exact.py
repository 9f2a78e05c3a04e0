r"""The weight block of the lifted objective, solved by Algorithm 2 of the paper.

.. math:: \min_W \sum_u \mu_u \sum \Phi_u(Z_u) - \langle X_u, Z_u \rangle, \qquad Z_u = A_u(X; W)

over the uses u of the weights: convex, with gradient :math:`\sum_u \mu_u J_u^T (\phi(Z_u) - X_u)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lpom.weights.blocks import Block, Use, least_squares


@torch.no_grad()
def exact_step(
    block: Block,
    uses: Sequence[Use],
    *,
    iterations: int = 1,
    ridge: float = 0.1,
) -> bool:
    r"""Algorithm 2 in the metric of the states, in place; returns whether they were deficient.

    :math:`W_{k+1} = Y_k - \frac{1}{\gamma} X^+ (\phi(A(X; Y_k)) - X_{next})` (eq. 35) with the
    accelerated sequence :math:`Y_k`, for all uses at once, :math:`\gamma` the largest of theirs.
    The pseudo-inverse is never formed: every iterate is the old weights plus what coefficients
    :math:`C` stand for. With a ridge :math:`X^T X + \lambda I` still majorises and Theorem 4 holds
    in that metric.
    """
    if block.layer is not None:
        uses = [use for use in map(Use.counting, uses) if len(use.goal)]
    if not uses:
        return False
    squares = least_squares(block, uses, ridge)
    phis = [use.node.activation.phi for use in uses]
    gamma = max(use.node.activation.lipschitz for use in uses)

    def gradient(C: Tensor | None) -> Tensor:
        Z = [use.Z for use in uses]
        if C is not None:
            Z = [z + move for z, move in zip(Z, squares.apply(C), strict=True)]
        residuals = [phi(z) - use.goal for phi, z, use in zip(phis, Z, uses, strict=True)]
        return squares.solve(residuals) / gamma

    C = -gradient(None)  # Y_0 = 0
    C_old, theta_old = torch.zeros_like(C), next_theta(0.0)
    for _ in range(iterations - 1):
        theta = next_theta(theta_old)
        Y = theta * C - math.sqrt(theta) * (theta_old * C_old - C)
        C_old, C = C, Y - gradient(Y)
        theta_old = theta
    squares.add(C)
    return squares.deficient


def next_theta(theta: float) -> float:
    r"""The root in (0, 1) of :math:`1 - \theta_k = \sqrt{\theta_k} (1 - \theta_{k-1})`.

    A quadratic in :math:`\sqrt{\theta_k}`.
    """
    c = 1.0 - theta
    root = (-c + math.sqrt(c * c + 4.0)) / 2.0
    return root * root
