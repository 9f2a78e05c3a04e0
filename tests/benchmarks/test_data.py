"""The readers of published files: what they read, and that damaged files are refused."""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import struct
import tarfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import scipy.io

import data
from data import Dataset, cifar10, svhn
from data.cifar10 import read_batch
from data.files import Source, fetch
from data.mnist import read_idx
from data.preprocessing import hog_features
from lpom.exceptions import DataError

RNG = np.random.default_rng(0)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", 0x0800 | array.ndim, *array.shape) + array.tobytes()


class TestMNIST:
    images = {"train": (7, 28, 28), "t10k": (3, 28, 28)}

    @pytest.fixture
    def made(self, folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        made = {}
        for part, shape in self.images.items():
            images = RNG.integers(0, 256, shape, dtype=np.uint8)
            labels = RNG.integers(0, 10, shape[0], dtype=np.uint8)
            (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
            (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))
            made[part] = images, labels
        return made

    def test_reads_packed_and_plain_files(self, made: dict) -> None:
        loaded = data.load("mnist")
        for x, y, part in (
            (loaded.x_train, loaded.y_train, "train"),
            (loaded.x_test, loaded.y_test, "t10k"),
        ):
            np.testing.assert_array_equal(x, made[part][0].reshape(-1, 784) / np.float32(255))
            np.testing.assert_array_equal(y, made[part][1])
            assert x.dtype == np.float32 and y.dtype == np.int64

    def test_pictures_keep_their_values(self, made: dict) -> None:
        pictures = data.load("mnist").pictures()
        assert pictures.x_train.shape == (7, 1, 28, 28)
        np.testing.assert_array_equal(pictures.x_test[1, 0], made["t10k"][0][1] / np.float32(255))

    @pytest.mark.parametrize("labels", [np.zeros(6, np.uint8), np.full(7, 10, np.uint8)])
    def test_labels_that_do_not_fit(self, made: dict, labels: np.ndarray, folder: Path) -> None:
        (folder / "train-labels-idx1-ubyte").write_bytes(idx(labels))
        with pytest.raises(DataError, match="label"):
            data.load("mnist")

    @pytest.mark.parametrize(
        "damage",
        [
            lambda whole: b"",
            lambda whole: whole[:9],
            lambda whole: whole[:-1],
            lambda whole: whole + b"!",
            lambda whole: b"\x00\x00\x0d\x03" + whole[4:],
            lambda whole: struct.pack(">4I", 0x803, 2**32 - 1, 2**32 - 1, 2**32 - 1),
        ],
    )
    def test_damaged_files_are_refused(
        self, damage: Callable[[bytes], bytes], folder: Path
    ) -> None:
        damaged = damage(idx(np.zeros((2, 3, 4), np.uint8)))
        for path, content in ((folder / "a", damaged), (folder / "a.gz", gzip.compress(damaged))):
            path.write_bytes(content)
            with pytest.raises(DataError, match="Fetch it again"):
                read_idx(path, 3)
        (folder / "b.gz").write_bytes(gzip.compress(damaged)[:-9])
        with pytest.raises(DataError, match="cannot be unpacked"):
            read_idx(folder / "b.gz", 3)

    def test_the_real_files(self, real_data: Callable[[str], None]) -> None:
        real_data("mnist")
        loaded = data.load("mnist")
        assert loaded.x_train.shape == (60_000, 784) and loaded.x_test.shape == (10_000, 784)
        counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
        np.testing.assert_array_equal(np.bincount(loaded.y_train), counts)
        assert loaded.x_train.mean(dtype=np.float64) == pytest.approx(0.1306605, abs=1e-6)


class TestCIFAR10:
    batches = [
        (RNG.integers(0, 256, (2 + k, 32, 32, 3), dtype=np.uint8), RNG.integers(0, 10, 2 + k))
        for k in range(6)
    ]

    def records(self, k: int) -> bytes:
        """Label, red, green and blue plane of each picture."""
        return b"".join(
            bytes([label]) + b"".join(image[..., c].tobytes() for c in range(3))
            for image, label in zip(*self.batches[k], strict=True)
        )

    def check(self) -> None:
        loaded = data.load("cifar-10")
        train = np.concatenate([images for images, _ in self.batches[:5]]) / 255
        means = train.mean((0, 1, 2))
        np.testing.assert_allclose(loaded.x_train, (train - means).reshape(-1, 3072), atol=1e-6)
        images, labels = self.batches[5]
        test = (images / 255 - means).reshape(-1, 3072)
        np.testing.assert_allclose(loaded.x_test, test, atol=1e-6)
        np.testing.assert_array_equal(loaded.y_test, labels)
        pictures = loaded.pictures()
        assert pictures.x_train.shape == (20, 3, 32, 32)
        expected = (train - means).transpose(0, 3, 1, 2) / train.std((0, 1, 2))[:, None, None]
        np.testing.assert_allclose(pictures.x_train, expected, atol=1e-4)

    def test_reads_unpacked_files(self, folder: Path) -> None:
        for k, name in enumerate(cifar10.FILES):
            (folder / name).write_bytes(self.records(k))
        self.check()

    def test_reads_the_archive_and_refuses_a_damaged_one(self, folder: Path) -> None:
        with tarfile.open(folder / cifar10.ARCHIVE, "w:gz") as tar:
            for k in (3, 0, 5, 1, 2, 4):
                member = tarfile.TarInfo(f"{cifar10.SOURCE.folder}/{cifar10.FILES[k]}")
                member.size = len(self.records(k))
                tar.addfile(member, io.BytesIO(self.records(k)))
        self.check()
        whole = (folder / cifar10.ARCHIVE).read_bytes()
        for damaged in (whole[: len(whole) // 2], b"", b"no archive"):
            (folder / cifar10.ARCHIVE).write_bytes(damaged)
            with pytest.raises(DataError, match="archive"):
                data.load("cifar-10")

    @pytest.mark.parametrize("batch", [b"", bytes(3072), bytes(3073 * 2 + 5), b"9" * 3073])
    def test_batches_that_do_not_fit(self, batch: bytes) -> None:
        with pytest.raises(DataError, match=r"some\.bin"):
            read_batch(batch, "some.bin")


class TestSVHN:
    @staticmethod
    def made(part: str) -> tuple[np.ndarray, np.ndarray]:
        drawn = np.random.default_rng(len(part))
        images = drawn.integers(0, 256, (10, 32, 32, 3), dtype=np.uint8)
        return images, np.resize(np.array([2, 0, 1, 9, 2], np.uint8), 10)

    def write(self, folder: Path, layout: str) -> None:
        for part in ("train", "test"):
            images, labels = self.made(part)
            if layout == "mat":
                y = np.where(labels == 0, 10, labels)[:, None]
                content = {"X": images.transpose(1, 2, 3, 0), "y": y}
                scipy.io.savemat(folder / f"{part}_32x32.mat", content)
                continue
            file = io.BytesIO()
            np.save(file, images)
            name, packed = svhn.NPY_NAMES[part], layout == "npy.xz"
            content = lzma.compress(file.getvalue()) if packed else file.getvalue()
            (folder / f"{name}_images.{layout}").write_bytes(content)
            np.save(folder / f"{name}_labels.npy", labels)

    @pytest.mark.parametrize("layout", ["mat", "npy", "npy.xz"])
    def test_reads_both_layouts(self, layout: str, folder: Path) -> None:
        self.write(folder, layout)
        loaded = data.load("svhn-0-2")
        for x, y, part in (
            (loaded.x_train, loaded.y_train, "train"),
            (loaded.x_test, loaded.y_test, "test"),
        ):
            images, labels = self.made(part)
            chosen = np.isin(labels, (0, 2))
            np.testing.assert_array_equal(x, hog_features(images[chosen]))
            np.testing.assert_array_equal(y, labels[chosen] == 2)

    @pytest.mark.parametrize("layout", ["mat", "npy", "npy.xz"])
    def test_damaged_files_are_refused(self, layout: str, folder: Path) -> None:
        self.write(folder, layout)
        name = "train_32x32.mat" if layout == "mat" else f"train_digits_0_2_images.{layout}"
        whole = (folder / name).read_bytes()
        for damaged in (b"", whole[:300], whole[: len(whole) // 2], bytes(500)):
            (folder / name).write_bytes(damaged)
            with pytest.raises(DataError, match="Fetch it again"):
                data.load("svhn-0-2")

    def test_no_pickle_is_read(self, folder: Path) -> None:
        self.write(folder, "npy")
        labels = np.array([{}] * 10, dtype=object)
        np.save(folder / "train_digits_0_2_labels.npy", labels, allow_pickle=True)
        with pytest.raises(DataError, match="cannot be read"):
            data.load("svhn-0-2")


class TestDownload:
    """From a server on the loopback; nothing here leaves the machine."""

    good = bytes(range(256)) * 40

    @pytest.fixture
    def source(self) -> Iterator[Source]:
        good = self.good

        class Server(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                content = {"/good": good, "/changed": b"!" + good[1:]}.get(self.path)
                if content is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        digest = hashlib.md5(good).hexdigest()
        names = dict.fromkeys(("good", "changed", "absent"), digest)
        yield Source("things", f"http://127.0.0.1:{server.server_address[1]}", names)
        server.shutdown()
        server.server_close()
        thread.join()

    def test_a_good_file_is_kept_and_a_damaged_one_fetched_again(
        self, source: Source, folder: Path
    ) -> None:
        path = fetch(source, "good")
        assert path == folder / "cache" / "things" / "good" and path.read_bytes() == self.good
        path.write_bytes(self.good[:100])
        assert fetch(source, "good").read_bytes() == self.good

    @pytest.mark.parametrize("name", ["changed", "absent"])
    def test_a_bad_file_is_not_kept(self, name: str, source: Source, folder: Path) -> None:
        with pytest.raises(DataError, match=f"{name}.*LPOM_DATA"):
            fetch(source, name)
        assert not [path for path in folder.rglob("*") if path.is_file()]


def test_a_sixth_is_held_out_and_nothing_is_lost() -> None:
    digits = data.load("digits")
    held = digits.held_out()
    assert len(held.x_test) == len(digits.x_train) // 6
    rows = np.concatenate([held.x_train, held.x_test])
    order, expected = np.lexsort(rows.T), np.lexsort(digits.x_train.T)
    np.testing.assert_array_equal(rows[order], digits.x_train[expected])


def test_a_table_has_no_pictures_and_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="no pictures"):
        data.load("iris").pictures()
    with pytest.raises(ValueError, match="minst"):
        data.load("minst")
    assert isinstance(data.load("iris"), Dataset)
