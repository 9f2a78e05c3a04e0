r"""Recurrent layers over all their steps at once: forwards, and backwards by LPOM's rule.

The same numbers as `lpom.graph.recurrence` gives, written out step by step, in one sweep down with
every gap of the same weight. With :math:`P` for pulls and :math:`R = \phi(Z) - \phi(Z - P)` for the
answers to them, a tanh layer has

.. math:: P_{t} \mathrel{+}= R_{t+1} W_{hh}, \qquad \nabla W_{hh} = \sum_t R_t^T h_{t-1}

and the sums over steps are one product each. A network of a thousand small states is most of all
a thousand small calls: here a step of a layer makes a dozen, on memory that is there already.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpom.activations import Activation, ReLU, Sigmoid, Tanh
from lpom.graph.adjoints import product

#: A hidden state, and what else is carried from step to step; None at the start stands for zeros.
Carried = tuple[Tensor | None, ...]
Steps = Sequence[Tensor]

_SIGMOID, _TANH = Sigmoid(), Tanh()


class Cell(ABC):
    """What one kind of layer does, over all steps in one direction; it runs without autograd.

    Sequences of tensors have one for each step, in the order in which steps are taken.
    """

    gates: ClassVar[int]
    n_carried: ClassVar[int] = 1
    #: Whether the recurrent product has a bias, and residuals, of its own.
    apart: ClassVar[bool] = False
    #: How often it calls each activation in a step.
    calls: ClassVar[dict[str, int]]
    #: What each gate is to hear for a state of zero to stay zero.
    still: ClassVar[tuple[float, ...]]

    @abstractmethod
    def forward(
        self, Z: Tensor, H: Tensor, start: Carried, W: Tensor, bias: Tensor | None, back: bool
    ) -> tuple[Carried, Any]:
        """Write hidden states to H, (steps, m, width); give what is carried on, and what is known.

        Z, (steps, m, gates x width), is what the inputs say to the gates; it is written over.
        ``back``: the last step comes first.
        """

    @abstractmethod
    def backward(
        self, known: Any, P: Tensor, ends: list[Tensor | None], W: Tensor, back: bool, start: bool
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The residuals of the gates and of the recurrent product, and pulls on the ``start``.

        P has pulls on H, ``ends`` those on what is carried on; they are written over, as is what is
        known.
        """


def _steps(x: Tensor, back: bool) -> Steps:
    return x.unbind(0)[::-1] if back else x.unbind(0)


