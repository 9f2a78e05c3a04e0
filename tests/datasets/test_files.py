from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lpom.datasets import read_table
from lpom.exceptions import DataError

FRAME = pd.DataFrame(
    {"length": [1.5, 2.5, 3.5], "colour": ["red", "blue", "red"], "kind": ["a", "b", "a"]}
)


def write(frame: pd.DataFrame, path: Path) -> Path:
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        frame.to_parquet(path)
    elif path.suffix == ".npz":
        np.savez(
            path,
            **{
                name: frame[name].to_numpy().astype(frame[name].to_numpy()[0].__class__)
                for name in frame.columns
            },
        )
    else:
        frame.to_csv(path, index=False, sep="\t" if ".tsv" in path.name else ",")
    return path


@pytest.mark.parametrize(
    "name", ["t.csv", "t.CSV", "t.csv.gz", "t.tsv", "t.tsv.gz", "t.parquet", "t.npz"]
)
def test_read(name: str, tmp_path: Path) -> None:
    path = write(FRAME, tmp_path / name)
    table = read_table(path, target="kind")
    assert list(table.features.columns) == ["length", "colour"]
    assert table.features["length"].tolist() == [1.5, 2.5, 3.5]
    assert table.features["colour"].tolist() == ["red", "blue", "red"]
    assert table.target is not None
    assert table.target.tolist() == ["a", "b", "a"]
    assert table.target.name == "kind"

    everything = read_table(str(path))
    assert list(everything.features.columns) == list(FRAME.columns)
    assert everything.target is None


def test_semicolons_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes('\ufeff"a;1";b\n1;2\n3;4\n'.encode())
    table = read_table(path, target="a;1")
    assert table.features["b"].tolist() == [2, 4]


def test_npz_with_X_and_y(tmp_path: Path) -> None:
    X, y = np.arange(6.0).reshape(3, 2), np.array([0, 1, 0])
    np.savez(tmp_path / "t.npz", X=X, y=y)
    table = read_table(tmp_path / "t.npz")
    np.testing.assert_array_equal(table.features.to_numpy(), X)
    assert list(table.features.columns) == ["X0", "X1"]
    assert table.target is not None
    np.testing.assert_array_equal(table.target.to_numpy(), y)

    np.savez(tmp_path / "column.npz", X=X, y=y[:, None])
    np.testing.assert_array_equal(read_table(tmp_path / "column.npz").target, y)

    np.savez(tmp_path / "no_y.npz", X=X)
    assert read_table(tmp_path / "no_y.npz").target is None


