"""A network as data: its modules, its tensors and the steps that join them.

What `describe` gives is plain JSON and `lpom.graph.rebuilding` makes the network again.
``{"value": k}`` stands for the result of step k, 0 for the input.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, fx, nn

from lpom.activations import Elementwise
from lpom.graph.operations import call_name
from lpom.graph.rebuilding import build
from lpom.graph.tracing import left_as_it_was, traced
from lpom.graph.vocabulary import (
    ATTRIBUTES,
    CLASSES,
    MODE,
    NAMES,
    arguments,
    function_names,
    holders,
)


class Undescribable(ValueError):
    """A module needs Python of its own, so that no file can hold it."""


def describe(
    model: nn.Module, example: Tensor | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The network as JSON, and the tensors that it needs beyond those of its state_dict.

    The JSON has ``modules`` by name, and the ``steps`` that join them up to the ``output``; a
    Sequential of known layers needs no steps. Raises `Undescribable` where that is not enough to
    `build` the network.
    """
    description: dict[str, Any] = {}
    constants: dict[str, Tensor] = {}
    called = None
    if not _is_plain(model):
        try:
            with left_as_it_was(model):
                description, constants = _program(model, example)
        except Undescribable:
            raise
        except Exception as error:  # the model's Python may do anything, given stand-ins
            hint = "" if example is not None else "; example=, a batch of its inputs, may help"
            raise Undescribable(str(error).rstrip(".") + hint) from error
        steps = description["steps"]
        called = {step["target"] for step in steps if step["op"] == "call_module"}
    description["modules"] = _modules(model, called)
    try:
        build(description, *tensors(model, constants))
    except (ValueError, TypeError, LookupError, RuntimeError) as error:
        raise Undescribable(str(error)) from error
    return description, constants


def tensors(
    model: nn.Module, constants: Mapping[str, Tensor] | None = None
) -> tuple[dict[str, Tensor], dict[str, str], dict[str, str]]:
    """Each tensor by its first name, its kind (one of `KINDS`), and other names it goes by."""
    first: dict[int, str] = {}
    found: dict[str, Tensor] = {}
    kinds: dict[str, str] = {}
    shared: dict[str, str] = {}

    def add(name: str, tensor: Tensor, kind: str) -> None:
        if id(tensor) in first:
            shared[name] = first[id(tensor)]
            return
        first[id(tensor)] = name
        found[name] = tensor
        kinds[name] = kind

    for name, parameter in model.named_parameters(remove_duplicate=False):
        add(name, parameter, "parameter" if parameter.requires_grad else "frozen")
    for name, buffer in model.named_buffers(remove_duplicate=False):
        path, _, part = name.rpartition(".")
        if part not in model.get_submodule(path)._non_persistent_buffers_set:
            add(name, buffer, "buffer")
    for name, constant in (constants or {}).items():
        add(name, constant, "constant")
    return found, kinds, shared


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _is_leaf(module: nn.Module) -> bool:
    return type(module) is Elementwise or CLASSES.get(type(module).__name__) is type(module)


def _is_plain(module: nn.Module) -> bool:
    """Whether it is a known layer, or a Sequential of such."""
    if _is_hooked(module):
        return False
    if type(module) is nn.Sequential:
        own = bool(module._parameters or module._buffers)
        return not own and all(_is_plain(child) for child in module)
    return _is_leaf(module)


def _modules(model: nn.Module, called: set[str] | None) -> dict[str, Any]:
    """Classes and settings of the modules that are called, None for all; the rest only hold."""
    entries: dict[str, Any] = {}
    first: dict[nn.Module, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if any("same" in entries[holder] for holder in holders(path) if holder in entries):
            continue  # within a module that is there already
        if module in first:
            entries[path] = {"same": first[module]}
            continue
        first[module] = path
        if called is None and type(module) is nn.Sequential:
            entries[path] = {"class": "Sequential"}
        elif called is None or path in called:
            entries[path] = {"class": type(module).__name__, "settings": _settings(path, module)}
        else:
            entries[path] = {"class": "Module"}
    return entries


def _settings(path: str, module: nn.Module) -> dict[str, Any]:
    if not _is_leaf(module) or _is_hooked(module):
        why = "has forward hooks" if _is_leaf(module) else "is not among the layers that are known"
        raise Undescribable(f"{path} ({type(module).__name__}) {why}")
    if isinstance(module, Elementwise):
        try:
            parameters = module.activation.params()
        except TypeError as error:
            raise Undescribable(str(error).rstrip(".")) from error
        settings = {"activation": module.activation.name, **parameters}
    else:
        settings = {}
        for name, default in arguments(type(module)).items():
            value = getattr(module, name, default)  # a few are not kept, as they mean nothing after
            value = value is not None if name == "bias" else value
            if not (value == default and type(value) is type(default)):
                settings[name] = value
    return {name: _encode(value, {}) for name, value in settings.items()}


def _program(model: nn.Module, example: Tensor | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The steps from input to output, and the constants that they use."""
    graph, _ = traced(model, example, whole=CLASSES.values())
    known: dict[fx.Node, Any] = {}
    steps: list[dict[str, Any]] = []
    output = None
    for node in graph.nodes:
        if node.op == "placeholder":
            if known and not node.args:
                raise Undescribable(f"it takes more than one input ({node.name})")
            known[node] = _encode(node.args[0], {}) if known else {"value": 0}
        elif node.op == "output":
            output = node.args[0]
        else:
            steps.append(_step(node, known))
            known[node] = {"value": len(steps)}
    if not isinstance(output, fx.Node):
        raise Undescribable("it returns something else than one tensor")
    attributes = {step["target"] for step in steps if step["op"] == "get_attr"}
    constants = {
        name: operator.attrgetter(name)(model)
        for name in sorted(attributes - {MODE, *model.state_dict(keep_vars=True)})
    }
    return {"steps": steps, "output": known[output]["value"]}, constants


def _step(node: fx.Node, known: Mapping[fx.Node, Any]) -> dict[str, Any]:
    target = str(node.target) if isinstance(node.target, str) else function_names().get(node.target)
    if target is None or (node.op == "call_method" and call_name(target) not in NAMES):
        raise Undescribable(f"it calls {call_name(node.target)}, which is not among what is known")
    args = [_encode(a, known) for a in node.args]
    if target == "getattr" and args[1] not in ATTRIBUTES:
        raise Undescribable(f"it asks for the attribute {args[1]!r} of a tensor")
    step: dict[str, Any] = {"op": node.op, "target": target}
    if args:
        step["args"] = args
    if node.kwargs:
        step["kwargs"] = {name: _encode(a, known) for name, a in node.kwargs.items()}
    return step


def _encode(value: Any, known: Mapping[fx.Node, Any]) -> Any:
    """A constant or a value of the graph as JSON."""
    if isinstance(value, fx.Node):
        return known[value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        items = [_encode(v, known) for v in value]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, slice):
        return {"slice": [_encode(v, known) for v in (value.start, value.stop, value.step)]}
    if isinstance(value, EllipsisType):
        return {"ellipsis": None}
    if isinstance(value, torch.device):
        return {"device": "cpu"}  # where a loaded model is
    for kind in ("dtype", "memory_format"):
        if isinstance(value, getattr(torch, kind)):
            return {kind: str(value).removeprefix("torch.")}
    raise Undescribable(f"it holds a constant of {type(value).__name__}")
