"""MNIST and Fashion-MNIST, from the four IDX files each is published as."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from data.base import Array, Dataset
from data.files import Source, fetch, find
from lpom.exceptions import DataError

SOURCES = {
    "mnist": Source(
        folder="mnist",
        url="https://ossci-datasets.s3.amazonaws.com/mnist",
        hashes={
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    "fashion-mnist": Source(
        folder="fashion-mnist",
        url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        hashes={
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
}


def load_mnist(name: str = "mnist") -> Dataset:
    """60,000 grey pictures for training, 10,000 for testing, 28x28, values in [0, 1]."""
    x_train, y_train = _part("train", SOURCES[name])
    x_test, y_test = _part("t10k", SOURCES[name])
    notes = "Published split; grey levels divided by 255."
    return Dataset(name, x_train, y_train, x_test, y_test, 10, (28, 28), notes)


def _part(part: str, source: Source) -> tuple[Array, Array]:
    images = read_idx(_path(f"{part}-images-idx3-ubyte", source), 3)
    labels = read_idx(_path(f"{part}-labels-idx1-ubyte", source), 1)
    if len(images) != len(labels) or len(images) == 0 or labels.max() > 9:
        raise DataError(
            f"the {part} files of {source.folder} should hold images and one label from 0 to 9 for "
            f"each, got {len(images)} images and {len(labels)} labels. Fetch both again."
        )
    return images.reshape(len(images), -1) / np.float32(255), labels.astype(np.int64)


def _path(name: str, source: Source) -> Path:
    return find(source, [f"{name}.gz", name]) or fetch(source, f"{name}.gz")


def read_idx(path: Path, ndim: int) -> Array:
    """The bytes of an IDX file, as an array of `ndim` dimensions.

    The format is a four-byte magic number (two zeros, element type, number of dimensions), each
    dimension as a big-endian 32-bit number, then the elements, and nothing after them.
    """
    data = path.read_bytes()
    if path.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{path} cannot be unpacked ({error}). Fetch it again.") from error
    magic, header = 0x0800 | ndim, 4 + 4 * ndim
    if len(data) < header or struct.unpack(">I", data[:4])[0] != magic:
        raise DataError(
            f"{path} should start with the magic number {magic:#010x} (IDX, unsigned bytes, "
            f"{ndim} dimensions) and its dimensions, got {data[:4].hex()!r}. Fetch it again."
        )
    shape = struct.unpack(f">{ndim}I", data[4:header])
    if len(data) - header != math.prod(shape):
        size = " x ".join(map(str, shape))
        raise DataError(
            f"{path} should hold {size} bytes after its header, got {len(data) - header}. Fetch it "
            "again."
        )
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)