class _Plain(Cell):
    """``h = phi(z + W h)``."""

    gates, still = 1, (0.0,)
    activation: ClassVar[Activation]

    @staticmethod
    @abstractmethod
    def apply(z: Tensor, out: Tensor) -> Tensor:
        """The activation, written to memory that is there."""

    def forward(
        self, Z: Tensor, H: Tensor, start: Carried, W: Tensor, bias: Tensor | None, back: bool
    ) -> tuple[Carried, Any]:
        (h,), across = start, W.t()
        for z, into in zip(_steps(Z, back), _steps(H, back), strict=True):
            if h is not None:
                z.addmm_(h, across)
            h = self.apply(z, into)
        return (h,), (Z, H)

    def backward(
        self, known: Any, P: Tensor, ends: list[Tensor | None], W: Tensor, back: bool, start: bool
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        Z, H = known
        pulls = _steps(P, back)
        if ends[0] is not None:
            pulls[-1].add_(ends[0])
        R: Tensor | None = None
        for z, p, h in zip(*(reversed(_steps(x, back)) for x in (Z, P, H)), strict=True):
            if R is not None:
                p.addmm_(R, W)
            R = self.activation.response(z, p, out=z, said=h)
        assert R is not None
        return Z, Z, [R @ W] if start else []


@final
class _TanhCell(_Plain):
    activation = _TANH
    calls = {"tanh": 1}

    @staticmethod
    def apply(z: Tensor, out: Tensor) -> Tensor:
        return torch.tanh(z, out=out)


@final
class _ReLUCell(_Plain):
    activation = ReLU()
    calls = {"relu": 1}

    @staticmethod
    def apply(z: Tensor, out: Tensor) -> Tensor:
        return torch.clamp_min(z, 0, out=out)


@final
class _LSTMCell(Cell):
    r"""``c = f c + i g``, ``h = o tanh(c)``: gates i, f, o are sigmoids and g is a tanh.

    With :math:`\tanh z = 2 \sigma(2 z) - 1` all gates are one call, on :math:`2 z` at g; torch's
    tanh would take five times as long as its sigmoid, and be no nearer where i, f and o are not.
    """

    gates, n_carried = 4, 2
    still = (0.0,) * 4
    calls = {"sigmoid": 1, "tanh": 2}

    def forward(
        self, Z: Tensor, H: Tensor, start: Carried, W: Tensor, bias: Tensor | None, back: bool
    ) -> tuple[Carried, Any]:
        (h, c), across, width = start, W.t(), H.shape[-1]
        X = torch.empty_like(Z)  # the gates
        C = Z.new_empty(*Z.shape[:2], width)
        D = torch.empty_like(C)  # tanh(C)
        start_c = c
        minus = Z.new_full((), -1.0)  # a number would be made a tensor at every step
        z_g, (i, f, g, o) = _gate(Z, 2, back), (_gate(X, k, back) for k in range(4))
        for t, (z, x, c_t, d, into) in enumerate(
            zip(*(_steps(a, back) for a in (Z, X, C, D, H)), strict=True)
        ):
            if h is not None:
                z.addmm_(h, across)
            z_g[t].add_(z_g[t])
            torch.sigmoid(z, out=x)
            torch.add(minus, g[t], alpha=2, out=g[t])
            torch.mul(i[t], g[t], out=c_t)
            if c is not None:
                c_t.addcmul_(f[t], c)
            c = c_t
            torch.add(c, c, out=d).sigmoid_()
            h = torch.mul(o[t], torch.add(minus, d, alpha=2, out=d), out=into)
        return (h, c), (Z, X, C, D, start_c)

    def backward(
        self, known: Any, P: Tensor, ends: list[Tensor | None], W: Tensor, back: bool, start: bool
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        Z, X, C, D, start_c = known
        cells = _steps(C, back)
        before = [start_c, *cells[:-1]]
        G = Z.new_empty(Z.shape[1:])  # pulls on the gates of one step, on 2 z at g
        G_i, G_f, G_g, G_o = G.chunk(4, -1)
        z_g, (i, f, g, o) = _gate(Z, 2, back), (_gate(X, k, back) for k in range(4))
        residuals, x, P_h, d = (_steps(a, back) for a in (Z, X, P, D))
        P_end, P_c = ends
        minus = Z.new_full((), -1.0)
        moved = torch.empty_like(D[0])  # tanh of a cell that was pulled
        if P_end is not None:
            P_h[-1].add_(P_end)
        for t in reversed(range(len(cells))):
            p = P_h[t]
            if t + 1 < len(cells):
                p.addmm_(residuals[t + 1], W)
            torch.mul(p, d[t], out=G_o)
            torch.sub(cells[t], p.mul_(o[t]), out=moved)
            torch.add(minus, moved.add_(moved).sigmoid_(), alpha=2, out=moved)
            P_c = d[t] - moved if P_c is None else P_c.add_(d[t]).sub_(moved)
            torch.mul(P_c, g[t], out=G_i)
            torch.mul(P_c, i[t], out=G_g)
            G_g.add_(G_g)
            if before[t] is None:
                G_f.zero_()
            else:
                torch.mul(P_c, before[t], out=G_f)
            P_c.mul_(f[t])
            R = residuals[t].sub_(G).sigmoid_()
            torch.add(minus, z_g[t], alpha=2, out=z_g[t])
            torch.sub(x[t], R, out=R)
        assert P_c is not None
        return Z, Z, [residuals[0] @ W, P_c] if start else []


@final
class _GRUCell(Cell):
    """``n = tanh(z_n + r (W h)_n)``, ``h = n + u (h - n)``: gates r and u are sigmoids."""

    gates, apart = 3, True
    still = (0.0, 1e4, 0.0)  # u is one
    calls = {"sigmoid": 1, "tanh": 1}

    def forward(
        self, Z: Tensor, H: Tensor, start: Carried, W: Tensor, bias: Tensor | None, back: bool
    ) -> tuple[Carried, Any]:
        (h,), width = start, H.shape[-1]
        if h is None:
            h = Z.new_zeros(Z.shape[1], width)
        start_h = h
        across = torch.empty_like(Z)  # W h + b
        X = torch.empty_like(Z)  # r, u, n
        for z, y, x, into in zip(*(_steps(a, back) for a in (Z, across, X, H)), strict=True):
            if bias is None:
                torch.mm(h, W.t(), out=y)
            else:
                torch.addmm(bias, h, W.t(), out=y)
            (z_ru, z_n), (y_ru, y_n), (x_ru, n) = (
                torch.split(a, [2 * width, width], -1) for a in (z, y, x)
            )
            torch.sigmoid(z_ru.add_(y_ru), out=x_ru)
            r, u = x_ru.chunk(2, -1)
            torch.tanh(z_n.addcmul_(r, y_n), out=n)
            h = torch.lerp(n, h, u, out=into)
        return (h,), (Z, across, X, H, start_h)

    def backward(
        self, known: Any, P: Tensor, ends: list[Tensor | None], W: Tensor, back: bool, start: bool
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        Z, across, X, H, start_h = known
        width = H.shape[-1]
        before = [start_h, *_steps(H, back)[:-1]]
        G = Z.new_empty(*Z.shape[1:-1], 2 * width)
        G_r, G_u = G.chunk(2, -1)
        (p_on,) = ends
        above: Tensor | None = None  # residuals of the recurrent product one step on
        for z, y, x, h, p in zip(
            *(reversed(_steps(a, back)) for a in (Z, across, X)),
            reversed(before),
            reversed(_steps(P, back)),
            strict=True,
        ):
            p = p if p_on is None else p.add_(p_on)
            p = p if above is None else p.addmm_(above, W)
            (z_ru, z_n), (y_ru, y_n), (x_ru, n) = (
                torch.split(a, [2 * width, width], -1) for a in (z, y, x)
            )
            r, u = x_ru.chunk(2, -1)
            torch.mul(p, h - n, out=G_u)
            R_n = _TANH.response(z_n, p - p * u, out=z_n, said=n)
            torch.mul(R_n, y_n, out=G_r)
            torch.mul(R_n, r, out=y_n)
            y_ru.copy_(_SIGMOID.response(z_ru, G, out=z_ru, said=x_ru))
            p_on, above = p * u, y
        assert p_on is not None and above is not None
        return Z, across, [p_on.addmm_(above, W)] if start else []


def _gate(x: Tensor, k: int, back: bool) -> Steps:
    """The k-th of four groups of columns at every step."""
    return _steps(x.chunk(4, -1)[k], back)


CELLS: dict[str, Cell] = {
    "RNN_TANH": _TanhCell(),
    "RNN_RELU": _ReLUCell(),
    "LSTM": _LSTMCell(),
    "GRU": _GRUCell(),
}


@dataclass
class _Pass:
    """What one layer in one direction knows of a batch."""

    x: Tensor
    H: Tensor
    start: Carried
    known: Any
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
                w_ih, w_hh, b_ih, b_hh = given[k]
                assert w_ih is not None and w_hh is not None
                across = b_hh if cell.apart else None
                said = b_ih if cell.apart or b_ih is None or b_hh is None else b_ih + b_hh
                Z = F.linear(x, w_ih, said)
                if ended is not None and d:
                    for gate, still in zip(Z.chunk(cell.gates, -1), cell.still, strict=True):
                        gate.masked_fill_(ended, still)
                begin: Carried = tuple(part[k] for part in start) or (None,) * cell.n_carried
                end, known = cell.forward(Z, H, begin, w_hh, across, back=bool(d))
                passes.append(_Pass(x, H, begin, known))
                ends.append(end)
            x = whole if ended is None else whole.masked_fill(ended, 0)
        stacked = tuple(torch.stack(parts) for parts in zip(*ends, strict=True))
        return x, stacked, Memory(x, passes, ended)

    def backward(
        self,
        memory: Memory,
        P: Tensor,
        ends: Sequence[Tensor | None],
        weights: Sequence[Tensor],
        *,
        down: bool,
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """The pull on x where it is wanted (``down``), and those on the start if there was one.

        P, the pull on the outputs, is written over.
        """
        n_directions = 1 + self.bidirectional
        given = self._weights(weights)
        starts: list[list[Tensor]] = [[]] * len(memory.passes)
        below: Tensor | None = P
        for layer in reversed(range(self.n_layers)):
            assert below is not None
            if memory.ended is not None:
                below.masked_fill_(memory.ended, 0)
            pulls, below = torch.split(below, below.shape[-1] // n_directions, -1), None
            for d, pull in enumerate(pulls):
                k = layer * n_directions + d
                one, (w_ih, w_hh, *_) = memory.passes[k], given[k]
                assert w_ih is not None and w_hh is not None
                end = [None if part is None else part[k].clone() for part in ends]
                one.R, one.R_across, starts[k] = self.cell.backward(
                    one.known, pull, end, w_hh, bool(d), one.start[0] is not None
                )
                one.known = None
                if memory.ended is not None and d:  # pulls on states before the first step
                    one.R.masked_fill_(memory.ended, 0)
                    one.R_across.masked_fill_(memory.ended, 0)
                if layer or down:
                    found = one.R @ w_ih
                    below = found if below is None else below.add_(found)
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
                yield size * k, _product(R, one.x)
            if recurrent:
                earlier = (across[:-1], H[1:]) if back else (across[1:], H[:-1])
                yield size * k + 1, _product(*earlier)
                if h is not None:
                    yield size * k + 1, across[-1 if back else 0].T @ h
            total: Tensor | None = None
            for place, (of, bias) in enumerate(zip((R, across), biases, strict=False)):
                if bias:
                    total = of.sum((0, 1)) if total is None or self.cell.apart else total
                    yield size * k + 2 + place, total


def _product(R: Tensor, X: Tensor) -> Tensor:
    """``R.T X`` over all steps."""
    return product(R.reshape(-1, R.shape[-1]), X.reshape(-1, X.shape[-1]))


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
        """The pull on x where it is wanted; P, the pull on the outputs, is written over."""
        ends, P = [None] * self.scan.cell.n_carried, P.transpose(0, 1)
        below, _ = self.scan.backward(memory, P, ends, self.parameters, down=down)
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
