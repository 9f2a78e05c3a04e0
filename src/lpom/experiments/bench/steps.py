"""A training step beside back-propagation's: time, memory, what its products take, how it grows."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from lpom import losses, methods, networks
from lpom.experiments.bench.contest import Row, contest, counted
from lpom.experiments.bench.lifted import LiftedLoop
from lpom.experiments.memory import LiveTensors
from lpom.methods import LPOM, Batch, Method, Problem
from lpom.states import Sweeps
from lpom.weights.exact import Exact
from lpom.networks.mlp import mlp
from lpom.training.compiling import Step, compiled
from lpom.training.interface import Interface
from lpom.training.precision import Bfloat16

#: Ways to make a step, by the name they have in a table.
CONTESTANTS: dict[str, Method[Any] | str] = {
    "lpom": "lpom",
    "lpom, 3 sweeps": LPOM(states=Sweeps(max_sweeps=3)),
    "lpom, exact": LPOM(weights=Exact()),
    "lift": LiftedLoop(),
}
COMPILED = ", compiled"  # after a method's name: steps go through torch's compiler
ROUNDED = ", bf16"  # the same: its products are made in bfloat16


@dataclass(frozen=True)
class Net:
    """A network and the shape of its samples."""

    name: str
    model: nn.Module
    shape: tuple[int, ...]

    @classmethod
    def of_sizes(cls, sizes: Sequence[int], seed: int = 0) -> Net:
        return cls("-".join(map(str, sizes)), mlp(sizes, seed=seed), tuple(sizes[:1]))

    @classmethod
    def known(
        cls, network: str, shape: Sequence[int], options: Mapping[str, Any], seed: int = 0
    ) -> Net:
        return cls(network, networks.get(network, tuple(shape), 10, seed, **options), tuple(shape))


class Runner:
    """One method on its own copy of a network, with one random batch."""

    def __init__(self, method: str | Method[Any], net: Net, batch_size: int, seed: int = 0) -> None:
        name = method if isinstance(method, str) else ""
        if COMPILED in name and ROUNDED in name:
            raise ValueError(f"{name!r}: steps are compiled or in bfloat16, not both.")
        self.rounded = name.endswith(ROUNDED)
        if isinstance(method, str):
            method = method.removesuffix(ROUNDED).removesuffix(COMPILED)
            method = CONTESTANTS.get(method, method)
        self.method = methods.get(method)
        model = copy.deepcopy(net.model).train()
        generator = torch.Generator().manual_seed(seed)
        rows = torch.rand(batch_size, *net.shape, generator=generator)
        takes = Interface.of(model, rows)
        if takes.indices:  # an embedding's, of as many characters as there are outputs
            rows = (rows * takes.n_outputs).floor()
        loss = losses.get("cross-entropy")
        self.problem = Problem(model, loss, takes.example)
        said = (batch_size, takes.n_steps) if takes.n_steps else (batch_size,)
        labels = torch.randint(takes.n_outputs, said, generator=generator)
        target = loss.encode(labels.flatten(), takes.n_outputs, takes.n_outputs)
        counts = torch.full((batch_size,), float(takes.n_steps)) if takes.n_steps else None
        self.batch = Batch(takes.inputs(rows), target.reshape(*said, -1), counts=counts)
        self.state = self.method.init(self.problem)
        self._step: Step = lambda batch: self.method.step(self.problem, batch, self.state)
        if COMPILED in name:
            shape = self.batch.inputs.shape
            self._step = compiled(self._step, self.method, self.problem, self.state, shape)

    def step(self) -> None:
        with Bfloat16() if self.rounded else nullcontext():
            self._step(self.batch)

    def peak_bytes(self) -> int:
        """Most bytes of tensors made by a step alive at once, gradients from before freed."""
        for parameter in self.problem.graph.parameters:
            parameter.grad = None
        live = LiveTensors()
        with live:
            self.step()
        return live.peak


def step(
    net: Net,
    contestants: Sequence[str] = ("lpom",),
    *,
    baseline: str = "adam",
    batch_size: int = 100,
    rounds: int = 20,
) -> list[Row]:
    """Time one step of each method on the same batch; the baseline is the reference."""
    runners = {name: Runner(name, net, batch_size) for name in (baseline, *contestants)}
    turns = {name: runner.step for name, runner in runners.items()}
    return contest(f"{net.name}, batch {batch_size}", turns, rounds=rounds, warmup=3)


def memory(
    net: Net,
    contestants: Sequence[str] = ("lpom",),
    *,
    baseline: str = "adam",
    batch_size: int = 100,
) -> list[Row]:
    """Peak bytes of the tensors that a step makes, when it has been made before."""
    _check_seen(contestants)
    peaks = {}
    for name in (baseline, *contestants):
        runner = Runner(name, net, batch_size)
        runner.step()
        peaks[name] = runner.peak_bytes() / 2**20
    return counted(f"{net.name}, batch {batch_size}", peaks, "MiB")


def limit(
    net: Net, contestants: Sequence[str] = ("lpom",), *, batch_size: int = 100, rounds: int = 20
) -> list[Row]:
    """A step beside its own matrix products and convolutions, done again with nothing between."""
    _check_seen(contestants)
    rows = []
    for name in contestants:
        runner = Runner(name, net, batch_size)
        runner.step()
        seen = Products()
        with seen:
            runner.step()
        case = f"{net.name}, batch {batch_size}, {name}"
        turns = {"its products": seen.again, "step": runner.step}
        rows += contest(case, turns, rounds=rounds, warmup=3)
    return rows


def _check_seen(contestants: Sequence[str]) -> None:
    hidden = [name for name in contestants if COMPILED in name]
    if hidden:
        raise ValueError(
            f"what {hidden[0]!r} makes within a step is not seen from outside: the compiler takes "
            "memory and calls products by itself. Time it with `lpom bench step`."
        )


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes down every product and convolution that is made, with what it was given."""

    KINDS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "convolution", "convolution_backward")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self.KINDS:
            given = tree_map(_copied, (args, kwargs or {}))
            self.calls.append((func, *given))
        return func(*args, **(kwargs or {}))

    @torch.no_grad()
    def again(self) -> None:
        for func, args, kwargs in self.calls:
            func(*args, **kwargs)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def scaling(
    contestants: Sequence[str] = ("adam", "lpom"), *, rounds: int = 10, largest: int = 1024
) -> list[Row]:
    """How a step grows with batch, width, depth and length: times, and exponents of the size.

    Exponents are slopes of least squares in logarithms over the larger half of the sizes.
    """
    rows = []
    for what, nets in _growing(largest).items():
        times: dict[str, list[tuple[int, float]]] = {name: [] for name in contestants}
        for size, net, batch_size in nets:
            found = step(
                net, contestants[1:], baseline=contestants[0], batch_size=batch_size, rounds=rounds
            )
            for row in found:
                times[row.contestant].append((size, row.amount or math.nan))
                rows.append(replace(row, case=f"{what} {size}"))
        for name, points in times.items():
            rows.append(Row(what, name, exponent(points[len(points) // 2 - 1 :]), "exponent"))
    return rows


def _growing(largest: int) -> dict[str, Iterator[tuple[int, Net, int]]]:
    """Networks that grow in one size each, as (size, network, rows of a batch)."""
    sizes = [largest >> k for k in (5, 4, 3, 2, 1, 0) if largest >> k >= 1]
    middle = max(2, largest // 4)
    return {
        "batch": ((n, Net.of_sizes((middle, middle, middle, 10)), n) for n in sizes),
        "width": ((n, Net.of_sizes((n, n, n, 10)), 100) for n in sizes),
        "depth": (
            (n, Net.of_sizes((middle, *[middle] * n, 10)), 100)
            for n in sizes
            if n <= max(2, largest // 16)
        ),
        "length": (
            (n, Net.known("rnn", (1, n, 28), {}), 100) for n in sizes if n <= max(2, largest // 8)
        ),
    }


def exponent(points: Sequence[tuple[int, float]]) -> float:
    """The slope of the logarithms of amounts over those of sizes."""
    x, y = zip(*[(math.log(size), math.log(amount)) for size, amount in points], strict=True)
    return statistics.linear_regression(x, y).slope if len(x) > 1 else math.nan
