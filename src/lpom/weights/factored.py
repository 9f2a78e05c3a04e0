"""Adam, but matrices move in the metric of both Kronecker factors of their gradient."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lpom.weights.adam import Adam

#: Eigenvectors that are followed of each factor.
RANK = 32
#: What is added to eigenvalues beside their mean: of what a matrix multiplies, of the residuals.
DAMPING = {"X": 10.0, "R": 0.1}
#: Steps between two looks at the factors, after as many first steps; what is kept of them then.
EVERY, KEPT = 10, 0.95
MOMENTUM = 0.9


class Factored(Adam):
    r"""A step of a Linear layer's matrix in the metric of what meets in its gradient.

    With X the states below the layer and R the residuals above it, the gradient is
    :math:`R^T X`, and the natural one is about :math:`S_R^{-1} R^T X\, S_X^{-1}` with the running
    means :math:`S` of :math:`X^T X / m` and :math:`R^T R / m`:

    .. math:: M \leftarrow \beta M + (R P_R)^T (X P_X), \qquad
        W \leftarrow W - \eta\, M / \mathrm{rms}(M), \qquad
        P = I - U\, \mathrm{diag}\Big(\frac{s - \rho}{s + d}\Big) U^T

    P is :math:`(S + d I)^{-1}` up to a factor if all eigenvalues but the largest, s with vectors U,
    are taken for their mean :math:`\rho`; d is a multiple of the mean of all. Residuals and states
    are turned before they are multiplied, so a step has four thin products more than Adam's. The
    eigenvectors are followed by orthogonal iteration.

    Whatever is no matrix of one Linear layer, and all weights where gradients are needed as a whole
    (several ranks, penalties, further sweeps), moves as Adam moves it.
    """

    @property
    def above(self) -> int:
        return 0

    def descend(
        self, weight: nn.Parameter, R: Tensor, X: Tensor, share: float | Tensor, decay: float
    ) -> None:
        """The step of one matrix, whose gradient is ``share * R.T @ X + decay * weight``."""
        if isinstance(share, Tensor):
            R, share = R * share, 1.0
        group = next(g for g in self.param_groups if any(p is weight for p in g["params"]))
        memory: dict[str, Tensor] = self.state[weight]
        if not memory:
            memory["step"] = torch.zeros(())
            memory["exp_avg"] = torch.zeros_like(weight)
        done = int(memory["step"])
        memory["step"] += 1
        if done < EVERY or done % EVERY == 0:
            _see(memory, "X", X)
            _see(memory, "R", R)
        M = memory["exp_avg"]
        M.addmm_(_turned(memory, "R", R).T, _turned(memory, "X", X), beta=MOMENTUM, alpha=share)
        if decay:
            M.add_(_turned(memory, "X", _turned(memory, "R", weight.T).T), alpha=decay)
        rms = float(torch.linalg.vector_norm(M)) / M.numel() ** 0.5
        if rms > 0:
            weight.sub_(M, alpha=group["lr"] / rms)


def _see(memory: dict[str, Tensor], side: str, Y: Tensor) -> None:
    """Take rows into the running mean of ``Y.T @ Y / m``: one orthogonal iteration."""
    rows, n = Y.shape
    if f"{side} U" not in memory:
        generator = torch.Generator().manual_seed(n)
        start = torch.randn(n, min(RANK, n), generator=generator, dtype=torch.float64)
        memory[f"{side} U"] = torch.linalg.qr(start)[0].to(Y)
        memory[f"{side} s"] = Y.new_zeros(min(RANK, n))
        memory[f"{side} trace"], memory[f"{side} seen"] = Y.new_zeros(()), Y.new_zeros(())
    U, s, trace = (memory[f"{side} {of}"] for of in ("U", "s", "trace"))
    memory[f"{side} seen"] += 1
    new = (1 / memory[f"{side} seen"]).clamp_min(1 - KEPT)
    trace = trace + new * (Y.square().sum() / rows - trace)
    U, upper = torch.linalg.qr((1 - new) * U * s + new / rows * (Y.T @ (Y @ U)))
    s = upper.diagonal().abs()
    rest = (trace - s.sum()).clamp_min(0) / max(n - len(s), 1)
    damped = (s + DAMPING[side] * trace / n).clamp_min(torch.finfo(s.dtype).tiny)
    found = {"U": U, "V": U * ((s - rest) / damped), "s": s, "trace": trace}
    memory.update({f"{side} {of}": value for of, value in found.items()})


def _turned(memory: dict[str, Tensor], side: str, Y: Tensor) -> Tensor:
    """``Y @ P``."""
    return torch.addmm(Y, Y @ memory[f"{side} V"], memory[f"{side} U"].T, alpha=-1)
