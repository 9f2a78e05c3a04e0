"""CIFAR-10, binary version: from the six unpacked files, or from the archive as published."""

from __future__ import annotations

import tarfile
import zlib
from pathlib import Path

import numpy as np

from data.base import Array, Dataset
from data.files import Source, find_or_fetch, folders
from lpom.exceptions import DataError

SIDE = 32
RECORD = 1 + 3 * SIDE * SIDE  # label, then the red, green and blue plane, row by row
ARCHIVE = "cifar-10-binary.tar.gz"
FILES = (*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin")

SOURCE = Source(
    folder="cifar-10-batches-bin",
    url="https://www.cs.toronto.edu/~kriz",
    hashes={ARCHIVE: "c32a1d4ab5d03f1284b67883e8d87530"},
)


def load_cifar10() -> Dataset:
    """Colour photographs of ten classes: 50,000 for training, 10,000 for testing, 32x32.

    Rows hold the pixels in the order row, column, colour. Values are bytes over 255, less the mean
    of their colour over the training pictures.
    """
    whole = next((f for f in folders(SOURCE) if all((f / n).is_file() for n in FILES)), None)
    if whole is not None:
        batches = [(whole / name).read_bytes() for name in FILES]
    else:
        batches = _unpacked(find_or_fetch(SOURCE, ARCHIVE))
    *train, test = [read_batch(batch, name) for batch, name in zip(batches, FILES, strict=True)]
    x_train = np.concatenate([images for images, _ in train]) / np.float32(255)
    x_test = test[0] / np.float32(255)
    # per pixel first, in float64: float32 would lose digits over 50,000 pictures
    means = x_train.mean(0, dtype=np.float64).mean((0, 1)).astype(np.float32)
    return Dataset(
        name="cifar-10",
        x_train=(x_train - means).reshape(len(x_train), -1),
        y_train=np.concatenate([labels for _, labels in train]),
        x_test=(x_test - means).reshape(len(x_test), -1),
        y_test=test[1],
        n_classes=10,
        image_shape=(SIDE, SIDE, 3),
        notes="Published split; bytes divided by 255, and the mean of each colour over the "
        "training images subtracted.",
    )


def read_batch(data: bytes, where: str) -> tuple[Array, Array]:
    """Pictures (n, 32, 32, 3) and labels (n,) of one binary file."""
    n, rest = divmod(len(data), RECORD)
    if n == 0 or rest:
        raise DataError(
            f"{where} should hold records of {RECORD} bytes (1 label, 3072 pixels), got "
            f"{len(data)} bytes. Fetch the binary version again."
        )
    records = np.frombuffer(data, np.uint8).reshape(n, RECORD)
    labels = records[:, 0].astype(np.int64)
    if labels.max() > 9:
        raise DataError(f"{where} should hold labels 0 to 9, got {labels.max()}. Fetch it again.")
    images = records[:, 1:].reshape(n, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), labels


def _unpacked(archive: Path) -> list[bytes]:
    """The six files straight from the archive; nothing is written."""
    try:
        with tarfile.open(archive, "r:gz") as tar:
            members = (tar.extractfile(f"{SOURCE.folder}/{name}") for name in FILES)
            return [member.read() for member in members if member is not None]
    except (tarfile.TarError, KeyError, OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{archive} should be a tar.gz archive with the six files of the binary version, but "
            f"cannot be read ({error}). Fetch it again."
        ) from error
