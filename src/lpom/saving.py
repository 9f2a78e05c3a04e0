"""Model files: a network and what belongs to it in one ``.safetensors`` file, without pickle.

Tensors have their names in the module. The header holds, as one JSON text, the network described
as data (`lpom.graph.description`), which tensors are frozen or shared, the caller's metadata and a
checksum of everything. Weights of few levels, or few in number, are packed (`lpom.packing`); they
come back to the last bit. A file that was cut off or changed is refused. (A checksum notices
damage; it does not say who wrote the file. Loading runs no code from it, and not the network
either.)
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
from torch.nn.parameter import is_lazy

import lpom
from lpom import packing
from lpom.exceptions import ModelFileError, warn
from lpom.files import write_atomically
from lpom.graph import description, rebuilding
from lpom.graph.tracing import unwrapped
from lpom.graph.vocabulary import DTYPES, KINDS

FORMAT = "lpom"  # the key of the metadata
FORMAT_VERSION, PACKED_VERSION = 2, 3  # the second of files with packed tensors
_TEXTS = "__metadata__"  # where the safetensors format keeps them
MOST_HEADER = 100_000_000  # bytes, as in the safetensors format

_KINDS = {
    "lpom_version": str,
    "tensors": dict,
    "shared": dict,
    "metadata": dict,
    "sha256": str,
}


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    example: Tensor | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write ``model`` to one file, whole or not at all.

    Any network that :func:`lpom.fit` can train is described as data, so that :func:`load` needs
    nothing but the file. Of one that needs Python of its own the weights alone are written, which
    is said in a warning; ``load(path, into=model)`` fills such a model.

    Parameters
    ----------
    path : where to, e.g. ``model.safetensors``
    model : any torch module
    example : a batch of inputs, for models whose Python asks for sizes, as a loop over time steps
        does; those sizes are then fixed
    metadata : anything that JSON can hold; :func:`load` gives it back as it is

    Raises
    ------
    ModelFileError
        If a weight is NaN or infinite, or has no value yet.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            "expected a path and then a torch module, save(path, model); got "
            f"{type(path).__name__} and {type(model).__name__}."
        )
    model = unwrapped(model)
    for name, parameter in model.named_parameters():
        if is_lazy(parameter) or parameter.is_meta:
            raise ModelFileError(
                f"{name} has no values yet, so there is nothing to save; call the model once on a "
                "batch of data first."
            )
    network: dict[str, Any] | None = None
    constants: dict[str, Tensor] = {}
    reason = ""
    try:
        network, constants = description.describe(model, example)
    except description.Undescribable as error:
        reason = str(error)
    found, kinds, shared = description.tensors(model, constants)
    tensors = _storable(found)
    _check_values(tensors, kinds, "the model")
    tensors, notes = _packed(tensors)
    header = {
        "format_version": PACKED_VERSION if notes else FORMAT_VERSION,
        "lpom_version": lpom.__version__,
        "network": network,
        "reason": reason,
        "tensors": kinds,
        "shared": shared,
        "metadata": dict(metadata or {}),
        **({"packed": notes} if notes else {}),
    }
    header["sha256"] = _checksum(tensors, header)
    text = json.dumps(header, allow_nan=False)
    write_atomically(Path(path), safetensors.torch.save(tensors, metadata={FORMAT: text}))
    if network is None:
        warn(
            f"{path} holds the weights alone, because the network needs its own Python: {reason}. "
            "lpom.saving.load(path, into=model) fills a model that your code makes.",
            UserWarning,
        )


def load(
    path: str | os.PathLike[str], *, into: nn.Module | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """The network and the metadata that :func:`save` wrote, on the CPU, in evaluation mode.

    Parameters
    ----------
    path : a file that :func:`save` wrote
    into : a model to fill, on its own device; its tensors must have the names, shapes and kinds of
        numbers of those in the file. Without it the network is made from its description: an
        ``nn.Sequential`` where the saved one was one of known layers, else a module that follows
        the description step by step.

    Raises
    ------
    ModelFileError
        If the file is not one of ours, is damaged, was changed, or does not fit ``into``; the
        sentence says how. The model is then as it was.
    """
    path = Path(path)
    if not path.is_file():
        raise ModelFileError(f"there is no model file {path}. Check the path.")
    tensors, header = _read(path)
    if header["sha256"] != _checksum(tensors, header):
        raise ModelFileError(
            f"{path} was changed after it was written: its checksum does not match its contents. "
            "Use the original file, or train again."
        )
    tensors = _unpacked(path, tensors, header)
    _check_tensors(path, tensors, header)
    _check_values(tensors, header["tensors"], str(path))
    if into is not None:
        _fill(path, unwrapped(into), tensors, header)
        return into.eval(), header["metadata"]
    if header.get("network") is None:
        raise ModelFileError(
            f"{path} holds the weights alone, because the network needs its own Python: "
            f"{header.get('reason')}. Make the model as it was made for training and call "
            "lpom.saving.load(path, into=model)."
        )
    try:
        model = rebuilding.build(header["network"], tensors, header["tensors"], header["shared"])
    except _UNBUILDABLE as error:
        raise ModelFileError(
            f"{path} has a description of a network that can't be: {error}. It was changed after "
            "it was written: use the original file, or train again."
        ) from error
    return model, header["metadata"]


#: What torch's own constructors raise, besides ValueError, for settings that make no sense.
_UNBUILDABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
)


def _storable(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors on the CPU, each with memory of its own."""
    stored: dict[str, Tensor] = {}
    memory = set()
    for name, tensor in found.items():
        if tensor.dtype not in DTYPES.values():
            raise ModelFileError(
                f"{name} is of {tensor.dtype}, which a model file can't hold; it holds "
                f"{', '.join(DTYPES)}."
            )
        plain = tensor.detach().cpu().contiguous()
        pointer = plain.untyped_storage().data_ptr()
        stored[name] = plain.clone() if pointer in memory else plain
        memory.add(pointer)
    return stored


