"""Attention by LPOM's rule: torch's own kernel forward, blocks of queries on the way back."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lpom.rows import Softmax, softmax_answer
from lpom.rule import Rule, widened

#: Entries of the softmax that are answered together, about: no more of them are ever there.
SCORES = 1 << 16
#: Up to so many keys the softmax is kept for the way back, which saves its second computation.
FEW = 48


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
    if enable_gqa:
        n_heads = query.shape[-3]
        key, value = (t.repeat_interleave(n_heads // t.shape[-3], -3) for t in (key, value))
    if dropout_p == 0 and key.shape[-2] > FEW and not torch.compiler.is_compiling():
        attended: Tensor = Attention.apply(  # type: ignore[no-untyped-call]
            query, key, value, attn_mask, is_causal, scale, rule
        )
        return attended
    scores = (query * scale) @ key.mT
    bias = _bias(attn_mask, is_causal, scores, 0)
    if bias is not None:  # rows that may look nowhere are looked at as if they might, and left out
        blind = _blind(bias)
        scores = scores + bias.masked_fill(blind, 0)
    shares = Softmax.apply(scores, rule, None)  # type: ignore[no-untyped-call]
    if bias is not None:
        shares = shares.masked_fill(blind, 0)
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
        lead = g.shape[:-2]
        tensors = [widened(t).expand(*lead, *t.shape[-2:]) for t in (query, key, value, g)]
        pulls = None
        if mask is not None and ctx.needs_input_grad[3]:
            pulls = torch.zeros_like(mask, dtype=tensors[0].dtype)
        if len(lead) > 1:  # some samples together
            share = max(1, SCORES // (lead[1:].numel() * query.shape[-2] * key.shape[-2]))
            slices = [slice(k, k + share) for k in range(0, lead[0], share)]
        else:
            slices = [slice(None)]
        answers = []
        for samples in slices:
            own, own_pulls = mask, pulls
            if mask is not None and mask.ndim == g.ndim and mask.shape[0] > 1:
                own, own_pulls = mask[samples], None if pulls is None else pulls[samples]
            q, k, v, g_own = (t[samples] if len(lead) else t for t in tensors)
            answers.append(
                _answer(q, k, v, g_own, own, own_pulls, ctx.is_causal, ctx.scale, ctx.rule)
            )
        found = [
            (torch.cat(parts) if len(parts) > 1 else parts[0]).sum_to_size(t.shape).to(t.dtype)
            for parts, t in zip(zip(*answers, strict=True), (query, key, value), strict=True)
        ]
        return *found, None if pulls is None else pulls.to(mask.dtype), None, None, None


def _answer(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    g: Tensor,
    mask: Tensor | None,
    pulls: Tensor | None,
    is_causal: bool,
    scale: float,
    rule: Rule,
) -> tuple[Tensor, Tensor, Tensor]:
    """What comes down to queries, keys and values, and is added to the ``pulls`` on the mask."""
    n, n_keys = Q.shape[-2], K.shape[-2]
    block = max(1, SCORES // (Q.shape[:-2].numel() * n_keys))
    down: list[Tensor] = []
    others: list[Tensor] = []
    for start in reversed(range(0, n, block)):  # the last queries see the most keys
        rows = slice(start, start + block)
        q, g_rows = Q[..., rows, :], g[..., rows, :]
        seen = n_keys if mask is not None or not is_causal else min(start + block, n_keys)
        k, v = K[..., :seen, :], V[..., :seen, :]
        scores = (q @ k.mT).mul_(scale)
        bias = _bias(mask, is_causal, scores, start)
        if bias is not None:
            scores = scores + bias
        shares = torch.softmax(scores, -1)
        if mask is not None:
            shares = shares.masked_fill(_blind(scores), 0)
        residual = softmax_answer(shares, g_rows @ v.mT, rule, bias is not None)
        if pulls is not None:
            part = pulls if pulls.shape[-2] == 1 else pulls[..., rows, :]
            part += residual.sum_to_size(part.shape)
        residual *= scale
        down.append(residual @ k)
        parts = residual.mT @ q, shares.mT @ g_rows
        if not others:
            others = [F.pad(part, (0, 0, 0, n_keys - seen)) for part in parts]
        else:
            for other, part in zip(others, parts, strict=True):
                other[..., :seen, :] += part
    return torch.cat(down[::-1], -2), others[0], others[1]
