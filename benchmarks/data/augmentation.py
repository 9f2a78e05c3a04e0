"""Pictures flipped, shifted, turned, stretched, bent and made noisy whenever they are drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from lpom.checks import check_number

Batch = tuple[Tensor, Tensor]
#: Points of each side of a picture that are moved by themselves where it is bent.
_KNOTS = 5


def augmented_loader(
    X: Any,
    y: Any,
    batch_size: int,
    *,
    flip: bool = True,
    crop: int = 4,
    turn: float = 0.0,
    stretch: float = 0.0,
    bend: float = 0.0,
    noise: float = 0.0,
    seed: int = 0,
    generator: torch.Generator | None = None,
) -> DataLoader[Batch]:
    """A data loader of shuffled batches, every picture changed in a way of its own.

    The order of the rows and all changes are drawn from ``loader.generator`` and from nothing
    else, one epoch after the other: its state at the beginning of an epoch decides all of it, and
    seeding it anew starts again from the first. Digits want ``flip=False, crop=2, turn=10,
    stretch=0.1, bend=1``.

    Parameters
    ----------
    X : (n, channels, rows, columns)
    y : (n, ...)
    batch_size : rows of a batch; the last one has what is left
    flip : whether a picture is mirrored, left to right, in one case of two
    crop : pixels of zeros put around a picture before one of its size is cut out somewhere
    turn : most degrees by which a picture is turned, either way
    stretch : most by which each of its sides grows or shrinks, e.g. 0.1 for a tenth
    bend : pixels by which its parts are moved against each other, smoothly: the standard deviation
        of how far each of 5 x 5 points goes, down and across
    noise : standard deviation of what is added to every pixel
    seed : where a generator that is not given starts from
    generator : draws everything; on the CPU
    """
    X, y = torch.as_tensor(X), torch.as_tensor(y)
    if X.ndim != 4 or len(X) == 0 or len(X) != len(y):
        raise ValueError(
            "augmented_loader takes pictures X of shape (n, channels, rows, columns), n at least "
            f"1, and n targets, got X of shape {tuple(X.shape)} and y of shape {tuple(y.shape)}. "
            "A data set with flat pictures has them as .pictures()."
        )
    check_number("batch_size", batch_size, whole=True)
    check_number("crop", crop, strict=False, whole=True)
    check_number("turn", turn, strict=False)
    check_number("bend", bend, strict=False)
    check_number("noise", noise, strict=False)
    if not 0 <= stretch < 1:
        raise ValueError(f"stretch must be a share from 0 to below 1, got {stretch!r}.")
    if generator is None:
        generator = torch.Generator().manual_seed(seed)
    return DataLoader(
        _Augmented(X, y, generator, flip, crop, math.radians(turn), stretch, bend, noise),
        batch_size,
        shuffle=True,
        generator=generator,
        collate_fn=as_it_is,
    )


class _Augmented(TorchDataset[Batch]):
    """Rows by number, drawn anew each time; a loader asks for a whole batch at once."""

    def __init__(
        self,
        X: Tensor,
        y: Tensor,
        generator: torch.Generator,
        flip: bool,
        crop: int,
        turn: float,
        stretch: float,
        bend: float,
        noise: float,
    ) -> None:
        self.X, self.y, self.generator = X, y, generator
        self.flip, self.crop, self.turn = flip, crop, turn
        self.stretch, self.bend, self.noise = stretch, bend, noise

    def __len__(self) -> int:
        return len(self.X)

    def __getitem__(self, row: int) -> Batch:
        pictures, targets = self.__getitems__([row])
        return pictures[0], targets[0]

    def __getitems__(self, rows: Sequence[int]) -> Batch:
        chosen = torch.tensor(rows, device=self.X.device)
        pictures = self.X[chosen]
        if self.flip:
            pictures = self._flipped(pictures)
        if self.crop:
            pictures = self._cropped(pictures)
        if self.turn or self.stretch or self.bend:
            drawn = 2 * torch.rand(3, len(pictures), generator=self.generator) - 1
            angles, sides = self.turn * drawn[0], 1 + self.stretch * drawn[1:]
            pictures = turned(pictures, angles, sides, self._moves(pictures) if self.bend else None)
        if self.noise:
            drawn = torch.randn(pictures.shape, generator=self.generator)
            pictures = pictures + (self.noise * drawn).to(pictures)
        return pictures, self.y[chosen.to(self.y.device)]

    def _flipped(self, pictures: Tensor) -> Tensor:
        heads = torch.randint(2, (len(pictures), 1, 1, 1), generator=self.generator)
        return torch.where(heads.bool().to(pictures.device), pictures.flip(3), pictures)

    def _moves(self, pictures: Tensor) -> Tensor:
        knots = torch.randn(len(pictures), 2, _KNOTS, _KNOTS, generator=self.generator)
        size = list(pictures.shape[2:])
        return self.bend * F.interpolate(knots, size, mode="bicubic", align_corners=True)

    def _cropped(self, pictures: Tensor) -> Tensor:
        n, _, n_rows, n_columns = pictures.shape
        top, left = torch.randint(2 * self.crop + 1, (2, n), generator=self.generator)
        padded = F.pad(pictures, [self.crop] * 4)
        # a view of every crop: (n, channels, top, left, rows, columns)
        crops = padded.unfold(2, n_rows, 1).unfold(3, n_columns, 1)
        chosen: Tensor = crops[torch.arange(n), :, top, left]
        return chosen


def turned(pictures: Tensor, angles: Tensor, sides: Tensor, moves: Tensor | None = None) -> Tensor:
    """Each picture turned against the clock about its centre, its rows and columns made longer.

    Between pixels it is linear, and outside it is zero. ``angles`` (n,) are in radians, ``sides``
    (2, n) are factors of height and width. With ``moves`` (n, 2, rows, columns) a pixel comes from
    that many pixels further down and to the right.
    """
    n_rows, n_columns = pictures.shape[2:]
    cosine, sine, zero = angles.cos(), angles.sin(), torch.zeros_like(angles)
    # from where in the old picture, both sides of which go from -1 to 1, each pixel comes
    height, width = sides
    across = n_rows / n_columns
    x = torch.stack([cosine / width, -sine * across / width, zero], 1)
    y = torch.stack([sine / across / height, cosine / height, zero], 1)
    matrices = torch.stack([x, y], 1).to(pictures)
    places = F.affine_grid(matrices, list(pictures.shape), align_corners=False)
    if moves is not None:
        down, right = 2 * moves[:, 0] / n_rows, 2 * moves[:, 1] / n_columns
        places = places + torch.stack([right, down], 3).to(places)
    return F.grid_sample(pictures, places, align_corners=False)


def as_it_is(batch: Any) -> Any:
    """For loaders of data sets that give whole batches."""
    return batch
