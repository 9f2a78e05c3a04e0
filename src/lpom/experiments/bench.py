"""What a training step costs beside back-propagation's: time and memory.

Machines are noisy, so a time alone means nothing: the methods take turns in one process, step by
step, and what is reported is their ratio. Memory is counted in the tensors that a
step makes, at the moment when most of them are alive.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lpom import losses, methods
from lpom.experiments.memory import LiveTensors
from lpom.methods import Batch, Method, Problem
from lpom.networks.mlp import mlp


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
    contenders: Sequence[str | Method[Any]] = ("lpom",),
    baseline: str | Method[Any] = "adam",
    batch_size: int = 100,
    rounds: int = 20,
    warmup: int = 3,
    seed: int = 0,
    device: str = "cpu",
) -> list[StepCost]:
    """Time one step of each method on the same random batch, taking turns; baseline first."""
    runners = [
        _Runner(methods.get(method), sizes, batch_size, seed, device)
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
        self, method: Method[Any], sizes: Sequence[int], batch_size: int, seed: int, device: str
    ) -> None:
        self.method, self.device = method, torch.device(device)
        model = mlp(sizes, seed=seed).to(device)
        self.problem = Problem.of(model, losses.get("cross-entropy"))
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.rand(batch_size, sizes[0], generator=generator)
        labels = torch.randint(sizes[-1], (batch_size,), generator=generator)
        target = self.problem.loss.encode(labels, sizes[-1], sizes[-1])
        self.batch = Batch(inputs.to(device), target.to(device))
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
