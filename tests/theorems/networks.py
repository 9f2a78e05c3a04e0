"""Small networks with everything that makes a graph more than a chain.

Each maker draws its options and returns a module and the shape of its inputs. Activations are
modules with names of their own, so that a test can put something else in their place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from lpom.activations import Activation

Made = tuple[nn.Module, tuple[int, ...]]


def pick(draw: st.DrawFn, acts: Sequence[Activation], count: int) -> list[nn.Module]:
    return [draw(st.sampled_from(acts)).to_module() for _ in range(count)]


class Skips(nn.Module):
    """An addition over a block, and a concatenation with the data."""

    def __init__(self, n: int, width: int, acts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(n, width), nn.Linear(width, width, bias=False)
        self.last = nn.Linear(width + n, 2)
        self.act1, self.act2, self.act3 = acts

    def forward(self, x: Tensor) -> Tensor:
        a = self.act1(self.first(x))
        b = self.act2(a - self.second(a))
        return self.act3(self.last(torch.cat([a + b, x], 1)))


def skips(draw: st.DrawFn, acts: Sequence[Activation]) -> Made:
    n, width, m = (draw(st.integers(1, 4)) for _ in range(3))
    return Skips(n, width, pick(draw, acts, 3)), (m, n)


class Convolutions(nn.Module):
    """Two convolutions, the second beside a skip, with pooling, batch norm and dropout."""

    def __init__(
        self, conv: nn.Conv2d, pool: nn.Module, skip: bool, drop: float, acts: Sequence[nn.Module]
    ) -> None:
        super().__init__()
        width = conv.out_channels
        self.conv, self.norm, self.pool, self.skip = conv, nn.BatchNorm2d(width), pool, skip
        self.again = nn.Conv2d(width, width, 3, padding=1, groups=2, bias=False)
        self.drop, self.last = nn.Dropout(drop), nn.Linear(4 * width, 3)
        self.act1, self.act2, self.act3 = acts

    def forward(self, x: Tensor) -> Tensor:
        a = self.pool(self.act1(self.norm(self.conv(x))))
        b = self.again(a)
        b = self.act2(b + a if self.skip else b)
        return self.act3(self.last(self.drop(b).flatten(1)))


def convolutions(draw: st.DrawFn, acts: Sequence[Activation]) -> Made:
    stride, padding, groups = (draw(st.integers(1, 2)) for _ in range(3))
    conv = nn.Conv2d(2, 2 * draw(st.integers(1, 2)), 2, stride, padding, groups=groups)
    # to 2 x 2, in windows that do not overlap: max pooling is put below its activation, which then
    # answers window by window
    windows = {(1, 1): (3, 3, 1), (1, 2): (3, 3), (2, 1): (2, 2, 1), (2, 2): (2, 2)}
    pool = draw(st.sampled_from([nn.AvgPool2d, nn.MaxPool2d]))(*windows[stride, padding])
    if draw(st.booleans()):
        pool = nn.AdaptiveAvgPool2d(2)
    skip, drop = draw(st.booleans()), draw(st.sampled_from([0.0, 0.4]))
    model = Convolutions(conv, pool, skip, drop, pick(draw, acts, 3))
    return model, (draw(st.integers(2, 3)), 2, 4, 4)


class Recurrent(nn.Module):
    """A recurrent network unrolled over its time steps; one cell, one activation."""

    def __init__(self, steps: int, n: int, width: int, acts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.steps = steps
        self.input, self.recur = nn.Linear(n, width), nn.Linear(width, width, bias=False)
        self.last = nn.Linear(width, 2)
        self.act1, self.act2 = acts

    def forward(self, x: Tensor) -> Tensor:
        h = self.act1(self.input(x[:, 0]))
        for t in range(1, self.steps):
            h = self.act1(self.input(x[:, t]) + self.recur(h))
        return self.act2(self.last(h))


class Tied(nn.Module):
    """One layer used three times, and another as it is and transposed."""

    def __init__(self, n: int, width: int, acts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.code, self.same = nn.Linear(n, width), nn.Linear(width, width)
        self.act1, self.act2, self.act3 = acts

    def forward(self, x: Tensor) -> Tensor:
        h = self.act1(self.code(x))
        for _ in range(3):
            h = self.act2(self.same(h))
        return self.act3(nn.functional.linear(h, self.code.weight.t()))


def shared(draw: st.DrawFn, acts: Sequence[Activation]) -> Made:
    n, width, m, steps = (draw(st.integers(1, 3)) for _ in range(4))
    if draw(st.booleans()):
        return Tied(n, width, pick(draw, acts, 3)), (m, n)
    return Recurrent(1 + steps, n, width, pick(draw, acts, 2)), (m, 1 + steps, n)


class Gates(nn.Module):
    """A gated unit: ``g * c + (1 - g) * h``, and a layer upon the product of two states."""

    def __init__(self, n: int, width: int, acts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.keep, self.new, self.old = (nn.Linear(n, width) for _ in range(3))
        self.last, self.scale = nn.Linear(width, 2), nn.Parameter(torch.zeros(2))
        self.act1, self.act2, self.act3, self.act4 = acts

    def forward(self, x: Tensor) -> Tensor:
        g, c, h = self.act1(self.keep(x)), self.act2(self.new(x)), self.act3(self.old(x))
        mixed = g * c + (1 - g) * h
        return self.act4(self.last(mixed * h) * self.scale)


class Attention(nn.Module):
    """One head of attention over a few tokens, beside a skip, then a layer norm."""

    def __init__(self, width: int, eps: float, acts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.weights, self.norm = nn.Softmax(-1), nn.LayerNorm(width, eps, False)
        self.last = nn.Linear(width, 2)
        (self.act1,) = acts

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        mixed = self.weights(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5) @ v
        return self.act1(self.last(self.norm(mixed + x).mean(1)))


def products(draw: st.DrawFn, acts: Sequence[Activation]) -> Made:
    if draw(st.booleans()):
        n, width, m = (draw(st.integers(1, 3)) for _ in range(3))
        return Gates(n, width, pick(draw, acts, 4)), (m, n)
    width, tokens, m = (draw(st.integers(1, 3)) for _ in range(3))
    eps = draw(st.sampled_from([0.01, 1.0]))
    return Attention(1 + width, eps, pick(draw, acts, 1)), (m, tokens, 1 + width)


class Slices(nn.Module):
    """Activations of whole slices: a layer norm with weights, a group norm, a softmax."""

    def __init__(self, n: int, eps: float, acts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(n, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.norm, self.groups = nn.LayerNorm(4, eps), nn.GroupNorm(2, 4, eps, affine=False)
        self.share = nn.Softmax(1)
        (self.act1,) = acts

    def forward(self, x: Tensor) -> Tensor:
        h = self.act1(self.norm(self.first(x)))
        return self.share(self.last(self.groups(self.second(h) + h)))


def slices(draw: st.DrawFn, acts: Sequence[Activation]) -> Made:
    n, m = (draw(st.integers(1, 3)) for _ in range(2))
    return Slices(n, draw(st.sampled_from([0.01, 1.0])), pick(draw, acts, 1)), (m, n)


KINDS = {
    "skips": skips,
    "convolutions": convolutions,
    "shared": shared,
    "products": products,
    "slices": slices,
}
