"""A small character model on any text: what ``lpom train text.txt`` runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lpom import networks, saving
from lpom.checks import check_number
from lpom.exceptions import DataError, ModelFileError
from lpom.methods import Method
from lpom.modes import evaluating
from lpom.training import Callback, Checkpoint, Result, fit

HELD_OUT = 0.1  # of the text, from its end


@dataclass(frozen=True)
class Text:
    """A text as indices into the sorted characters that occur in it."""

    characters: str
    indices: Tensor = field(repr=False)

    @classmethod
    def read(cls, path: str | Path) -> Text:
        try:
            return cls.of(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise DataError(f"there is no file {path}; expected a text to learn from.") from error
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path} is not a text in UTF-8 (byte {error.start}); save it as UTF-8, or give "
                "another file."
            ) from error

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
    """A trained character model, with the bits it needs for a character of the held-out text.

    Beside these ``baseline`` is what the frequencies of the characters alone would need.
    """

    model: nn.Module = field(repr=False)
    characters: str
    length: int
    bits: float
    baseline: float
    network: str = "char-transformer"
    options: Mapping[str, Any] = field(default_factory=dict)
    result: Result | None = field(default=None, repr=False)

    def sample(self, n: int = 200, start: str = "", *, seed: int = 0) -> str:
        """``n`` characters drawn one after the other, each from what the model expects next."""
        known = [self.characters.index(c) for c in start if c in self.characters]
        first = max(self.characters.find("\n"), 0)
        drawn = draw(self.model, known or [first], n, self.length, seed)
        return "".join(self.characters[int(k)] for k in drawn)

    def save(self, path: str | Path) -> None:
        """Write all of it to one file but the history."""
        kept = {name: getattr(self, name) for name in _KEPT}
        saving.save({"weights": self.model.state_dict(), "text": kept}, path)

    @classmethod
    def load(cls, path: str | Path) -> TextModel:
        """What :meth:`save` wrote."""
        saved = saving.load(path)
        try:
            kept = saved["text"]
            shape, n = (kept["length"],), len(kept["characters"])
            model = networks.get(kept["network"], shape, n, 0, **kept["options"])
            model.load_state_dict(saved["weights"])
            return cls(model.eval(), **kept)
        except (KeyError, TypeError) as error:
            raise ModelFileError(f"{path} holds no model of a text ({error!r}).") from error


_KEPT = ("characters", "length", "bits", "baseline", "network", "options")


def train_text(
    text: str | Path | Text,
    *,
    network: str = "char-transformer",
    method: str | Method[Any] = "lpom",
    epochs: int = 1,
    length: int = 128,
    batch_size: int = 32,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    device: str | torch.device | None = None,
    callbacks: Callback | Iterable[Callback] = (),
    progress: bool | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
) -> TextModel:
    """Train a model that predicts each next character of a text.

    Parameters
    ----------
    text : a text file in UTF-8, or what `Text.read` made of one
    network : a network over (length,) indices with an output per character and step
    epochs : passes over the first 90 % of the text; the rest is held out
    length : characters that the model sees at once
    options : of the network, e.g. ``{"blocks": 2}``
    device, callbacks, progress, checkpoint : as `lpom.fit` has them

    Returns
    -------
    TextModel
        Its ``bits`` are per held-out character, and ``sample`` draws a new text.
    """
    check_number("length", length, whole=True)
    text = text if isinstance(text, Text) else Text.read(text)
    cut = int(len(text.indices) * (1 - HELD_OUT))
    if len(text.indices) - cut <= length + 1:
        raise ValueError(
            f"the text has {len(text.indices)} characters, too few to hold out a piece of "
            f"{length}; give one of {math.ceil((length + 2) / HELD_OUT)} or more, or a smaller "
            "length."
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
        device=device,
        callbacks=callbacks,
        progress=progress,
        checkpoint=checkpoint,
    )
    losses = [epoch.validation_loss for epoch in result.history]
    bits = math.nan if not losses or losses[-1] is None else losses[-1] / math.log(2)
    baseline = by_frequency(text.indices[:cut], text.indices[cut:], len(text.characters))
    kept = (network, dict(options or {}))
    return TextModel(model, text.characters, length, bits, baseline, *kept, result=result)


def by_frequency(train: Tensor, held_out: Tensor, n_characters: int) -> float:
    """Bits per held-out character if each were expected as often as it is in the rest.

    Every character is counted once more than it occurs, so that none is impossible.
    """
    counts = torch.bincount(train, minlength=n_characters).double() + 1
    return float(-torch.log2(counts / counts.sum())[held_out].mean())


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
