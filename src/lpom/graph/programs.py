"""An edge as a list of operations, run forwards and backwards without autograd."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, fx, nn

from lpom.graph.adjoints import ADJOINTS, COPIES, SIZES, TURNS, Adjoint, Piece, Slot, View, packed
from lpom.graph.kernels import BatchNorm, Kernel, Pooling, kernel
from lpom.graph.operations import PIECES, SPLITS, call_name, is_computed, module_name

if TYPE_CHECKING:
    from lpom.graph.edges import Edge, Step

Shown = Callable[[Tensor], Tensor]


class Receiver(Protocol):
    """Where an edge hands what it carries back."""

    def hand(self, source: int, pull: Tensor, *, own: bool) -> None:
        """A pull on a source, by its index; ``own``: nobody else looks at its memory."""

    def hand_product(self, source: int, R: Tensor, W: Tensor) -> None:
        """A pull ``R @ W`` on a source."""

    def hand_part(self, source: int, view: Shown, pull: Tensor) -> None:
        """A pull on the part of a source that a view shows."""

    def add_product(self, parameter: nn.Parameter, R: Tensor, X: Tensor) -> None:
        """``R.T @ X`` for the gradient of a matrix; one row per sample in both."""

    def add_sum(self, parameter: nn.Parameter, R: Tensor) -> None:
        """The sum of the rows of R for the gradient of a vector."""

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Something of the parameter's own shape."""


@dataclass
class Operation:
    """``values[out] = call(*args, **kwargs)``, where slots stand for values."""

    name: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: int
    root: int = -1  # of a piece: what it is a piece of, by views one after the other
    path: tuple[Shown, ...] = ()
    adjoint: Adjoint | None = None  # else that of its name

    def __post_init__(self) -> None:
        self.adjoint = self.adjoint or ADJOINTS.get(self.name)
        self.remembers = isinstance(self.adjoint, Kernel)
        self.frees: tuple[int, ...] = ()  # values that nobody reads after it
        self.lets_go: tuple[int, ...] = ()  # the same on the way back
        self.run = _runner(self.call, self.args, self.kwargs)
        found: list[int] = []
        _replace((self.args, self.kwargs), lambda slot: found.append(slot.index))
        self.reads = tuple(dict.fromkeys(found))

    def view(self, x: Tensor) -> Tensor:
        """The piece of a tensor shaped as the root is."""
        for call in self.path:
            x = call(x)
        return x

    def given(self, *names: str) -> list[Any]:
        """The arguments after the first by these names, None for those that are not there."""
        rest = self.args[1:]
        return [rest[k] if k < len(rest) else self.kwargs.get(name) for k, name in enumerate(names)]


