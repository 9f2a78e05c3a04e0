"""A model's modes, training or evaluation, put back as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def keeping_modes(model: nn.Module) -> Iterator[None]:
    """Whatever is done to the modes inside, every submodule is back in its own afterwards."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """With ``model.eval()``; every submodule is put back into its mode afterwards."""
    with keeping_modes(model):
        model.eval()
        yield


def training(model: nn.Module) -> Callable[[], None]:
    """What puts a model into the mode of training.

    Submodules that are in evaluation now while the model itself is in training stay so: somebody
    has put them there, as batch norm whose statistics are to stay.
    """
    kept = [m for m in model.modules() if not m.training] if model.training else []

    def train() -> None:
        model.train()
        for module in kept:
            module.training = False

    return train
