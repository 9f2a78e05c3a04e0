"""A running mean of the weights of a run, kept beside them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

Tensors = tuple[Tensor, ...] | list[Tensor]
_SHARE = 10  # steps count with this over their number until the decay says less


def averaged(model: nn.Module, decay: float) -> AveragedModel:
    r"""A copy of ``model`` whose ``update_parameters(model)`` after step t makes it the mean

    .. math:: M_t = M_{t-1} + w_t (W_t - M_{t-1}), \quad w_t = \max(1 - d, 10 / (9 + t)),

    of weights and buffers, d the ``decay``: over about the last tenth of the steps, and over
    :math:`1 / (1 - d)` of them once that is less, so that short runs don't end with their start.
    """

    @torch.no_grad()
    def move(means: Tensors, now: Tensors, before: Tensor | int) -> None:
        if means[0].is_floating_point():
            weight = max(1 - decay, _SHARE / (_SHARE + int(before)))
            torch._foreach_lerp_(means, now, weight)
        else:  # counters
            torch._foreach_copy_(means, now)

    return AveragedModel(model, multi_avg_fn=move, use_buffers=True)
