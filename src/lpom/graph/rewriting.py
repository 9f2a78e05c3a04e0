"""Traces rewritten: operations that write over a tensor, as the values that they give.

``h.add_(1)`` changes what ``h``, and every other name of it, is from there on. In a graph of values
that is: whoever reads it later reads the result. Where a piece of another tensor is written over
that can't be said so simply, and is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from lpom.exceptions import UntrainableError
from lpom.graph.operations import SPLITS, VIEWS, call_name


def as_values(
    graph: fx.Graph, module: Callable[[str], nn.Module], lines: Mapping[fx.Node, str]
) -> None:
    """Let those who come after such an operation read its result."""
    places = {node: k for k, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        changed = _changed(node, module)
        if changed is None:
            continue

        def later(user: fx.Node, node: fx.Node = node) -> bool:
            return user is not node and places[user] > places[node]

        whole = _root(changed)
        seen = [other for other in _views(whole) if other is not changed]
        if whole.op == "get_attr":
            _refuse(
                node, lines, "it changes a tensor of the model itself, which steps would not do"
            )
        if any(later(user) for other in seen for user in other.users):
            _refuse(node, lines, "it changes a tensor of which another view is read later")
        changed.replace_all_uses_with(node, delete_user_cb=later)


def pick_from_stacks(graph: fx.Graph) -> None:
    """``stack(steps, 1)[:, -1]`` is the last step: the others need not be looked at."""
    for pick in list(graph.nodes):
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
            graph.erase_node(pick)
            if not below.users:
                graph.erase_node(below)


def _changed(node: fx.Node, module: Callable[[str], nn.Module]) -> fx.Node | None:
    """The value that an operation writes over; None for all others."""
    written = False
    if node.op == "call_module":
        written = bool(getattr(module(str(node.target)), "inplace", False))
    elif node.op.startswith("call"):
        target: Any = node.target
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        plain = name.endswith("_") and not name.endswith("__")
        written = plain or name in ("iadd", "isub", "imul", "itruediv", "setitem")
        written = written or node.kwargs.get("inplace") is True
    value = node.args[0] if node.args else node.kwargs.get("input")
    return value if written and isinstance(value, fx.Node) else None


def _root(value: fx.Node) -> fx.Node:
    """The tensor that a value is a view of."""
    while _is_view(value) and isinstance(value.args[0], fx.Node):
        value = value.args[0]
    return value


def _views(value: fx.Node) -> list[fx.Node]:
    """A value and all that may be views of it, or views of these."""
    found = [value]
    for one in found:
        found += [user for user in one.users if _is_view(user) and user.args[0] is one]
    return found


def _is_view(node: fx.Node) -> bool:
    named = node.op in ("call_function", "call_method")
    return named and call_name(node.target) in VIEWS | SPLITS and bool(node.args)


def _refuse(node: fx.Node, lines: Mapping[fx.Node, str], reason: str) -> None:
    line = lines.get(node)
    raise UntrainableError(
        f"{node.target if isinstance(node.target, str) else call_name(node.target)}"
        f"{f', {line},' if line else ''} can't be trained: {reason}. Write it without changing "
        "tensors in place; the default step of lpom.fit needs no graph and takes it."
    )
