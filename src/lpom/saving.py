"""Files: a network, an estimator, a pipeline or a dictionary of such in one file, without pickle.

The file is a ``.safetensors`` file. Its tensors have their names in the object; its metadata has
one JSON text with the rest (`lpom.encoding`) and a checksum of everything. A file that was cut off
or changed is refused. (A checksum notices damage; it does not say who wrote the file. Loading runs
no code from it and makes objects of known classes only.) A name that ends in ``.gz`` has the file
deflated: networks of few different weights become small.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, TypeVar, overload

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

import lpom
from lpom.encoding import decode, encode, register
from lpom.exceptions import ModelFileError, warn
from lpom.files import write_atomically
from lpom.graph.tracing import unwrapped
from lpom.layers import WeightsAloneError, fill

__all__ = ["load", "register", "save"]

M = TypeVar("M", bound=nn.Module)

FORMAT, VERSION = "lpom", 4  # the key of the metadata, and the version in it
MODEL = "model.safetensors"  # in the folder of a run
_TEXTS = "__metadata__"  # where the safetensors format keeps them
_MOST_HEADER = 100_000_000  # bytes, as in the safetensors format
#: What can be wrong with JSON that was changed: torch's own constructors raise most of these.
_UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,  # RecursionError too
    TypeError,
    ValueError,
)


def save(object: Any, path: str | os.PathLike[str]) -> None:
    """Write a module, a fitted estimator or a pipeline to one file, whole or not at all.

    An ``nn.Sequential`` of torch's layers and of activations of ours comes back as it is from
    :func:`load`. Of another module the weights alone are written, which a warning says;
    ``load(path, into=model)`` fills such a model. Estimators of lpom, scikit-learn's pipelines and
    the common transformers in them come back fitted; so do dictionaries and lists of all these.

    Parameters
    ----------
    object : a module, an estimator, a pipeline, or plain values, arrays and these in a dictionary
    path : where to, e.g. ``model.safetensors``, or ``model.safetensors.gz`` to have it deflated

    Raises
    ------
    ModelFileError
        If something in it can't be written, or a weight is NaN or infinite; the sentence says what.
        A file that was there stays as it was.
    """
    if isinstance(object, str | os.PathLike):
        raise TypeError(
            "expected an object and then a path, save(model, path); got "
            f"{type(object).__name__} and {type(path).__name__}."
        )
    content, reason = _written(object)
    if Path(path).suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    write_atomically(Path(path), content)
    if reason:
        warn(
            f"{path} holds the weights alone, because {reason}. lpom.load(path, into=model) fills "
            "a model that your code makes.",
            UserWarning,
        )


@overload
def load(path: str | os.PathLike[str]) -> Any: ...
@overload
def load(path: str | os.PathLike[str], into: M) -> M: ...
def load(path: str | os.PathLike[str], into: nn.Module | None = None) -> Any:
    """What :func:`save` wrote; networks are on the CPU and in evaluation mode.

    Parameters
    ----------
    path : a file that :func:`save` wrote, or the folder of a run
    into : a model to fill, on its own device; its tensors must have the names, shapes and kinds of
        numbers of those in the file

    Raises
    ------
    ModelFileError
        If the file is not one of ours, is damaged, was changed, or does not fit ``into``; the
        sentence says how. The model is then as it was.
    """
    path = Path(path)
    if path.is_dir():
        path /= MODEL
    if not path.is_file():
        raise ModelFileError(f"there is no model file {path}. Check the path.")
    with path.open("rb") as file:
        return _read(file, os.fstat(file.fileno()).st_size, str(path), into)


def dumps(object: Any) -> bytes:
    """What :func:`save` writes to a file."""
    return _written(object)[0]


def loads(content: bytes) -> Any:
    """What :func:`dumps` gave the bytes of."""
    return _read(io.BytesIO(content), len(content), "the content", None)


def _written(object: Any) -> tuple[bytes, str]:
    """The bytes of a file, and why a module's weights alone are in it."""
    tree, tensors = encode(object)
    header = {"version": VERSION, "lpom_version": lpom.__version__, "object": tree}
    header["sha256"] = _checksum(tensors, header)
    text = json.dumps(header, allow_nan=False, ensure_ascii=False)
    reason = tree["module"].get("reason", "") if isinstance(tree, dict) and "module" in tree else ""
    return safetensors.torch.save(tensors, metadata={FORMAT: text}), reason


