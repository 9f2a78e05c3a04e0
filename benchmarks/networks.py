"""Known networks by name: plain torch modules, their weights drawn from a seed.

>>> model = get("lenet5", (1, 28, 28), pool="avg")
>>> sum(parameter.numel() for parameter in model.parameters())
61706
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lpom
from lpom import activations
from lpom.activations import Activation


def get(
    name: str, input_shape: Sequence[int], n_outputs: int = 10, seed: int = 0, **options: Any
) -> nn.Module:
    """The network of this name, one of `NETWORKS`.

    Parameters
    ----------
    input_shape : (channels, rows, columns) of a picture; `mlp` takes any shape, `char-transformer`
        the length of a piece of text
    n_outputs : how many numbers it predicts: one per class
    seed : makes the weights the same every time; torch's global generator is left alone
    options : of this network, e.g. ``width=0.25`` for vgg5
    """
    if name not in NETWORKS:
        raise ValueError(f"unknown network {name!r}; there are {', '.join(NETWORKS)}.")
    return NETWORKS[name](input_shape, n_outputs, seed, **options)


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
        layer: nn.Conv2d = nn.utils.skip_init(
            nn.Conv2d, n_inputs, n_outputs, size, stride=stride, padding=padding, bias=bias
        )
        self._draw(layer, n_inputs * size**2, gain)
        return layer

    def linear(self, n_inputs: int, n_outputs: int, *, gain: float = 1.0) -> nn.Linear:
        layer: nn.Linear = nn.utils.skip_init(nn.Linear, n_inputs, n_outputs)
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
    plain = iter(lpom.mlp(sizes, activations.get(activation), seed=seed))
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


def rnn(input_shape: Sequence[int], n_outputs: int, seed: int, *, width: int = 128) -> nn.Module:
    """A tanh RNN of 128 units over the rows of a picture; `width` changes that."""
    return RowReader(nn.RNN, input_shape, n_outputs, width, Layers(seed))


def lstm(input_shape: Sequence[int], n_outputs: int, seed: int, *, width: int = 128) -> nn.Module:
    """An LSTM of 128 units over the rows of a picture; `width` changes that."""
    return RowReader(nn.LSTM, input_shape, n_outputs, width, Layers(seed))


def transformer(
    input_shape: Sequence[int],
    n_outputs: int,
    seed: int,
    *,
    width: int = 64,
    blocks: int = 2,
    heads: int = 4,
    attention: str | Activation = "softmax",
) -> nn.Module:
    """A transformer over the rows of a picture: 2 blocks of width 64, RMSNorm and ReLU.

    `attention` is what makes weights of the scores: ``"one_hot"`` attends to the largest alone.
    """
    return RowTransformer(
        input_shape, n_outputs, width, blocks, heads, activations.get(attention), Layers(seed)
    )


def char_transformer(
    input_shape: Sequence[int],
    n_outputs: int,
    seed: int,
    *,
    width: int = 128,
    blocks: int = 4,
    heads: int = 4,
) -> nn.Module:
    """A transformer that predicts each next character of a text: 4 blocks of width 128.

    The shape is that of a piece of the text, (length,), and there is an output per character.
    """
    (length,) = input_shape
    return CharTransformer(length, n_outputs, width, blocks, heads, Layers(seed))


class RowReader(nn.Module):
    """Recurrent layers over rows, and a prediction from what is left at the end."""

    def __init__(
        self,
        kind: type[nn.RNN] | type[nn.LSTM],
        input_shape: Sequence[int],
        n_outputs: int,
        width: int,
        layers: Layers,
    ) -> None:
        super().__init__()
        channels, _, columns = input_shape
        self.recurrent: nn.RNNBase = layers.recurrent(kind, channels * columns, width)
        # hidden states of an LSTM begin at a fifth of the size of those of a tanh layer
        gain = 5.0 if kind is nn.LSTM else 1.5
        self.classifier = layers.linear(width, n_outputs, gain=gain)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.recurrent(rows(x))
        logits: Tensor = self.classifier(states[:, -1])
        return logits


class RowTransformer(nn.Module):
    """Blocks over embedded rows, and a prediction from the mean of what they give."""

    def __init__(
        self,
        input_shape: Sequence[int],
        n_outputs: int,
        width: int,
        n_blocks: int,
        heads: int,
        attention: Activation,
        layers: Layers,
    ) -> None:
        super().__init__()
        channels, n_rows, columns = input_shape
        self.embed = layers.linear(channels * columns, width)
        self.places = layers.table(n_rows, width)
        self.blocks = nn.Sequential(
            *(Block(width, heads, n_blocks, attention, layers) for _ in range(n_blocks))
        )
        self.norm = nn.RMSNorm(width)
        self.classifier = layers.linear(width, n_outputs, gain=2.0)  # a mean is smaller

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.embed(rows(x)) + self.places)
        logits: Tensor = self.classifier(self.norm(x).mean(1))
        return logits


class CharTransformer(nn.Module):
    """Blocks over embedded characters, each of which sees itself and those before it."""

    def __init__(
        self, length: int, n_characters: int, width: int, n_blocks: int, heads: int, layers: Layers
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(
            layers.table(n_characters, width).detach(), freeze=False
        )
        self.places = layers.table(length, width)
        softmax = activations.get("softmax")
        self.blocks = nn.Sequential(
            *(Block(width, heads, n_blocks, softmax, layers, length) for _ in range(n_blocks))
        )
        self.norm = nn.RMSNorm(width)
        self.predict = layers.linear(width, n_characters, gain=0.5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.predict(self.norm(self.blocks(self.embed(x) + self.places)))
        return logits


class Block(nn.Module):
    r"""``x + attend(norm(x))``, then ``x + linear(relu(linear(norm(x))))``.

    What the `n_blocks` blocks add is as large as what it is added to at the start.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        n_blocks: int,
        attention: Activation,
        layers: Layers,
        causal_length: int = 0,
    ) -> None:
        super().__init__()
        share = 1 / math.sqrt(2 * n_blocks)
        self.first_norm = nn.RMSNorm(width)
        self.attend = Attention(width, heads, share, attention, layers, causal_length)
        self.second_norm = nn.RMSNorm(width)
        self.widen = layers.linear(width, 2 * width, gain=RELU_GAIN)
        self.relu = nn.ReLU()
        self.narrow = layers.linear(2 * width, width, gain=share)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.first_norm(x))
        added: Tensor = self.narrow(self.relu(self.widen(self.second_norm(x))))
        return x + added


