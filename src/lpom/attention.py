"""Attention by LPOM's rule: torch's own kernel forward, blocks of queries on the way back."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lpom.rows import Softmax, softmax_answer
from lpom.rule import Rule, widened

#: Queries that are answered together: no more than so many rows of the softmax are ever there.
BLOCK = 128


def attention(
    rule: Rule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What ``F.scaled_dot_product_attention`` does, its softmax answering by the rule."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    if dropout_p == 0 and not torch.compiler.is_compiling():
        attended: Tensor = Attention.apply(  # type: ignore[no-untyped-call]
            query, key, value, attn_mask, is_causal, scale, rule
        )
        return attended
    scores = query @ key.mT * scale
    bias = _bias(attn_mask, is_causal, scores, 0)
    shares = Softmax.apply(scores if bias is None else scores + bias, rule, None)  # type: ignore[no-untyped-call]
    if bias is not None:  # rows that may look nowhere
        shares = shares.masked_fill(_blind(bias), 0)
    return F.dropout(shares, dropout_p) @ value


def _bias(mask: Tensor | None, is_causal: bool, like: Tensor, start: int) -> Tensor | None:
    """What is added to the scores of the queries from ``start`` on: -inf where none may look."""
    bias = None
    if mask is not None:
        rows = mask if mask.shape[-2] == 1 else mask[..., start : start + like.shape[-2], :]
        bias = rows
        if rows.dtype == torch.bool:
            bias = torch.zeros_like(rows, dtype=like.dtype).masked_fill(~rows, -torch.inf)
    if is_causal:
        hidden = like.new_full(like.shape[-2:], -torch.inf).triu(1 + start)
        bias = hidden if bias is None else bias + hidden
    return bias


def _blind(bias: Tensor) -> Tensor:
    return (bias == -torch.inf).all(-1, keepdim=True)


class Attention(torch.autograd.Function):
    """Softmax of ``Q K^T``, times V. Nothing of the size of the softmax is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float,
        rule: Rule,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.is_causal, ctx.scale, ctx.rule = is_causal, scale, rule
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal, scale=scale
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask = ctx.saved_tensors
        Q, K, V, g = (widened(t) for t in (query, key, value, g))
        n, n_keys = Q.shape[-2], K.shape[-2]
        pulls = None
        if mask is not None and ctx.needs_input_grad[3]:
            pulls = torch.zeros_like(mask, dtype=Q.dtype)
        below: list[Tensor] = []
        grads: list[Tensor] = []
        for start in reversed(range(0, n, BLOCK)):  # the last queries see the most keys
            rows = slice(start, start + BLOCK)
            q, g_rows = Q[..., rows, :], g[..., rows, :]
            seen = n_keys if mask is not None or not ctx.is_causal else min(start + BLOCK, n_keys)
            k, v = K[..., :seen, :], V[..., :seen, :]
            scores = q @ k.mT * ctx.scale
            bias = _bias(mask, ctx.is_causal, scores, start)
            if bias is not None:
                scores = scores + bias
            shares = torch.softmax(scores, -1)
            if mask is not None:
                shares = shares.masked_fill(_blind(scores), 0)
            residual = softmax_answer(shares, g_rows @ v.mT, ctx.rule, bias is not None)
            if pulls is not None:
                part = pulls if mask.shape[-2] == 1 else pulls[..., rows, :]
                part += residual.sum_to_size(part.shape)
            residual *= ctx.scale
            below.append(residual @ k)
            parts = residual.mT @ q, shares.mT @ g_rows
            if not grads:
                grads = [F.pad(part, (0, 0, 0, n_keys - seen)) for part in parts]
            else:
                for grad, part in zip(grads, parts, strict=True):
                    grad[..., :seen, :] += part
        grads.insert(0, torch.cat(below[::-1], -2) if len(below) > 1 else below[0])
        found = [
            grad.sum_to_size(t.shape).to(t.dtype)
            for grad, t in zip(grads, (query, key, value), strict=True)
        ]
        return *found, None if pulls is None else pulls.to(mask.dtype), None, None, None