class Program:
    """The operations of an edge, and their adjoints; it runs where autograd is off."""

    def __init__(self, edge: Edge, operations: list[Operation], result: int) -> None:
        self.sources, self.parameters = edge.sources, edge.parameters
        self.operations, self.result = operations, result
        self.first = len(self.sources)
        self.size = operations[-1].out + 1 if operations else self.first + len(self.parameters)
        self._leading: dict[tuple[bool, bool, int], frozenset[int]] = {}
        everything = self.leading(True, True)
        self.carried = [o for o in operations if o.out in everything][::-1]
        #: whether the way back looks at the value itself
        self.by_value = self._norm_by_value()
        valued: set[int] = set()
        shaped: set[int] = set()
        for operation in reversed(self.carried):
            assert operation.adjoint is not None
            needs = operation.adjoint.valued(operation, everything)
            first_made = self.first + len(self.parameters)
            operation.lets_go = tuple(k for k in needs - valued if k >= first_made)
            valued |= needs
            shaped |= operation.adjoint.shaped(operation, everything)
        self.again = self._views_of_sources(valued)
        taken = {o.out for o in self.again} | {o.args[0].index for o in self.again}
        #: sources whose states adjoints need
        self.valued = [k for k in range(self.first) if k in valued | taken]
        made = {o.out for o in operations}
        self.kept = sorted((valued & made) - {o.out for o in self.again})
        self.shaped = sorted(shaped)
        made_by = {o.out: o for o in operations}
        base, turned = result, False
        while base in made_by and isinstance(made_by[base].adjoint, View | Piece):
            turned = turned or made_by[base].name in TURNS
            base = made_by[base].args[0].index
        #: whether the value is given in its own order, as those who multiply it need it
        self.reorders = turned and base in made_by
        #: whether nobody else looks at the memory of the value
        self.owns = base in made_by and _is_fresh(made_by[base]) and base not in self.kept
        self.owns = self.owns and not self.by_value
        self._free(made_by)

    def _norm_by_value(self) -> bool:
        """Have a batch norm that gives the value know its own way back by it, and say so.

        Where its input is some other operation's and nobody else's: that is let go of.
        """
        end = self.carried[0] if self.carried else None
        if end is None or end.out != self.result or not isinstance(end.adjoint, BatchNorm):
            return False
        x = end.args[0].index
        made = any(o.out == x and _is_fresh(o) for o in self.operations)
        end.adjoint.by_value = made and sum(x in o.reads for o in self.operations) == 1
        return end.adjoint.by_value

    def _free(self, made_by: dict[int, Operation]) -> None:
        """Let values go after their last reader, and sums be written over what they add to."""
        last = {k: o for o in self.operations for k in o.reads}
        readers = Counter(k for o in self.operations for k in o.reads)
        for k, reader in last.items():
            if k not in made_by or k in self.kept or k == self.result or not _is_fresh(made_by[k]):
                continue
            reader.frees += (k,)
            others = [a for a in reader.args if a != Slot(k)]
            if readers[k] > 1 or len(others) != 1 or reader.kwargs or reader.adjoint is None:
                continue
            if reader.name == "add" and type(others[0]) is Slot:
                reader.run = _adder(k, others[0].index)
            elif reader.name == "mul" and isinstance(others[0], float):
                reader.run = _scaler(k, others[0])

    @classmethod
    def of(cls, edge: Edge) -> Program | None:
        """The program of an edge; None where some operation of it has no adjoint here."""
        made_elsewhere = not edge.sources and not edge.parameters
        return None if made_elsewhere else _Compiler(edge).program()

    def _views_of_sources(self, valued: set[int]) -> list[Operation]:
        """Views that adjoints need and that are taken again, not kept: they cost nothing."""
        views = {
            o.out: o
            for o in self.operations
            if isinstance(o.adjoint, View | Piece) and o.name not in COPIES and len(o.reads) == 1
        }
        again: set[int] = set()
        for out in valued:
            chain = []
            while out in views:
                chain.append(out)
                out = views[out].args[0].index
            if out < self.first:
                again |= set(chain)
        return [o for o in self.operations if o.out in again]

    def leading(self, states: bool, weights: bool, source: int = -1) -> frozenset[int]:
        """Slots on the way to sources (or one of them, by its place) and to parameters."""
        key = states, weights, source
        if key not in self._leading:
            ends = {k for k, s in enumerate(self.sources) if s and source in (-1, k)}
            found = ends if states else set()
            if weights:
                found |= set(range(self.first, self.first + len(self.parameters)))
            for o in self.operations:
                if o.adjoint is not None and o.name not in SIZES and found & set(o.reads):
                    found.add(o.out)
            self._leading[key] = frozenset(found)
        return self._leading[key]

    def forward(self, X: Sequence[Tensor]) -> tuple[Tensor, Any]:
        """The edge's value, and what `backward` needs to know beside the sources."""
        values: list[Any] = [*X, *self.parameters]
        memory: dict[int, Any] = {}
        shapes: dict[int, torch.Size] = {}
        for operation in self.operations:
            value = operation.run(values)
            if operation.remembers:
                value, memory[operation.out] = value
            values.append(value)
            for k in operation.frees:
                shapes[k], values[k] = values[k].shape, None
        for k in self.shaped:
            if k not in shapes:
                shapes[k] = values[k].shape
        value = packed(values[self.result]) if self.reorders else values[self.result]
        return value, ([values[k] for k in self.kept], shapes, memory)

    def backward(
        self,
        state: Callable[[int], Tensor],
        known: Any,
        R: Tensor,
        receiver: Receiver,
        wanted: frozenset[int],
        value: Tensor | None = None,
        *,
        last: bool = False,
    ) -> None:
        """Hand ``R`` down to the sources and across to the parameters, those that are wanted.

        ``state`` gives a source by its index, ``value`` is what `forward` gave, for a program
        ``by_value``; ``last``: what is known will not be asked for again.
        """
        values: list[Any] = [None] * self.size
        for k in self.valued:
            values[k] = state(self.sources[k])
        values[self.first : self.first + len(self.parameters)] = self.parameters
        kept, shapes, memory = known
        for k, one in zip(self.kept, kept, strict=True):
            values[k] = one
        if self.by_value:
            values[self.result] = value
        if last:
            kept.clear()
        for operation in self.again:
            values[operation.out] = operation.run(values)
        down = Carrying(self, receiver, wanted, values, shapes, memory)
        down.give(self.result, R)
        for operation in self.carried:
            R_out = down.gradients[operation.out]
            if R_out is not None:
                down.gradients[operation.out] = None
                operation.adjoint(operation, R_out, down)  # type: ignore[misc]
                for k in operation.lets_go:
                    values[k] = None