@given(
    values=st.lists(
        st.tuples(
            st.floats(allow_nan=False, allow_infinity=False),
            st.integers(-(2**53), 2**53),
        ),
        min_size=1,
        max_size=20,
    )
)
@settings(max_examples=25, deadline=None)
def test_numbers_survive(values: list[tuple[float, int]], tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("numbers") / "t.csv"
    frame = pd.DataFrame(values, columns=["x", "y"])
    frame.to_csv(path, index=False)
    table = read_table(path, target="y")
    np.testing.assert_allclose(table.features["x"], frame["x"], rtol=1e-14)
    assert table.target is not None
    assert table.target.tolist() == frame["y"].tolist()


def refused(path: Path, target: str | None, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read_table(path, target)
    assert str(path) in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a\n1\n")
    refused(tmp_path / "trian.csv", None, "There is no file .* Did you mean 'train.csv'")
    refused(tmp_path / "no" / "train.csv", None, "There is no file .*csv. Check the path")


def test_folder(tmp_path: Path) -> None:
    refused(tmp_path, None, "should be a file, but is a folder")


@pytest.mark.parametrize("name", ["t.xlsx", "t", "t.npy.gz", "t.csv.zip"])
def test_unsupported_ending(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("a,b\n1,2\n")
    refused(tmp_path / name, None, r"should end in .csv, .tsv, .csv.gz, .parquet or .npz, got '")


CSV_ERRORS = {
    "empty": (b"", "should start with a line of column names, but is empty"),
    "blank": (b"\n \n", "should start with a line of column names, but is empty"),
    "no rows": (b"a,b\n", "should hold rows of data, got none"),
    "long line": (b"a,b\n1,2\n1,2,3\n", "cannot be read .*Expected 2 fields in line 3, saw 3"),
    "all lines longer": (b"a,b\n1,2,3\n1,2,3\n", "as many values in each line .*cannot be read"),
    "open quote": (b'a,b\n1,"2\n3,4\n', "cannot be read .*EOF inside string"),
    "cut off": (b"a,b,c\n1,2,3\n4,5\n", "missing, NaN or infinite in column 'c', row 2 "),
    "not text": (b"a,b\n\xff\xfe\x80,1\n", "is not UTF-8 text .*Save it with the encoding UTF-8"),
    "zeros": (b"a,b\n1,2\n" + bytes(40), "should be text, but holds zero bytes"),
    "twice": (b"a,b,a,b,c\n1,2,3,4,5\n", "a name of its own, got 'a', 'b' more than once"),
    "no header": (b"1,1,2\n1,2,3\n", "got '1' more than once.*if the first line holds data"),
    "hole": (
        b"a,b\n1,2\n,2\n3,x\n,4\n",
        r"in column 'a', rows 2, 4 \(the first row of data is 1\)",
    ),
    "infinity": (b"a,b\n1,2\ninf,2\n", "infinite in column 'a', row 2 "),
}


@pytest.mark.parametrize("case", CSV_ERRORS)
@pytest.mark.parametrize("packed", [False, True], ids=["csv", "csv.gz"])
def test_csv_errors(case: str, packed: bool, tmp_path: Path) -> None:
    data, message = CSV_ERRORS[case]
    path = tmp_path / ("t.csv.gz" if packed else "t.csv")
    path.write_bytes(gzip.compress(data) if packed else data)
    refused(path, None, message)


def test_truncated_gzip(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 1000)[:-12])
    refused(path, None, "cannot be read .*damaged, was cut off")
    path.write_bytes(b"a,b\n1,2\n")
    refused(path, None, "cannot be read .*gzip")


def test_many_missing_values_are_shortened(tmp_path: Path) -> None:
    frame = pd.DataFrame({f"c{k}": [np.nan] * 8 for k in range(7)})
    path = write(frame.assign(y=1), tmp_path / "t.csv")
    refused(path, "y", "columns 'c0', .*'c4' and 2 more, rows 1, 2, 3, 4, 5 and 3 more")


def test_missing_target_value(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,y\n1,no\n2,\n")
    refused(path, "y", "in column 'y', row 2 ")


def test_target_that_is_not_there(tmp_path: Path) -> None:
    path = write(FRAME, tmp_path / "t.csv")
    refused(
        path, "knid", "has no column 'knid' to predict. Did you mean 'kind'.*'length', 'colour'"
    )
    refused(path, "zzz", "has no column 'zzz' to predict. Its columns are 'length'")


def test_only_the_target(tmp_path: Path) -> None:
    path = write(FRAME[["kind"]], tmp_path / "t.csv")
    refused(path, "kind", "should have columns besides the target 'kind'")


def test_damaged_parquet(tmp_path: Path) -> None:
    path = write(FRAME, tmp_path / "t.parquet")
    whole = path.read_bytes()
    for data in (b"", b"PAR1", whole[:-20], whole[: len(whole) // 2], b"a,b\n1,2\n" * 10):
        path.write_bytes(data)
        refused(path, None, "should be a Parquet file, but cannot be read")


def test_parquet_with_two_columns_of_one_name(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table([[1], [2], [3]], names=["a", "b", "a"]), path)
    refused(path, None, "a name of its own, got 'a' more than once")


def test_empty_and_incomplete_parquet(tmp_path: Path) -> None:
    refused(write(FRAME[:0], tmp_path / "t.parquet"), None, "should hold rows of data, got none")
    holes = FRAME.assign(colour=["red", None, "red"])
    refused(write(holes, tmp_path / "t.parquet"), None, "in column 'colour', row 2 ")


def test_damaged_npz(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    np.savez(path, X=np.random.default_rng(0).random((50, 3)), y=np.zeros(50))
    whole = path.read_bytes()
    middle = len(whole) // 2
    for data in (
        b"",
        b"PK",
        whole[:-30],
        whole[:middle],
        whole[:300] + b"garbled" + whole[307:],
        b"a,b\n1,2\n",
    ):
        path.write_bytes(data)
        refused(path, None, "should be an NPZ file of plain numbers and texts, but cannot be read")


def test_npz_with_objects_is_not_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", X=np.array([{}, []], dtype=object))
    refused(tmp_path / "t.npz", None, "cannot be read .*allow_pickle=False")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"X": np.zeros((4, 2)), "y": np.zeros(3)}, "same number of rows, got 'X' 4, 'y' 3"),
        ({"X": np.zeros((4, 2, 2))}, r"got 'X' of shape \(4, 2, 2\). Reshape it"),
        ({"X": np.float64(1)}, r"got 'X' of shape \(\)"),
        ({"X": np.zeros((0, 2)), "y": np.zeros(0)}, "should hold rows of data, got none"),
        ({}, "should hold rows of data, got none"),
        ({"X": np.array([[1.0, np.nan], [np.inf, 2.0]])}, "columns 'X0', 'X1', rows 1, 2 "),
        ({"X": np.zeros((2, 2)), "X0": np.zeros(2)}, "a name of its own, got 'X0' more than once"),
    ],
)
def test_npz_arrays_that_do_not_fit(
    arrays: dict[str, np.ndarray], message: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "t.npz", **arrays)
    refused(tmp_path / "t.npz", None, message)


def test_row_numbers_that_pandas_wrote_are_no_feature(tmp_path):
    frame = pd.DataFrame({"a": [1.5, 2.5], "b": [3, 4]})
    frame.to_csv(tmp_path / "t.csv")
    assert list(read_table(tmp_path / "t.csv").features.columns) == ["a", "b"]
    (tmp_path / "t.csv").write_text(",a\n7,1\n9,2\n")
    assert list(read_table(tmp_path / "t.csv").features.columns) == ["Unnamed: 0", "a"]
