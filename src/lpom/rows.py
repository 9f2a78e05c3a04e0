"""The rule for functions of whole rows, whose entries are coupled: softmax, norms, projections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lpom.rule import Phi, Rule, derivative, widened


class Rows(torch.autograd.Function):
    """A gradient of a convex function of rows along the last dimension."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, phi: Phi, rule: Rule) -> Tensor:
        ctx.save_for_backward(z)
        ctx.phi, ctx.rule = phi, rule
        return phi(z)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None, None]:
        (kept,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return derivative(ctx.phi, (kept,), (True,), g)[0], None, None
        z = widened(kept)
        size = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
        size = size.clamp(torch.finfo(z.dtype).eps, z.shape[-1] ** 0.5)
        answer = ctx.rule.rows(g.to(z.dtype), size).answer(ctx.phi, z)
        return answer.to(kept.dtype), None, None


class Softmax(torch.autograd.Function):
    """Softmax along the last dimension. Its values at a moved row follow from those at hand."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, rule: Rule, dtype: torch.dtype | None) -> Tensor:
        x = torch.softmax(z, -1, dtype=dtype)
        ctx.save_for_backward(x)
        ctx.rule, ctx.dtype = rule, z.dtype
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        x = widened(kept)
        g = g.to(x.dtype)
        if torch.is_grad_enabled():
            answer = x * (g - (g * x).sum(-1, keepdim=True))
        else:
            answer = softmax_answer(x, g, ctx.rule)
        return answer.to(ctx.dtype), None, None


def softmax_answer(x: Tensor, g: Tensor, rule: Rule, masked: bool = True) -> Tensor:
    r"""The rule for ``x = softmax(z)``, from x alone; what is ``masked`` does not move.

    With :math:`b = e^{-p} - 1` and :math:`\bar b = \langle x, b \rangle` the softmax at
    :math:`z - p` is :math:`x (1 + b) / (1 + \bar b)`, so no near numbers are subtracted.
    """
    pull, weight, sides = rule.rows(g.masked_fill(x == 0, 0) if masked else g, 1.0)
    if sides == 1:
        pull = pull - pull.amin(-1, keepdim=True)  # which changes nothing, and keeps exp below 1
    low = torch.expm1(-pull)
    mean = (x * low).sum(-1, keepdim=True)
    answer = (mean - low) / (1 + mean)
    if sides == 2:
        high = -low / (1 + low)
        mean = (x * high).sum(-1, keepdim=True)
        answer += (high - mean) / (1 + mean)
    return answer.mul_(x).mul_(weight)


class Norm(torch.autograd.Function):
    r"""Rows of one size, :math:`\sqrt n\, z / \sqrt{|z|^2 + n \epsilon}`, centred or not, scaled.

    Its values at a moved row follow from three sums over the row. A scale and a shift, one number
    for each entry of a row, belong to the edge above.
    """

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        centred: bool,
        rule: Rule,
    ) -> Tensor:
        ctx.save_for_backward(z, weight)
        ctx.eps, ctx.centred, ctx.rule, ctx.shifted = eps, centred, rule, bias is not None
        return norm(z, weight, bias, eps, centred)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        kept, scale = ctx.saved_tensors
        wanted = (True, scale is not None, ctx.shifted)
        if torch.is_grad_enabled():
            bias = torch.zeros_like(scale) if ctx.shifted else None

            def phi(z: Tensor, *affine: Tensor) -> Tensor:
                return norm(z, *_padded(affine, scale, bias), ctx.eps, ctx.centred)

            given = [t for t in (scale, bias) if t is not None]
            found = iter(derivative(phi, (kept, *given), (True,) * (1 + len(given)), g))
            return *(next(found) if w else None for w in wanted), None, None, None
        z = widened(kept)
        g, n = g.to(z.dtype), z.shape[-1]
        if ctx.centred:
            z = z - z.mean(-1, keepdim=True)
        size = (z.square().sum(-1, keepdim=True) + n * ctx.eps).sqrt()
        shift = g.reshape(-1, n).sum(0).to(kept.dtype) if ctx.shifted else None
        grad = None
        if scale is not None:
            grad = (g * z * (n**0.5 / size)).reshape(-1, n).sum(0).to(scale.dtype)
            g = g * scale
        if ctx.centred:
            g = g - g.mean(-1, keepdim=True)
        answer = norm_answer(z, g, size, ctx.rule)
        return answer.to(kept.dtype), grad, shift, None, None, None


def _padded(
    given: Sequence[Tensor], scale: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    left = list(given)
    return (None if scale is None else left.pop(0)), (None if bias is None else left.pop(0))


def norm(
    z: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> Tensor:
    """Layer norm or RMS norm over the last dimension, by torch's own functions."""
    n = z.shape[-1:]
    if centred:
        return torch.nn.functional.layer_norm(z, n, weight, bias, eps)
    x = torch.nn.functional.rms_norm(z, n, weight, eps)
    return x if bias is None else x + bias


def norm_answer(z: Tensor, g: Tensor, size: Tensor, rule: Rule) -> Tensor:
    r"""The rule for rows ``z`` (centred, if they are) of norm ``size``, from three sums.

    A row moved by s g has the squared norm :math:`size^2 + 2 s \langle z, g \rangle + s^2 |g|^2`.
    """
    n = z.shape[-1] ** 0.5
    along, length = (z * g).sum(-1, keepdim=True), torch.linalg.vector_norm(g, dim=-1, keepdim=True)
    share = rule.share(length, size)
    way = share * length
    moved = size.square() + way.square()
    least = torch.finfo(z.dtype).tiny ** 0.5
    low = (moved - 2 * share * along).clamp_min(least).sqrt()
    if rule.sides == 2:
        high = (moved + 2 * share * along).clamp_min(least).sqrt()
        along_z, along_g = -2 * along / ((high + low) * high * low), (1 / high + 1 / low) / 2
    else:
        along_z, along_g = (way * length - 2 * along) / ((low + size) * size * low), 1 / low
    answer: Tensor = z * (n * along_z) + g * (n * along_g)
    return answer
