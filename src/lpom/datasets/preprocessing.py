"""What the experiments do to the data before training, step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lpom.datasets.base import Array, require


def scale_bytes(images: Array) -> Array:
    """Bytes 0 to 255 as float32 in [0, 1]."""
    if images.dtype != np.uint8:
        raise TypeError(f"scale_bytes takes bytes (uint8), got {images.dtype}.")
    scaled = images.astype(np.float32)
    scaled /= 255
    return scaled


def subtract_channel_means(train: Array, test: Array) -> Array:
    """Subtract, in place, from each colour its mean over the training images.

    The test images are shifted by the means of the training images as well: nothing is learnt
    from them.

    Parameters
    ----------
    train, test : (n, rows, columns, channels) float32
        Changed in place: a copy of CIFAR-10 would take another 600 MB.

    Returns
    -------
    means : (channels,) float32
    """
    for part, images in (("train", train), ("test", test)):
        if images.ndim != 4 or images.dtype.kind != "f":
            raise ValueError(
                f"{part} should be floating-point images of shape (n, rows, columns, channels), "
                f"got {images.dtype} of shape {images.shape}."
            )
    # Per pixel first, in float64: fast, and float32 would lose digits over 50,000 images.
    means: Array = train.mean(axis=0, dtype=np.float64).mean(axis=(0, 1)).astype(np.float32)
    mean_image = np.broadcast_to(means, train.shape[1:]).copy()  # subtracts faster than (channels,)
    train -= mean_image
    test -= mean_image
    return means


def select_digits(images: Array, labels: Array, digits: Sequence[int]) -> tuple[Array, Array]:
    """Only the images of `digits`, in their order; ``digits[k]`` becomes class k."""
    classes = np.full(labels.shape, -1, dtype=np.int64)
    for k, digit in enumerate(digits):
        classes[labels == digit] = k
    chosen = classes >= 0
    return images[chosen], classes[chosen]


def hog_features(images: Array, orientations: int = 18, cell: int = 8, block: int = 2) -> Array:
    """Histograms of oriented gradients of the grey images, as float32.

    A 32x32 image has 4x4 cells and so 3x3 overlapping blocks: with the default 18 orientations
    that gives 3 * 3 * 2 * 2 * 18 = 648 features, the number in Taylor et al. (2016).

    Parameters
    ----------
    images : (n, rows, columns, 3) uint8
    orientations : int
        Directions that are told apart.
    cell : int
        Side of a cell, in pixels.
    block : int
        Side of a block, in cells; each block is normalised (L2-Hys).
    """
    if images.ndim != 4 or images.shape[3] != 3:
        raise ValueError(f"images should have shape (n, rows, columns, 3), got {images.shape}.")
    purpose = "Computing HOG features"
    hog = require("skimage.feature", purpose, "'lpom[data]' (scikit-image)").hog
    grey = require("skimage.color", purpose, "'lpom[data]' (scikit-image)").rgb2gray

    blocks = [max(side // cell - block + 1, 0) for side in images.shape[1:3]]
    features = np.empty((len(images), *blocks, block, block, orientations), dtype=np.float32)
    for k, image in enumerate(images):
        features[k] = hog(
            grey(image),
            orientations=orientations,
            pixels_per_cell=(cell, cell),
            cells_per_block=(block, block),
            feature_vector=False,
        )
    return features.reshape(len(images), math.prod(features.shape[1:]))
