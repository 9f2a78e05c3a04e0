"""A Sequential cut into consecutive pieces of about equal work."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lpom.modes import evaluating


def modules_of(model: nn.Module) -> list[nn.Module]:
    """The modules that a Sequential, and Sequentials within it, call one after the other."""
    if type(model) is nn.Sequential and not (model._forward_hooks or model._forward_pre_hooks):
        return [inner for module in model for inner in modules_of(module)]
    return [model]


def pieces(model: nn.Module, example: Tensor, n: int) -> list[nn.Sequential]:
    """The model in n pieces that share its modules; the largest has as little work as can be.

    A piece begins with a module that has weights, and weights that stand in several modules stay
    in one piece. ``example`` are some rows of data.
    """
    modules = modules_of(model)
    if n == 1:
        return [nn.Sequential(*modules)]
    if not isinstance(model, nn.Sequential):
        raise ValueError(
            f"layers={n} gives consecutive modules of an nn.Sequential to different ranks, and the "
            f"model is a {type(model).__name__}. Write it as nn.Sequential(first, second, ...) of "
            "its parts, or take layers=1 and data= as many ranks as you like."
        )
    starts = [0, *_starts(modules)]
    work = _work(modules, example)
    if len(starts) < n:
        raise ValueError(
            f"layers={n} needs a network that can be cut into {n} pieces with weights, and this "
            f"one can be cut into {len(starts)}. Take layers={len(starts)} or fewer."
        )
    ends = [*starts[1:], len(modules)]
    sums = [sum(work[start:end]) for start, end in zip(starts, ends, strict=True)]
    cuts = [starts[i] for i in _evenly(sums, n)]
    return [
        nn.Sequential(*modules[start:end])
        for start, end in zip(cuts, [*cuts[1:], len(modules)], strict=True)
    ]


def _starts(modules: list[nn.Module]) -> Iterator[int]:
    """The places beside the first where a piece may begin."""
    names = [{id(p) for p in module.parameters()} for module in modules]
    for place in range(1, len(modules)):
        below = set().union(*names[:place])
        above = set().union(*names[place:])
        if below and names[place] and not below & above:
            yield place


@torch.no_grad()
def _work(modules: list[nn.Module], example: Tensor) -> list[float]:
    """Products of each module in a step: forward, back to its inputs, and for its weights."""
    work: list[float] = []
    X = example
    for module in modules:
        with evaluating(module), FlopCounterMode(display=False) as counted:
            X = module(X)
        if not isinstance(X, Tensor):
            raise ValueError(
                "layers on several ranks send one tensor to each other, and a "
                f"{type(module).__name__} gives {type(X).__name__}. Write a module that takes its "
                "one output, or take layers=1."
            )
        flops = counted.get_total_flops()
        # the first needs no way back to the data
        work.append(flops * (3 if any(work) else 2))
    return work


def _evenly(sums: list[float], n: int) -> list[int]:
    """Where each of n runs of the sums begins, such that the largest run is as small as can be."""
    count = len(sums)
    best = {(0, 0): (0.0, [0])}  # by runs and places that they take: the largest run, the starts
    for runs in range(1, n + 1):
        for end in range(runs, count - (n - runs) + 1):
            options = [
                (max(best[runs - 1, start][0], sum(sums[start:end])), start)
                for start in range(runs - 1, end)
                if (runs - 1, start) in best
            ]
            largest, start = min(options)
            best[runs, end] = (largest, [*best[runs - 1, start][1], end])
    return best[n, count][1][:-1]
