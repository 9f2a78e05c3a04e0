"""CIFAR-10, binary version: from the six unpacked files, or from the archive as published."""

from __future__ import annotations

import tarfile
import zlib
from pathlib import Path

import numpy as np

from lpom.datasets.base import Array, DataDir, Dataset, pixel_names
from lpom.datasets.download import Source, data_folder, find_or_fetch
from lpom.datasets.preprocessing import scale_bytes, subtract_channel_means
from lpom.datasets.unpacking import tar_members
from lpom.exceptions import DataError

SIDE = 32
RECORD = 1 + 3 * SIDE * SIDE  # label, then the red, green and blue plane, row by row
FOLDER = "cifar-10-batches-bin"  # in the archive, and where it is unpacked
ARCHIVE = "cifar-10-binary.tar.gz"
TRAIN_FILES = tuple(f"data_batch_{k}.bin" for k in range(1, 6))
TEST_FILE = "test_batch.bin"

CIFAR10 = Source(
    folder=FOLDER,
    base_url="https://www.cs.toronto.edu/~kriz",
    hashes={ARCHIVE: "md5:c32a1d4ab5d03f1284b67883e8d87530"},
)

CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)


def load_cifar10(data_dir: DataDir = None, source: Source = CIFAR10) -> Dataset:
    """Colour photographs of ten classes: 50,000 for training, 10,000 for testing, 32x32.

    Rows hold the pixels in the order row, column, colour, so that they reshape to (32, 32, 3).
    Values are bytes over 255, less the mean of their colour over the training images.
    """
    batches = _unpacked_batches(data_dir)
    if batches is None:
        batches = _archived_batches(find_or_fetch(source, ARCHIVE, data_dir))
    parts = [read_batch(data, where) for data, where in batches]

    train = scale_bytes(np.concatenate([images for images, _ in parts[:-1]]))
    test = scale_bytes(parts[-1][0])
    means = subtract_channel_means(train, test)
    return Dataset(
        name="cifar-10",
        x_train=train.reshape(len(train), -1),
        y_train=np.concatenate([labels for _, labels in parts[:-1]]),
        x_test=test.reshape(len(test), -1),
        y_test=parts[-1][1],
        classes=CLASSES,
        feature_names=pixel_names((SIDE, SIDE, 3)),
        image_shape=(SIDE, SIDE, 3),
        notes=(
            "Published split; bytes divided by 255, and the mean of each colour over the "
            "training images subtracted."
        ),
        picture_offset=means,
    )


def read_batch(data: bytes, where: str) -> tuple[Array, Array]:
    """Images (n, 32, 32, 3) and labels (n,) of one binary file."""
    n, rest = divmod(len(data), RECORD)
    if n == 0 or rest:
        raise DataError(
            f"{where} should hold records of {RECORD} bytes (1 label, 3072 pixels), got "
            f"{len(data)} bytes, {n} records and {rest} bytes more. It was cut off, or is no "
            "batch of the binary version: fetch it again."
        )
    records = np.frombuffer(data, np.uint8).reshape(n, RECORD)
    labels = records[:, 0].astype(np.int64)
    if labels.max() >= len(CLASSES):
        raise DataError(
            f"{where} should hold labels 0 to {len(CLASSES) - 1}, got {labels.max()}. It is "
            "damaged, or belongs to CIFAR-100: fetch it again."
        )
    images = records[:, 1:].reshape(n, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), labels


def _unpacked_batches(data_dir: DataDir) -> list[tuple[bytes, str]] | None:
    root = data_folder(data_dir)
    if root is None:
        return None
    for folder in (root / FOLDER, root):
        paths = [folder / name for name in (*TRAIN_FILES, TEST_FILE)]
        missing = [path.name for path in paths if not path.is_file()]
        if not missing:
            return [(path.read_bytes(), str(path)) for path in paths]
        if len(missing) < len(paths):
            raise DataError(
                f"{folder} should hold the six files of the binary version, but "
                f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing. Unpack "
                f"{ARCHIVE} there again."
            )
    return None


def _archived_batches(archive: Path) -> list[tuple[bytes, str]]:
    """The six files straight from the archive; nothing is written."""
    wanted = {f"{FOLDER}/{name}" for name in (*TRAIN_FILES, TEST_FILE)}
    found = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar_members(archive, tar):
                if member.name in wanted and (file := tar.extractfile(member)) is not None:
                    found[member.name] = file.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{archive} should be a tar.gz archive, but it cannot be unpacked ({error}). It is "
            "damaged or was cut off: fetch it again."
        ) from error
    if missing := sorted(wanted - set(found)):
        raise DataError(
            f"{archive} should hold the six files of the binary version, but has no "
            f"{', '.join(missing)}. Fetch the binary version, not the one for Python or Matlab."
        )
    # Sorted, data_batch_1 to 5 come before test_batch.
    return [(found[name], f"{archive}:{name}") for name in sorted(found)]