def _packed(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors with those that can be packed in parts, ``name|part``, and the notes of these."""
    stored: dict[str, Tensor] = {}
    notes: dict[str, Any] = {}
    for name, tensor in tensors.items():
        packed = packing.pack(tensor)
        if packed is None:
            stored[name] = tensor
            continue
        parts, notes[name] = packed
        stored |= {f"{name}|{part}": piece.contiguous() for part, piece in parts.items()}
    return stored, notes


def _unpacked(
    path: Path, stored: Mapping[str, Tensor], header: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The reverse, of a file that may have been changed."""
    tensors, notes = dict(stored), header.get("packed", {})
    try:
        for name, note in notes.items():
            parts = {key: tensors.pop(key) for key in stored if key.rpartition("|")[0] == name}
            tensors[name] = packing.unpack(
                {k.rpartition("|")[2]: p for k, p in parts.items()}, note
            )
    except (AttributeError, KeyError, ValueError, OverflowError) as error:
        raise ModelFileError(
            f"{path} has a packed tensor that can't be: {error}. It was changed after it was "
            "written: use the original file, or train again."
        ) from error
    return tensors


def _checksum(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> str:
    """SHA-256 over the header (but for the checksum itself) and every tensor."""
    digest = hashlib.sha256()
    rest = {key: value for key, value in header.items() if key != "sha256"}
    digest.update(json.dumps(rest, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _check_values(tensors: Mapping[str, Tensor], kinds: Mapping[str, str], where: str) -> None:
    """Parameters are finite; a mask among the buffers may be infinite, but nothing is NaN."""
    for name, tensor in tensors.items():
        masks = kinds[name] in ("buffer", "constant")
        bad = torch.isnan(tensor) if masks else ~torch.isfinite(tensor)
        if bool(bad.any()):
            raise ModelFileError(
                f"{where} holds NaN or infinity in {name}; such a network cannot predict anything. "
                "Train again, with a smaller learning rate or a larger mu."
            )


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and header; the size of the file is checked before anything large is read."""
    with path.open("rb") as file:
        total = os.fstat(file.fileno()).st_size
        size = int.from_bytes(file.read(8), "little")
        begin = file.read(1)
        if not (begin == b"{" and size <= min(total - 8, MOST_HEADER)):
            state = "is cut off or damaged" if begin == b"{" else "is not a safetensors file"
            raise _unreadable(path, state, f"a header of {size} bytes in a file of {total}")
        try:
            outer = json.loads(begin + file.read(size - 1))
            ends = [entry["data_offsets"][1] for key, entry in outer.items() if key != _TEXTS]
            if max(ends, default=0) != total - 8 - size:
                raise ValueError(f"the tensors do not fill the {total} bytes of the file")
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise _unreadable(path, "is cut off or damaged", error) from error
        header = _header(path, outer.get(_TEXTS))
        file.seek(0)
        try:
            return safetensors.torch.load(file.read(total)), header
        except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise _unreadable(path, "is cut off or damaged", error) from error


def _unreadable(path: Path, state: str, why: object) -> ModelFileError:
    return ModelFileError(
        f"{path} {state} ({why}). Expected a model.safetensors file that lpom wrote: copy it "
        "again, or train again."
    )


def _header(path: Path, texts: Any) -> dict[str, Any]:
    if not isinstance(texts, dict) or FORMAT not in texts:
        raise ModelFileError(
            f"{path} is a safetensors file, but not an lpom model: its metadata has no {FORMAT!r}. "
            "Expected a file that `lpom train` or lpom.saving.save wrote."
        )
    try:
        header = dict(json.loads(texts[FORMAT]))
    except (TypeError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} has metadata that is not valid JSON ({error}).") from error
    if header.get("format_version") not in (FORMAT_VERSION, PACKED_VERSION):
        raise ModelFileError(
            f"{path} has format version {header.get('format_version')!r}, and lpom "
            f"{lpom.__version__} reads version {FORMAT_VERSION} and {PACKED_VERSION}. It was "
            f"written by lpom {header.get('lpom_version', 'of unknown version')}: install that "
            "version, or train again."
        )
    kinds = {**_KINDS, **({"network": dict} if header.get("network") is not None else {})}
    for key, kind in kinds.items():
        if not isinstance(header.get(key), kind):
            raise ModelFileError(
                f"{path} lacks {key!r}, a JSON {kind.__name__}, in its metadata. It was changed "
                "after it was written: use the original file, or train again."
            )
    return header


def _check_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """The file holds the tensors that its header lists, no more and no fewer."""
    kinds, shared = header["tensors"], header["shared"]
    missing, extra = sorted(set(kinds) - set(tensors)), sorted(set(tensors) - set(kinds))
    if missing or extra:
        raise ModelFileError(
            f"{path} does not hold the tensors that it lists: "
            + "; ".join(_listed(missing, "is missing") + _listed(extra, "is too many"))
            + ". Use the original file, or train again."
        )
    for name, kind in kinds.items():
        if kind not in KINDS:
            raise ModelFileError(
                f"{path} calls {name} a {kind!r}, which is none of {', '.join(KINDS)}."
            )
    for name, first in shared.items():
        if name in kinds or not isinstance(first, str) or first not in kinds:
            raise ModelFileError(f"{path} says that {name} is {first!r}, which it does not hold.")


def _listed(names: list[str], what: str) -> list[str]:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return [f"{shown} {what}"] if names else []


def _fill(
    path: Path, model: nn.Module, tensors: Mapping[str, Tensor], header: Mapping[str, Any]
) -> None:
    """Copy the tensors into a model, once all of them are known to fit."""
    kinds = header["tensors"]
    kept = {name for name, kind in kinds.items() if kind != "constant"}
    source = {name: name for name in kept}
    source |= {name: first for name, first in header["shared"].items() if first in kept}
    found, _, shared = description.tensors(model)
    places = {**{name: name for name in found}, **shared}
    missing, extra = sorted(set(places) - set(source)), sorted(set(source) - set(places))
    faults = _listed(missing, "of the model is not in the file")
    faults += _listed(extra, "of the file is not in the model")
    for name in [name for name in places if name in source]:
        own, stored = found[places[name]], tensors[source[name]]
        if own.shape != stored.shape or own.dtype != stored.dtype:
            faults.append(
                f"{name} has shape {tuple(own.shape)} of {own.dtype} in the model, "
                f"{tuple(stored.shape)} of {stored.dtype} in the file"
            )
        elif source[name] != source.get(places[name]):
            faults.append(f"{name} and {places[name]} are one tensor in the model, two in the file")
    if faults:
        raise ModelFileError(
            f"{path} does not fit the model: {'; '.join(faults[:5])}. Make the model as it was "
            "made for training."
        )
    with torch.no_grad():
        for name, own in found.items():
            own.copy_(tensors[source[name]])
            if isinstance(own, nn.Parameter):
                own.requires_grad_(kinds[source[name]] != "frozen")
