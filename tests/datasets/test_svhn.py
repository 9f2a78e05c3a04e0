from __future__ import annotations

import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.io

from lpom import datasets
from lpom.datasets import svhn
from lpom.datasets.preprocessing import hog_features, select_digits
from lpom.datasets.svhn import read_part
from lpom.exceptions import DataError

N = {"train": 12, "test": 9, "extra": 15}


def made(part: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(N[part])
    images = rng.integers(0, 256, (N[part], 32, 32, 3), dtype=np.uint8)
    return images, np.resize(np.array([2, 0, 1, 9, 2], dtype=np.uint8), N[part])


def write_mat(folder: Path, part: str) -> Path:
    images, labels = made(part)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{part}_32x32.mat"
    y = np.where(labels == 0, 10, labels)[:, None]
    scipy.io.savemat(path, {"X": images.transpose(1, 2, 3, 0), "y": y}, do_compression=True)
    return path


def write_npy(folder: Path, part: str, packed: bool = True) -> tuple[Path, Path]:
    images, labels = made(part)
    folder.mkdir(parents=True, exist_ok=True)
    name = svhn.NPY_NAMES[part]
    paths = folder / f"{name}_images.npy", folder / f"{name}_labels.npy"
    np.save(paths[0], images)
    np.save(paths[1], labels)
    if packed:
        xz = paths[0].with_suffix(".npy.xz")
        xz.write_bytes(lzma.compress(paths[0].read_bytes()))
        paths[0].unlink()
        return xz, paths[1]
    return paths


def check(data: datasets.Dataset, train: str) -> None:
    for x, y, part in ((data.x_train, data.y_train, train), (data.x_test, data.y_test, "test")):
        images, labels = made(part)
        np.testing.assert_array_equal(x, hog_features(images[np.isin(labels, (0, 2))]))
        np.testing.assert_array_equal(y, labels[np.isin(labels, (0, 2))] == 2)
        assert x.dtype == np.float32 and y.dtype == np.int64
    assert data.classes == ("0", "2")
    assert len(data.feature_names) == 648


@pytest.mark.parametrize("folder", ["svhn", ""])
@pytest.mark.parametrize("layout", ["mat", "npy", "npy.xz"])
def test_load(layout: str, folder: str, tmp_path: Path) -> None:
    for part in ("train", "test"):
        if layout == "mat":
            write_mat(tmp_path / folder, part)
        else:
            write_npy(tmp_path / folder, part, packed=layout == "npy.xz")
    data = datasets.load("svhn-0-2", tmp_path)
    check(data, "train")
    assert "stand in for the 120,290" in data.notes


def test_load_extra(tmp_path: Path) -> None:
    write_mat(tmp_path / "svhn", "extra")
    write_mat(tmp_path / "svhn", "test")
    data = datasets.load("svhn-0-2-extra", tmp_path)
    check(data, "extra")
    assert "stand in" not in data.notes


def test_damaged_mat(tmp_path: Path) -> None:
    path = write_mat(tmp_path, "train")
    whole = path.read_bytes()
    for data in (b"", b"MATLAB", whole[:300], whole[: len(whole) // 2], bytes(500)):
        path.write_bytes(data)
        with pytest.raises(DataError, match="should be a MATLAB file .* fetch it again"):
            read_part([path])


def test_mat_without_labels(tmp_path: Path) -> None:
    path = tmp_path / "train_32x32.mat"
    scipy.io.savemat(path, {"X": made("train")[0].transpose(1, 2, 3, 0)})
    with pytest.raises(DataError, match="images X and the labels y, but cannot be read .*KeyError"):
        read_part([path])


def test_damaged_npy(tmp_path: Path) -> None:
    images, labels = write_npy(tmp_path, "train")
    whole = images.read_bytes()
    for data in (b"", whole[:100], whole[:-200], b"garbled" + whole):
        images.write_bytes(data)
        with pytest.raises(DataError, match="should be a NumPy array, but cannot be read"):
            read_part([images, labels])
    images.write_bytes(lzma.compress(lzma.decompress(whole) + b"more"))
    with pytest.raises(DataError, match="numbers should follow its header, and nothing else"):
        read_part([images, labels])


def test_no_pickle_is_read(tmp_path: Path) -> None:
    images, labels = write_npy(tmp_path, "train", packed=False)
    np.save(labels, np.array([{}] * N["train"], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="cannot be read .*it holds Python objects"):
        read_part([images, labels])


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((2, 28, 28), np.uint8), np.zeros(2, int), r"got an array of shape \(2, 28, 28\)"),
        (np.zeros((2, 32, 32, 3)), np.zeros(2, int), "32 x 32 bytes, got .* type float64"),
        (np.zeros((2, 32, 32, 3), np.uint8), np.zeros(3, int), r"2 images and labels of shape \(3"),
        (np.zeros((2, 32, 32, 3), np.uint8), np.full(2, 11), "the digits 0 to 9 as labels"),
        (np.zeros((2, 32, 32, 3), np.uint8), np.zeros(2), "the digits 0 to 9 as labels"),
    ],
)
def test_arrays_that_do_not_fit(
    images: np.ndarray, labels: np.ndarray, message: str, tmp_path: Path
) -> None:
    np.save(tmp_path / "images.npy", images)
    np.save(tmp_path / "labels.npy", labels)
    with pytest.raises(DataError, match=message):
        read_part([tmp_path / "images.npy", tmp_path / "labels.npy"])


@pytest.mark.parametrize(
    ("part", "counts"),
    [
        ("train", [4948, 0, 10585]),
        ("test", [1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595]),
    ],
)
def test_the_real_svhn(part: str, counts: list[int], real_data: Callable[[str], Path]) -> None:
    root = real_data("svhn")
    paths = svhn._paths(part, root, svhn.SVHN)
    if part == "train" and len(paths) == 1:
        pytest.skip("the official training file is there, and holds all digits")
    images, labels = read_part(paths)
    np.testing.assert_array_equal(np.bincount(labels), counts)
    _, classes = select_digits(images, labels, svhn.DIGITS)
    assert len(classes) == {"train": 15_533, "test": 5_893}[part]

    features = hog_features(images[:20])
    assert features.shape == (20, 648)
    # L2-Hys makes each block a unit vector; only a block without any gradient stays zero.
    norms = np.linalg.norm(features.reshape(20, 9, 72), axis=2)
    np.testing.assert_allclose(norms, 1.0, atol=1e-3)
