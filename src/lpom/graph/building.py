"""Any torch module that torch.fx can follow, cut into states and the edges between them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from lpom import activations
from lpom.activations import Activation, Identity
from lpom.exceptions import UntrainableError
from lpom.graph.edges import Edge, Step
from lpom.graph.lengths import steps_but_last
from lpom.graph.network import Graph, Node
from lpom.graph.operations import (
    AFFINE,
    CONSTANTS,
    ORDERLESS,
    PRODUCTS,
    QUOTIENTS,
    SHAPES,
    SWITCHES,
    VIEWS,
    WEIGHTED,
    call_name,
    is_computed,
    module_name,
)
from lpom.graph.scans import Layer
from lpom.graph.tracing import leave_out_unused, traced, unwrapped


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
    try:
        builder = _Builder(model, *traced(model, example, whole=(nn.RNN, nn.LSTM, nn.GRU)))
        return builder.build(model) if builder.close_layers() else None
    except UntrainableError:  # what is made of a layer's parts can be told step by step alone
        return None


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
        self.ordered = True

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
        calls = {n for n in self.traced.nodes if n.op.startswith("call")}
        self.ordered = any(self._name(n) not in ORDERLESS for n in calls - {*states})
        index = {inputs: 0} | {n: i for i, n in enumerate(states, start=1)}
        names = self._names(states)
        nodes = []
        for n in states:
            edge = self._edge(n.args[0] if n.args else n.kwargs["input"], index)
            layer, there = self.layers.get(n), n.kwargs.get("there")
            told = None if layer is None or there is None else self._edge(there, index)
            nodes.append(Node(index[n], names[n], self.activations[n], edge, layer, told))
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
        _, *others = [n for n in self.traced.nodes if n.op == "placeholder"]
        for other in others:  # with a default
            with self.traced.inserting_before(other):
                other.replace_all_uses_with(other.args[0])
            self.traced.erase_node(other)
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
            outputs, ends = picks
            with self.traced.inserting_after(call):
                whole = call
                if not module.batch_first:
                    whole = self._call(call, torch.transpose, call, 0, 1)
            if not module.batch_first:
                with self.traced.inserting_before(call):
                    call.args = (self._call(call, torch.transpose, call.args[0], 0, 1),)
            for pick in outputs:
                pick.replace_all_uses_with(whole)
            for pick, direction in ends:
                pick.replace_all_uses_with(self._end(pick, call, module, direction))
            self.layers[call] = Layer(module)
        leave_out_unused(self.traced)
        return True

    def _end(self, pick: fx.Node, call: fx.Node, module: nn.RNNBase, direction: int) -> fx.Node:
        """Where the last layer ends in a direction: its last output, or its first."""
        with self.traced.inserting_before(pick):
            own, there, width = call, call.kwargs.get("there"), module.hidden_size
            if module.bidirectional:
                own = self._call(call, torch.narrow, call, 2, direction * width, width)
            if direction or there is None:
                return self._call(call, torch.select, own, 1, 0 if direction else -1)
            others = self._call(call, steps_but_last, there)
            return self._call(
                call, torch.sum, self._call(call, torch.masked_fill, own, others, 0.0), 1
            )

    def _picks(
        self, call: fx.Node, module: nn.RNNBase
    ) -> tuple[list[fx.Node], list[tuple[fx.Node, int]]] | None:
        """What is taken of a layer: its outputs, and what its last layer carries out, by direction.

        None where anything else is taken.
        """
        parts = list(call.users)
        if any(part.target is not operator.getitem for part in parts):
            return None
        ends = [part for part in parts if part.args[1] == 1]
        if module.mode == "LSTM":
            ends = [h for end in ends for h in end.users]
            if any(h.target is not operator.getitem or h.args[1] != 0 for h in ends):
                return None
        n_directions = 1 + module.bidirectional
        count, found = n_directions * module.num_layers, []
        for pick in [pick for end in ends for pick in end.users]:
            place = pick.args[1] if pick.target is operator.getitem else None
            if not isinstance(place, int) or place % count < count - n_directions:
                return None
            found.append((pick, place % n_directions))
        return [part for part in parts if part.args[1] == 0], found

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
        if name == "detach":  # as good as data from here on
            return _Value(data=any(v.data for v in below))
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
        if node.op == "call_module" and is_computed(self._module(node)):
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
                if n not in cut:  # which are states in the next round
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
        needed, sources = self._below(result, index, through=lambda node: True)
        learning, _ = self._below(
            result, index, through=lambda n: self._name_or_nothing(n) != "detach"
        )
        order = [n for n in self.traced.nodes if n in needed]
        inputs = tuple(sorted(sources, key=index.__getitem__))
        steps = tuple(self._step(n) for n in order)
        parameters, names = self._parameters([n for n in order if n in learning])
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
            ordered=self.ordered,
        )

    def _below(
        self, result: Any, index: dict[fx.Node, int], through: Callable[[fx.Node], bool]
    ) -> tuple[set[fx.Node], set[fx.Node]]:
        """What a result is made of down to the states, and which: as far as a way leads through."""
        needed: set[fx.Node] = set()
        queue, sources = [result], set()
        while queue:
            node = queue.pop()
            if node in index:
                sources.add(node)
            elif node not in needed and through(node):
                needed.add(node)
                queue += node.all_input_nodes
        return needed, sources

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
            call = _Method(_out_of_place(str(node.target)))
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
        return module if plain and not is_computed(module) else None

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


def _out_of_place(name: str) -> str:
    """The method that does the same to a copy; some, ``normal_`` say, have none."""
    plain = name.removesuffix("_")
    return name if name.endswith("__") or not hasattr(Tensor, plain) else plain


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
