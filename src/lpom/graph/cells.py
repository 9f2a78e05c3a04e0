r"""Recurrent cells over all steps in one direction: forwards, and backwards by LPOM's rule.

With :math:`P` for pulls and :math:`R = \phi(Z) - \phi(Z - P)` for the answers to them, a tanh layer
has :math:`P_t \mathrel{+}= R_{t+1} W_{hh}`. A network of a thousand small states is most of all a
thousand small calls: here a step makes a dozen, on memory that is there already.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from lpom.activations import Activation, ReLU, Sigmoid, Tanh

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
    #: What the weights of each gate are multiplied by before the cell sees them, where that is not
    #: one; gradients are multiplied by it too.
    factors: ClassVar[tuple[float, ...]] = ()

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
        self,
        known: Any,
        P: Tensor,
        share: float,
        ends: list[Tensor | None],
        W: Tensor,
        back: bool,
        start: bool,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The residuals of the gates and of the recurrent product, and pulls on the ``start``.

        ``share * P`` are the pulls on H, ``ends`` those on what is carried on; the latter and what
        is known are written over.
        """

    def scaled(self, weight: Tensor | None) -> Tensor | None:
        """A matrix or a bias, the rows of each gate times its factor."""
        if weight is None or not self.factors:
            return weight
        return self.scale_(weight.detach().clone())

    def scale_(self, weight: Tensor) -> Tensor:
        for rows, factor in zip(weight.chunk(self.gates), self.factors, strict=False):
            if factor != 1:
                rows.mul_(factor)
        return weight


def steps_of(x: Tensor, back: bool) -> Steps:
    return x.unbind(0)[::-1] if back else x.unbind(0)


