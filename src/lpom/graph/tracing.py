"""Any torch module that torch.fx can follow, cut into states and the edges between them."""

from __future__ import annotations

import contextlib
import itertools
import linecache
import operator
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import UninitializedParameter

from lpom import activations
from lpom.activations import Activation, Identity
from lpom.exceptions import UntrainableError
from lpom.graph.edges import Edge, Step
from lpom.graph.network import Graph, Node
from lpom.graph.operations import (
    AFFINE,
    CONSTANTS,
    PRODUCTS,
    QUOTIENTS,
    SHAPES,
    SWITCHES,
    VIEWS,
    WEIGHTED,
    call_name,
    module_name,
)
from lpom.graph.scans import Layer
from lpom.graph.written import written_function, written_module

_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_PLAIN = nn.Module.__call__, nn.Module.__getattr__
#: Functions that make tensors of a size, which torch.fx does not see by itself.
_FACTORIES = ("zeros", "ones", "full", "empty", "arange", "rand", "randn", "eye")


def trace(model: nn.Module, example: Tensor | None = None) -> Graph:
    """The graph of states of a module; the module keeps weights and buffers.

    ``example`` is a batch of inputs, needed where the model's own Python asks for sizes (a loop
    over time steps, say). Raises `UntrainableError`, a ValueError, for what can't be trained, with
    the line of the model where it stands.
    """
    model = unwrapped(model)
    graph = _Builder(model, *traced(model, example)).build(model)
    return replace(graph, swept=_swept(model, example))


def _swept(model: nn.Module, example: Tensor | None) -> Graph | None:
    """The graph with recurrent layers whole; None where there are none or one has to be open."""
    if not any(Layer.fits(module) for module in model.modules()):
        return None
    builder = _Builder(model, *traced(model, example, whole=(nn.RNN, nn.LSTM, nn.GRU)))
    return builder.build(model) if builder.close_layers() else None


def traced(
    model: nn.Module, example: Tensor | None = None, whole: Collection[type[nn.Module]] = ()
) -> tuple[fx.Graph, dict[fx.Node, str]]:
    """All that the module does, before it is cut into states, and the line where each thing stands.

    What does not reach the output is left out. Modules of the classes ``whole`` stay one call,
    others are written out where `lpom.graph.written` says how.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise UntrainableError(
                f"the layer of {name} is lazy and has no weights yet; call the model once on a "
                "batch of data first."
            )
    if model._forward_hooks or model._forward_pre_hooks:
        raise UntrainableError(
            "the model itself has forward hooks, which tracing would pass over; give "
            "nn.Sequential(model), which calls it with them, or remove them."
        )
    tracer = _Tracer(example, whole)
    try:
        graph = tracer.in_both_modes(model)
    except (fx.proxy.TraceError, TypeError, NameError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not isinstance(error, fx.proxy.TraceError):
            raise
        raise UntrainableError(
            f"torch.fx cannot follow {type(model).__name__}: {error} "
            f"({tracer.line or 'line unknown'}). The model's Python may not depend on values of "
            "tensors or on the size of the batch. lpom.lift(model) trains such models in a loop "
            "of your own."
        ) from error
    _leave_out_unused(graph)
    return graph, tracer.lines


def _leave_out_unused(graph: fx.Graph) -> None:
    """Leave out what does not reach the output."""
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op not in ("placeholder", "output"):
            graph.erase_node(node)


@contextlib.contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Without the attributes where torch.fx puts tensors that the model makes on its way."""
    before = set(vars(model))
    try:
        yield
    finally:
        for name in set(vars(model)) - before:
            delattr(model, name)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside torch.compile's wrapper, whose weights it shares."""
    inner = getattr(model, "_orig_mod", None)
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


