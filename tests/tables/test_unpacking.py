"""Files that unpack to far more than their size are refused before they fill the memory."""

from __future__ import annotations

import gzip
import io
import resource
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lpom.exceptions import DataError
from lpom.tables import reading
from lpom.tables.reading import read_npz, read_table

BYTES = 2**28  # what each bomb unpacks to
REFUSED = "made to fill the memory"


@pytest.fixture(autouse=True)
def little_room(monkeypatch):
    monkeypatch.setattr(reading, "ROOM", 2**20)


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


def test_gzip(tmp_path):
    refused(read_table, packed(tmp_path / "bomb.csv.gz", gzip.open))


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


class _Zeros(io.RawIOBase):
    def read(self, size=-1):
        return bytes(size)
