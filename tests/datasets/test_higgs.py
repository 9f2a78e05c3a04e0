from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from lpom.datasets import higgs
from lpom.datasets.higgs import FEATURES, load_higgs, read_rows
from lpom.exceptions import DataError


def made(n: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.column_stack([rng.integers(0, 2, n), rng.normal(size=(n, 28))])


def text(rows: np.ndarray) -> str:
    return "".join(",".join(f"{value:.18e}" for value in row) + "\n" for row in rows)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_rows, "__defaults__", (7,))


@pytest.mark.parametrize("name", ["HIGGS.csv", "HIGGS.csv.gz", "higgs/HIGGS.csv.gz"])
def test_load(name: str, tmp_path: Path) -> None:
    rows = made(50)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    data = text(rows).encode()
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    loaded = load_higgs(tmp_path, n_test=12)
    np.testing.assert_array_equal(loaded.x_train, rows[:-12, 1:].astype(np.float32))
    np.testing.assert_array_equal(loaded.y_train, rows[:-12, 0])
    np.testing.assert_array_equal(loaded.x_test, rows[-12:, 1:].astype(np.float32))
    np.testing.assert_array_equal(loaded.y_test, rows[-12:, 0])
    assert loaded.x_train.dtype == np.float32 and loaded.y_train.dtype == np.int64
    assert len(loaded.feature_names) == 28


@pytest.mark.parametrize("n_rows", [20, 21, 22])
@pytest.mark.parametrize("n_test", [1, 7, 8, 19])
@pytest.mark.parametrize("max_rows", [None, 1, 7, 8, 100])
def test_split_at_every_place(
    n_rows: int, n_test: int, max_rows: int | None, tmp_path: Path
) -> None:
    rows = made(n_rows).astype(np.float32)
    (tmp_path / "HIGGS.csv").write_text(text(rows))
    data = load_higgs(tmp_path, max_rows=max_rows, n_test=n_test)
    np.testing.assert_array_equal(data.x_train, rows[:-n_test][:max_rows, 1:])
    np.testing.assert_array_equal(data.x_test, rows[-n_test:, 1:])


def test_too_few_rows(tmp_path: Path) -> None:
    (tmp_path / "HIGGS.csv").write_text(text(made(20)))
    with pytest.raises(DataError, match="more than the 20 rows of the test set, got 20 rows"):
        load_higgs(tmp_path, n_test=20)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (text(made(10)[:, :-1]), r"should hold 29 columns \(label, 28 features\), got 28 in row 1"),
        (text(made(10))[:-40], "should hold 29 numbers in each row, row 10 has fewer"),
        (text(made(10)) + "1,2\n", "29 numbers in each row, row 11 has fewer"),
        (text(made(10)).replace("\n", ",7\n"), "29 columns .* got 30"),
        (text(made(10)) + text(made(1)).replace("\n", ",7\n"), "cannot be read after row 7"),
        (text(made(9)) + text(np.full((1, 29), 3.0)), "label 0 or 1 .* got 3 in row 10"),
        ("label," + ",".join(FEATURES) + "\n" + text(made(3)), "cannot be read after row 0"),
        ("", "cannot be read after row 0"),
    ],
    ids=["columns", "cut", "short row", "more columns", "long row", "label", "header", "empty"],
)
def test_damaged(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "HIGGS.csv").write_text(content)
    with pytest.raises(DataError, match=message):
        load_higgs(tmp_path, n_test=2)


def test_truncated_gzip(tmp_path: Path) -> None:
    (tmp_path / "HIGGS.csv.gz").write_bytes(gzip.compress(text(made(50)).encode())[:-20])
    with pytest.raises(DataError, match="damaged or was cut off: fetch it again"):
        load_higgs(tmp_path, n_test=2)


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="should be at least 1, got max_rows=0"):
        load_higgs(tmp_path, max_rows=0)


def test_published_test_set() -> None:
    assert higgs.N_TEST == 500_000
    assert len(FEATURES) == 28
