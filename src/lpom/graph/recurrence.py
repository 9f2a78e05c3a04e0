r"""Recurrent layers, written out step by step with their own parameters.

The inputs of all steps meet their weights at once, in one product on (m, steps, features); step by
step there is left

.. math:: Z_t = (X W_{ih}^T + b_{ih})_t + h_{t-1} W_{hh}^T + b_{hh}

and what the kind of layer makes of it. Gates are activations; their products with what they let
through are edges that are affine in each factor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpom.graph.lengths import Packed, steps_but_last
from lpom.graph.recording import record

#: The hidden state, and what else is carried from step to step.
Carried = tuple[Tensor, ...]
Cell = Callable[..., Carried]


def tanh_cell(z: Tensor, carried: Carried, weight: Tensor, bias: Tensor | None) -> Carried:
    return (torch.tanh(z + F.linear(carried[0], weight, bias)),)


def relu_cell(z: Tensor, carried: Carried, weight: Tensor, bias: Tensor | None) -> Carried:
    return (torch.relu(z + F.linear(carried[0], weight, bias)),)


def lstm_cell(
    z: Tensor,
    carried: Carried,
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor | None = None,
) -> Carried:
    """``c = f c + i g``, ``h = o tanh(c)``: gates i, f, o are sigmoids and g is a tanh."""
    h, c = carried
    i_f, g, o = _columns(z + F.linear(h, weight, bias), (2, 1, 1))
    i, f, o = _columns(torch.sigmoid(torch.cat([i_f, o], -1)), (1, 1, 1))
    c = f * c + i * torch.tanh(g)
    h = o * torch.tanh(c)
    return (h if projection is None else F.linear(h, projection)), c


def gru_cell(z: Tensor, carried: Carried, weight: Tensor, bias: Tensor | None) -> Carried:
    """``n = tanh(z_n + r (W h)_n)``, ``h = (1 - u) n + u h``: gates r and u are sigmoids."""
    (h,) = carried
    gates, below = _columns(z, (2, 1))
    across, reset = _columns(F.linear(h, weight, bias), (2, 1))
    r, u = _columns(torch.sigmoid(gates + across), (1, 1))
    n = torch.tanh(below + r * reset)
    return (n - u * n + u * h,)


def _columns(x: Tensor, shares: Sequence[int]) -> list[Tensor]:
    """Views of the columns, as wide as their shares."""
    unit, at, found = x.shape[-1] // sum(shares), 0, []
    for share in shares:
        found.append(torch.narrow(x, -1, at * unit, share * unit))
        at += share
    return found


CELLS: dict[str, Cell] = {
    "RNN_TANH": tanh_cell,
    "RNN_RELU": relu_cell,
    "LSTM": lstm_cell,
    "GRU": gru_cell,
}


def unrolled(
    cell: Cell,
    x: Tensor,
    start: Carried,
    weights: Sequence[Tensor],
    *,
    bias: bool,
    n_layers: int,
    bidirectional: bool,
    time: int,
    dropout: float,
    training: bool,
    there: Tensor | None = None,
) -> tuple[Tensor, Carried]:
    """All layers and directions over all steps: the outputs, and what is carried at the end.

    ``start`` and the end have shape (layers x directions, m, width). ``weights`` lie as torch's
    functions have them: for each layer and direction ``w_ih, w_hh``, with ``bias`` ``b_ih, b_hh``,
    and a projection where there is one. ``time`` is the dimension of the steps.

    Where ``there``, (m, steps), is False a sequence has ended: outputs are zero, its end is what
    was carried before, and on the way back it has not yet begun.
    """
    ended: Sequence[Tensor] = ()
    if there is not None:
        ended = list((~there).unsqueeze(-1).unbind(1))
        others = record(steps_but_last, there).transpose(0, 1)
    n_directions = 1 + bidirectional
    per_direction = len(weights) // (n_layers * n_directions)
    ends: list[Carried] = []
    for layer in range(n_layers):
        outputs = []
        for direction in range(n_directions):
            k = layer * n_directions + direction
            w_ih, w_hh, *rest = weights[k * per_direction : (k + 1) * per_direction]
            b_ih, b_hh = (rest.pop(0), rest.pop(0)) if bias else (None, None)
            steps = list(F.linear(x, w_ih, b_ih).unbind(time))
            begin = carried = tuple(whole[k] for whole in start)
            passed: list[Carried] = []
            order = range(len(steps))
            for t in reversed(order) if direction else order:
                if ended and passed:  # nothing is carried over an end, in neither direction
                    over = ended[t + direction]
                    carried = tuple(
                        torch.where(over, a, b) for a, b in zip(begin, carried, strict=True)
                    )
                carried = cell(steps[t], carried, w_hh, b_hh, *rest)
                passed.append(carried)
            if there is not None and not direction:
                carried = tuple(
                    torch.stack(list(parts)).masked_fill(others, 0.0).sum(0)
                    for parts in zip(*passed, strict=True)
                )
            given = [parts[0] for parts in (passed[::-1] if direction else passed)]
            if there is not None:
                given = [h.masked_fill(end, 0.0) for h, end in zip(given, ended, strict=True)]
            outputs.append(torch.stack(given, time))
            ends.append(carried)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and layer < n_layers - 1:
            x = F.dropout(x, dropout, training)
    return x, tuple(torch.stack(list(parts)) for parts in zip(*ends, strict=True))


# modules, as the tracer meets them


def _layers(module: nn.RNNBase, x: Any, hx: Any = None) -> tuple[Any, Any]:
    packed = x if isinstance(x, Packed) else None
    if packed is not None:
        x = packed.x
    elif not module.batch_first:
        x = x.transpose(0, 1)  # states have their samples first
    lstm = module.mode == "LSTM"
    if hx is None:
        count = module.num_layers * (1 + module.bidirectional)
        widths = (module.proj_size or module.hidden_size, module.hidden_size)
        hx = tuple(x.new_zeros(count, x.shape[0], width) for width in widths[: 1 + lstm])
    else:
        hx = tuple(hx) if lstm else (hx,)
    output, ends = unrolled(
        CELLS[module.mode],
        x,
        hx,
        [getattr(module, name) for name in module._flat_weights_names],
        bias=module.bias,
        n_layers=module.num_layers,
        bidirectional=module.bidirectional,
        time=1,
        dropout=module.dropout,
        training=module.training,
        there=None if packed is None else packed.there,
    )
    if packed is not None:
        return replace(packed, x=output), ends if lstm else ends[0]
    return output if module.batch_first else output.transpose(0, 1), ends if lstm else ends[0]


def _cell(module: nn.RNNCellBase, x: Tensor, hx: Any = None) -> Any:
    lstm = isinstance(module, nn.LSTMCell)
    if hx is None:
        hx = (x.new_zeros(x.shape[0], module.hidden_size),) * (1 + lstm)
    else:
        hx = tuple(hx) if lstm else (hx,)
    mode = f"RNN_{module.nonlinearity.upper()}" if isinstance(module, nn.RNNCell) else ""
    cell = CELLS[mode or type(module).__name__.removesuffix("Cell")]
    z = F.linear(x, module.weight_ih, module.bias_ih)
    ends = cell(z, hx, module.weight_hh, module.bias_hh)
    return ends if lstm else ends[0]


MODULES: dict[type[nn.Module], Callable[..., Any]] = {
    **dict.fromkeys((nn.RNN, nn.LSTM, nn.GRU), _layers),
    **dict.fromkeys((nn.RNNCell, nn.LSTMCell, nn.GRUCell), _cell),
}


# functions, as they are called in a model that runs


def _function(mode: str) -> Callable[..., Any]:
    cell, lstm = CELLS[mode], mode == "LSTM"

    def call(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
        """The layers; or, with the sizes of the batch at each step second, packed sequences."""
        packed = isinstance(args[0], Tensor) and not args[0].is_floating_point()
        sizes, args = (args[0], args[1:]) if packed else (None, args)
        hx, weights, bias, n_layers, dropout, training, bidirectional, *first = args
        hx = tuple(hx) if lstm else (hx,)
        there = None
        if sizes is not None:
            counts = [int(size) for size in sizes]
            there = torch.arange(counts[0], device=x.device)[:, None] < sizes.to(x.device)
            x = torch.stack(
                [F.pad(part, (0, 0, 0, counts[0] - len(part))) for part in torch.split(x, counts)]
            )
        output, ends = unrolled(
            cell,
            x,
            hx,
            weights,
            bias=bias,
            n_layers=n_layers,
            bidirectional=bidirectional,
            time=1 if first and first[0] else 0,
            dropout=dropout,
            training=training,
            there=there,
        )
        if sizes is not None:
            output = torch.cat([out[:count] for out, count in zip(output, counts, strict=True)])
        return output, *ends

    return call


def _cell_function(mode: str) -> Callable[..., Any]:
    cell, lstm = CELLS[mode], mode == "LSTM"

    def call(
        x: Tensor,
        hx: Any,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Any:
        ends = cell(F.linear(x, w_ih, b_ih), tuple(hx) if lstm else (hx,), w_hh, b_hh)
        return ends if lstm else ends[0]

    return call


FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.rnn_tanh: _function("RNN_TANH"),
    torch.rnn_relu: _function("RNN_RELU"),
    torch.lstm: _function("LSTM"),
    torch.gru: _function("GRU"),
    torch.rnn_tanh_cell: _cell_function("RNN_TANH"),
    torch.rnn_relu_cell: _cell_function("RNN_RELU"),
    torch.lstm_cell: _cell_function("LSTM"),
    torch.gru_cell: _cell_function("GRU"),
}
