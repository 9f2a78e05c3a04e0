"""Small networks of plain torch modules, with weights and data from seeded numpy generators.

Every module has a layer called ``first``: settings name it. Maximum pooling stands only
above what is affine or below an activation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpom import activations

ROWS = 6


@dataclass(frozen=True)
class Network:
    """A way to make a module, the shape of one row of its inputs, and what it predicts.

    ``loss`` is "cross-entropy" over ``n_outputs`` classes or "squared". With ``n_words`` the inputs
    are whole numbers below it.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    n_outputs: int
    loss: str = "cross-entropy"
    n_words: int = 0
    recurrent: bool = False


@dataclass(frozen=True)
class Example:
    """A network's data: labels are classes or numbers, and ``target`` is as the loss codes them."""

    inputs: Tensor
    labels: Tensor
    target: Tensor
    weight: Tensor


def chain(*layers: nn.Module) -> nn.Sequential:
    names = ["first", *(f"layer{i}" for i in range(1, len(layers)))]
    return nn.Sequential(OrderedDict(zip(names, layers, strict=True)))


def jump(name: str) -> nn.Module:
    """The one thing that torch has no module for."""
    return activations.get(name).to_module()


class Pictures(nn.Module):
    """Batch norm, a skip, maximum and mean pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.pool = nn.MaxPool2d(2)
        self.inner = nn.Conv2d(4, 4, 3, padding=1)
        self.inner_norm = nn.BatchNorm2d(4)
        self.outer = nn.Conv2d(4, 4, 1)
        self.classify = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.pool(self.norm(self.first(x))))
        inner = torch.relu(self.inner_norm(self.inner(x)))
        x = torch.relu(x + self.outer(inner))
        return self.classify(x.mean((2, 3)))


class PoolBelow(nn.Module):
    """The maximum of affine values, pooled below the activation and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 3, 3)
        self.second = nn.Conv2d(3, 3, 2)
        self.classify = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(F.max_pool2d(self.first(x), 2))
        x = F.leaky_relu(F.max_pool2d(self.second(x), 2), 0.1)
        return self.classify(x.flatten(1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], layers: int = 1) -> None:
        super().__init__()
        self.first = kind(3, 4, num_layers=layers, batch_first=True)
        self.classify = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.first(x)[0][:, -1])


class Attention(nn.Module):
    """A block with RMSNorm, two heads of softmax attention and a ReLU, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 6)
        self.norm = nn.RMSNorm(6)
        self.queries, self.keys, self.values = (nn.Linear(6, 6) for _ in range(3))
        self.out = nn.Linear(6, 6)
        self.second_norm = nn.LayerNorm(6)
        self.widen, self.narrow = nn.Linear(6, 8), nn.Linear(8, 6)
        self.classify = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.attend(self.norm(x))
        x = x + self.narrow(torch.relu(self.widen(self.second_norm(x))))
        return self.classify(x.mean(1))

    def attend(self, x: Tensor) -> Tensor:
        Q, K, V = (
            torch.unflatten(layer(x), 2, (2, 3)).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        )
        weights = torch.softmax(Q @ K.mT / 3**0.5, -1)
        return self.out((weights @ V).transpose(1, 2).flatten(2))


class TorchAttention(nn.Module):
    """``nn.MultiheadAttention`` on a sequence of tanh states."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.predict = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = x + self.attend(x, x, x, need_weights=False)[0]
        return self.predict(x.mean(1))


class Tied(nn.Module):
    """One matrix on the way in and, transposed, on the way out; another is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.again = nn.Linear(4, 4)
        self.bias = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.again(torch.tanh(self.again(x))))
        return F.linear(x, self.first.weight.T, self.bias)


class Product(nn.Module):
    """A gate: each factor comes from a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.value, self.gate = nn.Linear(6, 5), nn.Linear(6, 5)
        self.predict = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return self.predict(torch.tanh(self.value(x)) * torch.sigmoid(self.gate(x)))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(7, 4)
        self.widen = nn.Linear(4, 6)
        self.classify = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(torch.relu(self.widen(self.first(x).mean(1))))


