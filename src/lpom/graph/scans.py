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
import torch.nn.functional as F
from torch import Tensor, nn

from lpom.graph.cells import CELLS, Carried, Cell


@dataclass
class _Pass:
    """What one layer in one direction knows of a batch."""

    x: Tensor
    H: Tensor
    start: Carried
    known: Any
    weights: tuple[Tensor | None, ...]  # as the cell has them
    R: Tensor | None = None  # of the gates
    R_across: Tensor | None = None  # of the recurrent product


@dataclass
class Memory:
    """What a scan knows of a batch: each layer and direction, and the outputs of the last."""

    outputs: Tensor
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

    def _weights(self, weights: Sequence[Tensor]) -> list[tuple[Tensor | None, ...]]:
        size = 4 if self.bias else 2
        pairs = [tuple(weights[k : k + size]) for k in range(0, len(weights), size)]
        return [(*pair, *[None] * (4 - size)) for pair in pairs]

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
        n_directions, cell = 1 + self.bidirectional, self.cell
        given = self._weights(weights)
        for layer in range(self.n_layers):
            x = x.contiguous()
            width = given[0][1].shape[-1]  # type: ignore[union-attr]
            whole = x.new_empty(*x.shape[:2], n_directions * width)
            for d, H in enumerate(torch.split(whole, width, -1)):
                k = layer * n_directions + d
                w_ih, w_hh, b_ih, b_hh = own = tuple(cell.scaled(w) for w in given[k])
                assert w_ih is not None and w_hh is not None
                across = b_hh if cell.apart else None
                said = b_ih if cell.apart or b_ih is None or b_hh is None else b_ih + b_hh
                Z = F.linear(x, w_ih, said)
                if ended is not None and d:
                    for gate, still in zip(Z.chunk(cell.gates, -1), cell.still, strict=True):
                        gate.masked_fill_(ended, still)
                begin: Carried = tuple(part[k] for part in start) or (None,) * cell.n_carried
                end, known = cell.forward(Z, H, begin, w_hh, across, back=bool(d))
                passes.append(_Pass(x, H, begin, known, own))
                ends.append(end)
            x = whole if ended is None else whole.masked_fill(ended, 0)
        stacked = tuple(torch.stack(parts) for parts in zip(*ends, strict=True))
        return x, stacked, Memory(x, passes, ended)

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
            if memory.ended is not None:
                below = below.masked_fill(memory.ended, 0)
            pulls, below = torch.split(below, below.shape[-1] // n_directions, -1), None
            for d, pull in enumerate(pulls):
                k = layer * n_directions + d
                one = memory.passes[k]
                w_ih, w_hh, *_ = one.weights
                assert w_ih is not None and w_hh is not None
                end = [None if part is None else part[k].clone() for part in ends]
                one.R, one.R_across, starts[k] = self.cell.backward(
                    one.known, pull, share, end, w_hh, bool(d), one.start[0] is not None
                )
                one.known = None
                if memory.ended is not None and d:  # pulls on states before the first step
                    one.R.masked_fill_(memory.ended, 0)
                    one.R_across.masked_fill_(memory.ended, 0)
                if layer or down:
                    found = one.R @ w_ih
                    below = found if below is None else below.add_(found)
            share = 1.0
        return below, tuple(torch.stack(parts) for parts in zip(*starts, strict=True))

    def gradients(
        self, memory: Memory, wanted: Sequence[bool], weight: Tensor | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """The gradient of each weight that is wanted, by its place; some come in two parts.

        ``weight`` is that of the samples.
        """
        size = 4 if self.bias else 2
        for k, one in enumerate(memory.passes):
            R, across, H = one.R, one.R_across, one.H
            assert R is not None and across is not None
            if weight is not None:
                same = across is R
                R = R * weight.view(-1, 1)
                across = R if same else across * weight.view(-1, 1)
            back, h = bool(self.bidirectional and k % 2), one.start[0]
            into, recurrent, *biases = wanted[size * k : size * (k + 1)]
            if into:
                yield size * k, self._product(R, one.x)
            if recurrent:
                earlier = (across[:-1], H[1:]) if back else (across[1:], H[:-1])
                yield size * k + 1, self._product(*earlier)
                if h is not None:
                    yield size * k + 1, self._product(across[-1 if back else 0], h)
            total: Tensor | None = None
            for place, (of, bias) in enumerate(zip((R, across), biases, strict=False)):
                if bias:
                    if total is None or self.cell.apart:
                        total = self.cell.scale_(of.sum((0, 1)))
                    yield size * k + 2 + place, total

    def _product(self, R: Tensor, X: Tensor) -> Tensor:
        """``R.T X`` over all steps, turned round: that takes less time where R is the wider."""
        found = X.reshape(-1, X.shape[-1]).T @ R.reshape(-1, R.shape[-1])
        return self.cell.scale_(found.T)


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
