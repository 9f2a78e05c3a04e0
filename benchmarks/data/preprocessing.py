"""What the experiments do to the data before training, step by step."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from data.base import Array, Dataset
from lpom.checks import check_number

#: Bytes of red, green and blue to brightness in [0, 1] (ITU-R BT.709).
GREY = np.array([0.2125, 0.7154, 0.0721], dtype=np.float32) / 255


def whitened(data: Dataset, least: float = 0.1) -> Dataset:
    r"""The same data without correlations between its features: zero-phase whitening.

    With the mean :math:`m` and covariance :math:`U \Lambda U^T` of the training part

    .. math:: x \mapsto U (\Lambda + \lambda)^{-1/2} U^T (x - m),

    divided by what is then the standard deviation of all training values. Plain networks learn
    photographs sooner and better from it. The map of pixels is local, so that pictures stay
    pictures: flipped and shifted ones can be had from whitened ones. It is affine, so that the
    first weights of a network can take it in.

    Parameters
    ----------
    data : Dataset
        With features of one size; `Dataset.pictures` has a variance of 1 in each colour.
    least : float
        :math:`\lambda`, added to each variance, so that directions that vary less, mostly noise,
        are not blown up to the size of the others.
    """
    check_number("least", least)
    train, test = (torch.from_numpy(x.reshape(len(x), -1)) for x in (data.x_train, data.x_test))
    mean = train.mean(0, dtype=torch.float64).to(train)
    centred = train - mean
    # some rows at a time: float32 has few digits for a sum over all
    parts = [(part.T @ part).double() for part in torch.split(centred, 5000)]
    variances, directions = torch.linalg.eigh(torch.stack(parts).sum(0) / len(train))
    matrix = ((directions * (variances.clamp(min=0) + least).rsqrt()) @ directions.T).to(train)
    white, others = centred @ matrix, (test - mean) @ matrix
    size = white.std(correction=0)
    return replace(
        data,
        x_train=white.div_(size).numpy().reshape(data.x_train.shape),
        x_test=others.div_(size).numpy().reshape(data.x_test.shape),
        notes=f"{data.notes} Whitened by the covariance of the training part, {least:g} added to "
        "each variance.",
    )


def hog_features(
    images: Array,
    orientations: int = 18,
    cell: int = 8,
    block: int = 2,
    *,
    signed: bool = True,
    interpolate: bool = True,
) -> Array:
    """Histograms of oriented gradients (Dalal and Triggs, 2005) of the grey images, as float32.

    Every pixel votes with the length of its gradient for the gradient's direction. A 32x32 image
    has 4x4 cells and so 3x3 overlapping blocks: with the default 18 directions that gives
    3 * 3 * 2 * 2 * 18 = 648 features, the number in Taylor et al. (2016).

    Parameters
    ----------
    images : (n, rows, columns, 3) uint8
    orientations : int
        Directions that are told apart.
    cell : int
        Side of a cell, in pixels.
    block : int
        Side of a block, in cells; each block is normalised (L2-Hys).
    signed : bool
        Directions go all around. Otherwise opposite ones count as the same.
    interpolate : bool
        A vote is shared by the nearest two directions and the nearest four cells, so that a
        small turn or shift changes little. Otherwise it goes to one bin of one cell.
    """
    if images.ndim != 4 or images.shape[3] != 3:
        raise ValueError(f"images should have shape (n, rows, columns, 3), got {images.shape}.")
    if min(images.shape[1:3]) < block * cell:
        raise ValueError(
            f"a block takes {block * cell} x {block * cell} pixels, the images have only "
            f"{images.shape[1]} x {images.shape[2]}: take smaller cells."
        )
    pool = [_pooling(side, cell, interpolate) for side in images.shape[1:3]]
    cells = np.empty((len(images), orientations, *(len(p) for p in pool)), dtype=np.float32)
    for start in range(0, len(images), 256):  # the votes of all at once would take gigabytes
        part = slice(start, start + 256)
        votes = _votes(images[part] @ GREY, orientations, signed, interpolate)
        cells[part] = pool[0] @ votes @ pool[1].T
    window = np.lib.stride_tricks.sliding_window_view(cells, (block, block), axis=(2, 3))
    blocks = window.transpose(0, 2, 3, 4, 5, 1)  # (n, down, across, block, block, orientations)
    blocks = blocks.reshape(*blocks.shape[:3], block * block * orientations)
    blocks = _normalised(np.minimum(_normalised(blocks), 0.2))
    return blocks.reshape(len(images), math.prod(blocks.shape[1:]))


def _votes(grey: Array, orientations: int, signed: bool, interpolate: bool) -> Array:
    """(n, orientations, rows, columns): what each pixel gives to each direction."""
    down, across = np.zeros_like(grey), np.zeros_like(grey)
    down[:, 1:-1] = grey[:, 2:] - grey[:, :-2]
    across[:, :, 1:-1] = grey[:, :, 2:] - grey[:, :, :-2]
    turn = 2 * np.pi if signed else np.pi
    place = np.arctan2(down, across) % turn * (orientations / turn)  # bin k is k to k + 1
    if interpolate:
        place -= 0.5  # between the middles of the bins
    low = np.floor(place).astype(np.int64)
    share = place - low if interpolate else np.zeros_like(grey)
    length = np.hypot(down, across)
    votes = np.zeros((len(grey), orientations, *grey.shape[1:]), dtype=np.float32)
    for k, vote in ((low + 1, length * share), (low, length * (1 - share))):
        np.put_along_axis(votes, k[:, None] % orientations, vote[:, None], axis=1)
    return votes


def _pooling(side: int, cell: int, interpolate: bool) -> Array:
    """(cells, side): the weight of each pixel in each cell along one side of the image."""
    middles = cell * (np.arange(side // cell) + 0.5)
    distance = np.abs(np.arange(side) + 0.5 - middles[:, None]) / cell
    weights = np.maximum(1 - distance, 0) if interpolate else (distance < 0.5)
    return (weights / cell).astype(np.float32)


def _normalised(blocks: Array) -> Array:
    lengths: Array = np.sqrt((blocks**2).sum(axis=-1, keepdims=True) + 1e-10)
    return blocks / lengths
