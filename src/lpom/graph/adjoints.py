r"""The adjoint of each operation that an edge may consist of: what it hands to its arguments.

An edge :math:`Z = A(X; W)` made of views, sums and products needs no autograd. Going through its
operations backwards, each hands what came down to it, :math:`R`, to what it was made from: a sum
as it is, a product :math:`X W^T` as :math:`R W` and :math:`R^T X`, a view by the view turned
round. In a network with hundreds of small edges, a recurrent one say, that is most of the time of
a step. Convolution, pooling, batch norm and dropout are in `lpom.graph.kernels`; edges with other
operations have autograd.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lpom.graph.operations import CONSTANTS, PIECES, SHAPES

if TYPE_CHECKING:
    from lpom.graph.programs import Carrying, Operation


@dataclass(frozen=True)
class Slot:
    """Where a value stands: sources first, then the parameters, then what operations give."""

    index: int


def is_narrow(R: Tensor, X: Tensor) -> bool:
    """Whether ``X.T @ R`` is to be had in less time than ``R.T @ X``, which it is turned round.

    The product is vectorised along the columns of what it gives. With four of them in place of
    hundreds it may take twenty times as long.
    """
    rows, columns = X.shape
    return 1 < columns < min(64, R.shape[1]) and rows >= 16 * columns


def product(R: Tensor, X: Tensor) -> Tensor:
    """``R.T @ X``; which of its dimensions comes first in memory is left open."""
    return (X.T @ R).T if is_narrow(R, X) else R.T @ X


def is_turned(x: Tensor) -> bool:
    """Whether the columns of its matrices, and not their rows, lie one after the other."""
    return x.ndim > 1 and x.stride(-2) < x.stride(-1)


def packed(x: Tensor) -> Tensor:
    """Matrices one after the other in memory, turned or not: as products take them.

    They would copy any other order, those of the way back again.
    """
    return x.mT.contiguous().mT if is_turned(x) else x.contiguous()


class Adjoint(ABC):
    """The adjoint of an operation, and which values of its arguments it needs.

    ``fresh``: the operation's value has memory of its own.
    """

    fresh = True

    @abstractmethod
    def __call__(self, o: Operation, R: Tensor, down: Carrying) -> None:
        """Hand what came down to the operation to its arguments."""

    def valued(self, o: Operation, live: frozenset[int]) -> set[int]:
        return set()

    def shaped(self, o: Operation, live: frozenset[int]) -> set[int]:
        """The slots whose shapes it needs."""
        return {o.root} if o.root >= 0 else {k for k in o.reads if k in live}

    def fits(self, o: Operation) -> bool:
        """Whether the arguments are such as are known here."""
        return not o.kwargs


class _Factors(Adjoint):
    """Of operations on two tensors: each value is needed where the other is to be pulled."""

    def valued(self, o: Operation, live: frozenset[int]) -> set[int]:
        a, b = o.args[:2]
        found = set()
        for one, other in ((a, b), (b, a)):
            if type(one) is Slot and type(other) is Slot and one.index in live:
                found.add(other.index)
        return found


class _Linear(_Factors):
    def __call__(self, o: Operation, R: Tensor, down: Carrying) -> None:
        x, weight, bias = (*o.args, None)[:3]
        R = R if R.ndim == 2 else R.contiguous()  # once, for all three
        if down.wants(x):
            down.give_product(x.index, R, down.value(weight))
        if down.wants(weight):
            down.product(weight, R, down.value(x))
        if down.wants(bias):
            down.summed(bias, R)


class _Mul(_Factors):
    def __call__(self, o: Operation, R: Tensor, down: Carrying) -> None:
        a, b = o.args
        for one, other in ((a, b), (b, a)):
            if down.wants(one):
                down.summed(one, R * down.value(other), own=True)


class _Matmul(_Factors):
    def __call__(self, o: Operation, R: Tensor, down: Carrying) -> None:
        a, b = o.args
        rows, columns = down.shape(a), down.shape(b)
        R = R.unsqueeze(-1) if len(columns) == 1 else R  # vectors are matrices of one row, column
        R = packed(R.unsqueeze(-2) if len(rows) == 1 else R)
        if down.wants(a):
            B = down.value(b)
            found = R @ (B[:, None] if B.ndim == 1 else B).mT
            shape = (1, *rows) if len(rows) == 1 else rows
            down.give(a.index, found.sum_to_size(shape).reshape(rows), own=True)
        if down.wants(b):
            A = down.value(a)
            A = A[None] if A.ndim == 1 else A
            if len(columns) <= 2:  # one matrix for all: one product
                found = A.reshape(-1, A.shape[-1]).T @ R.reshape(-1, R.shape[-1])
                down.give(b.index, found.reshape(columns), own=True)
            else:
                found = (R.mT @ A).mT if is_turned(down.value(b)) else A.mT @ R
                down.give(b.index, found.sum_to_size(columns), own=True)


class _Add(Adjoint):
    def __init__(self, first: int = 1, second: int = 1) -> None:
        self.signs = first, second

    def __call__(self, o: Operation, R: Tensor, down: Carrying) -> None:
        for arg, sign in zip(o.args, self.signs, strict=False):
            if down.wants(arg):
                down.summed(arg, R if sign > 0 else -R, own=sign < 0)


class _Divide(Adjoint):
    def __call__(self, o: Operation, R: Tensor, down: Carrying) -> None:
        down.summed(o.args[0], R / down.value(o.args[1]), own=True)

    def valued(self, o: Operation, live: frozenset[int]) -> set[int]:
        return {o.args[1].index} if type(o.args[1]) is Slot else set()


class View(Adjoint):
    """All numbers of the input, in another shape: ``back`` turns that round."""

    fresh = False

    def __init__(self, back: Callable[[Operation, Tensor, torch.Size], Tensor]) -> None:
        self.back = back

    def __call__(self, o: Operation, R: Tensor, down: Carrying) -> None:
        x = o.args[0].index
        down.give(x, self.back(o, R, down.shapes[x]))

    def fits(self, o: Operation) -> bool:
        return bool(o.args) and type(o.args[0]) is Slot


class Piece(Adjoint):
    """A view of some numbers of the input."""

    fresh = False

    def __call__(self, o: Operation, R: Tensor, down: Carrying) -> None:
        down.part(o, R)

    def fits(self, o: Operation) -> bool:
        given = _items((o.args[1:], tuple(o.kwargs.values())))
        alone = o.root >= 0 and len(o.reads) == 1
        return alone and not any(isinstance(a, Tensor | list | Slot) for a in given)


class _Join(Adjoint):
    """``cat`` and ``stack``: each input has its place in what comes down."""

    def __call__(self, o: Operation, R: Tensor, down: Carrying) -> None:
        dim, at = self._dim(o), 0
        for k, x in enumerate(o.args[0]):
            if o.name == "stack":
                down.give(x.index, R.select(dim, k))
            else:
                width = down.shapes[x.index][dim]
                down.give(x.index, R.narrow(dim, at, width))
                at += width

    def fits(self, o: Operation) -> bool:
        return isinstance(o.args[0], tuple | list) and isinstance(self._dim(o), int)

    def shaped(self, o: Operation, live: frozenset[int]) -> set[int]:
        return set(o.reads)  # where one begins is where those before it end

    @staticmethod
    def _dim(o: Operation) -> Any:
        (dim,) = o.given("dim")
        return 0 if dim is None else dim


class _Reduce(Adjoint):
    """``mean`` and ``sum`` over given dimensions."""

    def __call__(self, o: Operation, R: Tensor, down: Carrying) -> None:
        dim, keep = o.given("dim", "keepdim")
        shape = down.shapes[o.args[0].index]
        dims = sorted(d % len(shape) for d in ([dim] if isinstance(dim, int) else dim))
        for d in dims if not keep else ():
            R = R.unsqueeze(d)
        if o.name == "mean":
            count = 1
            for d in dims:
                count *= shape[d]
            R = R / count
        down.give(o.args[0].index, R.expand(shape))

    def fits(self, o: Operation) -> bool:
        dim, keep = o.given("dim", "keepdim")
        known = type(o.args[0]) is Slot and not set(o.kwargs) - {"dim", "keepdim"}
        return known and isinstance(keep, bool | None) and (isinstance(dim, int) or bool(dim))


class _MaskedFill(Adjoint):
    def __call__(self, o: Operation, R: Tensor, down: Carrying) -> None:
        down.summed(o.args[0], R.masked_fill(down.value(o.args[1]), 0), own=True)

    def valued(self, o: Operation, live: frozenset[int]) -> set[int]:
        return {o.args[1].index}

    def fits(self, o: Operation) -> bool:
        number = len(o.args) == 3 and isinstance(o.args[2], int | float)
        return number and not o.kwargs and type(o.args[1]) is Slot


class _Where(Adjoint):
    def __call__(self, o: Operation, R: Tensor, down: Carrying) -> None:
        mask = down.value(o.args[0])
        for arg, other in zip(o.args[1:], (~mask, mask), strict=True):
            if down.wants(arg):
                down.summed(arg, R.masked_fill(other, 0), own=True)

    def valued(self, o: Operation, live: frozenset[int]) -> set[int]:
        return {o.args[0].index}

    def fits(self, o: Operation) -> bool:
        first = o.call is torch.where and len(o.args) == 3  # in the method the mask is second
        return first and not o.kwargs and type(o.args[0]) is Slot


class _Embedding(Adjoint):
    def __call__(self, o: Operation, R: Tensor, down: Carrying) -> None:
        indices, table = o.args
        gradient = torch.zeros_like(down.value(table))
        gradient.index_add_(0, down.value(indices).reshape(-1), R.reshape(-1, R.shape[-1]))
        down.give(table.index, gradient, own=True)

    def valued(self, o: Operation, live: frozenset[int]) -> set[int]:
        return {arg.index for arg in o.args}

    def fits(self, o: Operation) -> bool:
        return len(o.args) == 2 and not o.kwargs


def _transposed(o: Operation, R: Tensor, shape: torch.Size) -> Tensor:
    a, b = (0, 1) if o.name == "t" else o.given("dim0", "dim1")
    return R if o.name == "t" and R.ndim < 2 else R.transpose(a, b)


def _permuted(o: Operation, R: Tensor, shape: torch.Size) -> Tensor:
    dims = o.args[1] if isinstance(o.args[1], tuple | list) else o.args[1:]
    order = [d % len(dims) for d in dims]
    return R.permute([order.index(d) for d in range(len(order))])


ADJOINTS: dict[str, Adjoint] = {
    "linear": _Linear(),
    "mul": _Mul(),
    "multiply": _Mul(),
    "matmul": _Matmul(),
    "add": _Add(),
    "sub": _Add(1, -1),
    "rsub": _Add(-1, 1),
    "neg": _Add(-1),
    "truediv": _Divide(),
    "div": _Divide(),
    "cat": _Join(),
    "stack": _Join(),
    "mean": _Reduce(),
    "sum": _Reduce(),
    "masked_fill": _MaskedFill(),
    "where": _Where(),
    "embedding": _Embedding(),
    **dict.fromkeys(
        "flatten unflatten reshape view squeeze unsqueeze contiguous identity".split(),
        View(lambda o, R, shape: R.reshape(shape)),
    ),
    **dict.fromkeys("transpose swapaxes t".split(), View(_transposed)),
    "permute": View(_permuted),
    **dict.fromkeys(PIECES, Piece()),
}
#: Views in which the numbers have another order than in memory.
TURNS = frozenset("transpose swapaxes t permute".split())
#: Views that may be copies, which are kept and not made again.
COPIES = frozenset("flatten reshape contiguous".split())
#: Of their arguments these take sizes alone, or nothing that is pulled.
SIZES = SHAPES | CONSTANTS


def _items(structure: Any) -> list[Any]:
    """What tuples within tuples hold; the ends of slices too."""
    if isinstance(structure, slice):
        structure = (structure.start, structure.stop, structure.step)
    if isinstance(structure, tuple):
        return [a for item in structure for a in _items(item)]
    return [structure]