class _Tracer(fx.Tracer):
    """torch.fx's tracer; sizes of tensors are numbers, except those that follow the batch."""

    def __init__(self, example: Tensor | None, whole: Collection[type[nn.Module]]) -> None:
        super().__init__()
        self.example, self.whole = example, whole
        self.lines: dict[fx.Node, str] = {}
        self.line = ""
        self._known: dict[fx.Node, tuple[Any, Any]] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, activations.Elementwise):
            return True
        return super().is_leaf_module(m, module_qualified_name)

    def get_fresh_qualname(self, prefix: str) -> str:
        """The first free name, so that every trace of a model has the same ones."""
        names = (f"{prefix}{k}" for k in itertools.count())
        return next(name for name in names if not hasattr(self.root, name))

    def in_both_modes(self, model: nn.Module) -> fx.Graph:
        """What the model does in training; a flag that is another in evaluation stays a question.

        So ``F.dropout(x, training=self.training)`` follows the model's mode at every call.
        """
        modes = {module: module.training for module in model.modules()}
        try:
            with _factories_traced():
                model.eval()
                with left_as_it_was(model):
                    evaluated = self.trace(model)
                self.lines.clear()
                self._known.clear()
                model.train()
                traced = self.trace(model)
        finally:
            for module, training in modes.items():
                module.training = training
        pairs = list(zip(traced.nodes, evaluated.nodes, strict=False))
        if len(traced.nodes) != len(evaluated.nodes) or any(
            (a.op, call_name(a.target)) != (b.op, call_name(b.target)) for a, b in pairs
        ):
            raise fx.proxy.TraceError(
                "it does other operations in training than in evaluation (a branch on "
                "self.training); modules such as nn.Dropout may differ, the path may not."
            )
        for node, other in pairs:
            self._follow_mode(traced, node, other)
        return traced

    def _follow_mode(self, traced: fx.Graph, node: fx.Node, other: fx.Node) -> None:
        """Put the model's own flag where the two traces have True and False."""

        def chosen(training: Any, evaluating: Any) -> Any:
            if not (training is True and evaluating is False):
                return training
            with traced.inserting_before(node):
                flag = traced.get_attr("training", type_expr=bool)
            self.lines[flag] = self.lines.get(node, "")
            return flag

        node.args = tuple(map(chosen, node.args, other.args))
        node.kwargs = {k: chosen(v, other.kwargs.get(k)) for k, v in node.kwargs.items()}

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        written = None if type(m) in self.whole else written_module(m)
        if written is not None:
            if m._forward_hooks or m._forward_pre_hooks:
                raise UntrainableError(
                    f"{self.path_of_module(m)} ({type(m).__name__}) can't be trained: it has "
                    "forward hooks, which would be passed over."
                )
            return written(m, *args, **kwargs)
        try:
            self.path_of_module(m)
        except NameError:  # made inside of forward, as nn.ReLU()(x): what it calls is seen
            return forward(*args, **kwargs)
        called = super().call_module(m, forward, args, kwargs)
        if isinstance(m, nn.RNNBase) and type(m) in self.whole:  # the tuples that it returns
            end = called[1]
            return called[0], (end[0], end[1]) if m.mode == "LSTM" else end
        return called

    def create_proxy(
        self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **named: Any
    ) -> Any:
        if kind == "call_function":
            written = written_function(target, args, kwargs)
            if written is not None:
                return written(*args, **kwargs)
        return super().create_proxy(kind, target, args, kwargs, *more, **named)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        self.line = _user_line() or self.line
        self.lines[node] = self.line
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Shaped(node, self)

    def sizes(self, node: fx.Node) -> tuple[Any, ...] | None:
        """Sizes of a value for batches of two and of three rows, as pairs; None if unknown."""
        if self.example is None:
            return None
        two, three = (self._value(node, k) for k in (0, 1))
        if not (isinstance(two, Tensor) and isinstance(three, Tensor)):
            return None
        return tuple(zip(two.shape, three.shape, strict=True))

    def parts(self, node: fx.Node) -> int | None:
        """How many tensors a value consists of, None if that is unknown or it is one."""
        value = None if self.example is None else self._value(node, 0)
        return len(value) if isinstance(value, tuple | list) else None

    def _value(self, node: fx.Node, k: int) -> Any:
        """What the node gives for the first two (k = 0) or three rows of the example."""
        for earlier in self.graph.nodes:
            if earlier not in self._known and earlier.op != "output":
                self._known[earlier] = (self._run(earlier, 0), self._run(earlier, 1))
            if earlier is node:
                break
        return self._known[node][k]

    @torch.no_grad()
    def _run(self, node: fx.Node, k: int) -> Any:
        assert self.example is not None
        if node.op == "placeholder":
            rows = torch.cat([self.example] * 3) if len(self.example) < 3 else self.example
            return rows[: 2 + k]
        args: Any = fx.node.map_arg(node.args, lambda n: self._known[n][k])
        kwargs: Any = fx.node.map_arg(node.kwargs, lambda n: self._known[n][k])
        if node.op == "get_attr":
            with _untraced():
                return operator.attrgetter(str(node.target))(self.root)
        if node.op == "call_module":
            module = self.root.get_submodule(str(node.target))
            was = module.training
            module.eval()  # statistics and masks stay as they are
            try:
                with _untraced():
                    return module(*args, **kwargs)
            finally:
                module.train(was)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]


