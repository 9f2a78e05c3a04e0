r"""Calls of torch that are activations and more, written out in simpler calls.

The tracer meets these modules and functions while it follows a model. What is written here works on
tensors and on the proxies of torch.fx alike. A recurrent layer becomes its cells, step by step: the
inputs of all steps meet their weights in one product, and step by step there is left

.. math:: Z_t = (X W_{ih}^T + b_{ih})_t + h_{t-1} W_{hh}^T + b_{hh}

and what the kind of layer makes of it. Gates are activations; their products with what they let
through are edges that are affine in each factor. So is attention,
:math:`\mathrm{softmax}(Q K^T / \sqrt d + M) V`, with states for Q and K.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

# normalisation: the function of whole slices is an activation, its scale and shift are the edge's


def layer_norm(x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5) -> Any:
    return _affine(F.layer_norm(x, shape, None, None, eps), weight, bias)


def rms_norm(x: Tensor, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    return _affine(F.rms_norm(x, shape, None, eps), weight, None)


def group_norm(
    x: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: Any = 1e-5
) -> Any:
    normed = F.group_norm(x, groups, None, None, eps).transpose(1, -1)  # channels last
    return _affine(normed, weight, bias).transpose(1, -1)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """``relu(z) - a relu(-z)``: two states, and the slope a weight of the edge above."""
    below = torch.relu(-x).transpose(1, -1) * weight
    return torch.relu(x) - below.transpose(1, -1)


# attention


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
        scores = _one_call(masked_fill, scores, below)
    if attn_mask is not None:
        scores = _one_call(masked_fill, scores, attn_mask)
    weights = torch.softmax(scores, -1)
    # the rate is usually zero in evaluation: a trace in both modes sees that in the flag
    return F.dropout(weights, dropout_p, dropout_p > 0) @ value


def masked_fill(scores: Tensor, mask: Tensor) -> Tensor:
    """Scores where a mask says True, minus infinity elsewhere; or the sum with a mask of floats."""
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask


def logical_not(mask: Tensor) -> Tensor:
    """True for what is left out, as nn.MultiheadAttention has it: True for what is taken."""
    return ~mask if mask.dtype == torch.bool else mask


def _one_call(function: Callable[..., Any], *args: Any) -> Any:
    """A function that torch.fx records as one call of its name, whatever it does inside."""
    for arg in args:
        if isinstance(arg, fx.Proxy):
            return arg.tracer.create_proxy("call_function", function, args, {})
    return function(*args)


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
    if module.bias_k is not None or module.add_zero_attn:
        raise ValueError(
            "attention with add_bias_kv or add_zero_attn is not written out; leave it out instead."
        )
    batched, alike = query.dim() == 3, query is key and key is value
    query = _samples_first(module, query)
    key = query if alike else _samples_first(module, key)
    value = query if alike else _samples_first(module, value)
    q, k, v = _projected(module, query, key, value)
    if not batched:
        key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
    heads, width = module.num_heads, module.head_dim
    # (m, L, E) -> (m, heads, L, d)
    q, k, v = (torch.unflatten(x, -1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    scores = (q * (1 / math.sqrt(width))) @ k.transpose(-2, -1)
    if attn_mask is not None:
        attn_mask = _one_call(logical_not, attn_mask)
        if attn_mask.dim() == 3:  # one for each head of each sample
            attn_mask = torch.unflatten(attn_mask, 0, (-1, heads))
        scores = _one_call(masked_fill, scores, attn_mask)
    if key_padding_mask is not None:
        padding = _one_call(logical_not, key_padding_mask)[:, None, None]
        scores = _one_call(masked_fill, scores, padding)
    attended = torch.softmax(scores, -1)
    if module.dropout:
        attended = F.dropout(attended, module.dropout, module.training)
    out = (attended @ v).transpose(1, 2).flatten(-2)
    out = F.linear(out, module.out_proj.weight, module.out_proj.bias)
    if not batched:
        out = out.squeeze(0)
    elif not module.batch_first:
        out = out.transpose(0, 1)
    if not need_weights:
        return out, None
    seen = attended.mean(1) if average_attn_weights else attended
    return out, seen if batched else seen[0]


def _samples_first(module: nn.MultiheadAttention, x: Tensor) -> Tensor:
    """(L, m, E) or (L, E) to (m, L, E), as states are to be."""
    if x.dim() == 2:
        return x.unsqueeze(0)
    return x if module.batch_first else x.transpose(0, 1)


def _projected(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Any, ...]:
    """Queries, keys and values: one product where all are made of the same states."""
    inputs, bias = (query, key, value), module.in_proj_bias
    weight = module.in_proj_weight
    if weight is not None and query is key and key is value:
        parts = F.linear(query, weight, bias).chunk(3, -1)
        return parts[0], parts[1], parts[2]
    biases: Any = [None] * 3 if bias is None else bias.chunk(3)
    weights: Any = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    weights = weights if weight is None else weight.chunk(3)
    return tuple(F.linear(x, weights[i], biases[i]) for i, x in enumerate(inputs))


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


# recurrent layers

#: The hidden state, and what else is carried from step to step.
Carried = tuple[Tensor, ...]


def _lstm(z: Tensor, carried: Carried, W: Tensor, b: Any, projection: Any = None) -> Carried:
    """``c = f c + i g``, ``h = o tanh(c)``: gates i, f, o are sigmoids and g is a tanh."""
    h, c = carried
    z = z + F.linear(h, W, b)
    width = z.shape[-1] // 4
    i_f, g, o = (z.narrow(-1, at * width, n * width) for at, n in ((0, 2), (2, 1), (3, 1)))
    gates = torch.sigmoid(torch.cat([i_f, o], -1))
    i, f, o = (gates.narrow(-1, at * width, width) for at in range(3))
    c = f * c + i * torch.tanh(g)
    h = o * torch.tanh(c)
    return (h if projection is None else F.linear(h, projection)), c


def _gru(z: Tensor, carried: Carried, W: Tensor, b: Any) -> Carried:
    """``n = tanh(z_n + r (W h)_n)``, ``h = (1 - u) n + u h``: gates r and u are sigmoids."""
    (h,), width = carried, z.shape[-1] // 3
    across = F.linear(h, W, b)
    (z_gates, z_n), (h_gates, h_n) = (
        (x.narrow(-1, 0, 2 * width), x.narrow(-1, 2 * width, width)) for x in (z, across)
    )
    gates = torch.sigmoid(z_gates + h_gates)
    r, u = gates.narrow(-1, 0, width), gates.narrow(-1, width, width)
    n = torch.tanh(z_n + r * h_n)
    return (n - u * n + u * h,)


CELLS: dict[str, Callable[..., Carried]] = {
    "RNN_TANH": lambda z, carried, W, b: (torch.tanh(z + F.linear(carried[0], W, b)),),
    "RNN_RELU": lambda z, carried, W, b: (torch.relu(z + F.linear(carried[0], W, b)),),
    "LSTM": _lstm,
    "GRU": _gru,
}


def _recurrent(module: nn.RNNBase, x: Any, hx: Any = None) -> tuple[Any, Any]:
    """All layers and directions over all steps: the outputs, and what is carried at the end."""
    if x.dim() != 3:
        raise ValueError("a recurrent layer is written out for batches, (m, steps, features).")
    if not module.batch_first:
        x = x.transpose(0, 1)  # states have their samples first
    directions, lstm = 1 + module.bidirectional, module.mode == "LSTM"
    if hx is None:
        widths = (module.proj_size or module.hidden_size, module.hidden_size)
        start = tuple(
            x.new_zeros(module.num_layers * directions, x.shape[0], width)
            for width in widths[: 1 + lstm]
        )
    else:
        start = tuple(hx) if lstm else (hx,)
    cell, ends = CELLS[module.mode], []
    for layer in range(module.num_layers):
        outputs = []
        for direction in range(directions):
            w_ih, w_hh, b_ih, b_hh, projection = _weights(module, layer, direction)
            steps = list(F.linear(x, w_ih, b_ih).unbind(1))
            carried, passed = tuple(whole[layer * directions + direction] for whole in start), []
            for step in reversed(steps) if direction else steps:
                carried = cell(step, carried, w_hh, b_hh, *projection)
                passed.append(carried[0])
            outputs.append(torch.stack(passed[::-1] if direction else passed, 1))
            ends.append(carried)
        x = torch.cat(outputs, -1) if module.bidirectional else outputs[0]
        if module.dropout and layer < module.num_layers - 1:
            x = F.dropout(x, module.dropout, module.training)
    whole_ends = tuple(torch.stack(list(parts)) for parts in zip(*ends, strict=True))
    x = x if module.batch_first else x.transpose(0, 1)
    return x, whole_ends if lstm else whole_ends[0]


def _weights(module: nn.RNNBase, layer: int, direction: int) -> tuple[Any, ...]:
    end = f"l{layer}{'_reverse' if direction else ''}"
    biases = [
        getattr(module, f"bias_{kind}_{end}") if module.bias else None for kind in ("ih", "hh")
    ]
    projection = [getattr(module, f"weight_hr_{end}")] if module.proj_size else []
    weights = (getattr(module, f"weight_{kind}_{end}") for kind in ("ih", "hh"))
    return *weights, *biases, projection


def _cell(module: nn.RNNCellBase, x: Tensor, hx: Any = None) -> Any:
    lstm = isinstance(module, nn.LSTMCell)
    if hx is None:
        hx = (x.new_zeros(x.shape[0], module.hidden_size),) * (1 + lstm)
    else:
        hx = tuple(hx) if lstm else (hx,)
    mode = f"RNN_{module.nonlinearity.upper()}" if isinstance(module, nn.RNNCell) else ""
    cell = CELLS[mode or type(module).__name__.removesuffix("Cell")]
    ends = cell(F.linear(x, module.weight_ih, module.bias_ih), hx, module.weight_hh, module.bias_hh)
    return ends if lstm else ends[0]


#: Each is called with the module and what the module is called with.
_MODULES: dict[type[nn.Module], Callable[..., Any]] = {
    nn.PReLU: lambda m, x: prelu(x, m.weight),
    nn.LayerNorm: lambda m, x: layer_norm(x, m.normalized_shape, m.weight, m.bias, m.eps),
    nn.RMSNorm: lambda m, x: rms_norm(x, m.normalized_shape, m.weight, m.eps),
    nn.GroupNorm: lambda m, x: group_norm(x, m.num_groups, m.weight, m.bias, m.eps),
    nn.MultiheadAttention: _multihead,
    nn.TransformerEncoderLayer: _encoder_layer,
    nn.TransformerEncoder: _encoder,
    **dict.fromkeys((nn.RNN, nn.LSTM, nn.GRU), _recurrent),
    **dict.fromkeys((nn.RNNCell, nn.LSTMCell, nn.GRUCell), _cell),
}
_NORMS = (F.layer_norm, F.rms_norm, F.group_norm)
_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.prelu: prelu,
    F.prelu: prelu,
    F.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    F.group_norm: group_norm,
    F.scaled_dot_product_attention: scaled_dot_product_attention,
}


def simpler_module(module: nn.Module) -> Callable[..., Any] | None:
    """What does the same as the module in simpler calls; None where it is simple already."""
    norm = isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm)
    if norm and next(module.parameters(), None) is None:
        return None
    return _MODULES.get(type(module))


def simpler_function(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[..., Any] | None:
    """What does the same as a call in simpler calls; None where it is simple already."""
    if function in _NORMS:
        weights = (*args[2:4], kwargs.get("weight"), kwargs.get("bias"))
        if not any(isinstance(weight, Tensor | fx.Proxy) for weight in weights):
            return None
    return _FUNCTIONS.get(function)
