"""What a file may name: classes, functions, methods, constants. Nothing else is ever run."""

from __future__ import annotations

import builtins
import functools
import inspect
import operator
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lpom.activations.known import torch_calls, torch_modules
from lpom.graph.operations import AFFINE, CONSTANTS, MODULES, SHAPES, call_name

#: What may be computed from data, sizes and weights before they meet a state.
_CALCULATIONS = frozenset(
    "gt ge lt le eq ne and or xor not invert logical_and logical_or logical_not bitwise_and "
    "bitwise_or bitwise_not pow sqrt rsqrt exp log log1p expm1 sin cos abs square reciprocal sign "
    "floordiv floor_divide mod remainder floor ceil round norm amin max min maximum minimum prod "
    "argmax argmin one_hot softmax log_softmax numel rand randn rand_like randn_like diag outer "
    "type half bfloat16 isin cumprod".split()
)
NAMES = (AFFINE | SHAPES | CONSTANTS | _CALCULATIONS | set(torch_calls())) - {"getattr", "len"}
_SPACES: dict[str, ModuleType] = {
    "torch": torch,
    "torch.nn.functional": F,
    "operator": operator,
}
ATTRIBUTES = ("shape", "ndim", "dtype", "device", "T", "mT")  # of tensors
MEMORY_FORMATS = {
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
CLASSES: dict[str, type[nn.Module]] = {
    kind.__name__: kind for kind in (*MODULES, *torch_modules(), nn.PReLU)
}
MODE = "training"  # an attribute of every module that is no tensor
#: What a tensor is in its module; a constant is in no state_dict.
KINDS = ("parameter", "frozen", "buffer", "constant")


def arguments(kind: type[nn.Module]) -> dict[str, Any]:
    """What the constructor takes, with defaults; device and dtype are those of the tensors."""
    return {
        name: parameter.default
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if name not in ("device", "dtype") and not name.startswith("_")
    }


@functools.cache
def functions() -> dict[str, tuple[ModuleType, str]]:
    """Where each function that a file may name is found."""
    found = {
        f"{space}.{name}": (module, name)
        for space, module in _SPACES.items()
        for name in dir(module)
        if call_name(name) in NAMES
        if not name.startswith("__") and callable(getattr(module, name))
    }
    return {**found, "getattr": (builtins, "getattr")}


@functools.cache
def function_names() -> dict[Any, str]:
    names: dict[Any, str] = {}
    for name, (module, attribute) in functions().items():
        names.setdefault(getattr(module, attribute), name)
    return names


def holders(path: str) -> list[str]:
    """The names of the modules that hold this one."""
    parts = path.split(".")
    return [".".join(parts[:k]) for k in range(len(parts))]
