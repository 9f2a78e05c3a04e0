"""From a description back to the network that it describes.

Nothing in a description is ever run as code: classes and functions are found by name among those
that this library knows (`lpom.graph.vocabulary`), and the steps are followed one by one.
"""

from __future__ import annotations

import math
import operator
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from lpom import activations
from lpom.activations import Elementwise
from lpom.exceptions import unknown_name
from lpom.graph.operations import call_name
from lpom.graph.vocabulary import (
    ATTRIBUTES,
    CLASSES,
    DTYPES,
    MEMORY_FORMATS,
    MODE,
    NAMES,
    arguments,
    functions,
    holders,
)

_PART = re.compile(r"[\w-]{1,200}")  # of a name such as "blocks.0.weight"
_DEPTH = 64  # of modules in modules, and of lists in lists
_OPERATIONS = ("get_attr", "call_module", "call_method", "call_function")


@dataclass(frozen=True)
class _Value:
    """The result of a step."""

    index: int


@dataclass(frozen=True)
class _Step:
    op: str
    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, root: nn.Module, values: list[Any]) -> Any:
        args = [_filled(a, values) for a in self.args]
        kwargs = {name: _filled(a, values) for name, a in self.kwargs.items()}
        if self.op == "get_attr":
            return operator.attrgetter(self.target)(root)
        if self.op == "call_module":
            return root.get_submodule(self.target)(*args, **kwargs)
        if self.op == "call_method":
            return getattr(args[0], self.target)(*args[1:], **kwargs)
        module, name = functions()[self.target]
        return getattr(module, name)(*args, **kwargs)  # now: a tracer may stand in for torch.zeros


@dataclass(frozen=True)
class _Program:
    """Steps, the index of the output, and for each step the values that nothing needs after it."""

    steps: tuple[_Step, ...]
    output: int
    done: tuple[tuple[int, ...], ...]

    def run(self, root: nn.Module, x: Tensor) -> Any:
        values: list[Any] = [x]
        for step, done in zip(self.steps, self.done, strict=True):
            values.append(step.run(root, values))
            for index in done:
                values[index] = None
        return values[self.output]


@final
class Described(nn.Module):
    """A network that follows a description: the steps of `describe`, one by one."""

    def __init__(self, program: _Program) -> None:
        super().__init__()
        self.__program = program  # a name that no child can have

    def forward(self, x: Tensor) -> Any:
        return self.__program.run(self, x)


def build(
    description: Mapping[str, Any],
    stored: Mapping[str, Tensor],
    kinds: Mapping[str, str],
    shared: Mapping[str, str],
) -> nn.Module:
    """The network of a description, holding the tensors given, in evaluation mode.

    Raises ValueError for anything that `describe` would not have written.
    """
    entries = _mapping(description, "modules")
    program = None
    if "steps" in description:
        called = {path for path, entry in entries.items() if path and "settings" in entry}
        program = _decode_program(description, called, {*kinds, *shared, MODE})
    root = _build_modules(entries, program)
    for name, kind in kinds.items():
        _place(root, name, stored[name], kind)
    for name, first in shared.items():
        _share(root, name, first)
    for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
        if tensor.is_meta:
            raise ValueError(f"there is no tensor {name} for the layer that needs it")
    return root.eval()


def _build_modules(entries: Mapping[str, Any], program: _Program | None) -> nn.Module:
    made: dict[str, nn.Module] = {}
    for path, entry in entries.items():
        _check_path(path)
        if not isinstance(entry, dict):
            raise ValueError(f"module {path} is {type(entry).__name__}, not an object")
        if (path == "") != (not made):
            raise ValueError("the first module, and no other, is the whole network, named ''")
        if "same" in entry:
            module = made.get(_text(entry["same"]))
            if module is None or entry["same"] in holders(path):
                raise ValueError(
                    f"module {path} is said to be {entry['same']!r}, which is not there"
                )
        elif path == "" and program is not None:
            module = Described(program)
        else:
            module = _build_module(path, entry, holds=program is not None)
        if path:
            above, _, part = path.rpartition(".")
            if above not in made or type(made[above]) not in (nn.Sequential, nn.Module, Described):
                raise ValueError(f"module {path} has nothing that could hold it")
            made[above].add_module(part, module)
        made[path] = module
    if not made:
        raise ValueError("it describes no module")
    return made[""]


