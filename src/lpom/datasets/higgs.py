"""HIGGS of the UCI repository: is a simulated collision a Higgs boson, or background?"""

from __future__ import annotations

import gzip
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lpom.datasets.base import Array, DataDir, Dataset
from lpom.datasets.download import Source, fetch, find
from lpom.exceptions import DataError

FILE = "HIGGS.csv.gz"
N_TEST = 500_000  # the last ones, as published with the data
CHUNK_ROWS = 100_000
_LONGEST_LINE = 10_000  # bytes; the published ones have some 550

HIGGS = Source(
    folder="higgs",
    base_url="https://archive.ics.uci.edu/ml/machine-learning-databases/00280",
    # UCI publishes no hash. This is the one that several projects found independently for this
    # file of 2,816,407,858 bytes; the number of columns and every value are checked besides.
    hashes={FILE: "sha256:ea302c18164d4e3d916a1e2e83a9a8d07069fa6ebc7771e4c0540d54e593b698"},
)

FEATURES = (
    "lepton_pT",
    "lepton_eta",
    "lepton_phi",
    "missing_energy_magnitude",
    "missing_energy_phi",
    *(f"jet_{k}_{what}" for k in range(1, 5) for what in ("pt", "eta", "phi", "b-tag")),
    "m_jj",
    "m_jjj",
    "m_lv",
    "m_jlv",
    "m_bb",
    "m_wbb",
    "m_wwbb",
)


def load_higgs(
    data_dir: DataDir = None,
    max_rows: int | None = None,
    n_test: int = N_TEST,
    source: Source = HIGGS,
) -> Dataset:
    """28 numbers per collision: 10.5 million for training, 500,000 for testing.

    Parameters
    ----------
    data_dir : path, optional
        Holds ``HIGGS.csv`` or ``HIGGS.csv.gz``, itself or in ``higgs/``.
    max_rows : int, optional
        Keep only the first `max_rows` training rows, to save memory (1.2 GB for all). The test
        rows are always the last `n_test` of the file, so the whole file is still read.
    n_test : int
        Number of test rows.
    """
    if n_test < 1 or (max_rows is not None and max_rows < 1):
        raise ValueError(
            f"max_rows and n_test should be at least 1, got max_rows={max_rows}, n_test={n_test}."
        )
    path = find([FILE, "HIGGS.csv"], [source.folder, ""], data_dir) or fetch(source, FILE)
    train, test = _split(path, n_test, max_rows)
    taken = "" if max_rows is None else f" Only the first {len(train)} training rows are used."
    return Dataset(
        name="higgs",
        x_train=train[:, 1:],
        y_train=train[:, 0].astype(np.int64),
        x_test=test[:, 1:],
        y_test=test[:, 0].astype(np.int64),
        classes=("background", "signal"),
        feature_names=FEATURES,
        notes=f"The last {n_test} rows are the test set; features as published.{taken}",
    )


def _split(path: Path, n_test: int, max_rows: int | None) -> tuple[Array, Array]:
    """The first rows and the last `n_test`, holding no more than those and a chunk in memory."""
    train: list[Array] = []
    ahead: deque[Array] = deque()  # chunks that may still turn out to be test rows
    n_train = n_ahead = 0
    for chunk in read_rows(path):
        ahead.append(chunk)
        n_ahead += len(chunk)
        while n_ahead - len(ahead[0]) >= n_test:
            oldest = ahead.popleft()
            n_ahead -= len(oldest)
            room = len(oldest) if max_rows is None else max_rows - n_train
            if room > 0:
                train.append(oldest[:room])
                n_train += len(train[-1])
    if n_train + n_ahead <= n_test:
        raise DataError(
            f"{path} should hold more than the {n_test} rows of the test set, got "
            f"{n_train + n_ahead} rows. It was cut off: fetch it again, or pass a smaller n_test."
        )
    last = np.concatenate(list(ahead))
    rest, test = last[:-n_test], last[-n_test:]
    room = len(rest) if max_rows is None else max_rows - n_train
    if room > 0:
        train.append(rest[:room])
    return np.concatenate(train), test


def read_rows(path: Path, chunk_rows: int = CHUNK_ROWS) -> Iterator[Array]:
    """The rows of the file, label first, as float32, in pieces of `chunk_rows`."""
    import pandas as pd

    n_columns = 1 + len(FEATURES)
    start = 1
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        if b"\n" not in file.read(_LONGEST_LINE) and file.read(1):
            raise DataError(
                f"{path} should hold rows of {n_columns} numbers, but its first line has more than "
                f"{_LONGEST_LINE} bytes. It is another file: fetch it again."
            )
    try:
        with pd.read_csv(path, header=None, dtype=np.float32, chunksize=chunk_rows) as chunks:
            for chunk in chunks:
                rows: Array = chunk.to_numpy()
                _check(rows, n_columns, start, path)
                yield rows
                start += len(rows)
    except DataError:
        raise
    except (ValueError, OSError, EOFError, zlib.error) as error:
        reason = str(error).strip() or type(error).__name__
        raise DataError(
            f"{path} should hold rows of {n_columns} numbers, but cannot be read after row "
            f"{start - 1} ({reason}). It is damaged or was cut off: fetch it again."
        ) from error


def _check(rows: Array, n_columns: int, start: int, path: Path) -> None:
    if rows.shape[1] != n_columns:
        raise DataError(
            f"{path} should hold {n_columns} columns (label, {n_columns - 1} features), got "
            f"{rows.shape[1]} in row {start}. It is another table, or damaged: fetch it again."
        )
    incomplete = ~np.isfinite(rows).all(axis=1)
    if incomplete.any():
        raise DataError(
            f"{path} should hold {n_columns} numbers in each row, row "
            f"{start + int(incomplete.argmax())} has fewer. It was cut off: fetch it again."
        )
    strange = (rows[:, 0] != 0) & (rows[:, 0] != 1)
    if strange.any():
        k = int(strange.argmax())
        raise DataError(
            f"{path} should hold the label 0 or 1 in its first column, got {rows[k, 0]:g} in row "
            f"{start + k}. It is another table, or damaged: fetch it again."
        )
