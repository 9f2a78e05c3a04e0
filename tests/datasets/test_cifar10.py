from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lpom import datasets
from lpom.datasets.cifar10 import ARCHIVE, FOLDER, TEST_FILE, TRAIN_FILES, read_batch
from lpom.exceptions import DataError

FILES = (*TRAIN_FILES, TEST_FILE)


def made(k: int) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, 32, 32, 3) and labels of batch k."""
    rng = np.random.default_rng(k)
    n = 2 + k
    images = rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
    return images, rng.integers(0, 10, n, dtype=np.uint8)


def records(k: int) -> bytes:
    return b"".join(
        bytes([label]) + image[..., 0].tobytes() + image[..., 1].tobytes() + image[..., 2].tobytes()
        for image, label in zip(*made(k), strict=True)
    )


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for k, name in enumerate(FILES):
        (folder / name).write_bytes(records(k))


def archive(names: tuple[str, ...] = FILES) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name in reversed(names):
            data = records(FILES.index(name))
            member = tarfile.TarInfo(f"{FOLDER}/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def check(data: datasets.Dataset) -> None:
    train = np.concatenate([made(k)[0] for k in range(5)]).astype(np.float64) / 255
    means = train.mean(axis=(0, 1, 2))
    np.testing.assert_allclose(data.x_train, (train - means).reshape(-1, 3072), atol=1e-6)
    np.testing.assert_array_equal(data.y_train, np.concatenate([made(k)[1] for k in range(5)]))
    test, labels = made(5)
    np.testing.assert_allclose(data.x_test, (test / 255 - means).reshape(-1, 3072), atol=1e-6)
    np.testing.assert_array_equal(data.y_test, labels)
    np.testing.assert_allclose(data.picture(data.x_test[3]), test[3] / 255, atol=1e-6)
    assert data.x_train.dtype == np.float32 and data.y_train.dtype == np.int64


@pytest.mark.parametrize("folder", [FOLDER, ""])
def test_load_unpacked(folder: str, tmp_path: Path) -> None:
    write(tmp_path / folder)
    check(datasets.load("cifar-10", tmp_path))


def test_load_archive(tmp_path: Path) -> None:
    (tmp_path / ARCHIVE).write_bytes(archive())
    check(datasets.load("cifar-10", tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [ARCHIVE]


@pytest.mark.parametrize("size", [0, 3072, 3073 * 2 - 1, 3073 * 2 + 5])
def test_record_length(size: int) -> None:
    with pytest.raises(DataError, match=f"some.bin should hold records of 3073 .*got {size} bytes"):
        read_batch(bytes(size), "some.bin")


def test_labels_of_cifar_100() -> None:
    with pytest.raises(DataError, match="should hold labels 0 to 9, got 57"):
        read_batch(bytes([57]) + bytes(3072), "some.bin")


def test_missing_batch(tmp_path: Path) -> None:
    write(tmp_path / FOLDER)
    (tmp_path / FOLDER / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match="six files .* but data_batch_3.bin is missing"):
        datasets.load("cifar-10", tmp_path)


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[: len(data) // 2], lambda data: b"no archive", lambda data: b""],
    ids=["truncated", "garbled", "empty"],
)
def test_damaged_archive(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    (tmp_path / ARCHIVE).write_bytes(damage(archive()))
    with pytest.raises(DataError, match="should be a tar.gz archive, but it cannot be unpacked"):
        datasets.load("cifar-10", tmp_path)


def test_archive_of_another_version(tmp_path: Path) -> None:
    (tmp_path / ARCHIVE).write_bytes(archive(TRAIN_FILES))
    with pytest.raises(DataError, match=f"has no {FOLDER}/{TEST_FILE}. Fetch the binary version"):
        datasets.load("cifar-10", tmp_path)


def test_the_real_cifar_10(real_data: Callable[[str], Path]) -> None:
    data = datasets.load("cifar-10", real_data(FOLDER))
    assert data.x_train.shape == (50_000, 3072) and data.x_test.shape == (10_000, 3072)
    np.testing.assert_allclose(data.picture_offset, [0.49140, 0.48216, 0.44653], atol=5e-6)
    np.testing.assert_array_equal(np.bincount(data.y_train), [5000] * 10)
    np.testing.assert_array_equal(np.bincount(data.y_test), [1000] * 10)
    assert data.classes[data.y_train[0]] == "frog"
    picture = data.picture(data.x_train[0])
    np.testing.assert_allclose(picture[0, 0] * 255, [59, 62, 63], atol=1e-3)


def test_the_real_cifar_10_as_pictures(real_data: Callable[[str], Path]) -> None:
    pictures = datasets.load("cifar-10", real_data(FOLDER)).pictures()
    assert pictures.x_train.shape == (50_000, 3, 32, 32)
    # the deviations that are published with these means
    np.testing.assert_allclose(pictures.picture_scale, [0.24703, 0.24349, 0.26159], atol=1e-5)
    np.testing.assert_allclose(
        pictures.picture(pictures.x_train[0])[0, 0] * 255, [59, 62, 63], atol=1e-3
    )
