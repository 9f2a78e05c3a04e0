r"""The weight block of one layer: a convex problem that needs only the activation.

.. math:: \min_W \sum \Phi(Z) - \langle X_{next}, Z \rangle, \qquad Z = A(X; W)

Its gradient is :math:`(\phi(Z) - X_{next})^T X`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lpom.network import Layer


@torch.no_grad()
def exact_step(
    layer: Layer,
    X: Tensor,
    X_next: Tensor,
    *,
    Z: Tensor | None = None,
    iterations: int = 1,
    ridge: float = 0.1,
    weight: Tensor | None = None,
) -> bool:
    r"""Algorithm 2 in the metric of ``X``, in place; returns whether ``X`` was rank-deficient.

    ``Z`` is the layer's output on ``X``, where it is known already.
    :math:`W_{k+1} = Y_k - \frac{1}{\gamma} (X^+ (\phi(X Y_k^T) - X_{next}))^T` (eq. 35) with the
    accelerated sequence :math:`Y_k`. The pseudo-inverse is never formed: every iterate is the
    old weights plus a combination :math:`C` that the Gram object of the map understands. With a
    ridge, :math:`X^T X + \lambda I` still majorises and Theorem 4 holds in that metric.
    """
    if Z is None:
        Z = layer.map.apply(X)
    if weight is not None:
        kept = weight > 0
        X, Z, X_next, weight = X[kept], Z[kept], X_next[kept], weight[kept]
    if len(X) == 0:
        return False
    gamma, phi = layer.activation.lipschitz, layer.activation.phi
    gram = layer.map.gram(X, ridge, weight)
    goal = layer.map.as_rows(X_next)
    start = layer.map.as_rows(Z)  # (rows, out)
    scale = torch.ones_like(start[:, :1]) if weight is None else weight.sqrt()[:, None]

    C = -gram.solve(scale * (phi(start) - goal)) / gamma  # Y_0 = 0
    C_old, theta_old = torch.zeros_like(C), next_theta(0.0)
    for _ in range(iterations - 1):
        theta = next_theta(theta_old)
        Y = theta * C - math.sqrt(theta) * (theta_old * C_old - C)
        residual = phi(start + gram.apply(Y) / scale) - goal
        C_old, C = C, Y - gram.solve(scale * residual) / gamma
        theta_old = theta
    layer.map.add_matrix(gram.weights(C))
    return gram.deficient


def next_theta(theta: float) -> float:
    r"""The root in (0, 1) of :math:`1 - \theta_k = \sqrt{\theta_k} (1 - \theta_{k-1})`.

    A quadratic in :math:`\sqrt{\theta_k}`.
    """
    c = 1.0 - theta
    root = (-c + math.sqrt(c * c + 4.0)) / 2.0
    return root * root
