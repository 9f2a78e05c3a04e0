"""The solution of a linear problem as an activation: shortest paths, matchings, knapsacks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from lpom.activations.base import Activation, Parameter
from lpom.activations.custom import refuse_to_save
from lpom.exceptions import DeviceError, UntrainableError


@final
class Solver(Activation):
    r"""An activation of a solver: :math:`x = \arg\min_{x \in P} -\langle z, x \rangle`.

    Any that maximises a linear objective: OR-Tools, HiGHS, dynamic programming, sorting, matching.
    To minimise costs c, give it z = -c. It may stand between two trained layers.
    The class is also called `from_solver`.

    :math:`\Phi(z) = \max_{x \in P} \langle z, x \rangle` is the support function of P, convex
    whatever P is; its gradient is the solution, and :math:`\Phi^*` is 0 on the convex hull of P
    (every x is taken as feasible: only the solver knows the set). So the gap
    :math:`\langle z, x(z) - x \rangle` is what x falls short of the best.

    Its rule with the weight :math:`\mu`, :math:`\mu (x(z) - x(z - g / \mu))`, is "Differentiation
    of Blackbox Combinatorial Solvers" (Vlastelica et al., ICLR 2020) with
    :math:`\lambda = 1 / \mu`: ``lpom.lift(model, mu=1 / lam, reduction="sum")``. By default the
    displacement is held, and there is no :math:`\lambda` to search for.

    Parameters
    ----------
    solve : callable
        From the coefficients of one objective, (n,), to the best feasible x, (n,); or from (m, n)
        to (m, n) with ``batched=True``.
    numpy : bool
        Whether it takes arrays in place of tensors. It may give either.
    displacement : "auto" or float
        How far a row moves along its gradient, in units of the length of the row less its mean.
    sides : {1, 2}
        One side uses the solution of the way forward, so training solves each problem twice; from
        two sides it solves it three times, and regrets are lower.
    dim : int
        The dimension that holds the coefficients of one problem.

    Examples
    --------
    >>> def cheapest(z):  # choose two of the coefficients
    ...     return torch.zeros_like(z).index_fill(0, z.topk(2).indices, 1.0)
    >>> layer = from_solver(cheapest).to_module()
    >>> layer(torch.tensor([[0.3, 2.0, -1.0, 1.0]]))
    tensor([[0., 1., 0., 1.]])
    """

    formula = "argmax of <z, x> over feasible x"
    elementwise = False
    measured = True
    jumps = True
    lipschitz, lower, upper = math.inf, -math.inf, math.inf

    def __init__(
        self,
        solve: Callable[[Any], Any],
        *,
        batched: bool = False,
        numpy: bool = False,
        displacement: str | float = "auto",
        sides: int = 2,
        dim: int = -1,
        name: str = "solver",
    ) -> None:
        self.solve, self.batched, self.numpy = solve, batched, numpy
        self.size, self.sides, self.dim, self.name = displacement, sides, dim, name
        self.calls = 0

    def phi(self, z: Tensor) -> Tensor:
        if torch.is_grad_enabled() and z.requires_grad:
            raise UntrainableError(
                f"{self.name!r} has no derivative. Train with lpom.fit, or call lpom.lift(model) "
                "in place of the model; evaluate under torch.no_grad()."
            )
        moved = z.detach().movedim(self.dim, -1)
        rows = moved.reshape(-1, moved.shape[-1])
        self.calls += len(rows)
        given: Any = rows.cpu().numpy() if self.numpy else rows
        if self.batched:
            x = _tensor(self.solve(given), z)
        else:
            x = torch.stack([_tensor(self.solve(row), z) for row in given])
        if x.shape != rows.shape:
            raise DeviceError(
                f"{self.name!r} gave solutions of shape {tuple(x.shape)} for objectives of shape "
                f"{tuple(rows.shape)}; it must give one number for each coefficient."
            )
        if not bool(x.isfinite().all()):
            raise DeviceError(f"{self.name!r} gave a solution that is not finite.")
        return x.reshape(moved.shape).movedim(-1, self.dim)

    def displacement(self, z: Tensor, x: Tensor) -> Tensor:
        """Of each row, as long as the row is without its mean."""
        size = 1.0 if self.size == "auto" else float(self.size)
        centred = z - z.mean(self.dim, keepdim=True)
        length: Tensor = torch.linalg.vector_norm(centred, dim=self.dim, keepdim=True)
        return size * length.clamp(min=1e-6)

    def primitive(self, z: Tensor) -> Tensor:
        return (z * self.phi(z)).sum(self.dim, keepdim=True)

    def conjugate(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x.sum(self.dim, keepdim=True))

    def gap(self, x: Tensor, z: Tensor) -> Tensor:
        return (z * (self.phi(z.detach()) - x)).sum(self.dim, keepdim=True)

    def params(self) -> dict[str, Parameter]:
        refuse_to_save(self.name)

    def __repr__(self) -> str:
        return f"Solver({self.name!r})"


def _tensor(x: Any, like: Tensor) -> Tensor:
    return torch.as_tensor(x, dtype=like.dtype, device=like.device)


from_solver = Solver