class _Counted(dict[str, Tensor]):
    """Tensors, and which of them were taken."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.unused = set(tensors)

    def __getitem__(self, name: str) -> Tensor:
        self.unused.discard(name)
        return super().__getitem__(name)


def _read(file: IO[bytes], size: int, where: str, into: nn.Module | None) -> Any:
    stored, header = _parsed(file, size, where)
    if header.get("sha256") != _checksum(stored, header):
        raise ModelFileError(
            f"{where} was changed after it was written: its checksum does not match its contents. "
            "Use the original file, or train again."
        )
    tree, tensors = header.get("object"), _Counted(stored)
    try:
        if into is None:
            made = decode(tree, tensors)
        elif not isinstance(tree, dict) or "module" not in tree:
            raise ModelFileError("it holds no module that could fill one. Leave `into` out")
        else:
            fill(unwrapped(into), tree["module"], tensors)
            made = into.eval()
        if tensors.unused:
            raise ValueError(f"{', '.join(sorted(tensors.unused)[:5])} belongs to nothing in it")
        return made
    except WeightsAloneError as error:
        raise ModelFileError(
            f"{where} holds the weights alone, because {error}. Make the model as it was made for "
            "training and call lpom.load(path, into=model)."
        ) from error
    except ModelFileError as error:
        raise ModelFileError(f"{where}: {error}") from error
    except _UNREADABLE as error:
        raise ModelFileError(
            f"{where} describes something that can't be ({type(error).__name__}: {error}). It was "
            "changed after it was written: use the original file, or train again."
        ) from error


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


def _parsed(file: IO[bytes], size: int, where: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and header; what the header claims is checked before anything large is read."""
    try:
        if file.read(2) == b"\x1f\x8b":
            file.seek(0)
            with gzip.open(file) as inflated:  # deflate makes at most a thousand bytes of one
                return _parts(inflated, 1100 * size, exact=False)
        file.seek(0)
        return _parts(file, size, exact=True)
    except ModelFileError as error:
        raise ModelFileError(f"{where} {error}") from error
    except (SafetensorError, OSError, EOFError, zlib.error, *_UNREADABLE) as error:
        raise ModelFileError(
            f"{where} is cut off or damaged, or no safetensors file ({error}). Expected a file "
            "that lpom wrote: copy it again, or train again."
        ) from error


def _parts(file: Any, total: int, *, exact: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    begin = file.read(9)
    size = int.from_bytes(begin[:8], "little")
    if not (begin[8:] == b"{" and size <= min(total - 8, _MOST_HEADER)):
        raise ValueError(f"a header of {size} bytes in a file of {total}")
    text = b"{" + file.read(size - 1)
    outer = json.loads(text)
    end = max(
        (entry["data_offsets"][1] for key, entry in outer.items() if key != _TEXTS), default=0
    )
    if (end != total - 8 - size) if exact else (end > total):
        raise ValueError(f"the tensors do not fill the {total} bytes of the file")
    texts = outer.get(_TEXTS)
    if not isinstance(texts, dict) or FORMAT not in texts:
        raise ModelFileError(
            "is a safetensors file, but lpom did not write it: its metadata has no "
            f"{FORMAT!r}. Expected a file of `lpom train` or lpom.save."
        )
    header = json.loads(texts[FORMAT])
    if not isinstance(header, dict) or header.get("version") != VERSION:
        written = header.get("lpom_version", "unknown") if isinstance(header, dict) else "unknown"
        raise ModelFileError(
            f"has another format version than {VERSION}, which lpom {lpom.__version__} "
            f"reads; it was written by version {written}. Install that, or train again."
        )
    rest = file.read(end + 1)
    if len(rest) != end:
        raise ValueError(f"expected {end} bytes of tensors, got {len(rest)} or more")
    return safetensors.torch.load(begin[:8] + text + rest), header