class Sampling(nn.Module):
    """Grouped, dilated and transposed convolutions, and a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2)
        self.middle = nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=4)
        self.up = nn.ConvTranspose2d(4, 3, 2, stride=2, groups=1)
        self.predict = nn.Conv2d(5, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.elu(self.middle(torch.sigmoid(self.first(x))))
        x = torch.cat([x, F.softplus(self.up(inner))], 1)
        return self.predict(x).flatten(1)


NETWORKS = {
    "relu": Network(
        lambda: chain(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)),
        (5,),
        3,
    ),
    "tanh": Network(
        lambda: chain(
            nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)
        ),
        (4,),
        2,
        "squared",
    ),
    "sigmoid": Network(
        lambda: chain(nn.Linear(4, 6), nn.Sigmoid(), nn.Linear(6, 2), nn.Sigmoid()),
        (4,),
        2,
        "squared",
    ),
    "softmax": Network(
        lambda: chain(
            nn.Linear(4, 5), nn.Softmax(-1), nn.Linear(5, 5), nn.ReLU6(), nn.Linear(5, 3)
        ),
        (4,),
        3,
    ),
    "step": Network(
        lambda: chain(
            nn.Linear(5, 8), jump("step"), nn.Linear(8, 6), jump("step"), nn.Linear(6, 3)
        ),
        (5,),
        3,
    ),
    "sign": Network(
        lambda: chain(nn.Linear(5, 8), jump("sign"), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2)),
        (5,),
        2,
        "squared",
    ),
    "pictures": Network(Pictures, (2, 4, 4), 3),
    "pooled": Network(PoolBelow, (1, 8, 8), 3),
    "sampling": Network(Sampling, (2, 4, 4), 16, "squared"),
    "rnn": Network(lambda: Recurrent(nn.RNN, 2), (4, 3), 3, recurrent=True),
    "lstm": Network(lambda: Recurrent(nn.LSTM), (4, 3), 3, recurrent=True),
    "gru": Network(lambda: Recurrent(nn.GRU), (4, 3), 3, recurrent=True),
    "attention": Network(Attention, (4, 3), 3),
    "torch-attention": Network(TorchAttention, (4, 3), 2, "squared"),
    "tied": Network(Tied, (5,), 5, "squared"),
    "product": Network(Product, (4,), 2, "squared"),
    "words": Network(Words, (5,), 3, n_words=7),
}


def model(name: str) -> nn.Module:
    """The network in float64, every weight drawn here and not by torch."""
    made = NETWORKS[name].make().double()
    for key, parameter in made.named_parameters():
        fan_in = parameter[0].numel() if parameter.ndim > 1 else 4
        drawn = _generator(name, key).normal(size=tuple(parameter.shape)) / fan_in**0.5
        offset = 1.0 if "norm" in key and key.endswith("weight") else 0.0
        parameter.data.copy_(torch.from_numpy(0.3 * drawn + 1 if offset else drawn))
    return made.train()


def example(name: str) -> Example:
    """Six rows for a network, with weights of which one is zero."""
    network, generator = NETWORKS[name], _generator(name, "data")
    if network.n_words:
        inputs = torch.from_numpy(generator.integers(network.n_words, size=(ROWS, *network.shape)))
    else:
        inputs = torch.from_numpy(generator.normal(size=(ROWS, *network.shape)))
    if network.loss == "squared":
        labels = target = torch.from_numpy(generator.uniform(0.1, 0.9, (ROWS, network.n_outputs)))
    else:
        labels = torch.arange(ROWS) % network.n_outputs
        target = F.one_hot(labels, network.n_outputs).double()
    weight = torch.from_numpy(generator.uniform(0.2, 2.0, ROWS))
    weight[1] = 0.0
    return Example(inputs, labels, target, weight)


def _generator(*names: str) -> np.random.Generator:
    return np.random.default_rng(list("/".join(names).encode()))
