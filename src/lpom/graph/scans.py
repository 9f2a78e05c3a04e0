r"""Recurrent layers over all their steps at once: forwards, and backwards by LPOM's rule.

The same numbers as `lpom.graph.recurrence` gives, written out step by step, in one sweep down with
every gap of the same weight. `lpom.graph.cells` goes through the steps; sums over them are one
product each, :math:`\nabla W_{hh} = \sum_t R_t^T h_{t-1}`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn

from lpom.graph.cells import CELLS, Carried, Cell, Matrices

#: Columns come in multiples of this: products over all steps take a tenth less time.
LANES = 16


@dataclass
class _Pass:
    """What one layer in one direction knows of a batch, in the order in which steps are taken."""

    B: Tensor  # (x, 1, h before it) of every step
    W: Matrices
    started: bool
    known: Any
    R: Tensor | None = None  # of the gates
    R_across: Tensor | None = None  # of the recurrent product


@dataclass
class Memory:
    """What a scan knows of a batch: each layer and direction, and where sequences have ended."""

    passes: list[_Pass]
    ended: Tensor | None = None  # (steps, m, 1)


@final
@dataclass(frozen=True)
class Scan:
    """All layers and directions of a recurrent module, without projection or dropout.

    Weights lie as torch's functions have them: for each layer and direction ``w_ih, w_hh``, with
    ``bias`` ``b_ih, b_hh``.
    """

    mode: str
    bias: bool = True
    n_layers: int = 1
    bidirectional: bool = False

    @cached_property
    def cell(self) -> Cell:
        return CELLS[self.mode]

    def _weights(self, weights: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        size = 4 if self.bias else 2
        return [weights[k : k + size] for k in range(0, len(weights), size)]

    def forward(
        self,
        x: Tensor,
        start: Sequence[Tensor],
        weights: Sequence[Tensor],
        ended: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...], Memory]:
        """Outputs (steps, m, width), what is carried on as torch stacks it, and what is known.

        x is (steps, m, features); without a ``start`` states begin at zero. Where a sequence has
        ``ended``, (steps, m, 1), outputs are zero; on the way back it has not begun. It has no
        start then, and what is carried on goes beyond the end.
        """
        passes, ends = [], []
        given = self._weights(weights)
        for layer in range(self.n_layers):
            outputs = []
            for d in range(1 + self.bidirectional):
                k = layer * (1 + self.bidirectional) + d
                begin: Carried = [part[k] for part in start] or [None] * self.cell.n_carried
                W = self._matrices(*given[k])
                B = self._columns(x, W, begin[0], ended, back=bool(d))
                end, known = self.cell.forward(B, W, begin)
                passes.append(_Pass(B, W, bool(start), known))
                ends.append(end)
                outputs.append(_turned(W.hidden(B), d))
            x = torch.cat(outputs, -1) if self.bidirectional else outputs[0]
            x = x if ended is None else x.masked_fill(ended, 0)
        stacked = tuple(torch.stack(parts) for parts in zip(*ends, strict=True))
        return x, stacked, Memory(passes, ended)

    def _matrices(
        self, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
    ) -> Matrices:
        """The weights side by side, as the cell has them."""
        if b_ih is None or b_hh is None:
            parts = [w_ih], [w_hh]
        elif self.cell.apart:
            parts = [w_ih, b_ih[:, None]], [b_hh[:, None], w_hh]
        else:
            parts = [w_ih, (b_ih + b_hh)[:, None]], [w_hh]
        n, width = w_ih.shape[1], w_hh.shape[1]
        lacking = -(n + self.bias + width) % LANES
        parts[0].insert(1, w_ih.new_zeros(len(w_ih), lacking))
        sides = parts if self.cell.apart else (parts[0] + parts[1],)
        joined = [self.cell.scale_(torch.cat(side, 1)) for side in sides]
        return Matrices(joined[0], joined[-1], n, width)

    def _columns(
        self, x: Tensor, W: Matrices, h: Tensor | None, ended: Tensor | None, back: bool
    ) -> Tensor:
        """``(x, 1, h)`` of every step, h to be filled in; zero where a sequence has ended."""
        end = W.below.shape[1] - (0 if self.cell.apart else W.width)
        B = x.new_empty(len(x) + 1, x.shape[1], end + W.width)
        B[:-1, :, : W.n_inputs] = _turned(x, back)
        B[:-1, :, W.n_inputs : end] = 1
        if ended is not None:  # without an input and a bias a state of zero stays zero
            B[:-1, :, :end].masked_fill_(_turned(ended, back), 0)
        B[0, :, end:] = 0 if h is None else h
        return B

    def backward(
        self,
        memory: Memory,
        P: Tensor,
        ends: Sequence[Tensor | None],
        *,
        down: bool,
        share: float = 1.0,
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """The pull on x where it is wanted (``down``), and those on the start if there was one.

        ``share * P`` is the pull on the outputs, ``ends`` are those on what was carried on.
        """
        n_directions = 1 + self.bidirectional
        starts: list[list[Tensor]] = [[]] * len(memory.passes)
        below: Tensor | None = P
        for layer in reversed(range(self.n_layers)):
            assert below is not None
            pulls, below = _where_there(below, memory.ended).chunk(n_directions, -1), None
            for d, pull in enumerate(pulls):
                k = layer * n_directions + d
                one = memory.passes[k]
                end = [None if part is None else part[k].clone() for part in ends]
                one.R, one.R_across, starts[k] = self.cell.backward(
                    one.known, _by_step(_turned(pull, d)), share, end, one.W, one.started
                )
                one.known = None
                if layer or down:
                    found = _turned(one.R @ one.W.below[:, : one.W.n_inputs], d)
                    below = found if below is None else below.add_(found)
            share = 1.0
        below = None if below is None else _where_there(below, memory.ended)
        return below, tuple(torch.stack(parts) for parts in zip(*starts, strict=True))

    def gradients(
        self,
        memory: Memory,
        wanted: Sequence[bool],
        weight: Tensor | None = None,
        share: float = 1.0,
    ) -> Iterator[tuple[int, Tensor]]:
        """``share`` times the gradient of each weight that is wanted, by its place.

        ``weight`` is that of the samples.
        """
        size = 4 if self.bias else 2
        for k, one in enumerate(memory.passes):
            asked = wanted[size * k : size * (k + 1)]
            if not any(asked):
                continue
            R, across, W = one.R, one.R_across, one.W
            assert R is not None and across is not None
            if weight is not None:
                R, across = (part * weight.view(-1, 1) for part in (R, across))
            start = 0 if one.started else W.width
            if self.cell.apart:
                below = self._product(R, W.heard(one.B), share)
                recurrent = self._product(across, W.recalled(one.B), share, zeros=start)
            else:
                below = recurrent = self._product(R, one.B, share, zeros=start)
            found = [below[:, : W.n_inputs], recurrent[:, -W.width :]]
            if self.bias:
                ones = below.shape[1] - 1 - (0 if self.cell.apart else W.width)
                found += [below[:, ones], recurrent[:, -W.width - 1]]
            for place, (gradient, ask) in enumerate(zip(found, asked, strict=True)):
                if ask:
                    yield size * k + place, gradient

    def _product(self, R: Tensor, B: Tensor, share: float, zeros: int = 0) -> Tensor:
        """``share * R.T B`` over all steps, turned round: that takes less time where R is the
        wider. At the first step so many of the last columns of B are zeros.
        """
        n_columns, first = B.shape[-1], 1 if zeros else 0
        columns = B[first:-1].reshape(-1, n_columns).T
        residuals = R[first:].reshape(-1, R.shape[-1])
        found = torch.addmm(R.new_zeros(()), columns, residuals, beta=0, alpha=share)
        if first:
            columns = B[0, :, : n_columns - zeros].T
            found[: n_columns - zeros].addmm_(columns, R[0], alpha=share)
        return self.cell.scale_(found.T)


def _turned(x: Tensor, back: int) -> Tensor:
    """Steps in the order in which they are taken, or from it."""
    return x.flip(0) if back else x


def _by_step(P: Tensor) -> list[Tensor | None]:
    """The pull of each step, None where nobody pulls: a prediction from the last one alone.

    To look costs less than to add zeros, where looking does not wait for another device.
    """
    if P.device.type != "cpu" or not P.numel():
        return list(P.unbind(0))
    ends = zip(P.amin((1, 2)).tolist(), P.amax((1, 2)).tolist(), strict=True)
    return [None if low == high == 0 else p for p, (low, high) in zip(P, ends, strict=True)]


def _where_there(x: Tensor, ended: Tensor | None) -> Tensor:
    return x if ended is None else x.masked_fill(ended, 0)


@final
class Layer:
    """A recurrent module as one map from inputs to outputs, (m, steps, features) both.

    The module keeps the weights.
    """

    def __init__(self, module: nn.RNNBase) -> None:
        self.module = module
        self.scan = Scan(module.mode, module.bias, module.num_layers, module.bidirectional)

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether it is a recurrent module with nothing in it that a scan does not have."""
        if type(module) not in (nn.RNN, nn.LSTM, nn.GRU) or not isinstance(module, nn.RNNBase):
            return False
        dropped = module.dropout and module.num_layers > 1
        hooked = module._forward_hooks or module._forward_pre_hooks
        return not (module.proj_size or dropped or hooked)

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return tuple(getattr(self.module, name) for name in self.module._flat_weights_names)

    def forward(self, x: Tensor, there: Tensor | None = None) -> tuple[Tensor, Memory]:
        """The outputs; where a step is not ``there``, (m, steps), they are zero."""
        ended = None if there is None else ~there.T[..., None]
        outputs, _, memory = self.scan.forward(x.transpose(0, 1), (), self.parameters, ended)
        return outputs.transpose(0, 1), memory

    def backward(self, memory: Memory, P: Tensor, *, down: bool) -> Tensor | None:
        """The pull on x where it is wanted; P is that on the outputs."""
        ends = [None] * self.scan.cell.n_carried
        below, _ = self.scan.backward(memory, P.transpose(0, 1), ends, down=down)
        return None if below is None else below.transpose(0, 1)

    def gradients(
        self, memory: Memory, weight: Tensor | None
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """As `Scan.gradients`, of the weights that learn."""
        weights = self.parameters
        wanted = [parameter.requires_grad for parameter in weights]
        for k, gradient in self.scan.gradients(memory, wanted, weight):
            yield weights[k], gradient


@dataclass(frozen=True)
class Call:
    """A call of one of torch's recurrent functions, as a scan and what it is given.

    ``start`` is empty where it is zero.
    """

    scan: Scan
    x: Tensor
    start: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    batch_first: bool

    @property
    def n_steps(self) -> int:
        """How often a cell is called."""
        steps: int = self.x.shape[1 if self.batch_first else 0]
        return steps * self.scan.n_layers * (1 + self.scan.bidirectional)


MODES = {
    torch.lstm: "LSTM",
    torch.gru: "GRU",
    torch.rnn_tanh: "RNN_TANH",
    torch.rnn_relu: "RNN_RELU",
}


def called(function: Any, args: Sequence[Any]) -> Call | None:
    """What a call of torch is as a scan; None where it is none, or has packed sequences in it.

    Projections, dropout, half precision and calls that are being compiled have none either.
    """
    mode = MODES.get(function)
    if mode is None or len(args) != 9 or not isinstance(args[2], list | tuple):
        return None
    x, hx, weights, bias, n_layers, dropout, training, bidirectional, batch_first = args
    scan = Scan(mode, bias, n_layers, bidirectional)
    plain = len(weights) == n_layers * (1 + bidirectional) * (4 if bias else 2)
    dropped = dropout and training and n_layers > 1
    if not plain or dropped or x.dtype not in (torch.float32, torch.float64):
        return None
    if torch.is_autocast_enabled(x.device.type) or torch.compiler.is_compiling():
        return None
    start = tuple(hx) if mode == "LSTM" else (hx,)
    if x.device.type == "cpu" and not any(part.requires_grad or part.any() for part in start):
        start = ()  # as modules have it that are given none: a product less
    return Call(scan, x, start, tuple(weights), batch_first)
