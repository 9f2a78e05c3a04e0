"""A small character model on any text: what ``lpom train text.txt`` runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lpom import networks
from lpom.checks import check_number
from lpom.methods import Method
from lpom.training import Epoch, Result, fit
from lpom.training.measuring import evaluating

HELD_OUT = 0.1  # of the text, from its end


@dataclass(frozen=True)
class Text:
    """A text as indices into the sorted characters that occur in it."""

    characters: str
    indices: Tensor = field(repr=False)

    @classmethod
    def read(cls, path: str | Path) -> Text:
        return cls.of(Path(path).read_text(encoding="utf-8"))

    @classmethod
    def of(cls, text: str) -> Text:
        characters = "".join(sorted(set(text)))
        if len(characters) < 2:
            raise ValueError(
                "a text to learn from needs two different characters or more, got "
                f"{characters!r}; check the file."
            )
        places = {character: k for k, character in enumerate(characters)}
        return cls(characters, torch.tensor([places[character] for character in text]))

    def string(self, indices: Tensor) -> str:
        return "".join(self.characters[int(k)] for k in indices)


class Pieces(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text, each with the characters that come next; ``stride`` apart."""

    def __init__(self, indices: Tensor, length: int, stride: int) -> None:
        self.indices, self.length, self.stride = indices, length, stride

    def __len__(self) -> int:
        return (len(self.indices) - self.length - 1) // self.stride + 1

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        piece = self.indices[k * self.stride : k * self.stride + self.length + 1]
        return piece[:-1], piece[1:]


@dataclass(frozen=True)
class TextModel:
    """A trained character model, with the bits it needs for a character of the held-out text."""

    model: nn.Module = field(repr=False)
    text: Text
    length: int
    result: Result = field(repr=False)

    @property
    def bits(self) -> float:
        loss = self.result.history[-1].validation_loss
        assert loss is not None  # there is always a held-out end
        return loss / math.log(2)

    def sample(self, n: int = 200, start: str = "", *, seed: int = 0) -> str:
        """``n`` characters drawn one after the other, each from what the model expects next."""
        known = [self.text.characters.index(c) for c in start if c in self.text.characters]
        return self.text.string(
            draw(self.model, known or [int(self.text.indices[0])], n, self.length, seed)
        )


def train_text(
    path: str | Path,
    *,
    network: str = "char-transformer",
    method: str | Method[Any] = "lpom",
    epochs: int = 1,
    length: int = 128,
    batch_size: int = 32,
    seed: int = 0,
    options: dict[str, Any] | None = None,
    callbacks: Callable[[Epoch], bool | None] | tuple[()] = (),
    progress: bool | None = None,
) -> TextModel:
    """Train a model that predicts each next character of a text file.

    Parameters
    ----------
    path : a text file in UTF-8
    network : a network over (length,) indices with an output per character and step
    epochs : passes over the first 90 % of the text; the rest is held out
    length : characters that the model sees at once
    options : of the network, e.g. ``{"blocks": 2}``

    Returns
    -------
    TextModel
        Its ``bits`` are per held-out character, and ``sample`` draws a new text.
    """
    check_number("length", length, whole=True)
    text = Text.read(path)
    cut = int(len(text.indices) * (1 - HELD_OUT))
    if len(text.indices) - cut <= length + 1:
        raise ValueError(
            f"{path} has {len(text.indices)} characters, too few to hold out a piece of {length}; "
            f"give a text of {math.ceil((length + 2) / HELD_OUT)} or more, or a smaller length."
        )
    train = Pieces(text.indices[:cut], length, length)
    held_out = Pieces(text.indices[cut:], length, length)
    model = networks.get(network, (length,), len(text.characters), seed, **(options or {}))
    order = torch.Generator().manual_seed(seed)
    result = fit(
        model,
        DataLoader(train, batch_size=min(batch_size, len(train)), shuffle=True, generator=order),
        method=method,
        epochs=epochs,
        seed=seed,
        validation_data=DataLoader(held_out, batch_size=256),
        callbacks=callbacks,
        progress=progress,
    )
    return TextModel(model, text, length, result)


@torch.no_grad()
def draw(model: nn.Module, start: list[int], n: int, length: int, seed: int) -> Tensor:
    """``n`` indices after ``start``, each drawn from the softmax of the outputs at the last step.

    The model sees the last ``length`` of them; a shorter beginning is filled up behind its end,
    where a causal model does not look.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    drawn = list(start)
    with evaluating(model):
        for _ in range(n):
            seen = drawn[-length:]
            window = torch.tensor(seen + [0] * (length - len(seen)), device=device)
            expected = torch.softmax(model(window[None])[0, len(seen) - 1].double(), 0)
            drawn.append(int(torch.multinomial(expected.cpu(), 1, generator=generator)))
    return torch.tensor(drawn[len(start) :])
