"""Sequences of several lengths: one more feature of the data says which steps are there.

A model of ``(x, lengths)``, or of a packed sequence, is made one of a single tensor, (m, steps,
features + 1), whose last feature is one where a step is there and zero after the end. While it is
traced a packed sequence is a padded one and that mask, `Packed`: nothing is sorted, and what lies
after an end is computed but never read.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import rnn

from lpom.exceptions import DataError, UntrainableError
from lpom.graph.recording import record


def join(x: Tensor, lengths: Tensor, steps: int = 0) -> Tensor:
    """Sequences (m, steps, ...), padded at their ends, and their lengths (m,) as one tensor.

    It has as many steps as the longest sequence, and ``steps`` at least; what x holds after an end
    is not looked at.
    """
    whole = lengths.ndim == 1 and not (lengths.is_floating_point() or lengths.is_complex())
    if x.ndim < 2 or not whole or len(lengths) != len(x):
        raise DataError(
            "sequences of several lengths are a pair (x, lengths): x of shape (n_samples, steps, "
            "...), padded at the ends, and a whole number for each sample; got shapes "
            f"{tuple(x.shape)} and {tuple(lengths.shape)} ({lengths.dtype})."
        )
    if len(x) and not 1 <= int(lengths.min()) <= int(lengths.max()) <= x.shape[1]:
        raise DataError(
            f"lengths must lie between 1 and the {x.shape[1]} steps of x, got "
            f"{int(lengths.min())}..{int(lengths.max())}. Leave out sequences without any step."
        )
    longest = int(lengths.max()) if len(x) else 0
    there = alive(lengths, longest).to(x.device)[..., None]
    x = x[:, :longest].reshape(len(x), longest, -1)
    joined = torch.cat([x.masked_fill(~there, 0), there.to(x.dtype)], -1)
    return F.pad(joined, (0, 0, 0, max(0, steps - longest)))


def alive(lengths: Any, steps: int) -> Tensor:
    """Which of so many steps are there, (m, steps)."""
    count: Tensor = torch.as_tensor(lengths)[:, None]
    return torch.arange(steps, device=count.device) < count


def steps_but_last(there: Tensor) -> Tensor:
    """All steps but the last one of each sequence, (m, steps, 1), of a mask as `alive` gives it."""
    return ~(there & ~F.pad(there[:, 1:], (0, 1))).unsqueeze(-1)


def steps_of(X: Tensor, features: tuple[int, ...], steps: int) -> Tensor:
    """What `join` was given: x, (m, steps, ...)."""
    if X.shape[1] != steps:
        raise DataError(
            f"a sequence of {X.shape[1]} steps has come, and the network was written out for the "
            f"{steps} of the first batch; pad the x of that batch to as many steps as the longest "
            "sequence of all has."
        )
    return X[..., :-1].reshape(*X.shape[:2], *features)


def lengths_of(X: Tensor) -> Tensor:
    return (X[..., -1] > 0).sum(1)


class Ragged(nn.Module):
    """What a model of sequences and their lengths becomes: one of a single tensor, as `join` makes.

    Predictions at every step are filled up to all steps of its input.
    """

    features: ClassVar[tuple[int, ...]]
    packed: ClassVar[bool]

    def forward(self, X: Tensor) -> Any:
        x = record(steps_of, X, self.features, X.shape[1])
        lengths = record(lengths_of, X)
        if self.packed:
            x = rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            outputs = super().forward(x)
        else:
            outputs = super().forward(x, lengths)
        if isinstance(outputs, Tensor) and outputs.ndim == 3:  # no proxy, which has all steps
            missing = X.shape[1] - outputs.shape[1]
            if missing > 0 and outputs.shape[1] == int(lengths.max()):
                return F.pad(outputs, (0, 0, 0, missing))
        return outputs


def ragged(model: nn.Module, features: tuple[int, ...], packed: bool) -> Ragged:
    """The model as a `Ragged` one: its weights, modules and names, and another forward."""
    try:
        inspect.signature(model.forward).bind(*[None] * (1 if packed else 2))
    except TypeError as error:
        given = "a PackedSequence" if packed else "(x, lengths)"
        wanted = "forward(self, packed)" if packed else "forward(self, x, lengths)"
        raise UntrainableError(
            f"X is {given}, which {type(model).__name__} does not take: {error}. Write "
            f"{wanted}, or give X as one tensor."
        ) from error
    kind = type(model)
    made = type(kind.__name__, (Ragged, kind), {"features": features, "packed": packed})
    copy: Ragged = object.__new__(made)
    vars(copy).update(vars(model))
    return copy


@dataclass(frozen=True)
class Packed:
    """A packed sequence while a model is traced: padded, (m, steps, features), in its own order."""

    x: Tensor
    lengths: Any
    there: Tensor  # (m, steps)

    def __getattr__(self, name: str) -> Any:
        if name in rnn.PackedSequence._fields:
            raise fx.proxy.TraceError(
                f"it asks a packed sequence for its {name}; recurrent layers and "
                "pad_packed_sequence can be given one."
            )
        raise AttributeError(name)


def pack(
    input: Any, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True
) -> Packed:
    """What the tracer meets for `torch.nn.utils.rnn.pack_padded_sequence`."""
    x = input if batch_first else input.transpose(0, 1)
    return Packed(x, lengths, record(alive, lengths, x.shape[1]))


def pad(
    sequence: Packed,
    batch_first: bool = False,
    padding_value: float = 0.0,
    total_length: Any = None,
) -> tuple[Tensor, Any]:
    """What the tracer meets for `torch.nn.utils.rnn.pad_packed_sequence`."""
    x = sequence.x
    if isinstance(total_length, int) and total_length != x.shape[1]:
        raise fx.proxy.TraceError(
            f"it pads a packed sequence to {total_length} steps, where x has {x.shape[1]}; write "
            "total_length=x.shape[1], or leave that out."
        )
    if padding_value:
        x = x.masked_fill(~sequence.there.unsqueeze(-1), padding_value)
    return (x if batch_first else x.transpose(0, 1)), sequence.lengths


#: What the tracer calls for torch's functions, whose Python looks at the lengths.
FUNCTIONS: dict[Any, Any] = {rnn.pack_padded_sequence: pack, rnn.pad_packed_sequence: pad}