class Carrying:
    """What comes down, on its way through the operations of one edge."""

    def __init__(
        self,
        program: Program,
        receiver: Receiver,
        wanted: frozenset[int],
        values: list[Any],
        shapes: dict[int, torch.Size],
        memory: dict[int, Any],
    ) -> None:
        self.program, self.receiver, self.wanted = program, receiver, wanted
        self.values, self.shapes, self.memory = values, shapes, memory
        self.gradients: list[Tensor | None] = [None] * program.size
        self.owned: set[int] = set()

    def wants(self, arg: Any) -> bool:
        return type(arg) is Slot and arg.index in self.wanted

    def learns(self, arg: Any) -> bool:
        """Whether something that is wanted and no frozen weight stands there."""
        return self.wants(arg) and self.value(arg).requires_grad

    def value(self, arg: Any) -> Any:
        return self.values[arg.index] if type(arg) is Slot else arg

    def shape(self, arg: Slot) -> torch.Size:
        shape = self.shapes.get(arg.index)
        known: torch.Size = self.values[arg.index].shape if shape is None else shape
        return known

    def give(self, slot: int, R: Tensor, *, own: bool = False) -> None:
        """Add to what has come down to a slot."""
        if slot not in self.wanted:
            return
        program = self.program
        if slot < program.first:
            self.receiver.hand(program.sources[slot], R, own=own)
        elif slot < program.first + len(program.parameters):
            self.receiver.add(program.parameters[slot - program.first], R)
        elif (old := self.gradients[slot]) is None:
            self.gradients[slot] = R
            if own:
                self.owned.add(slot)
        elif slot in self.owned:
            old.add_(R)
        else:
            self.gradients[slot] = old + R
            self.owned.add(slot)

    def give_product(self, slot: int, R: Tensor, W: Tensor) -> None:
        """Give ``R @ W`` to a slot that is wanted."""
        if slot < self.program.first:
            self.receiver.hand_product(self.program.sources[slot], R, W)
        else:
            self.give(slot, R @ W, own=True)

    def summed(self, arg: Any, R: Tensor, *, own: bool = False) -> None:
        """Give to what was broadcast to the shape of R."""
        shape = self.shapes[arg.index]
        if shape == R.shape:
            self.give(arg.index, R, own=own)
        elif self._is_parameter(arg.index) and len(shape) == 1 and shape[0] == R.shape[-1]:
            parameter = self.program.parameters[arg.index - self.program.first]
            self.receiver.add_sum(parameter, R.reshape(-1, R.shape[-1]))
        else:
            self.give(arg.index, R.sum_to_size(shape), own=True)

    def product(self, arg: Any, R: Tensor, X: Tensor) -> None:
        """Give ``R.T @ X``, added up over all but the last dimensions of both."""
        if R.ndim != 2:
            R, X = R.reshape(-1, R.shape[-1]), X.reshape(-1, X.shape[-1])
        if self._is_parameter(arg.index):
            parameter = self.program.parameters[arg.index - self.program.first]
            self.receiver.add_product(parameter, R, X)
        else:
            self.give(arg.index, R.T @ X, own=True)

    def part(self, operation: Operation, R: Tensor) -> None:
        """Give to the piece of the root that a view shows."""
        root = operation.root
        if root not in self.wanted:
            return
        if root < self.program.first:
            self.receiver.hand_part(self.program.sources[root], operation.view, R)
            return
        whole = self.gradients[root]
        if whole is None or root not in self.owned:
            fresh = R.new_zeros(self.shapes[root])
            whole = fresh if whole is None else fresh.add_(whole)
        operation.view(whole).add_(R)
        if self._is_parameter(root):
            self.give(root, whole)
        else:
            self.gradients[root] = whole
            self.owned.add(root)

    def _is_parameter(self, slot: int) -> bool:
        return 0 <= slot - self.program.first < len(self.program.parameters)


