"""Sequences of several lengths: padded, with what is not there left out of the loss."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import lpom

LENGTHS = (6, 2, 4, 5)
METHOD = lpom.LPOM(mu=20.0, weights={"adaptive": {"optimizer": "sgd", "learning_rate": 0.5}})


class Tagger(nn.Module):
    """A class at every step."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.read, self.say = kind(3, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.say(self.read(x)[0])


class AtTheEnd(nn.Module):
    """One class for a sequence; the last column of its inputs is one where it ends, else zero."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.read, self.say = kind(3, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        states = self.read(x[..., :3])[0]
        return self.say((states * x[..., 3:]).sum(1))


@pytest.fixture
def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in LENGTHS]


def moved(model: nn.Module, *data: object) -> list[Tensor]:
    """How far one step of gradient descent, with all rows in it, takes each weight."""
    trained = copy.deepcopy(model)
    lpom.fit(trained, *data, method=METHOD, epochs=1, seed=0, progress=False)
    pairs = zip(trained.parameters(), model.parameters(), strict=True)
    return [(a - b).detach() for a, b in pairs]


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("padding", [0.0, 7.0])
def test_steps_that_are_not_there_move_nothing(sequences, kind, padding):
    """A step on the padded batch is the mean of steps on each sequence by itself, by its length."""
    torch.manual_seed(0)
    model = Tagger(kind).double()
    generator = torch.Generator().manual_seed(1)
    tags = [torch.randint(0, 4, (n,), generator=generator) for n in LENGTHS]
    X = pad_sequence(sequences, batch_first=True, padding_value=padding)
    y = pad_sequence(tags, batch_first=True, padding_value=-100)
    alone = [moved(model, x[None], t[None]) for x, t in zip(sequences, tags, strict=True)]
    for k, together in enumerate(moved(model, X, y)):
        expected = sum(n * each[k] for n, each in zip(LENGTHS, alone, strict=True)) / sum(LENGTHS)
        torch.testing.assert_close(together, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_a_prediction_where_each_sequence_ends(sequences, kind):
    torch.manual_seed(0)
    model = AtTheEnd(kind).double()
    y = torch.tensor([0, 3, 1, 2])
    marked = [
        torch.cat([x, torch.eye(len(x), dtype=x.dtype)[:, -1:]], 1)  # one where it ends
        for x in sequences
    ]
    X = pad_sequence(marked, batch_first=True)
    alone = [moved(model, x[None], y[k : k + 1]) for k, x in enumerate(marked)]
    for k, together in enumerate(moved(model, X, y)):
        expected = sum(each[k] for each in alone) / len(alone)
        torch.testing.assert_close(together, expected, rtol=1e-9, atol=1e-12)
