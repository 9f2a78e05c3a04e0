"""Weights and settings of a run as plain values: copied, put back, compared."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lpom.methods import Method, State
from lpom.methods.optimizers import SCHEDULED, OptimizerState


def settings_of(method: Method[Any]) -> str:
    """The method and all its settings, the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", f"{method.name}({method.get_params()})")


def optimizer_of(state: State) -> list[str]:
    """The optimiser's own settings, which a function that makes it does not tell."""
    if not isinstance(state, OptimizerState) or state.optimizer is None:
        return []
    optimizer, found = state.optimizer, []
    for group in optimizer.param_groups:
        known = group | {"lr": group.get("initial_lr", group["lr"])}  # before any schedule
        if state.scheduler is not None:
            known = {k: v for k, v in known.items() if k not in SCHEDULED}
        plain = {k: v for k, v in known.items() if isinstance(v, int | float | str | tuple)}
        found.append(f"{type(optimizer).__name__}({plain})")
    return found


def check_agreement(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise and say what differs, unless one run can go on from the other."""
    differing = [name for name in now if before.get(name) != now[name]]
    if differing:
        listed = "; ".join(
            f"{name} {before.get(name)} there, {now[name]} here" for name in differing
        )
        raise ValueError(f"this is not the run that was begun: {listed}.")


def copied(value: Any, device: torch.device) -> Any:
    """Copies of all tensors, on this device but for the bytes of generators."""
    match value:
        case Tensor():
            place = torch.device("cpu") if value.dtype == torch.uint8 else device
            return value.detach().to(place, copy=True)
        case dict():
            return {name: copied(inner, device) for name, inner in value.items()}
        case list() | tuple():
            return [copied(inner, device) for inner in value]
    return value


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers, those too that ``state_dict`` leaves out."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        yield name, tensor.detach()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in named_tensors(model)}


def put_back(model: nn.Module, weights: dict[str, Tensor]) -> None:
    for name, tensor in named_tensors(model):
        tensor.copy_(weights[name])


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
