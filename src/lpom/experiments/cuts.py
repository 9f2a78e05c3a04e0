"""What is kept of a run that was cut: weights, the method's state and the epochs done."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from lpom.files import write_atomically
from lpom.history import Epoch


def write_cut(
    path: Path, model: nn.Module, state: dict[str, Tensor] | None, curve: list[Epoch]
) -> None:
    """Keep an unfinished trial, if its method's state can be written down."""
    if state is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    tensors |= {f"state.{name}": value.contiguous() for name, value in state.items()}
    metadata = {"curve": json.dumps([asdict(epoch) for epoch in curve])}
    write_atomically(path, save(tensors, metadata))


def read_cut(path: Path) -> tuple[list[Epoch], dict[str, Tensor]]:
    """The epochs done and the tensors to go on from; nothing if there is no such file, or half."""
    if not path.exists():
        return [], {}
    try:
        with safe_open(path, framework="pt") as file:
            curve = json.loads(file.metadata()["curve"])
        return [Epoch(**epoch) for epoch in curve], load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):
        path.unlink()
        return [], {}


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin so, without that beginning."""
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
