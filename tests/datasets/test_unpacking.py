"""Files that unpack to far more than their size are refused before they fill the memory."""

from __future__ import annotations

import gzip
import io
import lzma
import resource
import tarfile
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lpom.datasets import cifar10, svhn, unpacking
from lpom.datasets.files import read_npz, read_table
from lpom.datasets.mnist import read_idx
from lpom.exceptions import DataError

BYTES = 2**28  # what each bomb unpacks to
REFUSED = "made to fill the memory"


@pytest.fixture(autouse=True)
def little_room(monkeypatch):
    monkeypatch.setattr(unpacking, "ROOM", 2**20)


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def refused(read, path):
    before = peak()
    with pytest.raises(DataError, match=REFUSED):
        read(path)
    assert peak() - before < BYTES / 4


def packed(path, open_packed, head=b""):
    with open_packed(path, "wb") as file:
        file.write(head)
        for _ in range(BYTES // 2**20):
            file.write(bytes(2**20))
    return path


def test_a_good_file_is_read(tmp_path):
    path = tmp_path / "good.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 10_000))
    assert len(read_table(path).frame) == 10_000


@pytest.mark.parametrize("read", [read_table, lambda path: read_idx(path, 3)], ids=["csv", "idx"])
def test_gzip(read, tmp_path):
    refused(read, packed(tmp_path / "bomb.csv.gz", gzip.open))


def test_npy_in_xz(tmp_path):
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        head, {"descr": "|u1", "fortran_order": False, "shape": (BYTES // 3072, 32, 32, 3)}
    )
    path = packed(tmp_path / "bomb.npy.xz", lzma.open, head.getvalue())
    refused(lambda path: svhn.read_part([path, path]), path)


def test_matlab(tmp_path):
    from scipy.io import savemat

    path = tmp_path / "bomb.mat"
    images = np.zeros((32, 32, 3, BYTES // 3072 // 4), np.uint8)
    savemat(path, {"X": images, "y": np.zeros(images.shape[-1])}, do_compression=True)
    refused(lambda path: svhn.read_part([path]), path)


def test_npz(tmp_path):
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("X.npy", "w") as file:
            for _ in range(BYTES // 2**20):
                file.write(bytes(2**20))
    refused(read_npz, path)
    path = path.rename(path.with_suffix(".xlsx"))
    refused(read_table, path)


def test_parquet(tmp_path):
    path = tmp_path / "bomb.parquet"
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(BYTES // 8, np.int8)), ["a"])
    pq.write_table(pa.table({"a": column}), path)
    refused(read_table, path)


def test_tar(tmp_path):
    path = tmp_path / "bomb.tar.gz"
    with tarfile.open(path, "w:gz", compresslevel=9) as tar:
        member = tarfile.TarInfo(f"{cifar10.FOLDER}/{cifar10.TEST_FILE}")
        member.size = BYTES
        tar.addfile(member, _Zeros())
    refused(cifar10._archived_batches, path)


class _Zeros(io.RawIOBase):
    def read(self, size=-1):
        return bytes(size)


def test_links_in_an_archive_are_no_batches(tmp_path):
    path = tmp_path / "links.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        member = tarfile.TarInfo(f"{cifar10.FOLDER}/{cifar10.TEST_FILE}")
        member.type, member.linkname = tarfile.SYMTYPE, "elsewhere"
        tar.addfile(member)
    with pytest.raises(DataError, match=r"has no .*test_batch"):
        cifar10._archived_batches(path)
