"""Street view house numbers (SVHN): the digits 0 and 2, told apart by their HOG features.

Two layouts are read: the official ``train_32x32.mat``, ``test_32x32.mat`` (and
``extra_32x32.mat``), and NumPy files, ``NAME_images.npy`` with (n, 32, 32, 3) bytes beside
``NAME_labels.npy`` with the digits 0 to 9, either of them packed as ``.npy.xz`` too, where NAME
is ``train_digits_0_2`` or ``test``.
"""

from __future__ import annotations

import lzma
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lpom.datasets.base import Array, DataDir, Dataset
from lpom.datasets.download import Source, fetch, find
from lpom.datasets.preprocessing import hog_features, select_digits
from lpom.datasets.unpacking import check_claim
from lpom.exceptions import DataError

SIDE = 32
DIGITS = (0, 2)
NPY_NAMES = {"train": "train_digits_0_2", "test": "test"}

SVHN = Source(
    folder="svhn",
    base_url="http://ufldl.stanford.edu/housenumbers",
    hashes={
        "train_32x32.mat": "md5:e26dedcc434d2e4c54c9b2d4a06d8373",
        "test_32x32.mat": "md5:eb5a983be6a315427106f1b164d9cef3",
        "extra_32x32.mat": "md5:a93ce644f1a588dc4d68dda5feec44a7",
    },
)


def load_svhn_0_2(data_dir: DataDir = None, extra: bool = False, source: Source = SVHN) -> Dataset:
    """Digits 0 (class 0) and 2 (class 1) as 648 HOG features; 5,893 for testing.

    Parameters
    ----------
    data_dir : path, optional
        Holds the files, itself or in ``svhn/``.
    extra : bool
        Train on the "extra" digits (120,290, as in Taylor et al., 2016, and in the LPOM paper;
        1.3 GB to download) and not on the ordinary training digits (15,533).
    """
    arrays = {}
    for part, name in (("train", "extra" if extra else "train"), ("test", "test")):
        paths = _paths(name, data_dir, source)
        images, labels = select_digits(*read_part(paths), DIGITS)
        if missing := [digit for k, digit in enumerate(DIGITS) if not (labels == k).any()]:
            raise DataError(
                f"{paths[0]} should hold the digits 0 and 2, but has no {missing[0]}. Fetch it "
                "again."
            )
        arrays[f"x_{part}"] = hog_features(images)
        arrays[f"y_{part}"] = labels

    n_train = len(arrays["y_train"])
    if extra:
        notes = f'Trained on the {n_train:,} digits 0 and 2 of the "extra" set.'
    else:
        notes = (
            f"Trained on the {n_train:,} digits 0 and 2 of the ordinary training set, which "
            'stand in for the 120,290 of the "extra" set that the paper trained on.'
        )
    return Dataset(
        name="svhn-0-2-extra" if extra else "svhn-0-2",
        x_train=arrays["x_train"],
        y_train=arrays["y_train"],
        x_test=arrays["x_test"],
        y_test=arrays["y_test"],
        classes=tuple(str(digit) for digit in DIGITS),
        feature_names=tuple(f"hog_{k}" for k in range(arrays["x_train"].shape[1])),
        notes=f"{notes} HOG features of the grey images: 18 signed directions, cells of 8x8 "
        "pixels, blocks of 2x2 cells.",
    )


def read_part(paths: Sequence[Path]) -> tuple[Array, Array]:
    """Images (n, 32, 32, 3) uint8 and digits (n,) int64 of a .mat file, or of two .npy files."""
    if len(paths) == 1:
        images, labels = _read_mat(paths[0])
    else:
        images, labels = _read_npy(paths[0]), _read_npy(paths[1])
    where = " and ".join(str(path) for path in paths)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != (SIDE, SIDE, 3):
        raise DataError(
            f"{where} should hold colour images of {SIDE} x {SIDE} bytes, got an array of shape "
            f"{images.shape} and type {images.dtype}. Fetch it again."
        )
    if labels.shape != (len(images),):
        raise DataError(
            f"{where} should hold one label per image, got {len(images)} images and labels of "
            f"shape {labels.shape}. They do not belong together: fetch them again."
        )
    if len(labels) == 0 or labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() > 9:
        raise DataError(f"{where} should hold the digits 0 to 9 as labels. Fetch it again.")
    return images, labels.astype(np.int64)


def _paths(part: str, data_dir: DataDir, source: Source) -> tuple[Path, ...]:
    """The .mat file of a part, or its images and labels as .npy; downloaded if neither exists."""
    folders = [source.folder, ""]
    official = find([f"{part}_32x32.mat"], folders, data_dir)
    if official is None and part in NPY_NAMES:
        name = NPY_NAMES[part]
        images = find([f"{name}_images.npy.xz", f"{name}_images.npy"], folders, data_dir)
        labels = find([f"{name}_labels.npy", f"{name}_labels.npy.xz"], folders, data_dir)
        if images is not None and labels is not None:
            return images, labels
    return (official or fetch(source, f"{part}_32x32.mat"),)


def _read_mat(path: Path) -> tuple[Array, Array]:
    from scipy.io import loadmat, whosmat

    try:
        for _, shape, kind in whosmat(path):
            check_claim(path, math.prod(shape) * (1 if kind == "uint8" else 8))
        content = loadmat(path, variable_names=["X", "y"])
        images = np.ascontiguousarray(content["X"].transpose(3, 0, 1, 2))
        labels = content["y"].reshape(-1)
    except DataError:
        raise
    except Exception as error:  # a damaged file raises nearly anything
        raise DataError(
            f"{path} should be a MATLAB file with the images X and the labels y, but cannot be "
            f"read ({type(error).__name__}: {error}). It is damaged or was cut off: fetch it again."
        ) from error
    return images, np.where(labels == 10, 0, labels)  # the official files write 10 for 0


def _read_npy(path: Path) -> Array:
    try:
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
            first = np.lib.format.read_magic(file) == (1, 0)
            read = "read_array_header_1_0" if first else "read_array_header_2_0"
            shape, by_columns, dtype = getattr(np.lib.format, read)(file)
            size = math.prod(shape) * dtype.itemsize
            check_claim(path, size)
            content = file.read(size + 1)
        if dtype.hasobject:
            raise ValueError("it holds Python objects, no numbers")
        if len(content) != size:
            raise ValueError(f"{size} bytes of numbers should follow its header, and nothing else")
        array: Array = np.frombuffer(content, dtype).reshape(
            shape, order="F" if by_columns else "C"
        )
    except DataError:
        raise
    except Exception as error:  # a damaged header raises nearly anything
        raise DataError(
            f"{path} should be a NumPy array, but cannot be read ({error}). It is damaged or was "
            "cut off: fetch it again."
        ) from error
    return array
