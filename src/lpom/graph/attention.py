r"""Attention, written out: products of states, and softmax as an activation.

.. math:: \mathrm{softmax}(Q K^T / \sqrt d + M) V

Q and K are factors of a product, so the tracer makes states of them, and each edge stays affine in
each of its sources.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpom.graph.recording import recorded


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As torch's function: (..., L, d), (..., S, d), (..., S, e) give (..., L, e)."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)
    if is_causal:
        length, width = query.shape[-2], key.shape[-2]
        below = torch.ones(length, width, dtype=torch.bool, device=query.device).tril()
        scores = masked(scores, below)
    if attn_mask is not None:
        scores = masked(scores, attn_mask)
    weights = torch.softmax(scores, -1)
    # the rate is usually zero in evaluation: a trace in both modes sees that in the flag
    return F.dropout(weights, dropout_p, dropout_p > 0) @ value


@recorded("masked_fill")
def masked(scores: Tensor, mask: Tensor) -> Tensor:
    """Scores where a mask says True, minus infinity elsewhere; or the sum with a mask of floats."""
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask


@recorded("logical_not")
def _inverted(mask: Tensor) -> Tensor:
    """True for what is left out, as nn.MultiheadAttention has it: True for what is taken."""
    return ~mask if mask.dtype == torch.bool else mask


def _samples_first(x: Tensor, batched: bool) -> Tensor:
    """(L, m, E) or (L, E) to (m, L, E), as states are to be."""
    return x.transpose(0, 1) if batched else x.unsqueeze(0)


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,  # a hint: the mask says it as well
) -> tuple[Tensor, Tensor | None]:
    """As torch's function of this name, without its ``static`` keys and added ``bias`` rows."""
    extras = {
        "bias_k": bias_k,
        "bias_v": bias_v,
        "static_k": static_k,
        "static_v": static_v,
        "add_zero_attn": add_zero_attn or None,
    }
    for name, extra in extras.items():
        if extra is not None:
            raise ValueError(f"attention with {name} is not written out; leave it out instead.")
    batched = query.dim() == 3
    same = query is key, key is value
    query = _samples_first(query, batched)
    key = query if same[0] else _samples_first(key, batched)
    value = key if same[1] else _samples_first(value, batched)
    if not batched:
        key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
    if use_separate_proj_weight:
        weights = [q_proj_weight, k_proj_weight, v_proj_weight]
        biases = [None] * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
        inputs = (query, key, value)
        q, k, v = (
            F.linear(x, w, biases[i])  # type: ignore[arg-type]
            for i, (x, w) in enumerate(zip(inputs, weights, strict=True))
        )
    elif query is key and key is value:
        assert in_proj_weight is not None
        parts = F.linear(query, in_proj_weight, in_proj_bias).chunk(3, -1)
        q, k, v = parts[0], parts[1], parts[2]
    else:
        assert in_proj_weight is not None
        parts = in_proj_weight.chunk(3)
        biases = [None] * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
        q, k, v = (F.linear(x, parts[i], biases[i]) for i, x in enumerate((query, key, value)))
    # (m, L, E) -> (m, heads, L, d)
    q, k, v = (torch.unflatten(x, -1, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    scores = (q * (1 / math.sqrt(embed_dim_to_check // num_heads))) @ k.transpose(-2, -1)
    if attn_mask is not None:
        attn_mask = _inverted(attn_mask)
        if attn_mask.dim() == 3:  # one for each head of each sample
            attn_mask = torch.unflatten(attn_mask, 0, (-1, num_heads))
        scores = masked(scores, attn_mask)
    if key_padding_mask is not None:
        scores = masked(scores, _inverted(key_padding_mask)[:, None, None])
    attended = torch.softmax(scores, -1)
    if dropout_p:
        attended = F.dropout(attended, dropout_p, training)
    out = (attended @ v).transpose(1, 2).flatten(-2)
    out = F.linear(out, out_proj_weight, out_proj_bias)
    seen: Tensor | None = None
    if need_weights:
        seen = attended.mean(1) if average_attn_weights else attended
        seen = seen if batched else seen[0]
    return (out.transpose(0, 1) if batched else out.squeeze(0)), seen


def _multihead(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    swap = module.batch_first and query.dim() == 3
    if swap:
        same = query is key, key is value
        query = query.transpose(0, 1)
        key = query if same[0] else key.transpose(0, 1)
        value = key if same[1] else value.transpose(0, 1)
    out, weights = multi_head_attention_forward(
        query,
        key,
        value,
        module.embed_dim,
        module.num_heads,
        module.in_proj_weight,
        module.in_proj_bias,
        module.bias_k,
        module.bias_v,
        module.add_zero_attn,
        module.dropout,
        module.out_proj.weight,
        module.out_proj.bias,
        key_padding_mask=key_padding_mask,
        need_weights=need_weights,
        attn_mask=attn_mask,
        use_separate_proj_weight=not module._qkv_same_embed_dim,
        q_proj_weight=getattr(module, "q_proj_weight", None),
        k_proj_weight=getattr(module, "k_proj_weight", None),
        v_proj_weight=getattr(module, "v_proj_weight", None),
        average_attn_weights=average_attn_weights,
        training=module.training,
    )
    return (out.transpose(0, 1) if swap else out), weights


def _encoder_layer(
    module: nn.TransformerEncoderLayer,
    src: Tensor,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    x, masks = src, (src_mask, src_key_padding_mask)
    if module.norm_first:
        x = x + module._sa_block(module.norm1(x), *masks)
        return x + module._ff_block(module.norm2(x))
    x = module.norm1(x + module._sa_block(x, *masks))
    normed: Tensor = module.norm2(x + module._ff_block(x))
    return normed


def _encoder(
    module: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    for layer in module.layers:
        src = layer(src, src_mask=mask, src_key_padding_mask=src_key_padding_mask)
    return src if module.norm is None else module.norm(src)


MODULES: dict[type[nn.Module], Callable[..., Any]] = {
    nn.MultiheadAttention: _multihead,
    nn.TransformerEncoderLayer: _encoder_layer,
    nn.TransformerEncoder: _encoder,
}
FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.scaled_dot_product_attention: scaled_dot_product_attention,
    F.multi_head_attention_forward: multi_head_attention_forward,
}
