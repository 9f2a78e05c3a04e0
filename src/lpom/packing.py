"""Tensors of few levels or few weights in fewer bytes, such that they come back to the last bit.

*Levels*: where each channel (row) of a tensor has at most 256 different values, these are listed,
and every weight is the number of its value in 1, 2, 4 or 8 bits. *Sparse*: where many weights are
zero, one bit each says which are not, and these follow. What is shorter counts, if it saves a
quarter of the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

#: Bits of a code.
BITS = (1, 2, 4, 8)
#: A tensor is packed if that takes at most this share of its bytes.
WORTH = 0.75

#: What belongs to a packed tensor beside its parts: its kind, its shape, the bits of a code.
Note: TypeAlias = dict[str, Any]


def pack(tensor: Tensor) -> tuple[dict[str, Tensor], Note] | None:
    """The parts of a packed matrix or kernel by name, and a note of plain data; None if neither
    way saves much.
    """
    if tensor.ndim < 2 or not tensor.is_floating_point() or not tensor.numel():
        return None
    ways = [way for way in (_levels(tensor), _sparse(tensor)) if way is not None]
    if not ways:
        return None
    parts, note = min(ways, key=lambda way: n_bytes(way[0]))
    if n_bytes(parts) > WORTH * tensor.numel() * tensor.element_size():
        return None
    return parts, note | {"shape": list(tensor.shape)}


def unpack(parts: Mapping[str, Tensor], note: Note) -> Tensor:
    """The tensor that `pack` took apart.

    Raises
    ------
    ValueError
        If the parts and the note don't fit each other.
    """
    shape, kind = note.get("shape"), note.get("kind")
    if not (isinstance(shape, list) and len(shape) > 1 and all(type(n) is int for n in shape)):
        raise ValueError(f"a packed tensor has a shape of whole numbers, got {shape!r}")
    if min(shape) < 1:
        raise ValueError(f"a packed tensor has no empty side, got shape {shape}")
    names = {"levels": {"codes", "levels"}, "sparse": {"mask", "values"}}
    if not isinstance(kind, str) or kind not in names or parts.keys() != names[kind]:
        raise ValueError(f"{sorted(parts)} are not the parts of a {kind!r} tensor")
    if kind == "levels":
        return _from_levels(parts["codes"], parts["levels"], shape, note.get("bits"))
    return _from_sparse(parts["mask"], parts["values"], shape)


def n_bytes(parts: Mapping[str, Tensor]) -> int:
    return sum(part.numel() * part.element_size() for part in parts.values())


def _levels(tensor: Tensor) -> tuple[dict[str, Tensor], Note] | None:
    rows = tensor.flatten(1)
    ordered = rows.sort(dim=1).values
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    most = int(new.sum(1).max())
    bits = next((bits for bits in BITS if most <= 2**bits), None)
    if bits is None:
        return None
    # the k-th different value of each row; what is left over repeats the last
    levels = ordered[:, -1:].repeat(1, most)
    levels.scatter_(1, new.cumsum(1) - 1, ordered)
    codes = torch.searchsorted(levels, rows.contiguous())
    return {"codes": _to_bytes(codes, bits), "levels": levels}, {"kind": "levels", "bits": bits}


def _from_levels(codes: Tensor, levels: Tensor, shape: list[int], bits: Any) -> Tensor:
    if type(bits) is not int or bits not in BITS:
        raise ValueError(f"a code has {', '.join(map(str, BITS))} bits, got {bits!r}")
    if levels.ndim != 2 or len(levels) != shape[0] or not levels.is_floating_point():
        raise ValueError(f"levels of shape {list(levels.shape)} are not those of {shape}")
    numbers = _from_bytes(codes, bits, math.prod(shape)).view(shape[0], -1)
    if int(numbers.max()) >= levels.shape[1]:
        raise ValueError(f"code {int(numbers.max())} of {levels.shape[1]} levels")
    return levels.gather(1, numbers).reshape(shape)


def _sparse(tensor: Tensor) -> tuple[dict[str, Tensor], Note] | None:
    mask = tensor != 0
    parts = {"mask": _to_bytes(mask.flatten().long(), 1), "values": tensor[mask]}
    return (parts, {"kind": "sparse"}) if len(parts["values"]) else None


def _from_sparse(mask: Tensor, values: Tensor, shape: list[int]) -> Tensor:
    kept = _from_bytes(mask, 1, math.prod(shape)).bool()
    if values.ndim != 1 or not values.is_floating_point() or len(values) != int(kept.sum()):
        raise ValueError(f"{values.numel()} values for {int(kept.sum())} places")
    made = values.new_zeros(len(kept))
    made[kept] = values
    return made.reshape(shape)


def _to_bytes(codes: Tensor, bits: int) -> Tensor:
    """Whole numbers below ``2**bits``, the first in the highest bits of the first byte."""
    each = 8 // bits
    flat = codes.flatten()
    padded = torch.cat([flat, flat.new_zeros(-len(flat) % each)]).view(-1, each)
    return (padded << _shifts(bits)).sum(1).to(torch.uint8)


def _from_bytes(packed: Tensor, bits: int, count: int) -> Tensor:
    each = 8 // bits
    if packed.dtype != torch.uint8 or packed.ndim != 1 or len(packed) != math.ceil(count / each):
        raise ValueError(f"{packed.numel()} bytes for {count} codes of {bits} bits")
    codes: Tensor = (packed.long()[:, None] >> _shifts(bits)) & (2**bits - 1)
    return codes.flatten()[:count]


def _shifts(bits: int) -> Tensor:
    return torch.arange(8 - bits, -1, -bits)
