"""A module as its layers and tensors, and back; only layers that are listed here are made."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lpom import activations
from lpom.activations import Elementwise
from lpom.exceptions import ModelFileError, unknown_name
from lpom.graph.tracing import unwrapped

#: Layers of torch.nn, beside its activations. (The rest of a model is weights alone.)
_NAMES = (
    "Linear Bilinear Embedding EmbeddingBag Identity Flatten Unflatten Fold Unfold Dropout "
    "AlphaDropout FeatureAlphaDropout LayerNorm RMSNorm GroupNorm LocalResponseNorm Upsample "
    "UpsamplingNearest2d UpsamplingBilinear2d PixelShuffle PixelUnshuffle ChannelShuffle "
    "ZeroPad1d ZeroPad2d ZeroPad3d PReLU ReLU ReLU6 ELU SELU "
    "CELU GELU SiLU Mish LeakyReLU RReLU Sigmoid LogSigmoid Tanh Softplus Softsign Softmin "
    "Softmax Softmax2d LogSoftmax Softshrink Hardshrink Tanhshrink Hardtanh Hardsigmoid Hardswish "
    "Threshold GLU".split()
) + [
    f"{kind}{n}d"
    for n in (1, 2, 3)
    for kind in "Conv ConvTranspose BatchNorm InstanceNorm Dropout MaxPool AvgPool LPPool "
    "AdaptiveMaxPool AdaptiveAvgPool ConstantPad ReflectionPad ReplicationPad CircularPad".split()
]
LAYERS: dict[str, type[nn.Module]] = {
    name: getattr(nn, name) for name in _NAMES if hasattr(nn, name)
}
_PARTS = ("parameter", "frozen", "buffer")  # what a tensor is in its module
_NAME = re.compile(r"[\w-]{1,200}")  # of a child of a module


class WeightsAloneError(ModelFileError):
    """A file has weights without the layers that they belong to."""


def describe(model: nn.Module, at: str, encoder: Any, decode: Callable[..., Any]) -> Any:
    """Layers where all are known, and each tensor with what it is in the module."""
    model = unwrapped(model)
    first: dict[int, str] = {}
    parts: dict[str, str] = {}
    shared: dict[str, str] = {}
    for name, tensor in named_tensors(model).items():
        if id(tensor) in first:
            shared[name] = first[id(tensor)]
            continue
        first[id(tensor)] = name
        encoder.store(join(at, name), tensor)
        learned = isinstance(tensor, nn.Parameter)
        parts[name] = ("frozen", "parameter")[tensor.requires_grad] if learned else "buffer"
        check_finite(join(at, name), tensor, parts[name])
    entry: dict[str, Any] = {"at": at, "tensors": parts, "shared": shared}
    try:
        entry["layers"] = _described(model, "", {}, encoder)
        build(entry, encoder.tensors, decode)
    except (ModelFileError, ValueError, TypeError, LookupError, RuntimeError) as error:
        return entry | {"layers": None, "reason": str(error)}
    return entry


def _described(module: nn.Module, path: str, seen: dict[nn.Module, str], encoder: Any) -> Any:
    if module in seen:
        return {"same": seen[module]}
    seen[module] = path
    name = f"{path or 'it'} ({type(module).__name__})"
    if module._forward_hooks or module._forward_pre_hooks:
        raise ValueError(f"{name} has forward hooks")
    if type(module) is nn.Sequential:
        children = module._modules.items()
        return {"Sequential": {k: _described(m, join(path, k), seen, encoder) for k, m in children}}
    if isinstance(module, Elementwise):
        return {"Elementwise": {"activation": encoder.value(module.activation, path)}}
    if type(module) not in LAYERS.values():
        raise ValueError(f"{name} is not among the layers that are known")
    settings = {}
    for key, default in _arguments(type(module)).items():
        setting = getattr(module, key, default)  # a few are not kept: they mean nothing later
        setting = setting is not None if key == "bias" else setting
        if not (setting == default and type(setting) is type(default)):
            settings[key] = encoder.value(setting, join(path, key))
    return {type(module).__name__: settings}


def build(entry: Any, tensors: Mapping[str, Tensor], decode: Callable[..., Any]) -> nn.Module:
    """The module of layers with its tensors, in evaluation mode."""
    if entry["layers"] is None:
        raise WeightsAloneError(str(entry["reason"]))
    root = _built(entry["layers"], {}, "", decode)
    places, shared = named_tensors(root), entry["shared"]
    if places.keys() != {*entry["tensors"], *shared}:
        odd = sorted(places.keys() ^ {*entry["tensors"], *shared})
        raise ValueError(f"layers and tensors do not agree on {', '.join(odd[:5])}")
    made: dict[str, Tensor] = {}
    for name, expected in places.items():
        first = shared.get(name, name)
        if first not in made:
            tensor, part = tensors[join(entry["at"], first)], entry["tensors"][first]
            learned = part != "buffer"
            check_fits(name, expected, tensor)
            check_finite(name, tensor, part)
            if part not in _PARTS or learned != isinstance(expected, nn.Parameter):
                raise ValueError(f"{name} can't be a {part!r}")
            made[first] = nn.Parameter(tensor, part == "parameter") if learned else tensor
        check_fits(name, expected, made[first])
        path, _, last = name.rpartition(".")
        holder = root.get_submodule(path)
        place: dict[str, Any] = (
            holder._parameters if last in holder._parameters else holder._buffers
        )
        place[last] = made[first]
    return root.eval()


def _built(
    entry: Any, seen: dict[str, nn.Module], path: str, decode: Callable[..., Any]
) -> nn.Module:
    """Layers without values: on "meta" no memory is taken and no random number drawn."""
    ((name, settings),) = entry.items()
    if name == "same":
        return seen[settings]
    if name == "Sequential":
        made: nn.Module = nn.Sequential()
        for child, inner in settings.items():
            if not _NAME.fullmatch(child):
                raise ValueError(f"{child[:80]!r} is no name of a layer")
            made.add_module(child, _built(inner, seen, join(path, child), decode))
    elif name == "Elementwise":
        made = Elementwise(activations.get(decode(settings["activation"], {})))
    elif name not in LAYERS:
        raise ValueError(unknown_name("layer", name, LAYERS))
    else:
        kind = LAYERS[name]
        if extra := sorted(set(settings) - set(_arguments(kind))):
            raise ValueError(f"{name} has no setting {', '.join(map(repr, extra))}")
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as about layers without any weights
            made = kind(**{key: decode(value, {}) for key, value in settings.items()})
    seen[path] = made
    return made


def fill(model: nn.Module, entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors into a model, once all of them are known to fit."""
    parts, shared = entry["tensors"], entry["shared"]
    source = {**{name: name for name in parts}, **shared}
    places = named_tensors(model)
    faults = [f"{name} of the model is not in the file" for name in sorted(places - source.keys())]
    faults += [f"{name} of the file is not in the model" for name in sorted(source.keys() - places)]
    filled: dict[int, str] = {}
    for name in places.keys() & source.keys():
        first = source[name]
        tensor, place = tensors[join(entry["at"], first)], places[name]
        check_finite(name, tensor, parts[first])
        try:
            check_fits(name, place, tensor)
        except ModelFileError as error:
            faults.append(f"{error} in the file")
        other = filled.setdefault(id(place), first)
        if other != first:
            faults.append(f"{name} and {other} are one tensor in the model, and two in the file")
        if tensor.dtype != place.dtype:
            faults.append(f"{name} is of {place.dtype} in the model, of {tensor.dtype} in the file")
    if faults:
        raise ModelFileError(
            "the model does not fit: "
            + "; ".join(faults[:5])
            + (f" and {len(faults) - 5} more." if len(faults) > 5 else ".")
        )
    with torch.no_grad():
        for name, place in places.items():
            first = source[name]
            place.copy_(tensors[join(entry["at"], first)])
            if isinstance(place, nn.Parameter):
                place.requires_grad_(parts[first] != "frozen")


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and lasting buffers, by all their names."""
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for name, buffer in model.named_buffers(remove_duplicate=False):
        path, _, last = name.rpartition(".")
        if last not in model.get_submodule(path)._non_persistent_buffers_set:
            found[name] = buffer
    return found


def check_fits(name: str, expected: Tensor, tensor: Tensor) -> None:
    if expected.shape != tensor.shape:
        raise ModelFileError(
            f"{name} should have shape {tuple(expected.shape)}, got {tuple(tensor.shape)}"
        )
    if expected.is_floating_point() != tensor.is_floating_point():
        raise ModelFileError(f"{name} should be like {expected.dtype}, got {tensor.dtype}")


def check_finite(name: str, tensor: Tensor, part: str) -> None:
    """Weights are finite; a mask among the buffers may be infinite, but nothing is NaN."""
    bad = torch.isnan(tensor) if part == "buffer" else ~torch.isfinite(tensor)
    if bool(bad.any()):
        raise ModelFileError(
            f"{name} holds NaN or infinity; such a network cannot predict anything. Train again, "
            "with a smaller learning rate."
        )


def _arguments(kind: type[nn.Module]) -> dict[str, Any]:
    """What the constructor takes, with defaults; device and dtype are those of the tensors."""
    return {
        name: parameter.default
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if name not in ("device", "dtype") and not name.startswith("_")
    }


def join(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name
