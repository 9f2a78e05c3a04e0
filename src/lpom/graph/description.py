"""A network as data: its modules, its tensors and the steps that join them.

What `describe` gives is plain JSON and `build` makes the network again. Nothing in it is ever run
as code: classes and functions are found by name among those that this library knows, and the steps
are followed one by one. ``{"value": k}`` stands for the result of step k, 0 for the input.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import math
import operator
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import EllipsisType, ModuleType
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lpom import activations
from lpom.activations import Elementwise
from lpom.activations.known import torch_calls, torch_modules
from lpom.exceptions import unknown_name
from lpom.graph.operations import AFFINE, CONSTANTS, MODULES, SHAPES, call_name
from lpom.graph.tracing import left_as_it_was, traced

#: What may be computed from data, sizes and weights before they meet a state.
_CALCULATIONS = frozenset(
    "gt ge lt le eq ne and or xor not invert logical_and logical_or logical_not bitwise_and "
    "bitwise_or bitwise_not pow sqrt rsqrt exp log log1p expm1 sin cos abs square reciprocal sign "
    "floordiv floor_divide mod remainder floor ceil round norm amin max min maximum minimum prod "
    "argmax argmin one_hot softmax log_softmax numel rand randn rand_like randn_like diag outer "
    "type half bfloat16 isin cumprod".split()
)
_NAMES = (AFFINE | SHAPES | CONSTANTS | _CALCULATIONS | set(torch_calls())) - {"getattr", "len"}
_SPACES: dict[str, ModuleType] = {
    "torch": torch,
    "torch.nn.functional": F,
    "operator": operator,
}
_ATTRIBUTES = ("shape", "ndim", "dtype", "device", "T", "mT")  # of tensors
_MEMORY_FORMATS = {
    str(f).removeprefix("torch."): f
    for f in (torch.contiguous_format, torch.preserve_format, torch.channels_last)
}
#: Kinds of numbers that a file may hold.
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
_CLASSES: dict[str, type[nn.Module]] = {
    kind.__name__: kind for kind in (*MODULES, *torch_modules(), nn.PReLU)
}
_MODE = "training"  # an attribute of every module that is no tensor
_PART = re.compile(r"[\w-]{1,200}")  # of a name such as "blocks.0.weight"
_DEPTH = 64  # of modules in modules, and of lists in lists
_OPERATIONS = ("get_attr", "call_module", "call_method", "call_function")
#: What a tensor is in its module; a constant is in no state_dict.
KINDS = ("parameter", "frozen", "buffer", "constant")


class Undescribable(ValueError):
    """A module needs Python of its own, so that no file can hold it."""


# from a module to data


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
    return type(module) is Elementwise or _CLASSES.get(type(module).__name__) is type(module)


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
        if any("same" in entries[above] for above in _above(path) if above in entries):
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


def _above(path: str) -> list[str]:
    """The names of the modules that hold this one."""
    parts = path.split(".")
    return [".".join(parts[:k]) for k in range(len(parts))]


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
        for name, default in _arguments(type(module)).items():
            value = getattr(module, name, default)  # a few are not kept, as they mean nothing after
            value = value is not None if name == "bias" else value
            if not (value == default and type(value) is type(default)):
                settings[name] = value
    return {name: _encode(value, {}) for name, value in settings.items()}


def _arguments(kind: type[nn.Module]) -> dict[str, Any]:
    """What the constructor takes, with defaults; device and dtype are those of the tensors."""
    return {
        name: parameter.default
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if name not in ("device", "dtype") and not name.startswith("_")
    }


def _program(model: nn.Module, example: Tensor | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The steps from input to output, and the constants that they use."""
    graph, _ = traced(model, example, whole=_CLASSES.values())
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
        for name in sorted(attributes - {_MODE, *model.state_dict(keep_vars=True)})
    }
    return {"steps": steps, "output": known[output]["value"]}, constants


def _step(node: fx.Node, known: Mapping[fx.Node, Any]) -> dict[str, Any]:
    target = (
        str(node.target) if isinstance(node.target, str) else _function_names().get(node.target)
    )
    if target is None or (node.op == "call_method" and call_name(target) not in _NAMES):
        raise Undescribable(f"it calls {call_name(node.target)}, which is not among what is known")
    args = [_encode(a, known) for a in node.args]
    if target == "getattr" and args[1] not in _ATTRIBUTES:
        raise Undescribable(f"it asks for the attribute {args[1]!r} of a tensor")
    step: dict[str, Any] = {"op": node.op, "target": target}
    if args:
        step["args"] = args
    if node.kwargs:
        step["kwargs"] = {name: _encode(a, known) for name, a in node.kwargs.items()}
    return step


@functools.cache
def _functions() -> dict[str, tuple[ModuleType, str]]:
    """Where each function that a file may name is found."""
    found = {
        f"{space}.{name}": (module, name)
        for space, module in _SPACES.items()
        for name in dir(module)
        if call_name(name) in _NAMES
        if not name.startswith("__") and callable(getattr(module, name))
    }
    return {**found, "getattr": (builtins, "getattr")}


@functools.cache
def _function_names() -> dict[Any, str]:
    names: dict[Any, str] = {}
    for name, (module, attribute) in _functions().items():
        names.setdefault(getattr(module, attribute), name)
    return names


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


# from data to a module


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
        module, name = _functions()[self.target]
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
        program = _decode_program(description, called, {*kinds, *shared, _MODE})
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
            if module is None or entry["same"] in _above(path):
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
    if name not in _CLASSES:
        raise ValueError(f"module {path}: " + unknown_name("layer", name, _CLASSES))
    kind = _CLASSES[name]
    if extra := sorted(set(settings) - set(_arguments(kind))):
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
        "call_method": _NAMES,
        "call_function": _functions(),
    }[op]
    asked = call_name(target) if op == "call_method" else target
    if asked not in known:
        raise ValueError(f"step {k} asks for {target!r}, which is not among what may be called")
    if op == "call_method" and not (
        args and isinstance(args[0], dict) and "value" in args[0] and hasattr(Tensor, target)
    ):
        raise ValueError(f"step {k} calls {target!r} of something that is no tensor")
    if target == "getattr" and (len(args) != 2 or args[1] not in _ATTRIBUTES):
        raise ValueError(f"step {k} asks for an attribute other than {', '.join(_ATTRIBUTES)}")
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
    "memory_format": _one_of(_MEMORY_FORMATS),
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
