"""Layers whose weights are drawn from one generator, never from torch's global one."""

from __future__ import annotations

import math

import torch
from torch import nn

from lpom.activations import Activation

RELU_GAIN = math.sqrt(2.0)  # He et al. (2015): ReLU keeps half of the second moment


def gain(activation: Activation) -> float:
    r"""What weights are scaled by, so that a signal keeps its size through the activation.

    .. math:: E\big[(\phi(z) - \phi(0))^2\big]^{-1/2}, \qquad z \sim N(0, 1)

    This is He's factor for ReLU and leaky ReLU, and near one over the slope at 0 for a smooth
    activation, whatever its value there; where it jumps at 0, the middle of the jump counts. The
    mean is a sum over a fine grid.
    """
    z = torch.linspace(-8.0, 8.0, 4001, dtype=torch.float64)
    density = torch.exp(-(z**2) / 2)
    middle = activation.phi(torch.tensor([-1e-9, 1e-9], dtype=torch.float64)).mean()
    moved = activation.phi(z) - middle
    return float((density.sum() / (density * moved**2).sum()).sqrt())


class Layers:
    """Makes layers with normal weights of standard deviation ``gain / sqrt(fan in)``, biases zero.

    The order in which layers are made is the order in which their weights are drawn from `seed`.
    """

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def convolution(
        self,
        n_inputs: int,
        n_outputs: int,
        size: int,
        *,
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
        bias: bool = True,
        gain: float = RELU_GAIN,
    ) -> nn.Conv2d:
        layer: nn.Conv2d = nn.utils.skip_init(  # type: ignore[no-untyped-call]
            nn.Conv2d, n_inputs, n_outputs, size, stride=stride, padding=padding, bias=bias
        )
        self._draw(layer, n_inputs * size**2, gain)
        return layer

    def linear(self, n_inputs: int, n_outputs: int, *, gain: float = 1.0) -> nn.Linear:
        layer: nn.Linear = nn.utils.skip_init(  # type: ignore[no-untyped-call]
            nn.Linear, n_inputs, n_outputs
        )
        self._draw(layer, n_inputs, gain)
        return layer

    def recurrent(
        self, kind: type[nn.RNN] | type[nn.LSTM], n_inputs: int, width: int
    ) -> nn.RNN | nn.LSTM:
        """One layer over (m, steps, n_inputs), its recurrent matrices orthogonal."""
        layer = kind(n_inputs, width, batch_first=True, device="meta").to_empty(device="cpu")
        for name, parameter in layer.named_parameters():
            if name.startswith("bias"):
                nn.init.zeros_(parameter)
            elif name.startswith("weight_ih"):
                nn.init.normal_(parameter, std=1 / math.sqrt(n_inputs), generator=self.generator)
            else:
                for square in torch.split(parameter.detach(), width):
                    nn.init.orthogonal_(square, generator=self.generator)
        return layer

    def table(self, n_rows: int, width: int) -> nn.Parameter:
        """Normal numbers of which a row has the size of a hidden state."""
        return nn.Parameter(torch.randn(n_rows, width, generator=self.generator) / math.sqrt(2))

    def _draw(self, layer: nn.Conv2d | nn.Linear, fan_in: int, gain: float) -> None:
        nn.init.normal_(layer.weight, std=gain / math.sqrt(fan_in), generator=self.generator)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
