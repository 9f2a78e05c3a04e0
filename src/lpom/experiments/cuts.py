"""What is kept of a run that was cut: weights, the method's state and the epochs done."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from lpom.files import write_atomically
from lpom.history import Epoch
from lpom.methods import State


@dataclass
class Cut:
    """The epochs done, what the method had to say by then, and the tensors to go on from."""

    curve: list[Epoch] = field(default_factory=list)
    remarks: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


def write_cut(path: Path, model: nn.Module, state: State, curve: list[Epoch]) -> None:
    """Keep an unfinished trial, if its method's state can be written down."""
    kept = state.tensors()
    if kept is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    tensors |= {f"state.{name}": value.contiguous() for name, value in kept.items()}
    epochs = [asdict(epoch) for epoch in curve]
    metadata = {"curve": json.dumps(epochs), "remarks": json.dumps(state.remarks)}
    write_atomically(path, save(tensors, metadata))


def read_cut(path: Path) -> Cut:
    """What was kept; nothing if there is no such file, or half of one."""
    if not path.exists():
        return Cut()
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        curve = [Epoch(**epoch) for epoch in json.loads(metadata["curve"])]
        return Cut(curve, json.loads(metadata["remarks"]), load_file(path))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):
        path.unlink()
        return Cut()


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin so, without that beginning."""
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
