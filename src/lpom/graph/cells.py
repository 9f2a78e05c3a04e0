r"""Recurrent cells over all steps in one direction: forwards, and backwards by LPOM's rule.

With :math:`P` for pulls and :math:`R = \phi(Z) - \phi(Z - P)` for the answers to them, a tanh layer
has :math:`P_t \mathrel{+}= R_{t+1} W_{hh}`. A network of a thousand small states is most of all a
thousand small calls: here a step makes a dozen, on memory that is there already.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from lpom.activations import Activation, ReLU, Sigmoid, Tanh

#: A hidden state, and what else is carried from step to step; None at the start stands for zeros.
Carried = Sequence[Tensor | None]
#: On the hidden state of each step; None where there is none.
Pulls = Sequence[Tensor | None]

_SIGMOID, _TANH = Sigmoid(), Tanh()


@dataclass(frozen=True)
class Matrices:
    """The weights of a layer in one direction, beside the columns ``(x, 1, h)`` that they meet.

    ``below`` meets all of them; where the recurrent product is apart, those without h, and
    ``recurrent`` those without x. There may be several ones, of which the last has the bias.
    """

    below: Tensor
    recurrent: Tensor
    n_inputs: int
    width: int

    @cached_property
    def across(self) -> Tensor:
        """What h meets."""
        return self.recurrent[:, -self.width :]

    def hidden(self, B: Tensor) -> Tensor:
        """h after every step."""
        return B[1:, :, -self.width :]

    def heard(self, B: Tensor) -> Tensor:
        """The columns that ``below`` meets."""
        return B[..., : self.below.shape[1]]

    def recalled(self, B: Tensor) -> Tensor:
        """The columns that ``recurrent`` meets."""
        return B[..., -self.recurrent.shape[1] :]


def _products(B: Tensor, W: Tensor, width: int, h: Tensor | None) -> Iterator[tuple[Tensor, ...]]:
    """The factors ``b, W.T`` of each step; in the first a start ``h`` of zeros is left out."""
    weights = W.t()
    first, *others = B[:-1].unbind(0)
    yield (first[:, :-width], weights[:-width]) if h is None else (first, weights)
    for b in others:
        yield b, weights


def _multiply(factors: tuple[Tensor, ...], out: Tensor) -> Tensor:
    """Their product, to memory that nobody has looked at for long: going over it once before takes
    less time than the product loses by waiting for it.
    """
    return torch.mm(*factors, out=out.zero_())


class Cell(ABC):
    r"""What one kind of layer does, over all steps in the order they are taken; without autograd.

    ``B``, (steps + 1, m, columns), holds :math:`(x_t, 1, h_{t-1})` for each step and sample, so
    that a step is one product; hidden states are written there. The ones are missing in layers
    without bias.
    """

    gates: ClassVar[int]
    n_carried: ClassVar[int] = 1
    #: Whether the recurrent product has a bias, and residuals, of its own.
    apart: ClassVar[bool] = False
    #: How often it calls each activation in a step.
    calls: ClassVar[dict[str, int]]
    #: What the weights of each gate are multiplied by before the cell sees them, where that is not
    #: one; gradients are multiplied by it too.
    factors: ClassVar[tuple[float, ...]] = ()

    @abstractmethod
    def forward(self, B: Tensor, W: Matrices, start: Carried) -> tuple[Carried, Any]:
        """Write the hidden states; give what is carried on, and what is known."""

    @abstractmethod
    def backward(
        self, known: Any, P: Pulls, share: float, ends: Carried, W: Matrices, start: bool
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The residuals of the gates and of the recurrent product, and pulls on the ``start``.

        ``share * P`` are the pulls on hidden states, ``ends`` those on what is carried on; the
        latter and what is known are written over.
        """

    def scale_(self, weight: Tensor) -> Tensor:
        """A matrix or a bias, the rows of each gate times its factor."""
        for rows, factor in zip(weight.chunk(self.gates), self.factors, strict=False):
            if factor != 1:
                rows.mul_(factor)
        return weight


