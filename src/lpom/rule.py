r"""The rule: what a function answers to the gradient that comes down to it.

Back-propagation multiplies by a derivative, :math:`g \mapsto \phi'(z) g`. LPOM moves the state
against the gradient and reads the function where it has moved to,

.. math:: g \;\mapsto\; w\,(\phi(z) - \phi(z - p)), \qquad p = g / w,

which is one interleaved sweep of block coordinate descent with a gap of weight w (eqs. 25 and 28).
The weight may be any positive number, also another one for each unit and sample. So there are two
ways to choose it. `Displacement` holds how far a state moves, :math:`|p| = d`, so
:math:`w = |g| / d`; from both sides it is :math:`g\,(\phi(z + d) - \phi(z - d)) / (2 d)`.
`Weight` holds :math:`w = \mu`, as the paper does. Either way phi is only asked for values, and may
be any function.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor

from lpom.checks import check_number
from lpom.settings import Settings

Phi = Callable[..., Tensor]
#: Entries of a state from which its spread is measured, at most.
SAMPLE = 1 << 14


class Move(NamedTuple):
    """Where phi is read for one answer, ``z - pull`` and ``z + pull`` or z, and its weight."""

    pull: Tensor
    weight: Tensor | float
    sides: int

    def answer(self, phi: Phi, z: Tensor, x: Tensor | None = None) -> Tensor:
        """``weight * (phi(z + pull) - phi(z - pull))``, from one side with z for ``z + pull``.

        ``x`` is phi(z), where that is at hand.
        """
        if self.sides == 2:
            high = phi(z + self.pull)
        else:
            high = phi(z) if x is None else x
        return self.weight * (high - phi(z - self.pull))


class Rule(ABC):
    """How far states move; see `Displacement` and `Weight`."""

    sides: int

    @abstractmethod
    def elementwise(self, z: Tensor, g: Tensor, room: Tensor | None = None) -> Move:
        """Of a function of single elements, which may end at a distance ``room`` from them."""

    @abstractmethod
    def share(self, length: Tensor, size: Tensor | float) -> Tensor | float:
        """How far along its gradient, of this ``length``, a row of such a ``size`` moves.

        The entries of a row are coupled, so all of it moves by ``share * g`` with one weight.
        """

    def rows(self, g: Tensor, size: Tensor | float) -> Move:
        """Of a function of whole rows, along the last dimension."""
        share = self.share(torch.linalg.vector_norm(g, dim=-1, keepdim=True), size)
        return Move(share * g, 1 / (self.sides * share), self.sides)

    def device(self, activation: Any, z: Tensor, x: Tensor, g: Tensor) -> Tensor:
        """The answer of a device, which knows its noise and so how far to move; x was read."""
        d, sides = activation.displacement(z, x), activation.sides
        if activation.elementwise:
            return _held(g, d, sides).answer(activation.phi, z, x)
        length = torch.linalg.vector_norm(g, dim=activation.dim, keepdim=True)
        pull = d * g / length.clamp_min(torch.finfo(g.dtype).tiny)
        return Move(pull, length / (sides * d), sides).answer(activation.phi, z, x)

    @abstractmethod
    def jump(self, activation: Any, z: Tensor, g: Tensor) -> Tensor:
        """The answer of an activation that jumps."""


@final
@dataclass(frozen=True)
class Displacement(Rule, Settings):
    r"""Hold how far a state moves.

    Parameters
    ----------
    size : float
        Elements move by ``size * min(spread, 1)``, where the spread is the standard deviation of
        the whole tensor, or by ``size`` times the distance to where their function ends (0 for
        a logarithm or a root); a row moves by ``size`` times its norm, or ``size`` for a softmax.
    sides : {1, 2}
        Two sides have no bias of first order and need one more reading: the error is of second
        order in the displacement. One side reads ``z`` and ``z - p``.
    window : float
        Where a function jumps the two sides are half a window from z, that of the smaller of
        ``window`` and one spread; this is straight-through with a window.
    """

    size: float = 0.003
    sides: int = 2
    window: float = 2.0

    def __post_init__(self) -> None:
        check_number("displacement", self.size)
        check_number("window", self.window)
        if self.sides not in (1, 2):
            raise ValueError(f"sides must be 1 or 2, got {self.sides!r}.")

    def elementwise(self, z: Tensor, g: Tensor, room: Tensor | None = None) -> Move:
        if room is None:
            d = self.size * spread(z)
        else:  # powers and logarithms have no unit but the distance itself
            d = (self.size * room).clamp_min(torch.finfo(z.dtype).tiny ** 0.5)
        return _held(g, d, self.sides)

    def share(self, length: Tensor, size: Tensor | float) -> Tensor:
        tiny = torch.finfo(length.dtype).tiny ** 0.5  # whose square is still a number
        return self.size * size / length.clamp_min(tiny)

    def jump(self, activation: Any, z: Tensor, g: Tensor) -> Tensor:
        d = 0.5 * spread(z, self.window)
        if activation.elementwise:
            return Move(d, g / (2 * d), 2).answer(activation.phi, z)
        soft = activation.smoothed(2 * float(d))
        return self.rows(g, float(d)).answer(soft.phi, z)


@final
@dataclass(frozen=True)
class Weight(Rule, Settings):
    r"""Hold the weight of the gap: ``mu (phi(z) - phi(z - g / mu))``, with g as it comes down."""

    mu: float = 20.0
    window: float = 2.0

    sides: ClassVar[int] = 1  # type: ignore[misc]

    def elementwise(self, z: Tensor, g: Tensor, room: Tensor | None = None) -> Move:
        if room is None:
            return Move(g / self.mu, self.mu, 1)
        least = torch.finfo(z.dtype).tiny ** 0.5  # no further than half the way to the end of phi
        weight = (2 * g.abs() / room.clamp_min(least)).clamp_min(self.mu)
        return Move(g / weight, weight, 1)

    def share(self, length: Tensor, size: Tensor | float) -> float:
        return 1 / self.mu

    def device(self, activation: Any, z: Tensor, x: Tensor, g: Tensor) -> Tensor:
        return self.elementwise(z, g).answer(activation.phi, z, x)

    def jump(self, activation: Any, z: Tensor, g: Tensor) -> Tensor:
        return self.elementwise(z, g).answer(activation.smoothed(self.window).phi, z)


def _held(g: Tensor, d: Tensor, sides: int) -> Move:
    """Elements move by d, to both sides or against their gradient."""
    if sides == 2:
        return Move(d, g / (2 * d), 2)
    return Move(d * g.sign(), g.abs() / d, 1)


_WEIGHTS: list[Tensor | None] = [None]  # of the rows of the batch that is at work


@contextmanager
def row_weights(weights: Tensor | None) -> Iterator[None]:
    """Within, a row counts as often in a `spread` as its weight says."""
    before, _WEIGHTS[0] = _WEIGHTS[0], weights
    try:
        yield
    finally:
        _WEIGHTS[0] = before


def _std_mean(flat: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Those of entries that come so many times each."""
    total = weights.sum()
    mean = (weights * flat).sum() / total
    squares = (weights * (flat - mean) ** 2).sum()
    return (squares / torch.where(total > 2, total - 1, total)).sqrt(), mean


