"""Networks whose layers follow one another."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from lpom import activations
from lpom.activations import Activation
from lpom.checks import check_choice, check_number
from lpom.networks.layers import Layers, gain
from lpom.networks.mlp import mlp as perceptron

SIDE = 32  # of the pictures that LeNet-5 and VGG5 were made for
POOLINGS: dict[str, type[nn.MaxPool2d] | type[nn.AvgPool2d]] = {
    "max": nn.MaxPool2d,
    "avg": nn.AvgPool2d,
}


def mlp(
    input_shape: Sequence[int],
    n_outputs: int,
    seed: int,
    *,
    hidden: Sequence[int] = (300, 100),
    activation: str | Activation | nn.Module = "relu",
    norm: bool = False,
    dropout: Sequence[float] = (0.0, 0.0),
) -> nn.Module:
    """Fully connected layers, 300-100 unless `hidden` says otherwise.

    With `norm` batch norm stands under every activation; `dropout` are shares of the inputs and of
    the hidden states that are left out.
    """
    of_inputs, of_states = dropout
    sizes = [math.prod(input_shape), *hidden, n_outputs]
    plain = iter(perceptron(sizes, activations.get(activation), seed=seed))
    modules: list[nn.Module] = [nn.Flatten(), *[nn.Dropout(of_inputs)] * (of_inputs > 0)]
    for width in hidden:
        modules += [next(plain), *[nn.BatchNorm1d(width)] * norm, next(plain)]
        modules += [nn.Dropout(of_states)] * (of_states > 0)
    return nn.Sequential(*modules, *plain)


def lenet5(
    input_shape: Sequence[int],
    n_outputs: int,
    seed: int,
    *,
    pool: str = "max",
    activation: str | Activation | nn.Module = "relu",
    channels: Sequence[int] = (6, 16),
    hidden: Sequence[int] = (120, 84),
    norm: bool = False,
) -> nn.Module:
    """LeNet-5: 5x5 convolutions of 6 and 16 channels, pooled, then layers of 120 and 84.

    As in LeCun et al. (1998) but for the full second convolution, the pooling without weights and
    the output, which is linear. Pictures smaller than 32x32 are padded to that with zeros. With
    `norm` batch norm stands under every activation.
    """
    check_choice("pool", pool, tuple(POOLINGS))
    n_inputs, *sides = input_shape
    phi = activations.get(activation)
    layers, scale = Layers(seed), gain(phi)
    left = [((max(side, SIDE) - 4) // 2 - 4) // 2 for side in sides]  # after both poolings
    modules: list[nn.Module] = []
    for padding, width in zip((_missing(sides), (0, 0)), channels, strict=True):
        modules += [layers.convolution(n_inputs, width, 5, padding=padding, gain=scale)]
        modules += [*[nn.BatchNorm2d(width)] * norm, phi.to_module(), POOLINGS[pool](2)]
        n_inputs = width
    modules += [nn.Flatten()]
    n_inputs *= math.prod(left)
    for width in hidden:
        modules += [layers.linear(n_inputs, width, gain=scale)]
        modules += [*[nn.BatchNorm1d(width)] * norm, phi.to_module()]
        n_inputs = width
    return nn.Sequential(*modules, layers.linear(n_inputs, n_outputs))


def vgg5(input_shape: Sequence[int], n_outputs: int, seed: int, *, width: float = 1.0) -> nn.Module:
    """VGG5: four 3x3 convolutions of 128, 256, 512 and 512 channels, each pooled; `width` scales.

    As in the literature on CIFAR-10 without back-propagation (equilibrium propagation, predictive
    coding): ReLU, no normalisation, maxima over 2x2 after every convolution, and no padding in the
    last one, so that one position is left of a 32x32 picture. Smaller ones are padded to that.
    """
    check_number("width", width)
    n_channels, *sides = input_shape
    layers = Layers(seed)
    (down, across), modules = _missing(sides), []
    for k, channels in enumerate((128, 256, 512, 512)):
        padding = [(1 + down, 1 + across), (1, 1), (1, 1), (0, 0)][k]
        n_inputs, n_channels = n_channels, max(round(width * channels), 1)
        convolution = layers.convolution(n_inputs, n_channels, 3, padding=padding)
        modules += [convolution, nn.ReLU(), nn.MaxPool2d(2)]
    left = [(max(side, SIDE) // 8 - 2) // 2 for side in sides]
    classifier = layers.linear(n_channels * math.prod(left), n_outputs)
    return nn.Sequential(*modules, nn.Flatten(), classifier)


def _missing(sides: Sequence[int]) -> tuple[int, int]:
    """Zeros to add at each end of the rows and columns, so that there are 32."""
    down, across = (math.ceil(max(SIDE - side, 0) / 2) for side in sides)
    return down, across
