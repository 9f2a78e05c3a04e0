"""MNIST and Fashion-MNIST, from the four IDX files each is published as."""

from __future__ import annotations

import hashlib
import math
import struct
from pathlib import Path

import numpy as np

from lpom.datasets.base import Array, DataDir, Dataset, pixel_names
from lpom.datasets.download import Source, data_folder, fetch, find
from lpom.datasets.preprocessing import scale_bytes
from lpom.datasets.unpacking import gunzip
from lpom.exceptions import DataError

SIDE = 28
UNSIGNED_BYTE = 0x08  # IDX code of the element type

MNIST = Source(
    folder="mnist",
    base_url="https://ossci-datasets.s3.amazonaws.com/mnist",
    hashes={
        "train-images-idx3-ubyte.gz": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "md5:d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "md5:9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "md5:ec29112dd5afa0611ce80d1b7f02629c",
    },
)
FASHION_MNIST = Source(
    folder="fashion-mnist",
    base_url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    hashes={
        "train-images-idx3-ubyte.gz": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "md5:25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "md5:bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "md5:bb300cfdad3c16e7a12a480ee83cd310",
    },
)

DIGITS = tuple("0123456789")
CLOTHES = (
    "T-shirt/top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)


def load_mnist(data_dir: DataDir = None, source: Source = MNIST) -> Dataset:
    """Handwritten digits: 60,000 for training, 10,000 for testing, 28x28, values in [0, 1]."""
    return _load("mnist", DIGITS, data_dir, source, other=FASHION_MNIST)


def load_fashion_mnist(data_dir: DataDir = None, source: Source = FASHION_MNIST) -> Dataset:
    """Pictures of clothes, in the same number, size and format as MNIST."""
    return _load("fashion-mnist", CLOTHES, data_dir, source, other=MNIST)


def read_idx(path: Path, ndim: int) -> Array:
    """The bytes of an IDX file, as an array of `ndim` dimensions.

    The format is a four-byte magic number (two zeros, element type, number of dimensions), each
    dimension as a big-endian 32-bit number, then the elements, and nothing after them.
    """
    data = gunzip(path) if path.suffix == ".gz" else path.read_bytes()
    magic = UNSIGNED_BYTE << 8 | ndim
    header = 4 + 4 * ndim
    if len(data) >= 4 and (found := struct.unpack(">I", data[:4])[0]) != magic:
        raise DataError(
            f"{path} should start with the magic number {magic:#010x} (IDX, unsigned bytes, "
            f"{ndim} dimensions), got {found:#010x}. It is another kind of file: check its name, "
            "or fetch it again."
        )
    if len(data) < header:
        raise DataError(
            f"{path} should start with a header of {header} bytes, but holds {len(data)} bytes "
            "in all. It was cut off: fetch it again."
        )
    shape = struct.unpack(f">{ndim}I", data[4:header])
    expected, found = math.prod(shape), len(data) - header
    if found != expected:
        size = " x ".join(map(str, shape))
        what = "It was cut off" if found < expected else "Something was added after the data"
        raise DataError(
            f"{path} should hold {size} = {expected} bytes after its header, got {found}. "
            f"{what}: fetch it again."
        )
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def _load(
    name: str, classes: tuple[str, ...], data_dir: DataDir, source: Source, other: Source
) -> Dataset:
    x_train, y_train = _load_part("train", len(classes), data_dir, source, other)
    x_test, y_test = _load_part("t10k", len(classes), data_dir, source, other)
    return Dataset(
        name=name,
        x_train=x_train,
        y_train=y_train,
        x_test=x_test,
        y_test=y_test,
        classes=classes,
        feature_names=pixel_names((SIDE, SIDE)),
        image_shape=(SIDE, SIDE),
        notes="Published split; grey levels divided by 255.",
    )


def _load_part(
    part: str, n_classes: int, data_dir: DataDir, source: Source, other: Source
) -> tuple[Array, Array]:
    image_path = _path(f"{part}-images-idx3-ubyte", data_dir, source, other)
    label_path = _path(f"{part}-labels-idx1-ubyte", data_dir, source, other)
    images, labels = read_idx(image_path, 3), read_idx(label_path, 1)
    if images.shape[1:] != (SIDE, SIDE):
        rows, columns = images.shape[1:]
        raise DataError(
            f"{image_path} should hold images of {SIDE} x {SIDE} pixels, got {rows} x {columns}. "
            "It is not the published file: fetch it again."
        )
    if len(images) != len(labels):
        raise DataError(
            f"{image_path} and {label_path} should hold one label per image, got {len(images)} "
            f"images and {len(labels)} labels. They do not belong together: fetch both again."
        )
    if len(labels) == 0:
        raise DataError(f"{image_path} should hold images, got none. Fetch it again.")
    if labels.max() >= n_classes:
        raise DataError(
            f"{label_path} should hold labels 0 to {n_classes - 1}, got {labels.max()}. It is "
            "damaged: fetch it again."
        )
    return scale_bytes(images.reshape(len(images), -1)), labels.astype(np.int64)


def _path(name: str, data_dir: DataDir, source: Source, other: Source) -> Path:
    packed = f"{name}.gz"
    path = find([packed, name], [source.folder, ""], data_dir)
    if path is None:
        return fetch(source, packed)
    # The two data sets share their file names, so a file outside a named folder may be either.
    if path.parent == data_folder(data_dir) and path.suffix == ".gz":
        digest = "md5:" + hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
        if digest == other.hashes[packed]:
            raise DataError(
                f"{path} should belong to {source.folder}, but is the file of {other.folder}. "
                f"Move it to {path.parent / other.folder}/."
            )
    return path