def _pulled(p: Tensor, share: float, R: Tensor | None, W: Tensor, out: Tensor) -> Tensor:
    """``share * p + R W``: the pull on a hidden state, from above and from one step on."""
    return torch.mul(p, share, out=out) if R is None else torch.addmm(p, R, W, beta=share, out=out)


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
        for z, into in zip(steps_of(Z, back), steps_of(H, back), strict=True):
            if h is not None:
                z.addmm_(h, across)
            h = self.apply(z, into)
        return (h,), (Z, H)

    def backward(
        self,
        known: Any,
        P: Tensor,
        share: float,
        ends: list[Tensor | None],
        W: Tensor,
        back: bool,
        start: bool,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        Z, H = known
        (p_on,), R = ends, None
        pull = Z.new_empty(H.shape[1:])
        for z, p, h in zip(*(reversed(steps_of(x, back)) for x in (Z, P, H)), strict=True):
            _pulled(p, share, R, W, pull)
            if p_on is not None:
                pull.add_(p_on)
                p_on = None
            R = self.activation.response(z, pull, out=z, said=h)
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

    As :math:`\tanh z = 2 \sigma(2 z) - 1` every activation is a sigmoid: of all gates at once, with
    twice the weights at g, and of :math:`\bar c = 2 c`,

    .. math:: \bar c = f \bar c + i (4 s - 2), \qquad h = o\,(2 e - 1)

    with :math:`s = \sigma(2 z_g)` and :math:`e = \sigma(\bar c)`. torch's tanh would take five
    times as long as its sigmoid, and be no nearer where i, f and o are not.
    """

    gates, n_carried = 4, 2
    still = (0.0,) * 4
    factors = (1.0, 1.0, 2.0, 1.0)
    calls = {"sigmoid": 1, "tanh": 2}

    def forward(
        self, Z: Tensor, H: Tensor, start: Carried, W: Tensor, bias: Tensor | None, back: bool
    ) -> tuple[Carried, Any]:
        (h, c), across = start, W.t()
        C = Z.new_empty(*Z.shape[:2], H.shape[-1])
        x, d = torch.empty_like(Z[0]), torch.empty_like(C[0])
        i, f, s, o = x.chunk(4, -1)
        one, two = Z.new_full((), -1.0), Z.new_full((), -2.0)  # numbers would be made tensors
        if c is not None:
            c = 2 * c
        begin = c
        for z, c_new, into in zip(*(steps_of(part, back) for part in (Z, C, H)), strict=True):
            if h is not None:
                z.addmm_(h, across)
            torch.sigmoid(z, out=x)
            torch.mul(i, torch.add(two, s, alpha=4, out=d), out=c_new)
            if c is not None:
                c_new.addcmul_(f, c)
            c = c_new
            h = torch.mul(o, torch.add(one, torch.sigmoid(c, out=d), alpha=2, out=d), out=into)
        assert c is not None
        return (h, c / 2), (Z, C, begin)

    def backward(
        self,
        known: Any,
        P: Tensor,
        share: float,
        ends: list[Tensor | None],
        W: Tensor,
        back: bool,
        start: bool,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        Z, C, begin = known
        P_end, P_c = ends
        P_c = torch.zeros_like(C[0]) if P_c is None else P_c.div_(2)  # on twice the cell
        pull, moved, e, d = (torch.empty_like(P_c) for _ in range(4))
        G, x = (torch.empty_like(Z[0]) for _ in range(2))  # pulls on the gates, and the gates
        (G_i, G_f, G_s, G_o), (i, f, s, o) = G.chunk(4, -1), x.chunk(4, -1)
        one, two, four = (Z.new_full((), number) for number in (-1.0, -2.0, 4.0))
        cells = steps_of(C, back)
        R: Tensor | None = None
        for z, p, c, before in zip(
            *(reversed(steps_of(part, back)) for part in (Z, P)),
            reversed(cells),
            reversed([begin, *cells[:-1]]),
            strict=True,
        ):
            _pulled(p, share, R, W, pull)
            if P_end is not None:
                pull.add_(P_end)
                P_end = None
            torch.sigmoid(z, out=x)
            torch.sigmoid(c, out=e)
            torch.mul(pull, torch.add(one, e, alpha=2, out=d), out=G_o)
            torch.addcmul(c, pull, o, value=-2, out=moved).sigmoid_()
            P_c.add_(e).sub_(moved)
            torch.mul(P_c, torch.add(two, s, alpha=4, out=d), out=G_i)
            torch.mul(P_c, i, out=G_s).mul_(four)
            if before is None:
                G_f.zero_()
            else:
                torch.mul(P_c, before, out=G_f)
            P_c.mul_(f)
            R = _SIGMOID.response(z, G, out=z, said=x)
        assert R is not None
        return Z, Z, [R @ W, P_c.mul_(2)] if start else []


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
        for z, y, x, into in zip(*(steps_of(a, back) for a in (Z, across, X, H)), strict=True):
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
        self,
        known: Any,
        P: Tensor,
        share: float,
        ends: list[Tensor | None],
        W: Tensor,
        back: bool,
        start: bool,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        Z, across, X, H, start_h = known
        width = H.shape[-1]
        before = [start_h, *steps_of(H, back)[:-1]]
        G = Z.new_empty(*Z.shape[1:-1], 2 * width)
        G_r, G_u = G.chunk(2, -1)
        (p_on,), pull = ends, Z.new_empty(H.shape[1:])
        above: Tensor | None = None  # residuals of the recurrent product one step on
        for z, y, x, h, p in zip(
            *(reversed(steps_of(a, back)) for a in (Z, across, X)),
            reversed(before),
            reversed(steps_of(P, back)),
            strict=True,
        ):
            p = _pulled(p, share, above, W, pull)
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
        return Z, across, [p_on.addmm_(above, W)] if start else []


CELLS: dict[str, Cell] = {
    "RNN_TANH": _TanhCell(),
    "RNN_RELU": _ReLUCell(),
    "LSTM": _LSTMCell(),
    "GRU": _GRUCell(),
}
