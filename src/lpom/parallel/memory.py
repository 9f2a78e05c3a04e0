"""An optimiser whose weights are on several ranks: each moves its own, and remembers of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

Memory = dict[str, Any]  # of one weight
Rows = Mapping[nn.Parameter, Sequence[nn.Parameter]]  # of a weight, the views that are its rows


def take_own(optimizer: torch.optim.Optimizer, own: set[nn.Parameter], rows: Rows) -> None:
    """Move these weights alone, rows in the place of those they are of; forget all others."""
    memory = optimizer.state
    for weight, views in rows.items():
        known, begin = memory.get(weight), 0
        for view in views:
            end = begin + len(view)
            if view in own:
                _swap(optimizer, weight, view)
                if known:
                    memory[view] = {
                        name: value[begin:end].clone() if _has_rows(value) else value
                        for name, value in known.items()
                    }
            begin = end
    for forgotten in [weight for weight in memory if weight not in own]:
        del memory[forgotten]


def give_back(optimizer: torch.optim.Optimizer, rows: Rows, known: Mapping[str, Memory]) -> None:
    """Move the whole weights again; ``known`` is all that is remembered, by their places."""
    places = {
        p: str(i) for i, p in enumerate(chain(*(g["params"] for g in optimizer.param_groups)))
    }
    for weight, views in rows.items():
        for view in views:
            if view in places:
                _swap(optimizer, view, weight)
                optimizer.state.pop(view, None)
                if places[view] in known:
                    optimizer.state[weight] = known[places[view]]


def joined(found: Sequence[Mapping[str, Memory]]) -> dict[str, Memory]:
    """All that is remembered, by the places of the weights, from what each rank remembers.

    Of weights that several of them have, the ranks have one row after the other.
    """
    parts: dict[str, list[Memory]] = {}
    for of_rank in found:
        for place, memory in of_rank.items():
            parts.setdefault(place, []).append(memory)
    return {
        place: {
            name: torch.cat([part[name] for part in parts[place]]) if _has_rows(value) else value
            for name, value in parts[place][0].items()
        }
        for place in sorted(parts, key=int)
    }


def _swap(optimizer: torch.optim.Optimizer, old: nn.Parameter, new: nn.Parameter) -> None:
    for group in optimizer.param_groups:
        group["params"] = [new if p is old else p for p in group["params"]]


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0
