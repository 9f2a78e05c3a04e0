"""Calls of torch that are activations and more, written out in simpler calls.

Two tables, by module and by function. The tracer meets the modules of the first while it follows a
model, `lpom.lift` the functions of both kinds while a model runs; what is written here works on
tensors and on the proxies of torch.fx alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lpom.graph import attention, recurrence


def layer_norm(
    x: Tensor,
    shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """The normalisation is an activation; its scale and shift belong to the edge above."""
    x = F.layer_norm(x, shape, None, None, eps)
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def rms_norm(
    x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    x = F.rms_norm(x, shape, None, eps)
    return x if weight is None else x * weight


def group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    x = F.group_norm(x, groups, None, None, eps).transpose(1, -1)  # channels last
    x = x if weight is None else x * weight
    x = x if bias is None else x + bias
    return x.transpose(1, -1)


def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """``relu(z) - a relu(-z)``: two states, and the slope a weight of the edge above."""
    below = torch.relu(-x).transpose(1, -1) * weight
    return torch.relu(x) - below.transpose(1, -1)


def _layer_norm(module: nn.LayerNorm, x: Tensor) -> Tensor:
    return layer_norm(x, module.normalized_shape, module.weight, module.bias, module.eps)


def _rms_norm(module: nn.RMSNorm, x: Tensor) -> Tensor:
    return rms_norm(x, module.normalized_shape, module.weight, module.eps)


def _group_norm(module: nn.GroupNorm, x: Tensor) -> Tensor:
    return group_norm(x, module.num_groups, module.weight, module.bias, module.eps)


def _prelu(module: nn.PReLU, x: Tensor) -> Tensor:
    return prelu(x, module.weight)


#: Each is called with the module and what the module is called with.
_MODULES: dict[type[nn.Module], Callable[..., Any]] = {
    nn.PReLU: _prelu,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
    nn.GroupNorm: _group_norm,
    **recurrence.MODULES,
    **attention.MODULES,
}
FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.prelu: prelu,
    F.prelu: prelu,
    F.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    F.group_norm: group_norm,
    **recurrence.FUNCTIONS,
    **attention.FUNCTIONS,
}


def written_module(module: nn.Module) -> Callable[..., Any] | None:
    """What does the same as the module in simpler calls; None where it is simple already."""
    written = _MODULES.get(type(module))
    simple = isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm) and not any(
        True for _ in module.parameters()
    )
    return None if simple else written


def written_function(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[..., Any] | None:
    """What does the same as a call in simpler calls; None where it is simple already."""
    if function in (F.layer_norm, F.rms_norm, F.group_norm):
        weights = (*args[2:4], kwargs.get("weight"), kwargs.get("bias"))
        if not any(isinstance(weight, Tensor | fx.Proxy) for weight in weights):
            return None
    return FUNCTIONS.get(function)
