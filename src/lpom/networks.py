"""Fully connected networks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lpom import activations
from lpom.activations import Activation, Identity


def mlp(
    sizes: Sequence[int],
    activation: str | Activation = "relu",
    output: str | Activation = "identity",
    *,
    bias: bool = True,
    seed: int | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Sequential:
    """A fully connected network with Glorot-uniform weights and zero biases.

    The weights are scaled by one over the Lipschitz constant of the activation above them (four
    for a sigmoid), so that a signal neither fades nor grows from layer to layer.

    Parameters
    ----------
    sizes : widths of all layers, inputs and outputs included, e.g. ``[784, 300, 10]``
    activation, output : activation of the hidden layers and of the last one
    bias : whether layers have biases
    seed : makes the weights the same every time

    >>> mlp([4, 8, 3], "tanh", seed=0)
    Sequential(
      (0): Linear(in_features=4, out_features=8, bias=True)
      (1): Tanh()
      (2): Linear(in_features=8, out_features=3, bias=True)
    )
    """
    if len(sizes) < 2 or any(int(size) != size or size < 1 for size in sizes):
        raise ValueError(
            "sizes needs the widths of at least inputs and outputs, each an integer of at "
            f"least 1, e.g. [784, 300, 10]; got {list(sizes)}."
        )
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    hidden, last = activations.get(activation), activations.get(output)
    modules: list[nn.Module] = []
    for i, (n_in, n_out) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
        # without torch's own start, which would draw from the global generator
        linear = nn.Linear(int(n_in), int(n_out), bias, "meta", dtype)
        for name, parameter in list(linear.named_parameters()):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype)
            setattr(linear, name, nn.Parameter(empty))
        act = last if i == len(sizes) - 2 else hidden
        gain = 1.0 if act.jumps else 1.0 / act.lipschitz
        nn.init.xavier_uniform_(linear.weight, gain=gain, generator=generator)
        if bias:
            nn.init.zeros_(linear.bias)
        modules += [linear] if act == Identity() else [linear, act.to_module()]
    return nn.Sequential(*modules)