def _build_module(path: str, entry: Mapping[str, Any], holds: bool) -> nn.Module:
    name = _text(entry.get("class"))
    if name == ("Module" if holds else "Sequential"):
        return nn.Module() if holds else nn.Sequential()
    settings = {k: _decode(v, 0) for k, v in _mapping(entry, "settings").items()}
    if name == Elementwise.__name__:
        return Elementwise(activations.get(_text(settings.pop("activation", None)), **settings))
    if name not in CLASSES:
        raise ValueError(f"module {path}: " + unknown_name("layer", name, CLASSES))
    kind = CLASSES[name]
    if extra := sorted(set(settings) - set(arguments(kind))):
        raise ValueError(f"module {path}: {name} has no setting {', '.join(map(repr, extra))}")
    # on "meta" no memory is taken and no random number drawn
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as about layers without any weights
        return kind(**settings)


def _place(root: nn.Module, name: str, tensor: Tensor, kind: str) -> None:
    """Put a tensor into the module that holds it, which a layer expects and others take."""
    path, _, part = _check_path(name).rpartition(".")
    holder = root.get_submodule(path)
    layer = type(holder) not in (nn.Module, Described)
    parameter = kind in ("parameter", "frozen")
    expected = (holder._parameters if parameter else holder._buffers).get(part)
    if layer:
        if expected is None:
            raise ValueError(f"{type(holder).__name__} has no place for {name}")
        if expected.shape != tensor.shape:
            raise ValueError(
                f"{name} should have shape {tuple(expected.shape)}, got {tuple(tensor.shape)}"
            )
        if expected.is_floating_point() != tensor.is_floating_point():
            raise ValueError(
                f"{name} should be of a kind like {expected.dtype}, got {tensor.dtype}"
            )
    if parameter:
        if not tensor.is_floating_point():
            raise ValueError(f"{name} is a parameter, which must be of floats, got {tensor.dtype}")
        weight = nn.Parameter(tensor, requires_grad=kind == "parameter")
        if layer:
            holder._parameters[part] = weight
        else:
            holder.register_parameter(part, weight)
    elif layer:
        holder._buffers[part] = tensor
    else:
        holder.register_buffer(part, tensor, persistent=kind == "buffer")


def _share(root: nn.Module, name: str, first: str) -> None:
    """Let a second name mean the tensor that the first one means."""
    path, _, part = _check_path(name).rpartition(".")
    holder = root.get_submodule(path)
    at, _, known = first.rpartition(".")
    source = root.get_submodule(at)
    parameter = known in source._parameters
    own, theirs = ((m._parameters if parameter else m._buffers) for m in (holder, source))
    if part in own and own[part] is not None and own[part].shape != theirs[known].shape:  # type: ignore[union-attr]
        raise ValueError(f"{name} can't be {first}, which has another shape")
    if part not in own and type(holder) not in (nn.Module, Described):
        raise ValueError(f"{type(holder).__name__} has no place for {name}")
    if part not in own and hasattr(holder, part):
        raise ValueError(f"{name} is no name that a tensor can have")
    own[part] = theirs[known]  # type: ignore[assignment]
    if not parameter and known in source._non_persistent_buffers_set:
        holder._non_persistent_buffers_set.add(part)


def _decode_program(description: Mapping[str, Any], modules: set[str], names: set[str]) -> _Program:
    steps = []
    raw = description["steps"]
    if not isinstance(raw, list):
        raise ValueError(f"steps should be a list, got {type(raw).__name__}")
    for k, step in enumerate(raw, start=1):
        steps.append(_decode_step(k, step, modules, names))
    output = _decode({"value": description.get("output")}, len(steps) + 1).index
    last = {output: len(steps)}  # kept to the end
    done: list[list[int]] = [[] for _ in steps]
    for k, step in reversed(list(enumerate(steps))):
        for index in _used([*step.args, *step.kwargs.values()]):
            if index not in last:
                last[index] = k
                done[k].append(index)
    return _Program(tuple(steps), output, tuple(map(tuple, done)))


