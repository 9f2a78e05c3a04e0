r"""Adjoints of the operations that pictures go through: convolution, pooling, batch norm, dropout.

Each is torch's own kernel, forwards and backwards, called without autograd: no graph is built, and
of what the feed-forward pass chose (masks, statistics, places of maxima) only that is remembered
which the way back needs. Pooling does not look at its input again, so that state is not computed
again for it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from lpom.activations.base import at_hand
from lpom.graph.adjoints import Adjoint, Slot

if TYPE_CHECKING:
    from lpom.graph.programs import Carrying, Operation

_aten = torch.ops.aten

#: What a step that is traced takes for granted of the weights, to be asked again at every run.
GRANTED: ContextVar[list[Callable[[], bool]] | None] = ContextVar("GRANTED", default=None)


class Kernel(Adjoint):
    """An operation with a forward of its own, which gives the value and what it remembers."""

    @abstractmethod
    def forward(self, x: Tensor, *weights: Tensor) -> tuple[Tensor, Any]:
        """The value, and what the way back needs to know of it."""

    def shaped(self, o: Operation, live: frozenset[int]) -> set[int]:
        return set()


class Convolution(Kernel):
    def __init__(self, layer: Any, padding: tuple[int, ...], *, bias: bool) -> None:
        transposed = isinstance(layer, nn.modules.conv._ConvTransposeNd)
        self.bias = bias
        self.options = (
            layer.stride,
            padding,
            layer.dilation,
            transposed,
            layer.output_padding,
            layer.groups,
        )

    def forward(self, x: Tensor, *weights: Tensor) -> tuple[Tensor, Any]:
        weight, bias = weights if self.bias else (*weights, None)
        return torch.convolution(x, weight, bias, *self.options), None  # type: ignore[arg-type]

    def valued(self, o: Operation, live: frozenset[int]) -> set[int]:
        return {o.args[0].index}

    def __call__(self, o: Operation, R: Tensor, down: Carrying) -> None:
        x, weight, *_ = o.args
        W = down.value(weight)
        mask = [down.wants(x), *[down.learns(arg) for arg in o.args[1:]]]
        found = _aten.convolution_backward(
            R,
            down.value(x),
            W,
            [W.shape[1] * self.options[-1] if self.options[3] else W.shape[0]],
            *self.options,
            mask if self.bias else [*mask, False],
        )
        _give(o, found, down)


class BatchNorm(Kernel):
    r"""With the batch's own statistics while it is trained, with the running ones otherwise.

    Its way back asks for :math:`\hat x = (x - m) r` alone, and :math:`z = w \hat x + b` has that as
    well: where ``by_value``, the input is let go of, and torch's kernel is given :math:`z` with the
    mean :math:`b` and the rate :math:`1 / w` in place of :math:`x, m, r`.
    """

    def __init__(self, layer: nn.modules.batchnorm._BatchNorm) -> None:
        self.layer = layer
        self.by_value = False  # set by a program whose value is what this one gives

    def forward(self, x: Tensor, *weights: Tensor) -> tuple[Tensor, Any]:
        layer = self.layer
        own = layer.training or layer.running_mean is None
        if own and x.numel() <= x.shape[1]:
            layer(x)  # which says that one number has no variance
        share = 0.0 if layer.momentum is None else layer.momentum
        if layer.training and layer.num_batches_tracked is not None:
            layer.num_batches_tracked.add_(1)
            if layer.momentum is None:
                share = 1.0 / float(layer.num_batches_tracked)
        weight, bias = weights or (None, None)
        running = layer.running_mean, layer.running_var
        value, mean, rate = torch.native_batch_norm(
            x, weight, bias, *running, own, share, layer.eps
        )
        if not self.by_value:
            return value, (own, mean, rate, None)
        if own and weight is not None and bias is not None and _tells(weight, bias):
            # as they are now: by the way back the next batch may have moved them
            return value, (own, bias.clone(), weight.reciprocal(), weight * rate)
        return value, (own, mean, rate, x)

    def valued(self, o: Operation, live: frozenset[int]) -> set[int]:
        return set() if self.by_value else {o.args[0].index}

    def __call__(self, o: Operation, R: Tensor, down: Carrying) -> None:
        own, mean, rate, more = down.memory[o.out]
        x, weights, layer = o.args[0], o.args[1:], self.layer
        running = layer.running_mean, layer.running_var
        mask = [down.wants(x), *([down.learns(w) for w in weights] or [False, False])]
        weight = down.value(weights[0]) if weights else None
        if not self.by_value:
            seen = down.value(x)
        elif more.ndim > 1:  # the input itself
            seen = more
        else:
            seen, weight = down.values[o.out], weight * more
        found = _aten.native_batch_norm_backward(
            R, seen, weight, *running, mean, rate, own, layer.eps, mask
        )
        _give(o, found, down)


def _tells(weight: Tensor, bias: Tensor) -> bool:
    """Whether ``(z - bias) / weight`` has lost few of the digits that it had before z was made.

    Not asked of an accelerator, which would be waited for.
    """

    def holds() -> bool:
        return bool((bias.abs() < 64 * weight.abs()).all())

    granted = GRANTED.get()
    if granted is None or not weight.is_cpu:
        return at_hand(weight) and holds()
    with disable_proxy_modes_tracing():
        known = holds()
    if known:
        granted.append(holds)
    return known


class Pooling(Kernel):
    """``back(R, like, memory)``, where ``like`` has the input's shape and memory, no values.

    ``channels_last``: the layout in which it takes less time, that of the copies included. Where
    ``ordered``, what it gives has that of its input: a dropout above it draws its mask in that
    order, and a view needs it.
    """

    ordered = True  # set by the program of an edge

    def __init__(
        self,
        call: Callable[[Tensor], tuple[Tensor, Any]],
        back: Callable[[Tensor, Tensor, Any], Tensor],
        *,
        channels_last: bool = False,
    ) -> None:
        self.call, self.back, self.channels_last = call, back, channels_last

    def forward(self, x: Tensor, *weights: Tensor) -> tuple[Tensor, Any]:
        rows_first = x.is_contiguous()
        if self.channels_last and x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        value, memory = self.call(x)
        value = value.contiguous() if rows_first and self.ordered else value
        return value, (x.shape, x.stride(), memory)

    def __call__(self, o: Operation, R: Tensor, down: Carrying) -> None:
        shape, stride, memory = down.memory[o.out]
        like = torch.empty_strided(shape, stride, dtype=R.dtype, device=R.device)
        down.give(o.args[0].index, self.back(R, like, memory), own=True)


class Dropout(Kernel):
    fresh = False

    def __init__(self, share: float, training: Callable[[], bool]) -> None:
        self.share, self.training = share, training

    def forward(self, x: Tensor, *weights: Tensor) -> tuple[Tensor, Any]:
        if not self.training() or self.share == 0:
            return x, None
        if self.share == 1:
            return torch.zeros_like(x), torch.zeros_like(x)
        mask = torch.empty_like(x).bernoulli_(1 - self.share).div_(1 - self.share)
        return x * mask, mask

    def __call__(self, o: Operation, R: Tensor, down: Carrying) -> None:
        mask = down.memory[o.out]
        down.give(o.args[0].index, R if mask is None else R * mask, own=mask is not None)


def kernel(
    layer: nn.Module | None, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Kernel | None:
    """The kernel of a module, or of a call by its name; None where there is none for it."""
    if layer is not None and (layer._forward_hooks or layer._forward_pre_hooks):
        return None
    if getattr(layer, "return_indices", False) or getattr(layer, "divisor_override", None):
        return None
    if name.startswith("conv") and isinstance(layer, nn.modules.conv._ConvNd):
        padding = _padding(layer)
        if layer.padding_mode != "zeros" or padding is None:
            return None
        return Convolution(layer, padding, bias=layer.bias is not None)
    if name == "batch_norm" and isinstance(layer, nn.modules.batchnorm._BatchNorm):
        return BatchNorm(layer)
    if name == "dropout" and isinstance(layer, nn.Dropout):
        return Dropout(layer.p, lambda: layer.training)
    of = _POOLINGS.get(name)
    if of is None:
        return None
    names, make = of
    if layer is not None:
        given = [getattr(layer, key) for key in names]
    else:
        rest = dict(zip(names, args[1:], strict=False)) | kwargs
        if any(rest[key] for key in set(rest) - set(names)):
            return None
        given = [rest.get(key, _DEFAULTS.get(key)) for key in names]
    if any(isinstance(value, Slot) for value in given) or given.count(None) > ("stride" in names):
        return None
    return make(*given)


def _max_pool(size: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> Pooling:
    options = size, stride or size, padding, dilation, ceil
    return Pooling(
        lambda x: F.max_pool2d_with_indices(x, *options),
        lambda R, like, places: _aten.max_pool2d_with_indices_backward(
            R, like, *map(_pair, options[:4]), ceil, places
        ),
        channels_last=True,  # the maxima of all channels at once, not position by position
    )


def _avg_pool(size: Any, stride: Any, padding: Any, ceil: bool, inside: bool) -> Pooling:
    options = _pair(size), _pair(stride or size), _pair(padding), ceil, inside, None
    return Pooling(
        lambda x: (F.avg_pool2d(x, *options), None),
        lambda R, like, _: _aten.avg_pool2d_backward(R, like, *options),
    )


def _adaptive_avg_pool(size: Any) -> Pooling:
    if _pair(size) == [1, 1]:  # a mean takes less time
        return Pooling(
            lambda x: (x.mean((-2, -1), keepdim=True), None),
            lambda R, like, _: like.copy_(R / (like.shape[-2] * like.shape[-1])),
        )
    return Pooling(
        lambda x: (F.adaptive_avg_pool2d(x, size), None),
        lambda R, like, _: _aten._adaptive_avg_pool2d_backward(R, like),
    )


_POOLINGS: dict[str, tuple[tuple[str, ...], Callable[..., Pooling]]] = {
    "max_pool2d": (("kernel_size", "stride", "padding", "dilation", "ceil_mode"), _max_pool),
    "avg_pool2d": (
        ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad"),
        _avg_pool,
    ),
    "adaptive_avg_pool2d": (("output_size",), _adaptive_avg_pool),
}
_DEFAULTS = {"padding": 0, "dilation": 1, "ceil_mode": False, "count_include_pad": True}


def _give(o: Operation, found: tuple[Tensor | None, ...], down: Carrying) -> None:
    for arg, gradient in zip(o.args, found, strict=False):
        if gradient is not None:
            down.give(arg.index, gradient, own=True)


def _padding(layer: Any) -> tuple[int, ...] | None:
    """Padding in numbers; None where "same" is not the same on both sides."""
    if layer.padding == "valid":
        return (0,) * len(layer.kernel_size)
    if layer.padding == "same":
        both = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return None if any(b % 2 for b in both) else tuple(b // 2 for b in both)
    padding: tuple[int, ...] = layer.padding
    return padding


def _pair(value: Any) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)
