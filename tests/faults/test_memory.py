"""Training on more rows than fit into the memory, which a limit on the process stands for."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's"),
]

ROWS, COLUMNS = 150_000, 200  # 120 MB
CODE = """
import resource, sys
import numpy as np, torch
import lpom
from torch.utils.data import DataLoader, IterableDataset

torch.set_num_threads(1)
folder, kind = sys.argv[1:]
y = np.arange({rows}) % 2


def stream(first):
    if kind == "parquet":
        import pyarrow.parquet as pq
        batches = pq.ParquetFile(folder + "/X.parquet").iter_batches(1000)
        parts = (batch.to_pandas().to_numpy() for batch in batches)
    else:
        X = np.load(folder + "/X.npy", mmap_mode="r")
        parts = (np.array(X[k : k + 1000]) for k in range(0, len(X), 1000))
    for part in parts:
        yield torch.from_numpy(part[:, :{columns}]), torch.arange(len(part)) % 2
        if first:
            return


class Rows(IterableDataset):
    def __iter__(self):
        return stream(False)


def train(limited):
    model = lpom.mlp([{columns}, 4, 2], seed=0)
    options = {{"epochs": 1, "progress": False}}
    if kind == "mapped":
        X = np.load(folder + "/X.npy", mmap_mode="r")
        n = {rows} if limited else 2000
        lpom.fit(model, X[:n], y[:n], batch_size=1000, **options)
    elif limited:
        lpom.fit(model, DataLoader(Rows(), batch_size=None), **options)
    else:
        lpom.fit(model, DataLoader(list(stream(True)), batch_size=None), **options)
    if limited:
        print("trained")


train(limited=False)  # all that is loaded on the way is there
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData"))
limit = used * 1024 + 50 * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
if sys.argv[-1] == "whole":
    np.ones(({rows}, {columns}), np.float32)
train(limited=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import pyarrow as pa
    import pyarrow.parquet as pq

    made = tmp_path_factory.mktemp("large")
    rng = np.random.default_rng(0)
    X = np.lib.format.open_memmap(made / "X.npy", "w+", np.float32, (ROWS, COLUMNS))
    part = rng.normal(size=(1000, COLUMNS)).astype(np.float32)
    names = [f"x{k}" for k in range(COLUMNS)]
    columns = pa.table({name: part[:, k] for k, name in enumerate(names)})
    with pq.ParquetWriter(made / "X.parquet", columns.schema) as writer:
        for start in range(0, ROWS, 1000):
            X[start : start + 1000] = part
            writer.write_table(columns)
    X.flush()
    yield made
    (made / "X.npy").unlink()
    (made / "X.parquet").unlink()


def run(folder, kind):
    code = CODE.format(rows=ROWS, columns=COLUMNS)
    return subprocess.run(
        [sys.executable, "-c", code, str(folder), kind], capture_output=True, text=True
    )


@pytest.mark.parametrize("kind", ["mapped", "loader", "parquet"])
def test_rows_that_do_not_fit_into_the_memory(kind, folder):
    done = run(folder, kind)
    assert done.stdout == "trained\n", done.stderr


def test_the_limit_is_one(folder):
    assert "MemoryError" in run(folder, "whole").stderr
