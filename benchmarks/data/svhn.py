"""Street view house numbers (SVHN): the digits 0 and 2, told apart by their HOG features.

Two layouts are read: the official ``train_32x32.mat``, ``test_32x32.mat`` (and
``extra_32x32.mat``), and NumPy files, ``NAME_images.npy`` with (n, 32, 32, 3) bytes (or packed as
``.npy.xz``) beside ``NAME_labels.npy`` with the digits 0 to 9, where NAME is ``train_digits_0_2``
or ``test``.
"""

from __future__ import annotations

import lzma
from pathlib import Path

import numpy as np
from scipy.io import loadmat

from data.base import Array, Dataset
from data.files import Source, fetch, find
from data.preprocessing import hog_features
from lpom.exceptions import DataError

DIGITS = (0, 2)
NPY_NAMES = {"train": "train_digits_0_2", "test": "test"}

SOURCE = Source(
    folder="svhn",
    url="http://ufldl.stanford.edu/housenumbers",
    hashes={
        "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
        "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
        "extra_32x32.mat": "a93ce644f1a588dc4d68dda5feec44a7",
    },
)


def load_svhn(extra: bool = False) -> Dataset:
    """Digits 0 (class 0) and 2 (class 1) as 648 HOG features; 5,893 for testing.

    With ``extra`` it trains on the "extra" digits (120,290, as in the paper; 1.3 GB to download)
    and not on the ordinary training digits (15,533).
    """
    x_train, y_train = _features("extra" if extra else "train")
    x_test, y_test = _features("test")
    if extra:
        notes = f'Trained on the {len(y_train):,} digits 0 and 2 of the "extra" set.'
    else:
        notes = (
            f"Trained on the {len(y_train):,} digits 0 and 2 of the ordinary training set, which "
            'stand in for the 120,290 of the "extra" set that the paper trained on.'
        )
    notes += (
        " HOG features of the grey images: 18 signed directions, cells of 8x8 pixels, blocks of "
        "2x2 cells."
    )
    name = "svhn-0-2-extra" if extra else "svhn-0-2"
    return Dataset(name, x_train, y_train, x_test, y_test, len(DIGITS), notes=notes)


def _features(part: str) -> tuple[Array, Array]:
    """HOG features and classes of the two digits of a part."""
    images, labels = read_part(part)
    chosen = np.isin(labels, DIGITS)
    return hog_features(images[chosen]), (labels[chosen] == DIGITS[1]).astype(np.int64)


def read_part(part: str) -> tuple[Array, Array]:
    """Pictures (n, 32, 32, 3) and digits (n,) of "train", "test" or "extra"."""
    official = find(SOURCE, [f"{part}_32x32.mat"])
    name = NPY_NAMES.get(part, "")
    arrays = find(SOURCE, [f"{name}_images.npy.xz", f"{name}_images.npy"])
    named = find(SOURCE, [f"{name}_labels.npy"])
    where = f"the {part} files of SVHN"
    try:
        if official is None and arrays is not None and named is not None:
            where = f"{arrays} and {named}"
            images, labels = _read_npy(arrays), _read_npy(named)
        else:
            path = official or fetch(SOURCE, f"{part}_32x32.mat")
            where = str(path)
            content = loadmat(path, variable_names=["X", "y"])
            images, labels = content["X"].transpose(3, 0, 1, 2), content["y"].reshape(-1)
            labels = np.where(labels == 10, 0, labels)  # the official files write 10 for 0
    except DataError:
        raise
    except Exception as error:  # a damaged file raises nearly anything
        raise DataError(f"{where} cannot be read ({error}). Fetch it again.") from error
    if images.dtype != np.uint8 or images.shape != (len(labels), 32, 32, 3):
        raise DataError(
            f"{where} should hold colour pictures of 32 x 32 bytes and a label for each, got "
            f"{images.dtype} of shape {images.shape} and {len(labels)} labels. Fetch it again."
        )
    return np.ascontiguousarray(images), labels.astype(np.int64)


def _read_npy(path: Path) -> Array:
    with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
        array: Array = np.lib.format.read_array(file, allow_pickle=False)
    return array
