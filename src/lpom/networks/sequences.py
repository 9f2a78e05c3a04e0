"""Networks over sequences: rows of a picture, from the top down, or characters of a text."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lpom import activations
from lpom.activations import Activation
from lpom.checks import check_number
from lpom.networks.layers import RELU_GAIN, Layers


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
        check_number("width", width, whole=True)
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
        self.embed = nn.Embedding.from_pretrained(  # type: ignore[no-untyped-call]
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
        if width % heads:
            raise ValueError(
                f"the width of a transformer must be a multiple of its heads, got width={width} "
                f"and heads={heads}."
            )
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