def _pulled(p: Tensor | None, share: float, R: Tensor | None, W: Tensor, out: Tensor) -> Tensor:
    """``share * p + R W``: the pull on a hidden state, from above and from one step on."""
    if p is None:
        return out.zero_() if R is None else torch.mm(R, W, out=out)
    return torch.mul(p, share, out=out) if R is None else torch.addmm(p, R, W, beta=share, out=out)


class _Plain(Cell):
    """``h = phi(z)``."""

    gates = 1
    activation: ClassVar[Activation]

    @staticmethod
    @abstractmethod
    def apply(z: Tensor, out: Tensor) -> Tensor:
        """The activation, written to memory that is there."""

    def forward(self, B: Tensor, W: Matrices, start: Carried) -> tuple[Carried, Any]:
        H = W.hidden(B)
        Z = torch.empty_like(H)
        for factors, z, h in zip(_products(B, W.below, W.width, start[0]), Z, H, strict=True):
            self.apply(_multiply(factors, out=z), h)
        return (H[-1],), (Z, H)

    def backward(
        self, known: Any, P: Pulls, share: float, ends: Carried, W: Matrices, start: bool
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        Z, H = known
        (p_on,), R = ends, None
        pull = torch.empty_like(Z[0])
        whole = (x.unbind(0) for x in (Z, H))
        for z, h, p in zip(*(reversed(part) for part in (*whole, P)), strict=True):
            _pulled(p, share, R, W.across, pull)
            if p_on is not None:
                pull.add_(p_on)
                p_on = None
            R = self.activation.response(z, pull, out=z, said=h)
        assert R is not None
        return Z, Z, [R @ W.across] if start else []


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

    As :math:`\tanh z = 2 \sigma(2 z) - 1` every activation is a sigmoid: of all gates at once, with
    twice the weights at g, and of :math:`\bar c = 2 c`,

    .. math:: \bar c = f \bar c + i (4 s - 2), \qquad h = o\,(2 e - 1)

    with :math:`s = \sigma(2 z_g)` and :math:`e = \sigma(\bar c)`. torch's tanh would take five
    times as long as its sigmoid, and be no nearer where i, f and o are not.
    """

    gates, n_carried = 4, 2
    factors = (1.0, 1.0, 2.0, 1.0)
    calls = {"sigmoid": 1, "tanh": 2}

    def forward(self, B: Tensor, W: Matrices, start: Carried) -> tuple[Carried, Any]:
        H = W.hidden(B)
        c = begin = None if start[1] is None else 2 * start[1]
        Z, C = B.new_empty(*H.shape[:2], len(W.below)), B.new_empty(H.shape)
        # what is cheap to have again is not kept: memory takes longer
        x, d = torch.empty_like(Z[0]), torch.empty_like(C[0])
        i, f, s, o = x.chunk(4, -1)
        one, two = B.new_full((), -1.0), B.new_full((), -2.0)  # numbers would be made tensors
        products = _products(B, W.below, W.width, start[0])
        for factors, z, c_new, h in zip(products, Z, C, H, strict=True):
            torch.sigmoid(_multiply(factors, out=z), out=x)
            torch.mul(i, torch.add(two, s, alpha=4, out=d), out=c_new)
            if c is not None:
                c_new.addcmul_(f, c)
            c = c_new
            torch.mul(o, torch.add(one, torch.sigmoid(c, out=d), alpha=2, out=d), out=h)
        return (H[-1], C[-1] / 2), (Z, C, begin)

    def backward(
        self, known: Any, P: Pulls, share: float, ends: Carried, W: Matrices, start: bool
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        Z, C, begin = known
        P_end, P_c = ends
        P_c = torch.zeros_like(C[0]) if P_c is None else P_c.div_(2)  # on twice the cell
        pull, moved, e, d = (torch.empty_like(P_c) for _ in range(4))
        x = torch.empty_like(Z[0])
        i, f, s, o = x.chunk(4, -1)
        f.fill_(1)  # beyond the last step
        one, two = Z.new_full((), 1.0), Z.new_full((), 2.0)
        cells = C.unbind(0)
        R: Tensor | None = None
        whole = (part.unbind(0) for part in (Z, *Z.chunk(4, -1)))
        for z, z_i, z_f, z_s, z_o, p, c, before in zip(
            *(reversed(part) for part in (*whole, P, cells, (begin, *cells[:-1]))), strict=True
        ):
            _pulled(p, share, R, W.across, pull)
            if P_end is not None:
                pull.add_(P_end)
                P_end = None
            torch.sigmoid(c, out=e)
            torch.addcmul(e, P_c, f, out=P_c)  # f is still that of one step on
            torch.sigmoid(z, out=x)
            P_c.sub_(torch.addcmul(c, pull, o, value=-2, out=moved).sigmoid_())
            # each gate less the pull on it
            z_o.addcmul_(pull, torch.add(one, e, alpha=-2, out=d))
            z_i.addcmul_(P_c, torch.add(two, s, alpha=-4, out=d))
            z_s.addcmul_(P_c, i, value=-4)
            if before is not None:
                z_f.addcmul_(P_c, before, value=-1)
            R = torch.sub(x, z.sigmoid_(), out=z)
        assert R is not None
        return Z, Z, [R @ W.across, P_c.mul_(f).mul_(2)] if start else []


@final
class _GRUCell(Cell):
    """``n = tanh(z_n + r (W h)_n)``, ``h = n + u (h - n)``: gates r and u are sigmoids."""

    gates, apart = 3, True
    calls = {"sigmoid": 1, "tanh": 1}

    def forward(self, B: Tensor, W: Matrices, start: Carried) -> tuple[Carried, Any]:
        H, width = W.hidden(B), W.width
        Z = W.heard(B[:-1]) @ W.below.t()
        across = torch.empty_like(Z)  # W h + b
        X = torch.empty_like(Z)  # r, u, n
        products = _products(W.recalled(B), W.recurrent, width, start[0])
        for factors, before, z, y, x, into in zip(
            products, B[:-1, :, -width:], Z, across, X, H, strict=True
        ):
            _multiply(factors, out=y)
            (z_ru, z_n), (y_ru, y_n), (x_ru, n) = (
                torch.split(a, [2 * width, width], -1) for a in (z, y, x)
            )
            torch.sigmoid(z_ru.add_(y_ru), out=x_ru)
            r, u = x_ru.chunk(2, -1)
            torch.tanh(z_n.addcmul_(r, y_n), out=n)
            torch.lerp(n, before, u, out=into)
        return (H[-1],), (Z, across, X, B)

    def backward(
        self, known: Any, P: Pulls, share: float, ends: Carried, W: Matrices, start: bool
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        Z, across, X, B = known
        width = W.width
        G = Z.new_empty(*Z.shape[1:-1], 2 * width)
        G_r, G_u = G.chunk(2, -1)
        (p_on,), pull = ends, Z.new_empty(Z.shape[1], width)
        above: Tensor | None = None  # residuals of the recurrent product one step on
        whole = (a.unbind(0) for a in (Z, across, X, B[:-1, :, -width:]))
        for z, y, x, h, p in zip(*(reversed(part) for part in (*whole, P)), strict=True):
            p = _pulled(p, share, above, W.across, pull)
            p = p if p_on is None else p.add_(p_on)
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
        return Z, across, [p_on.addmm_(above, W.across)] if start else []


CELLS: dict[str, Cell] = {
    "RNN_TANH": _TanhCell(),
    "RNN_RELU": _ReLUCell(),
    "LSTM": _LSTMCell(),
    "GRU": _GRUCell(),
}