class _Shaped(fx.Proxy):
    """A proxy that knows its sizes: numbers, or proxies where they follow the batch's."""

    @property
    def shape(self) -> Any:
        sizes = self.tracer.sizes(self.node)  # type: ignore[attr-defined]
        if sizes is None:
            return self.tracer.create_proxy("call_function", getattr, (self, "shape"), {})
        return tuple(
            a if a == b else self.tracer.create_proxy("call_method", "size", (self, d), {})
            for d, (a, b) in enumerate(sizes)
        )

    def size(self, dim: int | None = None) -> Any:
        if self.tracer.sizes(self.node) is None:  # type: ignore[attr-defined]
            args = (self,) if dim is None else (self, dim)
            return self.tracer.create_proxy("call_method", "size", args, {})
        return self.shape if dim is None else self.shape[dim]

    @property
    def ndim(self) -> Any:
        sizes = self.tracer.sizes(self.node)  # type: ignore[attr-defined]
        if sizes is None:
            return self.tracer.create_proxy("call_function", getattr, (self, "ndim"), {})
        return len(sizes)

    def dim(self) -> Any:
        return self.ndim

    @property
    def T(self) -> Any:
        return self.t()

    @property
    def mT(self) -> Any:
        return self.transpose(-2, -1)

    def __len__(self) -> int:
        parts = self.tracer.parts(self.node)  # type: ignore[attr-defined]
        size = self.size(0) if parts is None else parts
        if isinstance(size, int):
            return size
        raise fx.proxy.TraceError("len() of a tensor is the size of the batch")

    def __iter__(self) -> Iterator[Any]:
        sizes = self.tracer.sizes(self.node)  # type: ignore[attr-defined]
        if sizes is not None and sizes[0][0] == sizes[0][1]:
            return iter([operator.getitem(self, i) for i in range(sizes[0][0])])
        parts = self.tracer.parts(self.node)  # type: ignore[attr-defined]
        if parts is not None:
            return iter([operator.getitem(self, i) for i in range(parts)])
        return super().__iter__()


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    """Run modules as they are, while torch.fx has its own hands on their calls and attributes."""
    patched = nn.Module.__call__, nn.Module.__getattr__
    nn.Module.__call__, nn.Module.__getattr__ = _PLAIN  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__, nn.Module.__getattr__ = patched  # type: ignore[method-assign]


