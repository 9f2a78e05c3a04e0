r"""Recurrent layers under the rule: a fast path over all steps, and the plain way, step by step.

With a held displacement the answer is the gradient times a slope read from phi,
:math:`(\phi(z + d) - \phi(z - d)) / (2 d)`. So torch's own kernel runs forward, the gates of all
steps follow by one product, their slopes by one reading, and what is left to do step by step on the
way back is a product and a few sums. The spread is that of all steps together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lpom.rule import Displacement, spread

#: What torch calls the layers, and single steps of them.
LAYERS = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
NAMES = (*LAYERS, *(f"{name}_cell" for name in LAYERS))

State = tuple[Tensor, ...]
#: One slope of a function, or those below and above z, by the sign of what comes down.
Slope = tuple[Tensor, ...]


def run(mode: Any, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """A call of torch's recurrent functions, by the rule of the ``mode`` that met it."""
    if name.endswith("_cell"):
        kind = name.removesuffix("_cell")
        x, state, w_ih, w_hh, *biases = args
        with mode:
            after = step(kind, F.linear(x, w_ih, *biases[:1]), _tuple(state), w_hh, *biases[1:])
        return after if kind == "lstm" else after[0]
    packed = isinstance(args[1 if name == "lstm" else 2], Tensor)
    data, *others = args
    sizes = others.pop(0) if packed else None
    start, weights, has_biases, n_layers, dropout, training, bidirectional, *rest = others
    batch_first = bool(rest and rest[0])
    x = data.transpose(0, 1) if batch_first and not packed else data
    n_directions, size = 1 + bidirectional, len(weights) // (n_layers * (1 + bidirectional))
    starts, ends = _tuple(start), []
    rule = mode.rule_for(name, "elementwise")
    fast = isinstance(rule, Displacement) and not packed and size == 2 + 2 * has_biases
    fast = fast and not torch.compiler.is_compiling() and x.dtype in (torch.float32, torch.float64)
    for layer in range(n_layers):
        outputs = []
        for direction in range(n_directions):
            k = layer * n_directions + direction
            own = list(weights[k * size : (k + 1) * size])
            begin = tuple(part[k] for part in starts)
            if fast:
                turned = x.flip(0) if direction else x
                h, *end = Layer.apply(name, rule, turned, *begin, *own)  # type: ignore[no-untyped-call]
                h = h.flip(0) if direction else h
            else:
                with mode:
                    h, end = _plainly(name, x, sizes, begin, own, has_biases, bool(direction))
            outputs.append(h)
            ends.append(tuple(end))
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and training and layer + 1 < n_layers:
            x = F.dropout(x, dropout)
    stacked = tuple(torch.stack(parts) for parts in zip(*ends, strict=True))
    return (x.transpose(0, 1) if batch_first and not packed else x), *stacked


def _tuple(state: Any) -> State:
    return (state,) if isinstance(state, Tensor) else tuple(state)


def step(
    kind: str,
    z: Tensor,
    state: State,
    w_hh: Tensor,
    b_hh: Tensor | None = None,
    projection: Tensor | None = None,
) -> State:
    """The state after a step, from what the inputs give to the gates: torch's equations."""
    h = state[0]
    across = F.linear(h, w_hh, b_hh)
    if kind == "lstm":
        i, f, g, o = (z + across).chunk(4, -1)
        c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return (h if projection is None else F.linear(h, projection)), c
    if kind == "gru":
        (r, u, n), (r_h, u_h, n_h) = z.chunk(3, -1), across.chunk(3, -1)
        n = torch.tanh(n + torch.sigmoid(r + r_h) * n_h)
        u = torch.sigmoid(u + u_h)
        return (n + u * (h - n),)
    return ((torch.tanh if kind == "rnn_tanh" else torch.relu)(z + across),)


def _plainly(
    kind: str,
    x: Tensor,
    sizes: Tensor | None,
    start: State,
    weights: Sequence[Tensor],
    has_biases: bool,
    backwards: bool,
) -> tuple[Tensor, State]:
    """A layer in one direction step by step; ``sizes`` are those of a packed sequence's batches."""
    w_ih, w_hh, *rest = weights
    b_ih, b_hh = (rest.pop(0), rest.pop(0)) if has_biases else (None, None)
    Z = F.linear(x, w_ih, b_ih)
    steps = list(Z.unbind(0) if sizes is None else Z.split(sizes.tolist()))
    outputs: list[Tensor] = [Z] * len(steps)
    state = start
    for t in reversed(range(len(steps))) if backwards else range(len(steps)):
        n = len(steps[t])  # of the sequences that have not ended, or have begun
        after = step(kind, steps[t], tuple(s[:n] for s in state), w_hh, b_hh, *rest)
        outputs[t] = after[0]
        state = tuple(torch.cat([new, old[n:]]) for new, old in zip(after, state, strict=True))
    return (torch.stack(outputs) if sizes is None else torch.cat(outputs)), state


