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
        ctx.kind, ctx.rule, ctx.n_states = kind, rule, n_states
        if kind.startswith("rnn"):
            Z, h = _forward(kind, x, start[0], *weights)
            ctx.save_for_backward(x, h, Z, *tensors)
            return h, h[-1].clone()
        begin = tuple(part[None].contiguous() for part in start)
        h, *end = getattr(torch, kind)(
            x, begin if kind == "lstm" else begin[0], weights, len(weights) == 4, 1, 0.0, False,
            False, False,
        )  # fmt: skip
        ctx.save_for_backward(x, h, None, *tensors)
        return h, *(part[0] for part in end)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor, *ends: Tensor) -> tuple[Tensor | None, ...]:
        x, h, Z, *tensors = ctx.saved_tensors
        start, (w_ih, w_hh, *biases) = tensors[: ctx.n_states], tensors[ctx.n_states :]
        before = torch.cat([start[0][None], h[:-1]])
        if Z is not None:
            R, R_across, starts = _rnn(ctx, Z, w_hh, g, ends)
        else:
            below, across = F.linear(x, w_ih, *biases[:1]), F.linear(before, w_hh, *biases[1:])
            back = _lstm if ctx.kind == "lstm" else _gru
            R, R_across, starts = back(ctx, below, across, before, start, w_hh, g, ends)
        flat, flat_across = R.flatten(0, 1), R_across.flatten(0, 1)
        found = [flat.T @ x.flatten(0, 1), flat_across.T @ before.flatten(0, 1)]
        if biases:
            found += [flat.sum(0), flat_across.sum(0)]
        return None, None, R @ w_ih, *starts, *found


def _forward(
    kind: str, x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, *biases: Tensor
) -> tuple[Tensor, Tensor]:
    """Pre-activations and h of every step, where torch's loop is no faster than this one."""
    Z = F.linear(x, w_ih, biases[0] + biases[1] if biases else None)
    H, phi, W = torch.empty_like(Z), torch.tanh if kind == "rnn_tanh" else torch.relu, w_hh.T
    for z, out in zip(Z.unbind(0), H.unbind(0), strict=True):
        h = out.copy_(phi(z.addmm_(h, W)))
    return Z, H


def _rnn(ctx: Any, Z: Tensor, W: Tensor, g: Tensor, ends: Any) -> Any:
    slopes = _slopes(ctx.rule, _tanh if ctx.kind == "rnn_tanh" else torch.relu, Z)
    R, down = torch.empty_like(Z), ends[0]
    for r, pull, *slope in _backwards(R, g, *slopes):
        pull = pull + down
        torch.mul(pull, _chosen(slope, pull), out=r)
        down = r @ W
    return R, R, (down,)


def _lstm(
    ctx: Any, below: Tensor, across: Tensor, before: Tensor, start: Any, W: Tensor, g: Tensor,
    ends: Any,
) -> Any:  # fmt: skip
    width = below.shape[-1] // 4
    Z = below.add_(across)
    moved = torch.ones(4 * width, dtype=Z.dtype, device=Z.device)
    moved[2 * width : 3 * width] = 2  # where the gate is a tanh, 2 sigmoid(2 z) - 1
    d = ctx.rule.size * spread(Z)
    Z *= moved
    gates = torch.sigmoid(Z)
    gates[..., 2 * width : 3 * width].mul_(2).sub_(1)
    slopes = _slopes(ctx.rule, torch.sigmoid, Z, d, moved)
    i, f, a, o = gates.chunk(4, -1)
    C = torch.empty(len(Z), *start[1].shape, dtype=Z.dtype, device=Z.device)
    c = start[1]
    for t, entering in enumerate(i * a):
        c = torch.addcmul(entering, f[t], c, out=C[t])
    top_slopes = _slopes(ctx.rule, _tanh, C)
    # what meets the pull on c: i gets a, f the c before, a gets i; o gets the top by that on h
    factors = torch.stack([a, torch.cat([start[1][None], C[:-1]]), i, _tanh(C)], 2)
    R, down, down_c = torch.empty_like(factors), ends[0], ends[1]
    steps = _backwards(R, factors, g, o, f, *top_slopes, *(s.view_as(R) for s in slopes))
    for r, factor, pull, o_t, f_t, *rest in steps:
        pull = pull + down
        slope_c, slope = rest[: len(slopes)], rest[len(slopes) :]
        opened = pull * o_t
        down_c = torch.addcmul(down_c, opened, _chosen(slope_c, opened))
        torch.mul(factor[:, :3], down_c[:, None], out=r[:, :3])
        torch.mul(factor[:, 3], pull, out=r[:, 3])
        r *= _chosen(slope, r)
        down = r.flatten(1) @ W
        down_c = down_c * f_t
    R = R.flatten(2)
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
    slopes, slopes_n = _slopes(ctx.rule, torch.sigmoid, Z), _slopes(ctx.rule, _tanh, Z_n)
    factors = torch.cat([reset, before - _tanh(Z_n)], -1)
    R, R_across, down = torch.empty_like(below), torch.empty_like(below), ends[0]
    steps = _backwards(R, R_across, factors, g, r, u, *slopes_n, *slopes)
    for own, onwards, factor, pull, r_t, u_t, *rest in steps:
        slope_n, slope = rest[: len(slopes)], rest[len(slopes) :]
        pull = pull + down
        kept = pull * u_t
        new = pull - kept
        new = new * _chosen(slope_n, new)
        gates = torch.cat([new, pull], -1).mul_(factor)
        gates *= _chosen(slope, gates)
        torch.cat([gates, new], -1, out=own)
        torch.cat([gates, new * r_t], -1, out=onwards)
        down = torch.addmm(kept, onwards, W)
    return R, R_across, (down,)


def _backwards(*tensors: Tensor) -> Any:
    """Step by step, the last one first."""
    return zip(*(reversed(t.unbind(0)) for t in tensors), strict=True)


def _tanh(z: Tensor) -> Tensor:
    """The same function, in an eighth of the time of torch.tanh on a processor."""
    return torch.sigmoid(2 * z).mul_(2).sub_(1)


def _slopes(
    rule: Displacement,
    phi: Any,
    z: Tensor,
    d: Tensor | None = None,
    moved: Tensor | float = 1.0,
) -> Slope:
    """What the rule multiplies a gradient by; from one side by its sign, below and above z.

    Where columns of z were multiplied by what they are ``moved`` by, and phi of them is as much
    steeper, the slope is that of the function of what they were.
    """
    d = rule.size * spread(z) if d is None else d
    scale = moved / d
    low, high = phi(z - moved * d), phi(z + moved * d)
    if rule.sides == 2:
        return (high.sub_(low).mul_(scale / 2),)
    x = phi(z)
    return (x - low).mul_(scale), (high - x).mul_(scale)


def _chosen(slope: Any, g: Tensor) -> Tensor:
    """The slope on the side that a gradient moves to."""
    return slope[0] if len(slope) == 1 else torch.where(g > 0, slope[0], slope[1])


#: The autograd functions that are the rule's.
FUNCTIONS = (Layer,)
