"""Functions of torch that bend whole rows, or are made of others: written out for the rule.

Softmax and norms have a rule for rows; roots of sums, quotients of them and gates are written in
simpler calls, which the mode sees one by one. Each is called with the mode, the function, its name
and what it is called with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lpom.rows import Norm, Softmax

if TYPE_CHECKING:
    from lpom.mode import Lifting


def by(function: Any, *args: Any) -> Any:
    """An autograd function of the rule."""
    return function.apply(*args)


def along(z: Tensor, dim: int, function: Callable[[Tensor], Any]) -> Any:
    """A function of rows along the last dimension, along another one."""
    if dim in (-1, z.ndim - 1):
        return function(z)
    return function(z.movedim(dim, -1)).movedim(-1, dim)


def softmax(mode: Lifting, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    z, dim, dtype = _softmax_arguments(*args, **kwargs)
    if name == "softmin":
        z = -z
    if dim is None:  # as torch chooses it
        return func(*args, **kwargs)
    rule = mode.rule_for("softmax", "softmax")
    return along(z, dim, lambda z: by(Softmax, z, rule, dtype))


def _softmax_arguments(
    input: Tensor, dim: Any = None, _stacklevel: Any = 3, dtype: Any = None, **kwargs: Any
) -> tuple[Tensor, int | None, Any]:
    if isinstance(_stacklevel, torch.dtype):
        dtype = _stacklevel
    return input, dim, dtype


def log_softmax(mode: Lifting, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    z, dim, dtype = _softmax_arguments(*args, **kwargs)
    if dim is None:
        return func(*args, **kwargs)
    z = z if dtype is None else z.to(dtype)
    return z - _log_sum_exp(mode, z, dim, True)


def _log_sum_exp(mode: Lifting, z: Tensor, dim: Any, keepdim: bool) -> Any:
    largest = z.detach().amax(dim, keepdim=True)
    largest = largest.masked_fill(largest.isinf(), 0)
    with mode:
        x = (z - largest).exp().sum(dim, keepdim=True).log() + largest
    return x if keepdim else x.squeeze(dim if isinstance(dim, int) else tuple(dim))


def logsumexp(mode: Lifting, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    def call(input: Tensor, dim: Any, keepdim: bool = False, **rest: Any) -> Any:
        return _log_sum_exp(mode, input, dim, keepdim)

    return call(*args, **kwargs)


def layer_norm(mode: Lifting, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    def call(
        input: Tensor,
        normalized_shape: Any,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        *rest: Any,
        **others: Any,
    ) -> Any:
        return _normalise(mode, "layer_norm", input, normalized_shape, weight, bias, eps, True)

    return call(*args, **kwargs)


def rms_norm(mode: Lifting, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    def call(
        input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
    ) -> Any:
        eps = torch.finfo(input.dtype).eps if eps is None else eps
        return _normalise(mode, "rms_norm", input, normalized_shape, weight, None, eps, False)

    return call(*args, **kwargs)


def _normalise(
    mode: Lifting,
    name: str,
    z: Tensor,
    shape: Any,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
) -> Any:
    if weight is None and bias is not None:
        return _normalise(mode, name, z, shape, None, None, eps, centred) + bias
    depth = len(shape) if isinstance(shape, list | tuple | torch.Size) else 1
    rows = z if depth == 1 else z.flatten(-depth)
    flat = [None if t is None else t.flatten() for t in (weight, bias)]
    rule = mode.rule_for(name, "norm")
    return by(Norm, rows, *flat, eps, centred, rule).reshape(z.shape)


def group_norm(mode: Lifting, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    def call(
        input: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        *rest: Any,
    ) -> Tensor:
        rows = input.reshape(len(input), num_groups, -1)
        rule = mode.rule_for("group_norm", "norm")
        x = by(Norm, rows, None, None, eps, True, rule).reshape(input.shape)
        return _per_channel(x, weight, bias)

    return call(*args, **kwargs)


def instance_norm(mode: Lifting, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    def call(
        input: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
        *rest: Any,
    ) -> Any:
        if not use_input_stats or running_mean is not None:
            return func(*args, **kwargs)
        rule = mode.rule_for("instance_norm", "norm")
        x = by(Norm, input.flatten(2), None, None, eps, True, rule)
        return _per_channel(x.reshape(input.shape), weight, bias)

    return call(*args, **kwargs)


def _per_channel(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    shape = (1, -1, *[1] * (x.ndim - 2))
    x = x if weight is None else x * weight.view(shape)
    return x if bias is None else x + bias.view(shape)


def vector_norm(mode: Lifting, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """The root of a sum of products; other norms than the second are of absolute values."""
    found = _norm_arguments(*args, **kwargs)
    if found is None:
        return func(*args, **kwargs)
    z, order, dim, keepdim, dtype = found
    z = z if dtype is None else z.to(dtype)
    dims = tuple(range(z.ndim)) if dim is None else dim
    with mode:
        if order == 2:
            return (z * z).sum(dims, keepdim=keepdim).sqrt()
        return z.abs().sum(dims, keepdim=keepdim)


def _norm_arguments(
    input: Tensor,
    p: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    out: Any = None,
    dtype: Any = None,
    ord: Any = None,
) -> Any:
    order = p if ord is None else ord
    order = 2 if order in (None, "fro") else order
    if order not in (1, 2) or out is not None:
        return None
    return input, order, dim, keepdim, dtype


def matrix_norm(mode: Lifting, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    order = args[1] if len(args) > 1 else kwargs.get("ord")
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    if order is None or isinstance(dim, int) or (args[0].ndim == 1 and order == 2):
        return vector_norm(mode, func, name, args, kwargs)
    return func(*args, **kwargs)


def std(mode: Lifting, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name == "std_mean":
        variance, mean = torch.var_mean(*args, **kwargs)
        with mode:
            return variance.sqrt(), mean
    variance = torch.var(*args, **kwargs)
    with mode:
        return variance.sqrt()


def cosine(mode: Lifting, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    def call(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
        with mode:
            sizes = [(x * x).sum(dim).sqrt().clamp_min(eps) for x in (x1, x2)]
            return (x1 * x2).sum(dim) / (sizes[0] * sizes[1])

    return call(*args, **kwargs)


def distance(mode: Lifting, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """cdist and pairwise_distance by the second norm."""
    named = dict(zip(("x1", "x2", "p"), args, strict=False)) | kwargs
    if named.get("p", 2) != 2 or len(args) > 3:
        return func(*args, **kwargs)
    x1, x2 = named["x1"], named["x2"]
    if name == "cdist":
        apart, keepdim = x1.unsqueeze(-2) - x2.unsqueeze(-3), False
    else:
        apart, keepdim = x1 - x2 + named.get("eps", 1e-6), named.get("keepdim", False)
    with mode:
        return (apart * apart).sum(-1, keepdim=keepdim).sqrt()


def glu(mode: Lifting, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    def call(input: Tensor, dim: int = -1) -> Tensor:
        value, gate = input.chunk(2, dim)
        with mode:
            return value * torch.sigmoid(gate)

    return call(*args, **kwargs)


def prelu(mode: Lifting, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """``relu(z) - a relu(-z)``: two states, and the slope a weight of the edge above."""

    def call(input: Tensor, weight: Tensor) -> Tensor:
        slope = weight.view(1, -1, *[1] * (input.ndim - 2)) if input.ndim > 1 else weight
        with mode:
            return torch.relu(input) - slope * torch.relu(-input)

    return call(*args, **kwargs)
