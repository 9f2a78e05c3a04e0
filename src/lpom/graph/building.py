"""Any torch module that torch.fx can follow, cut into states and the edges between them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from lpom import activations
from lpom.activations import Activation, Identity, split
from lpom.exceptions import UntrainableError
from lpom.graph.edges import Attribute, Edge, Method, Step, out_of_place
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
    is_computed,
    module_name,
)
from lpom.graph.rewriting import pick_from_stacks
from lpom.graph.tracing import check_outputs, traced, unwrapped


def trace(model: nn.Module, example: Tensor | None = None) -> Graph:
    """The graph of states of a module; the module keeps weights and buffers.

    ``example`` is a batch of inputs, needed where the model's own Python asks for sizes (a loop
    over time steps, say). Raises `UntrainableError`, a ValueError, for what can't be trained, with
    the line of the model where it stands.
    """
    model = unwrapped(model)
    try:
        graph = _Builder(model, *traced(model, example)).build(model)
        if example is not None and not graph.jumps:  # where units jump, rounding may tip one over
            check_outputs(model, lambda rows: graph.feed_forward(rows)[1][graph.output], example)
    except UntrainableError:
        raise
    except Exception as error:  # the model's own, given stand-ins or a few rows
        raise UntrainableError(
            f"torch.fx cannot follow {type(model).__name__}: {error}. The default step of lpom.fit "
            "needs no graph."
        ) from error
    return graph


def lifted_identity(x: Tensor) -> Tensor:
    """Marks a value that is a state of its own although no activation stands there."""
    return x


def raised_part(x: Tensor) -> Tensor:
    """Marks the monotone part of an activation that turns back, which the builder knows."""
    raise NotImplementedError


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
        self.raised: dict[fx.Node, tuple[Activation, str]] = {}  # monotone parts, and their names

    def build(self, model: nn.Module) -> Graph:
        self._check_ends()
        pick_from_stacks(self.traced)
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
            nodes.append(Node(index[n], names[n], self.activations[n], edge))
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

    def _name_or_nothing(self, node: fx.Node) -> str:
        return self._name(node) if node.op.startswith("call") else ""

    def _activation(self, node: fx.Node) -> Activation | None:
        """The activation that a call computes; raises for functions that can't be one."""
        if node.target is lifted_identity:
            return Identity()
        if node in self.raised:
            return self.raised[node][0]
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

    # what depends on what

    def _follow(self) -> None:
        """Dependences of every value; where an activation meets a live value stands a state."""
        self.values: dict[fx.Node, _Value] = {}
        self.activations: dict[fx.Node, Activation] = {}
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
        if activation is not None and activation.slope_bound > 0:
            self._split(node, activation)
            return self.values[node]
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

    def _split(self, node: fx.Node, activation: Activation) -> None:
        r"""Make two states of a node whose phi turns back: :math:`\phi(z) = \phi_1(z) - c z`.

        One is z itself, with the identity, the other :math:`\phi_1(z)`, which never decreases; who
        read the value reads their difference, which is affine.
        """
        place = "input" if not node.args else 0
        z: Any = node.kwargs["input"] if place else node.args[0]
        c, part = split(activation)
        with self.traced.inserting_before(node):
            state = self._call(node, lifted_identity, z)
            raised = self._call(node, raised_part, state)
            difference = self._call(node, torch.sub, raised, state, alpha=c)
        self.raised[raised] = part, self._label(node)
        node.replace_all_uses_with(difference)
        self.traced.erase_node(node)
        for made in (state, raised, difference):
            self.values[made] = self._call_value(made)
        self.values[node] = self.values[difference]

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

    def _label(self, node: fx.Node) -> str:
        return str(node.target) if node.op == "call_module" else str(node.name)

    def _names(self, states: list[fx.Node]) -> dict[fx.Node, str]:
        """The activation module's own name where there is one, unique."""
        names: dict[fx.Node, str] = {}
        for n in states:
            named: Any = n.args[0] if n.target is lifted_identity and n.name != "output" else n
            name = self.raised[n][1] if n in self.raised else self._label(named)
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
            return Step(node, Attribute(self.root, str(node.target)), (), {})
        if node.op == "call_module":
            return Step(node, self._module(node), node.args, node.kwargs, switch)
        if node.op == "call_method":
            call = Method(out_of_place(str(node.target)))
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
        modules = [self._module(n) if n.op == "call_module" else None for n in order]
        work = [m for m in modules if type(m) is not nn.Identity or m._forward_hooks]
        if len(work) != 1 or len(inputs) != 1 or work[0] is None:
            return None
        hooked = work[0]._forward_hooks or work[0]._forward_pre_hooks
        plain = type(work[0]) in (nn.Linear, nn.Conv2d) and not hooked
        return work[0] if plain and not is_computed(work[0]) else None

    def _refuse(self, node: fx.Node, reason: str) -> None:
        what = str(node.target) if node.op == "call_module" else self._name(node)
        kind = f" ({type(self._module(node)).__name__})" if node.op == "call_module" else ""
        where = f", {line}," if (line := self.lines.get(node)) else ""
        advised = "instead" in reason or "use " in reason.lower()
        advice = "" if advised else " The default step of lpom.fit needs no graph and takes it."
        reason = reason.rstrip(".")
        raise UntrainableError(f"{what}{kind}{where} can't be trained: {reason}.{advice}")