@contextlib.contextmanager
def _factories_traced() -> Iterator[None]:
    """Let torch.zeros(x.shape[0], ...) and its like be seen where a size is a proxy."""
    originals = {name: getattr(torch, name) for name in _FACTORIES}

    def seen(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            proxies: list[fx.Proxy] = []
            fx.node.map_aggregate(
                (args, kwargs), lambda a: proxies.append(a) if isinstance(a, fx.Proxy) else a
            )
            if proxies:
                return proxies[0].tracer.create_proxy("call_function", original, args, kwargs)
            return original(*args, **kwargs)

        return call

    for name, original in originals.items():
        setattr(torch, name, seen(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


def _user_line() -> str:
    """The line of the user's own model that is running."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file == __file__ and frame.f_code.co_name == "trace":
            return ""  # beyond it stands who asked for the trace
        if not file.startswith((_TORCH, _HERE)) and not file.startswith("<"):
            code = linecache.getline(file, frame.f_lineno).strip()
            return f"line {frame.f_lineno} of {Path(file).name}: {code}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def lifted_identity(x: Tensor) -> Tensor:
    """Marks a value that is a state of its own although no activation stands there."""
    return x


@dataclass
class _Value:
    """What a traced value depends on since the last states below it."""

    states: frozenset[fx.Node] = frozenset()
    data: bool = False
    weights: bool = False
    matrix: bool = False  # a weight matrix has met a state or the data
    curved: str = ""  # the operation by which it is not affine in its weights

    @property
    def live(self) -> bool:
        """Whether the network computes it: not from the data or the weights alone."""
        return bool(self.states) or (self.data and self.weights)


class _Builder:
    """Decides which values are states, and collects what lies between them."""

    def __init__(self, root: nn.Module, traced: fx.Graph, lines: dict[fx.Node, str]) -> None:
        self.root, self.traced, self.lines = root, traced, lines
        self.activations: dict[fx.Node, Activation] = {}
        self.values: dict[fx.Node, _Value] = {}
        self.layers: dict[fx.Node, Layer] = {}

    def build(self, model: nn.Module) -> Graph:
        self._check_ends()
        self._swap_pooling()
        self._pick_from_stacks()
        self._follow()
        self._mark_shared()
        self._mark_output()
        self._follow()  # with the marks
        states = [n for n in self.traced.nodes if n in self.activations]
        inputs = next(n for n in self.traced.nodes if n.op == "placeholder")
        index = {inputs: 0} | {n: i for i, n in enumerate(states, start=1)}
        names = self._names(states)
        nodes = []
        for n in states:
            edge = self._edge(n.args[0] if n.args else n.kwargs["input"], index)
            layer = self.layers.get(n)
            nodes.append(Node(index[n], names[n], self.activations[n], edge, layer))
        if not any(node.parameters for node in nodes):
            raise UntrainableError(
                f"{type(model).__name__} has no weights to train: its parameters, if any, do not "
                "reach the output."
            )
        return Graph(tuple(nodes), index[self._output()])

    # what stands where

    def _output(self) -> fx.Node:
        (result,) = next(n for n in self.traced.nodes if n.op == "output").args
        output: fx.Node = result
        return output

    def _check_ends(self) -> None:
        inputs = [n for n in self.traced.nodes if n.op == "placeholder"]
        for extra in inputs[1:]:
            if extra.args:  # a default
                with self.traced.inserting_before(extra):
                    extra.replace_all_uses_with(extra.args[0])
                self.traced.erase_node(extra)
            else:
                raise UntrainableError(
                    f"the model takes {len(inputs)} inputs ({', '.join(map(str, inputs))}); give "
                    "it one tensor, and take it apart inside the model."
                )
        if not isinstance(self._output(), fx.Node):
            raise UntrainableError(
                f"the model returns {type(self._output()).__name__}; it must return one tensor. "
                "Wrap it in a module that picks the prediction."
            )

    def _module(self, node: fx.Node) -> nn.Module:
        return self.root.get_submodule(str(node.target))

    def _name(self, node: fx.Node) -> str:
        """The bare name of a call, of a known module too; the class of an unknown one."""
        if node.op != "call_module":
            return call_name(node.target)
        module = self._module(node)
        return module_name(module) or type(module).__name__

    def _call(self, near: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = self.traced.call_function(target, args, kwargs)
        self.lines[made] = self.lines.get(near, "")
        return made

    def _swap_pooling(self) -> None:
        """Max-pooling commutes with every non-decreasing function: put it below it."""
        for pool in list(self.traced.nodes):
            if "max_pool" not in self._name_or_nothing(pool):
                continue
            act = pool.args[0]
            if not isinstance(act, fx.Node) or len(act.users) > 1 or not pool.users:
                continue
            activation = self._activation(act)
            if activation is None or not activation.elementwise:
                continue
            z = act.args[0]
            act.replace_all_uses_with(z)  # type: ignore[arg-type]
            pool.append(act)  # after the pool
            for user in [user for user in pool.users if user is not act]:
                user.replace_input_with(pool, act)
            act.args = (pool, *act.args[1:])

    def _pick_from_stacks(self) -> None:
        """``stack(steps, 1)[:, -1]`` is the last step: the others need not be looked at."""
        for pick in list(self.traced.nodes):
            below = pick.args[0] if pick.target is operator.getitem else None
            if not isinstance(below, fx.Node) or below.target is not torch.stack:
                continue
            stacked: Any = below.args[0]
            dim = below.args[1] if len(below.args) > 1 else below.kwargs.get("dim", 0)
            index = pick.args[1] if isinstance(pick.args[1], tuple) else (pick.args[1],)
            place = index[dim] if isinstance(dim, int) and 0 <= dim < len(index) else None
            rest = [i for d, i in enumerate(index) if d != dim]
            if type(place) is int and all(i == slice(None) for i in rest):
                pick.replace_all_uses_with(stacked[place])
                self.traced.erase_node(pick)
                if not below.users:
                    self.traced.erase_node(below)

    def _name_or_nothing(self, node: fx.Node) -> str:
        return self._name(node) if node.op.startswith("call") else ""

    def _activation(self, node: fx.Node) -> Activation | None:
        """The activation that a call computes; raises for functions that can't be one."""
        if node.target is lifted_identity or node in self.layers:
            return Identity()
        try:
            if node.op == "call_module":
                module = self._module(node)
                if isinstance(module, nn.Identity) or not activations.is_activation(module):
                    return None
                if module._forward_hooks or module._forward_pre_hooks:
                    raise UntrainableError("it has forward hooks, which would be passed over.")
                return activations.from_module(module)
            if node.op in ("call_function", "call_method"):
                options = {k: v for k, v in node.kwargs.items() if k != "input"}
                if options.get("out", 0) is None:  # nowhere in particular
                    del options["out"]
                return activations.from_call(call_name(node.target), tuple(node.args[1:]), options)
        except (ValueError, TypeError) as error:
            self._refuse(node, str(error))
        return None

    def close_layers(self) -> bool:
        """Let the calls of recurrent layers stand for their outputs, samples first.

        False where one has to stay open.
        """
        for call in [n for n in self.traced.nodes if n.op == "call_module"]:
            module = self._module(call)
            if not isinstance(module, nn.RNNBase):
                continue
            if not Layer.fits(module) or any(arg is not None for arg in call.args[1:]):
                return False
            picks = self._picks(call, module)
            if picks is None:
                return False
            outputs, lasts = picks
            with self.traced.inserting_after(call):
                last = self._call(call, torch.select, call, 1, -1)
                whole = call
                if not module.batch_first:
                    whole = self._call(call, torch.transpose, call, 0, 1)
            if not module.batch_first:
                with self.traced.inserting_before(call):
                    call.args = (self._call(call, torch.transpose, call.args[0], 0, 1),)
            for pick, made in [(n, whole) for n in outputs] + [(n, last) for n in lasts]:
                pick.replace_all_uses_with(made)
            self.layers[call] = Layer(module)
        _leave_out_unused(self.traced)
        return True

    def _picks(
        self, call: fx.Node, module: nn.RNNBase
    ) -> tuple[list[fx.Node], list[fx.Node]] | None:
        """What is taken of a layer: its outputs, and what its last layer carries out.

        The latter is the last output. None where anything else is taken.
        """
        parts = list(call.users)
        if any(part.target is not operator.getitem for part in parts):
            return None
        ends = [part for part in parts if part.args[1] == 1]
        if module.mode == "LSTM":
            ends = [h for end in ends for h in end.users]
            if any(h.target is not operator.getitem or h.args[1] != 0 for h in ends):
                return None
        lasts = [pick for end in ends for pick in end.users]
        places = (-1, module.num_layers - 1)
        if any(n.target is not operator.getitem or n.args[1] not in places for n in lasts):
            return None
        if lasts and module.bidirectional:
            return None
        return [part for part in parts if part.args[1] == 0], lasts

    # what depends on what

    def _follow(self) -> None:
        """Dependences of every value; where an activation meets a live value stands a state."""
        self.values, self.activations = {}, {}
        for node in list(self.traced.nodes):
            if node.op == "placeholder":
                self.values[node] = _Value(data=True)
            elif node.op == "get_attr":
                self.values[node] = _Value(weights=self._is_weight(node))
            elif node.op != "output":
                self.values[node] = self._call_value(node)

    def _is_weight(self, node: fx.Node) -> bool:
        return isinstance(operator.attrgetter(str(node.target))(self.root), nn.Parameter)

    def _call_value(self, node: fx.Node) -> _Value:
        below = [self.values[n] for n in node.all_input_nodes]
        name = self._name(node)
        if name in SHAPES or name in CONSTANTS:
            return _Value()
        own = node.op == "call_module" and any(True for _ in self._module(node).parameters())
        value = _Value(
            frozenset().union(*(v.states for v in below)),
            any(v.data for v in below),
            own or any(v.weights for v in below),
            any(v.matrix for v in below),
            next((v.curved for v in below if v.curved), ""),
        )
        if not value.live:
            if value.weights and name not in AFFINE:
                value.curved = name
            return value
        activation = self._activation(node)
        if activation is not None:
            self.activations[node] = activation
            return _Value(states=frozenset([node]), data=True)
        if name not in AFFINE:
            self._refuse(node, f"lpom does not know {name} as an operation that is affine")
        if name in QUOTIENTS and self.values.get(node.args[1], _Value()).live:  # type: ignore[arg-type]
            self._refuse(node, "it divides by a state, which is not affine")
        if self._cut_factors(node, name):
            return self._call_value(node)
        if node.op == "call_module" and _is_computed(self._module(node)):
            value.curved = f"the weight of {node.target}, which is computed from other parameters"
        value.matrix = value.matrix or (name in WEIGHTED and value.weights)
        return value

    def _cut_factors(self, node: fx.Node, name: str) -> bool:
        """Make states of factors that need to be; True if any was made.

        In a product of states each factor is a state of its own, so that the edge is affine in
        each; and a weight matrix meets no value that another one made.
        """
        if name not in PRODUCTS:
            return False
        live = [n for n in node.all_input_nodes if self.values[n].live]
        factors = [a for a in fx.node.map_aggregate(list(node.args), lambda a: a) if a in live]
        if len(live) > 1 or len(factors) > len(live):
            heads = [self._viewed(n) for n in live]
            cut = [n for n, head in zip(live, heads, strict=True) if head is None]
            twice = [
                n
                for k, n in enumerate(live)
                if factors.count(n) > 1 or (heads[k] is not None and heads[k] in heads[:k])
            ]
            for n in cut:
                self._mark(n, None)
            for n in twice:
                self._mark(n, node)
            return bool(cut or twice)
        if name in WEIGHTED and live and self.values[live[0]].matrix:
            self._mark(live[0], node)
            return True
        return False

    def _viewed(self, node: Any) -> fx.Node | None:
        """The state that a value is but a view of."""
        while isinstance(node, fx.Node) and node not in self.activations:
            if self._name_or_nothing(node) not in VIEWS or len(node.all_input_nodes) > 1:
                return None
            node = node.args[0] if node.args else None
        return node if isinstance(node, fx.Node) else None

    def _mark(self, value: fx.Node, user: fx.Node | None) -> fx.Node:
        """Put an identity node on a value: for all its users, or for one of them."""
        with self.traced.inserting_after(value):
            mark = self._call(value, lifted_identity, value)
        if user is None:
            value.replace_all_uses_with(mark, delete_user_cb=lambda u: u is not mark)
        else:
            args = list(user.args)
            args[args.index(value)] = mark
            user.args = tuple(args)
        self.values[mark] = _Value(states=frozenset([mark]), data=True)
        self.activations[mark] = Identity()
        return mark

    def _mark_shared(self) -> None:
        """A value that two edges need is a state, unless it is but another view of one."""
        heads: dict[fx.Node, frozenset[fx.Node]] = {}
        for node in reversed(list(self.traced.nodes)):
            above: frozenset[fx.Node] = frozenset()
            for user in node.users:
                ends = user in self.activations or user.op == "output"
                above |= frozenset([user]) if ends else heads.get(user, frozenset())
            heads[node] = above
            value = self.values.get(node)
            if value is None or not value.live or node in self.activations or len(above) < 2:
                continue
            if self._name(node) not in VIEWS:
                heads[node] = frozenset([self._mark(node, None)])

    def _mark_output(self) -> None:
        output = self._output()
        if output not in self.activations:
            if not self.values[output].live:
                raise UntrainableError("the model's output does not depend on its weights.")
            mark = self._mark(output, None)
            mark.name = "output"

    # what is made of it

    def _names(self, states: list[fx.Node]) -> dict[fx.Node, str]:
        """The activation module's own name where there is one, unique."""
        names: dict[fx.Node, str] = {}
        for n in states:
            named: Any = n.args[0] if n.target is lifted_identity and n.name != "output" else n
            name = str(named.target) if named.op == "call_module" else str(named.name)
            taken = sum(other == name or other.startswith(f"{name}#") for other in names.values())
            names[n] = name if not taken else f"{name}#{taken + 1}"
        return names

    def _edge(self, result: Any, index: dict[fx.Node, int]) -> Edge:
        """All operations between the states and ``result``."""
        needed: set[fx.Node] = set()
        queue, sources = [result], set()
        while queue:
            node = queue.pop()
            if node in index:
                sources.add(node)
            elif node not in needed:
                needed.add(node)
                queue += node.all_input_nodes
        order = [n for n in self.traced.nodes if n in needed]
        inputs = tuple(sorted(sources, key=index.__getitem__))
        steps = tuple(self._step(n) for n in order)
        parameters, names = self._parameters(order)
        products = [n for n in order if self._name_or_nothing(n) in PRODUCTS]
        return Edge(
            tuple(index[n] for n in inputs),
            parameters,
            steps,
            inputs,
            result,
            names,
            layer=self._layer(order, inputs),
            obstacle=next((v.curved for n in order if (v := self.values[n]).curved), ""),
            multiplies=any(
                sum(bool(self.values[a].states) for a in n.all_input_nodes) > 1 for n in products
            ),
        )

    def _step(self, node: fx.Node) -> Step:
        switch = ""
        if node.op.startswith("call"):
            name = self._name(node)
            live = any(self.values[n].live for n in node.all_input_nodes)
            switch = name if name in SWITCHES and (live or name != "amax") else ""
        if node.op == "get_attr":
            return Step(node, _Attribute(self.root, str(node.target)), (), {})
        if node.op == "call_module":
            return Step(node, self._module(node), node.args, node.kwargs, switch)
        if node.op == "call_method":
            call = _Method(str(node.target).rstrip("_") if _in_place(node) else str(node.target))
            return Step(node, call, node.args, node.kwargs, switch)
        assert callable(node.target)
        kwargs = {k: v for k, v in node.kwargs.items() if k != "inplace"}
        return Step(node, node.target, node.args, kwargs, switch)

    def _parameters(self, order: list[fx.Node]) -> tuple[tuple[nn.Parameter, ...], tuple[str, ...]]:
        found: dict[nn.Parameter, str] = {}
        for node in order:
            if node.op == "call_module":
                for name, parameter in self._module(node).named_parameters():
                    found.setdefault(parameter, f"{node.target}.{name}")
            elif node.op == "get_attr" and self._is_weight(node):
                found.setdefault(operator.attrgetter(str(node.target))(self.root), str(node.target))
        return tuple(found), tuple(found.values())

    def _layer(self, order: list[fx.Node], inputs: tuple[fx.Node, ...]) -> nn.Module | None:
        """The Linear or Conv2d that is the whole edge, if there is nothing else to it."""
        work = [n for n in order if not self._is_plain_identity(n)]
        if len(work) != 1 or len(inputs) != 1 or work[0].op != "call_module":
            return None
        module = self._module(work[0])
        hooked = module._forward_hooks or module._forward_pre_hooks
        plain = type(module) in (nn.Linear, nn.Conv2d) and not hooked
        return module if plain and not _is_computed(module) else None

    def _is_plain_identity(self, node: fx.Node) -> bool:
        if node.op != "call_module":
            return False
        module = self._module(node)
        return type(module) is nn.Identity and not module._forward_hooks

    def _refuse(self, node: fx.Node, reason: str) -> None:
        what = str(node.target) if node.op == "call_module" else self._name(node)
        kind = f" ({type(self._module(node)).__name__})" if node.op == "call_module" else ""
        line = self.lines.get(node)
        where = f", {line}," if line else ""
        reason = reason.rstrip(".")
        advice = (
            ""
            if "instead" in reason or "use " in reason.lower()
            else (
                " Leave it out, use an operation that is affine or an activation, or train the "
                "model with lpom.lift(model) in a loop of your own."
            )
        )
        raise UntrainableError(f"{what}{kind}{where} can't be trained: {reason}.{advice}")


def _is_computed(module: nn.Module) -> bool:
    """Whether a weight is made from other parameters: by weight_norm, pruning and the like."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and "weight" not in module._parameters


def _in_place(node: fx.Node) -> bool:
    return str(node.target).endswith("_") and not str(node.target).endswith("__")


@dataclass(frozen=True)
class _Attribute:
    """Reads a parameter or buffer of the model when it is needed."""

    root: nn.Module
    path: str

    def __call__(self) -> Any:
        return operator.attrgetter(self.path)(self.root)


@dataclass(frozen=True)
class _Method:
    """Calls a method of a tensor by its name."""

    name: str

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(x, self.name)(*args, **kwargs)