def _decode_step(k: int, step: Any, modules: set[str], names: set[str]) -> _Step:
    if not isinstance(step, dict):
        raise ValueError(f"step {k} is {type(step).__name__}, not an object")
    op, target = step.get("op"), _text(step.get("target"))
    args = step.get("args", [])
    if op not in _OPERATIONS or not isinstance(args, list):
        raise ValueError(f"step {k} has the operation {op!r} or arguments that are no list")
    known: Collection[str] = {
        "get_attr": names,
        "call_module": modules,
        "call_method": NAMES,
        "call_function": functions(),
    }[op]
    asked = call_name(target) if op == "call_method" else target
    if asked not in known:
        raise ValueError(f"step {k} asks for {target!r}, which is not among what may be called")
    if op == "call_method" and not (
        args and isinstance(args[0], dict) and "value" in args[0] and hasattr(Tensor, target)
    ):
        raise ValueError(f"step {k} calls {target!r} of something that is no tensor")
    if target == "getattr" and (len(args) != 2 or args[1] not in ATTRIBUTES):
        raise ValueError(f"step {k} asks for an attribute other than {', '.join(ATTRIBUTES)}")
    kwargs = {name: _decode(v, k) for name, v in _mapping({"kwargs": {}, **step}, "kwargs").items()}
    return _Step(op, target, tuple(_decode(a, k) for a in args), kwargs)


def _decode(raw: Any, n_values: int, depth: int = 0) -> Any:
    """A constant, or a `_Value` among the first ``n_values``."""
    if depth > _DEPTH:
        raise ValueError(f"it nests deeper than {_DEPTH} levels")
    if isinstance(raw, list):
        return [_decode(item, n_values, depth + 1) for item in raw]
    if not isinstance(raw, dict):
        return raw
    if len(raw) == 1:
        ((kind, inner),) = raw.items()
        if kind == "value" and type(inner) is int and 0 <= inner < n_values:
            return _Value(inner)
        if kind in _CONSTANTS:
            return _CONSTANTS[kind](_decode(inner, n_values, depth + 1))
    raise ValueError(f"{str(raw)[:80]} is no constant and no result of an earlier step")


def _one_of(table: Mapping[str, Any]) -> Callable[[Any], Any]:
    def find(name: Any) -> Any:
        if not isinstance(name, str) or name not in table:
            raise ValueError(f"{name!r} is none of {', '.join(table)}")
        return table[name]

    return find


def _slice(ends: Any) -> slice:
    if not isinstance(ends, list) or len(ends) != 3:
        raise ValueError("a slice needs start, stop and step")
    return slice(*ends)


def _tuple(items: Any) -> tuple[Any, ...]:
    if not isinstance(items, list):
        raise ValueError("a tuple needs a list")
    return tuple(items)


_CONSTANTS: dict[str, Callable[[Any], Any]] = {
    "float": _one_of({str(x): x for x in (math.inf, -math.inf, math.nan)}),
    "tuple": _tuple,
    "slice": _slice,
    "ellipsis": lambda _: ...,
    "device": _one_of({"cpu": torch.device("cpu")}),
    "dtype": _one_of(DTYPES),
    "memory_format": _one_of(MEMORY_FORMATS),
}


def _filled(argument: Any, values: list[Any]) -> Any:
    """An argument with results in the places that stand for them."""
    if isinstance(argument, _Value):
        return values[argument.index]
    if isinstance(argument, list | tuple):
        return type(argument)(_filled(a, values) for a in argument)
    if isinstance(argument, slice):
        return slice(*(_filled(a, values) for a in (argument.start, argument.stop, argument.step)))
    return argument


def _used(argument: Any) -> Iterator[int]:
    if isinstance(argument, _Value):
        yield argument.index
    elif isinstance(argument, slice):
        yield from _used([argument.start, argument.stop, argument.step])
    elif isinstance(argument, list | tuple):
        for item in argument:
            yield from _used(item)


def _check_path(path: str) -> str:
    parts = path.split(".") if path else []
    if len(parts) > _DEPTH or not all(_PART.fullmatch(part) for part in parts):
        raise ValueError(
            f"{path[:80]!r} is no name of a module or tensor: expected at most {_DEPTH} parts of "
            "letters, digits, '_' and '-', joined by dots"
        )
    return path


def _mapping(holder: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = holder.get(key)
    if not isinstance(found, dict):
        raise ValueError(f"{key} should be an object, got {type(found).__name__}")
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a name should be text, got {type(value).__name__}")
    return value