def spread(z: Tensor, most: float = 1.0) -> Tensor:
    """The standard deviation of a tensor, at most ``most``; from a sample where it is large.

    It is never so small that a displacement of a thousandth of it would drown in rounding.
    """
    flat = z.flatten() if z.is_contiguous() else z.reshape(-1)
    n = flat.numel()
    if n < 2:
        return z.new_full((), most)
    weights = _WEIGHTS[0]
    if weights is not None and len(weights) == len(z):
        weights = weights.to(z).repeat_interleave(n // len(z))
    else:
        weights = None
    if n > SAMPLE:  # an odd step, so that no column of a picture is always met
        step = (n // SAMPLE) | 1
        flat, weights = flat[::step], None if weights is None else weights[::step]
    deviation, mean = torch.std_mean(flat) if weights is None else _std_mean(flat, weights)
    info = torch.finfo(z.dtype)
    rounding = 1e5 * info.eps * torch.hypot(deviation, mean) + info.tiny**0.25
    found = deviation.clamp_max(most).maximum(rounding)
    return found.clamp_max(10 * most).nan_to_num(nan=most)  # a mask may have infinite entries


class Pointwise(torch.autograd.Function):
    """``phi(*tensors)``, elementwise in each; backwards each tensor is answered by the rule.

    ``room(z)`` is how far the first tensor may move towards where phi ends (0 for a logarithm).
    In half precision differences are taken in float32.
    """

    @staticmethod
    def forward(ctx: Any, phi: Phi, rule: Rule, room: Phi | None, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.phi, ctx.rule, ctx.room = phi, rule, room
        return phi(*tensors)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():
            return None, None, None, *derivative(ctx.phi, tensors, wanted, g)
        wide = [widened(t) for t in tensors]
        g = g.to(torch.promote_types(g.dtype, wide[0].dtype))
        answers: list[Tensor | None] = []
        for k, (z, kept) in enumerate(zip(wide, tensors, strict=True)):
            if not wanted[k]:
                answers.append(None)
                continue
            z, g_k = torch.broadcast_tensors(z, g)
            room = ctx.room(z) if ctx.room is not None and k == 0 else None
            move = ctx.rule.elementwise(z, g_k, room)

            def phi(moved: Tensor, k: int = k) -> Tensor:
                return ctx.phi(*wide[:k], moved, *wide[k + 1 :])  # type: ignore[no-any-return]

            answer = move.answer(phi, z)
            if room is not None:  # nothing comes down, or there is nowhere to move to
                answer = answer.masked_fill((g_k == 0) | (room <= abs(move.pull)), 0)
            answers.append(answer.sum_to_size(kept.shape).to(kept.dtype))
        return None, None, None, *answers


class ReLU(torch.autograd.Function):
    """The rectifier, whose difference has a form of its own without rounding and in fewer passes:
    from two sides a ramp, ``g * clamp(z / (2 d) + 1/2, 0, 1)``.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, rule: Rule) -> Tensor:
        ctx.save_for_backward(z)
        ctx.rule = rule
        return z.relu()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return g * (kept > 0), None
        z = widened(kept)
        rule = ctx.rule
        if isinstance(rule, Displacement) and rule.sides == 2:
            d = rule.size * spread(z)
            answer = z.mul(0.5 / d).add_(0.5).clamp_(0, 1).mul_(g)
        else:
            pull, weight, _ = rule.elementwise(z, g)
            answer = weight * torch.where(z > 0, torch.minimum(pull, z), (pull - z).clamp_max(0))
        return answer.to(kept.dtype), None


class Device(torch.autograd.Function):
    """An activation that is read from a device; the value on the way forward is read once."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, activation: Any, rule: Rule) -> Tensor:
        x: Tensor = activation.phi(z)
        ctx.save_for_backward(z, x)
        ctx.activation, ctx.rule = activation, rule
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        kept, x = ctx.saved_tensors
        z = widened(kept)
        answer = ctx.rule.device(ctx.activation, z, x.to(z.dtype), g.to(z.dtype))
        return answer.to(kept.dtype), None, None


class Jump(torch.autograd.Function):
    """An activation of ours that jumps."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, activation: Any, rule: Rule) -> Tensor:
        ctx.save_for_backward(z)
        ctx.activation, ctx.rule = activation, rule
        return activation.phi(z)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        z = widened(kept)
        return ctx.rule.jump(ctx.activation, z, g.to(z.dtype)).to(kept.dtype), None, None


def derivative(
    phi: Phi, tensors: Sequence[Tensor], wanted: Sequence[bool], g: Tensor
) -> list[Tensor | None]:
    """Autograd's own answer, for whoever asks for a derivative of the derivative."""
    with torch.enable_grad():
        leaves = [
            t if t.requires_grad else t.detach().requires_grad_(w)
            for t, w in zip(tensors, wanted, strict=True)
        ]
        out = phi(*leaves)
        asked = [t for t, w in zip(leaves, wanted, strict=True) if w]
        found = iter(torch.autograd.grad(out, asked, g, create_graph=True, allow_unused=True))
    return [next(found) if w else None for w in wanted]


def widened(z: Tensor) -> Tensor:
    """In half precision the difference of two near numbers would be lost."""
    return z.float() if z.dtype in (torch.float16, torch.bfloat16) else z