class _Compiler:
    """Makes operations of an edge's steps."""

    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        self.slots: dict[Any, int] = {node: k for k, node in enumerate(edge.inputs)}
        first = len(edge.inputs)
        self.weights = {p: first + k for k, p in enumerate(edge.parameters)}
        self.next = first + len(edge.parameters)
        self.operations: list[Operation] = []
        self.splits: dict[Any, Step] = {}
        live = {k for k, s in enumerate(edge.sources) if s} | set(self.weights.values())
        self.live: set[int] = live

    def program(self) -> Program | None:
        for step in self.edge.steps:
            if not self._take(step):
                return None
        if self.edge.result not in self.slots:
            return None
        return Program(self.edge, self.operations, self.slots[self.edge.result])

    def _take(self, step: Step) -> bool:
        node = step.out
        if node.op == "get_attr":
            value = step.call()
            if isinstance(value, nn.Parameter) and value in self.weights:
                self.slots[node] = self.weights[value]
            else:
                self._put(Operation("get_attr", step.call, (), {}, self.next), node)
            return True
        if any(below in self.splits for below in node.all_input_nodes):
            return self._take_piece(step)
        args, kwargs = self._slots(step.args), self._slots(step.kwargs)
        if node.op == "call_module":
            if any(True for _ in step.call.parameters()):  # type: ignore[attr-defined]
                return self._take_layer(step, args)
            name = module_name(step.call) or ""  # type: ignore[arg-type]
        else:
            name = call_name(node.target)
        layer = step.call if isinstance(step.call, nn.Module) else None
        by = kernel(layer, name, args, dict(kwargs))
        if isinstance(by, Pooling):
            by.ordered = self.edge.ordered
        if by is not None and type(args[0]) is Slot:
            return self._put(Operation(name, by.forward, args[:1], {}, self.next, adjoint=by), node)
        if name in SPLITS:
            self.splits[node] = step
            return True
        made = Operation(name, step.call, args, dict(kwargs), self.next)
        if name in PIECES and args and type(args[0]) is Slot:
            made.root, made.path = self._path(args[0].index, made)
        return self._put(made, node)

    def _take_layer(self, step: Step, args: tuple[Any, ...]) -> bool:
        """A Linear or an Embedding as torch's function of that name; or a kernel."""
        layer: Any = step.call
        if len(args) != 1 or step.kwargs or layer._forward_hooks or layer._forward_pre_hooks:
            return False
        if is_computed(layer):
            return False
        given = [p for p in (layer.weight, getattr(layer, "bias", None)) if p is not None]
        weights = [Slot(self.weights[p]) for p in given if p in self.weights]
        if len(weights) < len(given):
            return False
        name = module_name(layer) or ""
        by = kernel(layer, name, args, {})
        if by is not None:
            made = Operation(name, by.forward, (*args, *weights), {}, self.next, adjoint=by)
            return self._put(made, step.out)
        if type(layer) is nn.Linear and len(weights) == 1 + (layer.bias is not None):
            call: Callable[..., Any] = torch.nn.functional.linear
            made = Operation("linear", call, (*args, *weights), {}, self.next)
        elif type(layer) is nn.Embedding and _is_plain(layer) and weights:
            call = torch.nn.functional.embedding
            made = Operation("embedding", call, (*args, *weights), {}, self.next)
        else:
            return False
        return self._put(made, step.out)

    def _take_piece(self, step: Step) -> bool:
        """One of the pieces that ``unbind``, ``chunk`` or ``split`` make, without the others."""
        below = self.splits.get(step.out.args[0])
        if below is None or step.call is not operator.getitem or not isinstance(step.args[1], int):
            return False
        made = _piece(below, step.args[1], self._slots, self.next)
        if made is None:
            return False
        made.root, made.path = self._path(made.args[0].index, made)
        return self._put(made, step.out)

    def _path(self, below: int, made: Operation) -> tuple[int, tuple[Shown, ...]]:
        """The root of a piece, and the views that lead there."""
        rest, kwargs, call = made.args[1:], made.kwargs, made.call

        def view(x: Tensor) -> Tensor:
            seen: Tensor = call(x, *rest, **kwargs)
            return seen

        for earlier in self.operations:
            if earlier.out == below and earlier.root >= 0:
                return earlier.root, (*earlier.path, view)
        return below, (view,)

    def _put(self, made: Operation, node: fx.Node) -> bool:
        """Add an operation; False where it has no adjoint and needs one."""
        live = bool(self.live & set(made.reads)) and made.name not in SIZES
        if live and (made.adjoint is None or not made.adjoint.fits(made)):
            return False
        if live:
            self.live.add(made.out)
        else:
            made.adjoint = None
        self.operations.append(made)
        self.slots[node] = made.out
        self.next += 1
        return True

    def _slots(self, args: Any) -> Any:
        def slot(arg: Any) -> Any:
            return Slot(self.slots[arg]) if isinstance(arg, fx.Node) else arg

        return fx.node.map_aggregate(args, slot)