class Layer(torch.autograd.Function):
    """One layer in one direction: x (steps, m, features) to h of every step and the last state."""

    @staticmethod
    def forward(ctx: Any, kind: str, rule: Displacement, x: Tensor, *tensors: Tensor) -> Any:
        n_states = 2 if kind == "lstm" else 1
        start, weights = tensors[:n_states], tensors[n_states:]
        begin = tuple(part[None].contiguous() for part in start)
        h, *end = getattr(torch, kind)(
            x, begin if kind == "lstm" else begin[0], weights, len(weights) == 4, 1, 0.0, False,
            False, False,
        )  # fmt: skip
        ctx.save_for_backward(x, h, *tensors)
        ctx.kind, ctx.rule, ctx.n_states = kind, rule, n_states
        return h, *(part[0] for part in end)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor, *ends: Tensor) -> tuple[Tensor | None, ...]:
        x, h, *tensors = ctx.saved_tensors
        start, (w_ih, w_hh, *biases) = tensors[: ctx.n_states], tensors[ctx.n_states :]
        before = torch.cat([start[0][None], h[:-1]])
        below, across = F.linear(x, w_ih, *biases[:1]), F.linear(before, w_hh, *biases[1:])
        back = {"lstm": _lstm, "gru": _gru}.get(ctx.kind, _rnn)
        R, R_across, starts = back(ctx, below, across, before, start, w_hh, g, ends)
        flat, flat_across = R.flatten(0, 1), R_across.flatten(0, 1)
        found = [flat.T @ x.flatten(0, 1), flat_across.T @ before.flatten(0, 1)]
        if biases:
            found += [flat.sum(0), flat_across.sum(0)]
        return None, None, R @ w_ih, *starts, *found


def _rnn(
    ctx: Any, below: Tensor, across: Tensor, before: Tensor, start: Any, W: Tensor, g: Tensor,
    ends: Any,
) -> Any:  # fmt: skip
    Z = below.add_(across)
    slope = _slope(ctx.rule, torch.tanh if ctx.kind == "rnn_tanh" else torch.relu, Z)
    R, down = torch.empty_like(Z), ends[0]
    for t in reversed(range(len(Z))):
        torch.mul(*_at(slope, t, g[t] + down), out=R[t])
        down = R[t] @ W
    return R, R, (down,)


def _lstm(
    ctx: Any, below: Tensor, across: Tensor, before: Tensor, start: Any, W: Tensor, g: Tensor,
    ends: Any,
) -> Any:  # fmt: skip
    Z = below.add_(across)
    width, n = Z.shape[-1] // 4, len(Z)
    gates = torch.sigmoid(Z)
    gates[..., 2 * width : 3 * width] = torch.tanh(Z[..., 2 * width : 3 * width])
    i, f, a, o = gates.chunk(4, -1)
    C = torch.empty_like(before[:, :, :1]).expand(n, Z.shape[1], width).contiguous()
    c = start[1]
    for t in range(n):
        c = torch.addcmul(i[t] * a[t], f[t], c, out=C[t])
    C_before = torch.cat([start[1][None], C[:-1]])
    top = torch.tanh(C)
    d = ctx.rule.size * spread(Z)
    slopes = _slopes(ctx.rule, torch.sigmoid, Z, d)
    tanh_slopes = _slopes(ctx.rule, torch.tanh, Z[..., 2 * width : 3 * width], d)
    for whole, part in zip(slopes, tanh_slopes, strict=True):
        whole[..., 2 * width : 3 * width] = part
    top_slope = _slope(ctx.rule, torch.tanh, C)
    # what meets the pull on c: i gets a, f the c before, a gets i; and o the top by the pull on h
    factors = torch.cat([a, C_before, i, top], -1)
    R, down, down_c = torch.empty_like(Z), ends[0], ends[1]
    for t in reversed(range(n)):
        pull = g[t] + down
        slope, moved = _at(top_slope, t, pull * o[t])
        down_c = torch.addcmul(down_c, slope, moved)
        pulls = torch.cat([down_c, down_c, down_c, pull], -1).mul_(factors[t])
        torch.mul(*_at(slopes, t, pulls), out=R[t])
        down = R[t] @ W
        down_c = down_c * f[t]
    return R, R, (down, down_c)


def _gru(
    ctx: Any, below: Tensor, across: Tensor, before: Tensor, start: Any, W: Tensor, g: Tensor,
    ends: Any,
) -> Any:  # fmt: skip
    width = below.shape[-1] // 3
    Z = below[..., : 2 * width] + across[..., : 2 * width]
    r, u = torch.sigmoid(Z).chunk(2, -1)
    reset = across[..., 2 * width :]
    Z_n = below[..., 2 * width :] + r * reset
    n = torch.tanh(Z_n)
    slope, slope_n = _slope(ctx.rule, torch.sigmoid, Z), _slope(ctx.rule, torch.tanh, Z_n)
    apart = before - n
    R, down = torch.empty_like(below), ends[0]
    R_across = torch.empty_like(below)
    for t in reversed(range(len(below))):
        pull = g[t] + down
        new = torch.mul(*_at(slope_n, t, pull * (1 - u[t])), out=R[t][:, 2 * width :])
        gates = torch.cat([new * reset[t], pull * apart[t]], -1)
        torch.mul(*_at(slope, t, gates), out=R[t][:, : 2 * width])
        R_across[t][:, : 2 * width] = R[t][:, : 2 * width]
        torch.mul(new, r[t], out=R_across[t][:, 2 * width :])
        down = torch.addmm(pull * u[t], R_across[t], W)
    return R, R_across, (down,)


def _slope(rule: Displacement, phi: Any, z: Tensor) -> Slope:
    return _slopes(rule, phi, z, rule.size * spread(z))


def _slopes(rule: Displacement, phi: Any, z: Tensor, d: Tensor) -> Slope:
    """What the rule multiplies a gradient by; from one side by its sign, below and above z."""
    low, high = phi(z - d), phi(z + d)
    if rule.sides == 2:
        return (high.sub_(low).div_(2 * d),)
    x = phi(z)
    return (x - low).div_(d), (high - x).div_(d)


def _at(slope: Slope, t: int, g: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of the answer at a step."""
    if len(slope) == 1:
        return slope[0][t], g
    return torch.where(g > 0, slope[0][t], slope[1][t]), g


#: The autograd functions that are the rule's.
FUNCTIONS = (Layer,)
