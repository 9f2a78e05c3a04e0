"""Random numbers of a run: seeded at its start, written down with it, left alone by measuring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch
from torch import Tensor


def as_seed(seed: Any) -> int:
    """The seed, or without one a number drawn from torch's global generator."""
    if seed is None:
        return int(torch.randint(2**62, ()))
    if not isinstance(seed, Integral) or not 0 <= int(seed) < 2**63:
        raise ValueError(f"seed must be an integer from 0 to 2**63 - 1, or None; got {seed!r}.")
    return int(seed)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generators; they go on afterwards as if nothing had been drawn."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"):
        if devices:
            torch.manual_seed(seed)
        else:  # which would note the stack for devices that come later
            torch.default_generator.manual_seed(seed)
        yield


class Generators:
    """Torch's global generators and those that the order of the batches is drawn from.

    ``start`` are their states when this was made: at the start of the run, before any batch.
    """

    def __init__(self, device: torch.device, own: Sequence[torch.Generator]) -> None:
        self.own = list(own)
        self.module = None if device.type == "cpu" else torch.get_device_module(device)
        self.device = device
        self.start = self.states()

    def states(self) -> list[Tensor]:
        found = [torch.get_rng_state()]
        if self.module is not None:
            found.append(self.module.get_rng_state(self.device))
        return found + [generator.get_state() for generator in self.own]

    def restore(self, states: Sequence[Tensor]) -> None:
        rest = [state.cpu() for state in states]
        torch.set_rng_state(rest.pop(0))
        if self.module is not None:
            self.module.set_rng_state(rest.pop(0), self.device)
        for generator, state in zip(self.own, rest, strict=True):
            generator.set_state(state)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Whatever is drawn inside, it goes on afterwards as before."""
        states = self.states()
        try:
            yield
        finally:
            self.restore(states)
