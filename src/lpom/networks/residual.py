"""Networks with skip connections: each layer or block adds to what it was given."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from lpom.networks.layers import Layers

CHANNELS = (16, 32, 64)  # each stage halves rows and columns of the one before


def resnet8(input_shape: Sequence[int], n_outputs: int, seed: int) -> nn.Module:
    """ResNet-8 with batch norm: one block at each of 16, 32 and 64 channels (MLPerf Tiny)."""
    return ResNet(input_shape[0], n_outputs, 1, Layers(seed))


def resnet20(input_shape: Sequence[int], n_outputs: int, seed: int) -> nn.Module:
    """ResNet-20 with batch norm: three blocks at each of 16, 32 and 64 channels."""
    return ResNet(input_shape[0], n_outputs, 3, Layers(seed))


def residual20(input_shape: Sequence[int], n_outputs: int, seed: int) -> nn.Module:
    """20 residual convolution layers of 16, 32 and 64 channels without any normalisation."""
    return Residual(input_shape[0], n_outputs, 20, Layers(seed))


class ResNet(nn.Module):
    """The residual networks of He et al. (2016) for small pictures, with `n_blocks` a stage."""

    def __init__(self, n_inputs: int, n_outputs: int, n_blocks: int, layers: Layers) -> None:
        super().__init__()
        self.stem = layers.convolution(n_inputs, CHANNELS[0], 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(CHANNELS[0])
        self.blocks = nn.Sequential()
        n_channels = CHANNELS[0]
        for channels in CHANNELS:
            for _ in range(n_blocks):
                self.blocks.append(NormedBlock(n_channels, channels, layers))
                n_channels = channels
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = layers.linear(n_channels, n_outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        logits: Tensor = self.classifier(self.pool(x).flatten(1))
        return logits


class NormedBlock(nn.Module):
    """``relu(shortcut(x) + norm(conv(relu(norm(conv(x))))))``.

    Where the channels change, the shortcut is a normed 1x1 convolution and both halve the rows and
    columns; elsewhere it is the identity.
    """

    def __init__(self, n_inputs: int, n_outputs: int, layers: Layers) -> None:
        super().__init__()
        stride = 1 if n_inputs == n_outputs else 2
        self.conv1 = layers.convolution(
            n_inputs, n_outputs, 3, stride=stride, padding=1, bias=False
        )
        self.norm1 = nn.BatchNorm2d(n_outputs)
        self.conv2 = layers.convolution(n_outputs, n_outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(n_outputs)
        self.shortcut: nn.Module = nn.Identity()
        if n_inputs != n_outputs:
            resized = layers.convolution(n_inputs, n_outputs, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(resized, nn.BatchNorm2d(n_outputs))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.shortcut(x) + self.norm2(self.conv2(inner)))


class Residual(nn.Module):
    """A convolution, `n_layers` residual ones in three stages, and the mean over all positions.

    The first convolution and the first layers of the later stages halve rows and columns.
    """

    def __init__(self, n_inputs: int, n_outputs: int, n_layers: int, layers: Layers) -> None:
        super().__init__()
        self.stem = layers.convolution(n_inputs, CHANNELS[0], 3, stride=2, padding=1)
        self.layers = nn.Sequential()
        n_channels = CHANNELS[0]
        for k in range(n_layers):
            channels = CHANNELS[k * len(CHANNELS) // n_layers]
            self.layers.append(ResidualLayer(n_channels, channels, n_layers, layers))
            n_channels = channels
        self.classifier = layers.linear(n_channels, n_outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(F.relu(self.stem(x)))
        logits: Tensor = self.classifier(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


class ResidualLayer(nn.Module):
    r"""``relu(shortcut(x) + conv(x) / sqrt(n_layers))``.

    The sum of `n_layers` such branches is as large as what it is added to, and stays so while
    their weights move: this stands in for the missing normalisation. The shortcut is the identity,
    or a 1x1 convolution where the channels change.
    """

    def __init__(self, n_inputs: int, n_outputs: int, n_layers: int, layers: Layers) -> None:
        super().__init__()
        stride = 1 if n_inputs == n_outputs else 2
        self.scale = 1 / math.sqrt(n_layers)
        self.conv = layers.convolution(n_inputs, n_outputs, 3, stride=stride, padding=1, gain=1.0)
        self.shortcut: nn.Module = nn.Identity()
        if n_inputs != n_outputs:
            self.shortcut = layers.convolution(n_inputs, n_outputs, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.scale * self.conv(x))
