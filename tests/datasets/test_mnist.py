from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lpom import datasets
from lpom.datasets import mnist
from lpom.datasets.mnist import read_idx
from lpom.exceptions import DataError

N = {"train": 7, "t10k": 3}


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", 0x0800 | array.ndim, *array.shape) + array.tobytes()


def made(part: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(N[part])
    images = rng.integers(0, 256, (N[part], 28, 28), dtype=np.uint8)
    return images, rng.integers(0, 10, N[part], dtype=np.uint8)


def write(folder: Path, packed: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part in N:
        images, labels = made(part)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            data, path = idx(array), folder / f"{part}-{kind}-ubyte"
            if packed:
                path.with_suffix(".gz").write_bytes(gzip.compress(data))
            else:
                path.write_bytes(data)


@pytest.mark.parametrize("packed", [True, False], ids=["gz", "unpacked"])
@pytest.mark.parametrize(
    ("name", "folder"),
    [("mnist", "mnist"), ("mnist", ""), ("fashion-mnist", "fashion-mnist"), ("fashion-mnist", "")],
)
def test_load(name: str, folder: str, packed: bool, tmp_path: Path) -> None:
    write(tmp_path / folder, packed)
    data = datasets.load(name, tmp_path)
    for x, y, part in ((data.x_train, data.y_train, "train"), (data.x_test, data.y_test, "t10k")):
        images, labels = made(part)
        np.testing.assert_array_equal(x, images.reshape(-1, 784) / np.float32(255))
        np.testing.assert_array_equal(y, labels)
        assert x.dtype == np.float32 and y.dtype == np.int64
    np.testing.assert_array_equal(
        data.picture(data.x_test[1]), made("t10k")[0][1] / np.float32(255)
    )
    assert len(data.classes) == 10
    assert len(data.feature_names) == 784


def test_the_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "mnist")
    monkeypatch.setenv("LPOM_DATA", str(tmp_path))
    assert len(datasets.load("mnist").y_train) == N["train"]


def test_files_of_the_other_data_set_are_noticed(
    tmp_path: Path, real_data: Callable[[str], Path]
) -> None:
    real = real_data("mnist") / "mnist"
    for path in real.glob("*.gz"):
        (tmp_path / path.name).symlink_to(path)
    with pytest.raises(DataError, match="should belong to fashion-mnist, but is the file of mnist"):
        datasets.load("fashion-mnist", tmp_path)


IMAGES = np.zeros((2, 3, 4), dtype=np.uint8)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "should start with a header of 16 bytes, but holds 0 bytes in all. It was cut off"),
        (idx(IMAGES)[:9], "should start with a header of 16 bytes, but holds 9 bytes"),
        (
            idx(IMAGES)[:-1],
            r"should hold 2 x 3 x 4 = 24 bytes after its header, got 23. It was cut",
        ),
        (idx(IMAGES) + b"!", "24 bytes after its header, got 25. Something was added"),
        (idx(IMAGES[0, 0]), r"magic number 0x00000803 .*3 dimensions\), got 0x00000801"),
        (b"\x00\x00\x0d\x03" + idx(IMAGES)[4:], "got 0x00000d03. It is another kind of file"),
        (gzip.compress(idx(IMAGES)), "got 0x1f8b"),
        (struct.pack(">4I", 0x803, 2**32 - 1, 2**32 - 1, 2**32 - 1), "after its header, got 0"),
    ],
    ids=["empty", "header", "truncated", "trailing", "labels", "floats", "gzip", "huge"],
)
def test_read_idx_refuses(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "some-idx3-ubyte"
    path.write_bytes(data)
    with pytest.raises(DataError, match=message) as caught:
        read_idx(path, 3)
    assert str(path) in str(caught.value)
    assert "fetch it again" in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-9],
        lambda data: data[:20],
        lambda data: b"PK" + data[2:],
        lambda data: data[:-8] + bytes(8),
        lambda data: data + b"more",
    ],
    ids=["truncated", "nearly all gone", "no gzip", "wrong checksum", "trailing"],
)
def test_read_idx_refuses_damaged_gzip(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "some.gz"
    path.write_bytes(damage(gzip.compress(idx(made("train")[0]))))
    with pytest.raises(DataError, match="should be a gzip file, but it cannot be unpacked"):
        read_idx(path, 3)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        (
            "train-labels-idx1-ubyte",
            np.zeros(6, np.uint8),
            "one label per image, got 7 images and 6",
        ),
        ("train-labels-idx1-ubyte", np.full(7, 10, np.uint8), "should hold labels 0 to 9, got 10"),
        ("t10k-images-idx3-ubyte", np.zeros((3, 32, 32), np.uint8), "28 x 28 pixels, got 32 x 32"),
    ],
)
def test_files_that_do_not_fit(name: str, array: np.ndarray, message: str, tmp_path: Path) -> None:
    write(tmp_path / "mnist", packed=False)
    (tmp_path / "mnist" / name).write_bytes(idx(array))
    with pytest.raises(DataError, match=message):
        datasets.load("mnist", tmp_path)


def test_no_images(tmp_path: Path) -> None:
    write(tmp_path / "mnist", packed=False)
    images, labels = made("t10k")
    (tmp_path / "mnist" / "t10k-images-idx3-ubyte").write_bytes(idx(images[:0]))
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte").write_bytes(idx(labels[:0]))
    with pytest.raises(DataError, match="should hold images, got none"):
        datasets.load("mnist", tmp_path)


def test_both_data_sets_publish_the_same_four_names() -> None:
    assert set(mnist.MNIST.hashes) == set(mnist.FASHION_MNIST.hashes)
    assert set(mnist.MNIST.hashes.values()).isdisjoint(mnist.FASHION_MNIST.hashes.values())


def test_the_real_mnist(real_data: Callable[[str], Path]) -> None:
    data = datasets.load("mnist", real_data("mnist"))
    assert data.x_train.shape == (60_000, 784) and data.x_test.shape == (10_000, 784)
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    np.testing.assert_array_equal(np.bincount(data.y_train), counts)
    assert data.x_train.min() == 0 and data.x_train.max() == 1
    assert data.x_train.mean(dtype=np.float64) == pytest.approx(0.1306605, abs=1e-6)