def _piece(split: Step, k: int, slots: Callable[[Any], Any], out: int) -> Operation | None:
    """``split(x, ...)[k]`` as one view."""
    name, x, rest = call_name(split.out.target), slots(split.args[0]), split.args[1:]
    given = dict(split.kwargs)
    dim = given.pop("dim", None)
    if name == "unbind":
        dim = rest[0] if rest else dim or 0
        return None if given else Operation("select", torch.select, (x, dim, k), {}, out)
    size = rest[0] if rest else given.pop("chunks", given.pop("split_size", None))
    dim = rest[1] if len(rest) > 1 else dim or 0
    if given or not isinstance(size, int) or k < 0 or name not in ("chunk", "split"):
        return None

    def narrow(x: Tensor, dim: int, size: int, k: int) -> Tensor:
        width = -(-x.shape[dim] // size) if name == "chunk" else size
        return x.narrow(dim, k * width, min(width, x.shape[dim] - k * width))

    return Operation("narrow", narrow, (x, dim, size, k), {}, out)


def _is_fresh(operation: Operation) -> bool:
    return operation.adjoint is not None and operation.adjoint.fresh


def _adder(k: int, other: int) -> Callable[[list[Any]], Any]:
    """The sum of two values, written over the first where it is as large as the sum."""

    def add(values: list[Any]) -> Any:
        a, b = values[k], values[other]
        fits = a.shape == b.shape and a.dtype == b.dtype and a.layout == b.layout
        return a.add_(b) if fits else a + b

    return add


def _scaler(k: int, factor: float) -> Callable[[list[Any]], Any]:
    def scale(values: list[Any]) -> Any:
        a = values[k]
        return a.mul_(factor) if a.is_floating_point() else a * factor

    return scale


def _is_plain(layer: nn.Embedding) -> bool:
    plain = layer.max_norm is None and not layer.sparse and not layer.scale_grad_by_freq
    return plain and layer.padding_idx is None


def _runner(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[list[Any]], Any]:
    """The call as a function of all values; it runs hundreds of times in a step."""
    slots = [a.index if type(a) is Slot else -1 for a in args]
    nested = any(isinstance(a, tuple | list | slice) for a in args)
    if kwargs or nested:

        def general(values: list[Any]) -> Any:
            given, named = _replace((args, kwargs), lambda slot: values[slot.index])
            return call(*given, **named)

        return general
    if slots and slots[0] >= 0 and slots[1:] == [-1] * len(slots[1:]):
        x, rest = slots[0], args[1:]
        return lambda values: call(values[x], *rest)
    if len(slots) == 2 and min(slots) >= 0:
        a, b = slots
        return lambda values: call(values[a], values[b])
    pairs = list(zip(slots, args, strict=True))
    return lambda values: call(*[a if k < 0 else values[k] for k, a in pairs])


def _replace(structure: Any, of: Callable[[Slot], Any]) -> Any:
    if type(structure) is Slot:
        return of(structure)
    if isinstance(structure, dict):
        return {k: _replace(v, of) for k, v in structure.items()}
    if isinstance(structure, list):
        return [_replace(a, of) for a in structure]
    if isinstance(structure, tuple):
        return tuple(_replace(a, of) for a in structure)
    if isinstance(structure, slice):
        return slice(*_replace((structure.start, structure.stop, structure.step), of))
    return structure
