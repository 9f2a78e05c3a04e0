"""Model files: a network and what belongs to it in one ``.safetensors`` file, without pickle.

Weights are the tensors ``layers.0.weight``, ``layers.0.bias``, ...; the header holds the
architecture, the caller's metadata and a checksum of everything, as one JSON text. A file that was
cut off or changed is refused. (A checksum notices damage; it does not say who wrote the file.)
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

import lpom
from lpom import activations
from lpom.activations import Activation, Identity
from lpom.exceptions import ModelFileError
from lpom.files import write_atomically
from lpom.graph import Chain, chain, trace

FORMAT = "lpom"  # the key of the metadata
FORMAT_VERSION = 1

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
}
_KINDS = {"lpom_version": str, "architecture": list, "metadata": dict, "sha256": str}


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write ``model`` to one file, whole or not at all.

    Parameters
    ----------
    path : where to, e.g. ``model.safetensors``
    model : a network that :func:`lpom.fit` can train
    metadata : anything that JSON can hold; :func:`load` gives it back as it is

    Raises
    ------
    TypeError
        If an activation is the user's own function, which no file can hold.
    ModelFileError
        If a weight is NaN or infinite.
    """
    graph = trace(model)
    network = chain(graph)
    architecture, tensors = _describe(model, network)
    _check_finite(tensors, "the model")
    header = {
        "format_version": FORMAT_VERSION,
        "lpom_version": lpom.__version__,
        "architecture": architecture,
        "flattens": graph[1].edge.flattens,
        "metadata": dict(metadata or {}),
    }
    header["sha256"] = _checksum(tensors, header)
    text = json.dumps(header, allow_nan=False)
    write_atomically(Path(path), safetensors.torch.save(tensors, metadata={FORMAT: text}))


def load(path: str | os.PathLike[str]) -> tuple[nn.Sequential, dict[str, Any]]:
    """The network and the metadata that :func:`save` wrote, on the CPU.

    Raises
    ------
    ModelFileError
        If the file is not one of ours, is damaged, or was changed; the sentence says how.
    """
    path = Path(path)
    if not path.is_file():
        raise ModelFileError(f"there is no model file {path}. Check the path.")
    tensors, header = _read(path, path.read_bytes())
    _check_header(path, header)
    if header["sha256"] != _checksum(tensors, header):
        raise ModelFileError(
            f"{path} was changed after it was written: its checksum does not match its contents. "
            "Use the original file, or train again."
        )
    model = _build(path, header["architecture"], tensors)
    if header.get("flattens"):
        model.insert(0, nn.Flatten())
    _check_finite(tensors, str(path))
    return model, header["metadata"]


def _describe(model: nn.Module, network: Chain) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Each layer in words, and all weights by name."""
    architecture = []
    tensors: dict[str, Tensor] = {}
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for i, (layer, linear) in enumerate(zip(network, linears, strict=True)):
        architecture.append(
            {
                "kind": "dense",
                "inputs": linear.in_features,
                "outputs": linear.out_features,
                "bias": linear.bias is not None,
                "dtype": str(linear.weight.dtype).removeprefix("torch."),
                "activation": layer.activation.name,
                "parameters": layer.activation.params(),
            }
        )
        for name, parameter in linear.named_parameters():
            tensors[f"layers.{i}.{name}"] = parameter.detach().cpu().contiguous()
    return architecture, tensors


def _checksum(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> str:
    """SHA-256 over the header (but for the checksum itself) and every tensor."""
    digest = hashlib.sha256()
    rest = {key: value for key, value in header.items() if key != "sha256"}
    digest.update(json.dumps(rest, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _check_finite(tensors: Mapping[str, Tensor], where: str) -> None:
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ModelFileError(
                f"{where} holds NaN or infinity in {name}; such a network cannot predict anything. "
                "Train again, with a smaller learning rate or a larger mu."
            )


def _read(path: Path, content: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    size = int.from_bytes(content[:8], "little")  # a safetensors file: size of header, header
    try:
        tensors = safetensors.torch.load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        state = "is cut off or damaged" if content[8:9] == b"{" else "is not a safetensors file"
        raise ModelFileError(
            f"{path} {state} ({error}). Expected a model.safetensors file that lpom wrote: copy "
            "it again, or train again."
        ) from error
    texts = json.loads(content[8 : 8 + size]).get("__metadata__", {})
    if FORMAT not in texts:
        raise ModelFileError(
            f"{path} is a safetensors file, but not an lpom model: its metadata has no {FORMAT!r}. "
            "Expected a file that `lpom train` or lpom.saving.save wrote."
        )
    try:
        return tensors, dict(json.loads(texts[FORMAT]))
    except (TypeError, ValueError) as error:
        raise ModelFileError(f"{path} has metadata that is not valid JSON ({error}).") from error


def _check_header(path: Path, header: Mapping[str, Any]) -> None:
    if header.get("format_version") != FORMAT_VERSION:
        raise ModelFileError(
            f"{path} has format version {header.get('format_version')!r}, and lpom "
            f"{lpom.__version__} reads version {FORMAT_VERSION}. It was written by lpom "
            f"{header.get('lpom_version', 'of unknown version')}: install that version."
        )
    for key, kind in _KINDS.items():
        if not isinstance(header.get(key), kind):
            raise ModelFileError(
                f"{path} lacks {key!r}, a JSON {kind.__name__}, in its metadata. It was changed "
                "after it was written: use the original file, or train again."
            )


def _build(path: Path, architecture: list[Any], tensors: dict[str, Tensor]) -> nn.Sequential:
    modules: list[nn.Module] = []
    unused = set(tensors)
    width = None
    for i, layer in enumerate(architecture):
        linear, activation = _layer(path, i, layer)
        if width not in (None, linear.in_features):
            raise ModelFileError(
                f"{path} describes layer {i} with {linear.in_features} inputs, but the layer below "
                f"it has {width} outputs."
            )
        width = linear.out_features
        for part, empty in linear.named_parameters():
            name = f"layers.{i}.{part}"
            stored = tensors.get(name)
            if stored is None or stored.shape != empty.shape or stored.dtype != empty.dtype:
                found = "none" if stored is None else f"{tuple(stored.shape)} of {stored.dtype}"
                raise ModelFileError(
                    f"{path} does not hold the weights of its architecture: {name} should have "
                    f"shape {tuple(empty.shape)} of {empty.dtype}, got {found}."
                )
            unused.discard(name)
            setattr(linear, part, nn.Parameter(stored))
        modules += [linear] if activation == Identity() else [linear, activation.to_module()]
    if not modules or unused:
        raise ModelFileError(
            f"{path} does not hold the weights of its architecture: that has {len(architecture)} "
            f"layers, and no place for {', '.join(sorted(unused)) or 'anything'}."
        )
    return nn.Sequential(*modules)


def _layer(path: Path, i: int, layer: Any) -> tuple[nn.Linear, Activation]:
    """One layer as its description tells, its weights still without memory."""
    try:
        if layer["kind"] != "dense":
            raise ValueError(f"kind {layer['kind']!r}, where 'dense' is the one known.")
        activation = activations.get(layer["activation"], **layer["parameters"])
        # on "meta" no memory is taken and no random number drawn
        linear = nn.Linear(
            layer["inputs"],
            layer["outputs"],
            bias=bool(layer["bias"]),
            dtype=_DTYPES[layer["dtype"]],
            device="meta",
        )
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ModelFileError(f"{path} has an invalid description of layer {i}: {error}") from error
    return linear, activation
