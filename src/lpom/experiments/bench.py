"""What a training step costs beside back-propagation's: time and memory.

Machines are noisy, so a time alone means nothing: the methods take turns in one process, step by
step, and what is reported is their ratio. Memory is counted in the tensors that a
step makes, at the moment when most of them are alive.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lpom import losses, methods, networks
from lpom.experiments.lifted import LiftedLoop
from lpom.experiments.memory import LiveTensors
from lpom.methods import Batch, Method, Problem
from lpom.networks.mlp import mlp
from lpom.training.signature import Signature


@dataclass(frozen=True)
class StepCost:
    """Median seconds and peak extra bytes of one step, and their ratios to the baseline's.

    The ratio of times is the median over rounds of the two steps' ratio in that round.
    """

    method: str
    seconds: float
    bytes: int
    time_ratio: float
    memory_ratio: float


def bench_step(
    sizes: Sequence[int] = (784, 2048, 2048, 2048, 10),
    *,
    network: str = "",
    input_shape: Sequence[int] = (3, 32, 32),
    options: Mapping[str, Any] | None = None,
    contenders: Sequence[str | Method[Any]] = ("lpom",),
    baseline: str | Method[Any] = "adam",
    batch_size: int = 100,
    rounds: int = 20,
    warmup: int = 3,
    seed: int = 0,
    device: str = "cpu",
) -> list[StepCost]:
    """Time one step of each method on the same random batch, taking turns; baseline first.

    On a fully connected network of these ``sizes``, or on a known ``network`` with ``options`` for
    samples of ``input_shape``.
    """
    if network:
        shape = tuple(input_shape)
        model = networks.get(network, shape, 10, seed, **(options or {}))
    else:
        shape = (sizes[0],)
        model = mlp(sizes, seed=seed)
    runners = [
        _Runner(
            LiftedLoop() if method == "lift" else methods.get(method),
            model,
            shape,
            batch_size,
            seed,
            device,
        )
        for method in (baseline, *contenders)
    ]
    for _ in range(warmup):
        for runner in runners:
            runner.step()
    times: list[list[float]] = [[] for _ in runners]
    for _ in range(rounds):
        for runner, kept in zip(runners, times, strict=True):
            kept.append(runner.seconds())
    memory = [runner.peak_bytes() for runner in runners]
    return [
        StepCost(
            runner.method.name,
            statistics.median(kept),
            extra,
            statistics.median(a / b for a, b in zip(kept, times[0], strict=True)),
            extra / memory[0],
        )
        for runner, kept, extra in zip(runners, times, memory, strict=True)
    ]


class _Runner:
    """One method on its own copy of the same network."""

    def __init__(
        self,
        method: Method[Any],
        model: nn.Module,
        shape: Sequence[int],
        batch_size: int,
        seed: int,
        device: str,
    ) -> None:
        self.method, self.device = method, torch.device(device)
        model = copy.deepcopy(model).to(device).train()
        generator = torch.Generator().manual_seed(seed)
        rows = torch.rand(batch_size, *shape, generator=generator)
        takes = Signature.of(model, rows)
        self.problem = Problem(takes.graph, losses.get("cross-entropy"), model)
        labels = torch.randint(takes.n_outputs, (batch_size,), generator=generator)
        target = self.problem.loss.encode(labels, takes.n_outputs, takes.n_outputs)
        self.batch = Batch(takes.inputs(rows), target.to(device))
        self.state = method.init(self.problem)

    def step(self) -> None:
        self.method.step(self.problem, self.batch, self.state)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self) -> float:
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start

    def peak_bytes(self) -> int:
        """Most bytes of tensors made by a step alive at once, gradients from before freed."""
        for parameter in self.problem.graph.parameters:
            parameter.grad = None
        live = LiveTensors()
        with live:
            self.step()
        return live.peak
