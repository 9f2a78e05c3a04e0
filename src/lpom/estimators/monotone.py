r"""Networks whose outputs never fall (or never rise) with some inputs.

Every function of hidden units never decreases. Give each unit a sign s: +1 where it may only rise
with the constrained inputs, -1 where it may only fall. The network is monotone where

.. math:: s^{out}_a \, W_{ab} \, s^{in}_b \ge 0

for all weights but those of free inputs, with :math:`s = \pm 1` of the inputs as asked for. Both
signs among hidden units are needed: with the first alone and ReLU, outputs would be convex.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lpom.activations import Activation
from lpom.methods import Method
from lpom.penalties import Penalty, Step


@final
@dataclass(frozen=True, eq=False)
class Signs(Penalty):
    """Each weight is zero or has the sign that is asked for; one with sign 0 is free."""

    signs: Tensor

    def value(self, W: Tensor) -> Tensor:
        broken = (W * self.signs.to(W) < 0).any()
        return torch.where(broken, torch.inf, 0.0)

    def prox(self, W: Tensor, step: Step) -> Tensor:
        return torch.where(W * self.signs.to(W) < 0, 0, W)

    def strength_at(self, progress: float) -> float:
        return math.inf


def constrained(
    method: Method[Any], model: nn.Sequential, monotonic: NDArray[Any], hidden: Activation
) -> Method[Any]:
    """The method with a constraint on each matrix of the network, whose weights now keep it."""
    if "penalties" not in method.get_params():
        raise ValueError(
            f"method {method.name!r} has no penalties, by which monotonic_cst is kept; take 'lpom'."
        )
    if method.get_params()["penalties"] is not None:
        raise ValueError("give monotonic_cst or penalties of the method, not both.")
    if not hidden.elementwise:
        raise ValueError(f"monotonic_cst needs an activation of single units, got {hidden.name!r}.")
    below = torch.as_tensor(monotonic, dtype=torch.float64)
    penalties = {}
    linears = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    for k, (name, linear) in enumerate(linears):
        n = linear.out_features
        above = torch.ones(n, dtype=torch.float64)
        if k < len(linears) - 1:
            above[1::2] = -1
        penalties[f"{name}.weight"] = Signs(above[:, None] * below[None, :])
        below = above
    for name, linear in linears:
        asked = penalties[f"{name}.weight"].signs.to(linear.weight)
        W = linear.weight.detach()
        W.copy_(torch.where(W * asked < 0, -W, W))
    return method.with_params(penalties=penalties)


def restore(model: nn.Sequential, method: Method[Any]) -> None:
    """Keep the constraints to the last digit, which steps that solve for weights come near."""
    penalties = method.get_params().get("penalties")
    of_name = penalties if isinstance(penalties, Mapping) else {}
    for name, W in model.named_parameters():
        if isinstance(penalty := of_name.get(name), Signs):
            W.detach().copy_(penalty.prox(W.detach(), math.inf))