class Attention(nn.Module):
    """Each step takes a mean of all, with the weights that the activation makes of the scores.

    With a ``causal_length`` sequences have that length, and steps see themselves and what is
    before them.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        share: float,
        activation: Activation,
        layers: Layers,
        causal_length: int = 0,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.scale = 1 / math.sqrt(width // heads)
        self.queries, self.keys, self.values = (layers.linear(width, width) for _ in range(3))
        self.choose = activation.to_module()
        self.out = layers.linear(width, width, gain=share)
        self.after: Tensor | None
        after = torch.ones(causal_length, causal_length, dtype=torch.bool).triu(1)
        self.register_buffer("after", after if causal_length else None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        scores = self._split(self.queries(x) * self.scale) @ self._split(self.keys(x)).mT
        if self.after is not None:
            scores = scores.masked_fill(self.after, -math.inf)
        mixed = self.choose(scores) @ self._split(self.values(x))
        attended: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return attended

    def _split(self, x: Tensor) -> Tensor:
        """(m, steps, width) to (m, heads, steps, width / heads)."""
        return torch.unflatten(x, 2, (self.heads, -1)).transpose(1, 2)


def rows(pictures: Tensor) -> Tensor:
    """(m, channels, rows, columns) to (m, rows, channels x columns)."""
    return pictures.transpose(1, 2).flatten(2)


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "lenet5": lenet5,
    "vgg5": vgg5,
    "resnet8": resnet8,
    "resnet20": resnet20,
    "residual20": residual20,
    "rnn": rnn,
    "lstm": lstm,
    "transformer": transformer,
    "char-transformer": char_transformer,
}
