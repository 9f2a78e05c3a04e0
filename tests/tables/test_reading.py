from __future__ import annotations

import gzip
import io
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lpom.exceptions import DataError
from lpom.tables.numbers import NumberFormat
from lpom.tables.reading import read_table

FRAME = pd.DataFrame(
    {"length": [1.5, 2.5, 3.5], "colour": ["red", "blue", "red"], "kind": ["a", "b", "a"]}
)


def write(frame: pd.DataFrame, path: Path) -> Path:
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        frame.to_parquet(path)
    elif path.suffix == ".xlsx":
        pytest.importorskip("openpyxl", reason="openpyxl is not installed")
        frame.to_excel(path, index=False)
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
    "name", ["t.csv", "t.CSV", "t.csv.gz", "t.tsv", "t.tsv.gz", "t.parquet", "t.npz", "t.xlsx"]
)
def test_read(name: str, tmp_path: Path) -> None:
    table = read_table(write(FRAME, tmp_path / name))
    assert list(table.frame.columns) == ["length", "colour", "kind"] and table.notes == ()
    assert table.frame["length"].astype(float).tolist() == [1.5, 2.5, 3.5]
    assert table.frame["colour"].tolist() == ["red", "blue", "red"]
    assert "sv" not in name.lower() or table.frame["length"].tolist() == ["1.5", "2.5", "3.5"]


def test_semicolons_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes('\ufeff"a;1";b\n1;2\n3;4\n'.encode())
    assert read_table(path).frame.to_dict("list") == {"a;1": ["1", "3"], "b": ["2", "4"]}


@pytest.mark.parametrize("sign", [",", ";", "|", "\t", "~"])
def test_separators_and_encodings(tmp_path: Path, sign: str) -> None:
    path = tmp_path / "t.csv"
    text = f"Größe{sign}x\n1{sign}é\n"
    separator = sign if sign == "~" else None
    for encoding, said in (("utf-8", None), ("utf-16", None), ("cp1252", "cp1252")):
        path.write_bytes(text.encode(encoding))
        frame = read_table(path, encoding=said, separator=separator).frame
        assert frame.to_dict("list") == {"Größe": ["1"], "x": ["é"]}
    refused(path, "is not text in UTF-8 .*--encoding cp1252")
    with pytest.raises(DataError, match="no encoding 'cp125'"):
        read_table(path, encoding="cp125")


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a,b\n1,2\n")))
    assert read_table("-").frame.to_dict("list") == {"a": ["1"], "b": ["2"]}


def test_texts_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("code,n\n007,NA\nnone,\n")
    frame = read_table(tmp_path / "t.csv").frame
    assert frame["code"].tolist() == ["007", "none"]
    assert frame["n"].iloc[0] == "NA" and pd.isna(frame["n"].iloc[1])


def test_names_that_come_again(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b,a,\n1,2,3,\na,b,a,\n4,5,6,7\n")
    table = read_table(tmp_path / "t.csv")
    assert list(table.frame.columns) == ["a", "b", "a (2)", "column 4"]
    assert table.frame["a (2)"].tolist() == ["3", "a", "6"]  # the line differs: it has no 4th name
    assert table.notes == ("the second column 'a' is called 'a (2)'",)
    (tmp_path / "t.csv").write_text("a,b\n1,2\na,b\n4,5\na,b\n")
    table = read_table(tmp_path / "t.csv")
    assert table.frame["a"].tolist() == ["1", "4"]
    assert table.notes == ("2 lines repeating the names left out",)


def test_npz_with_X_and_y(tmp_path: Path) -> None:
    X, y = np.arange(6.0).reshape(3, 2), np.array([0, 1, 0])
    for last in (y, y[:, None]):
        np.savez(tmp_path / "t.npz", X=X, y=last)
        frame = read_table(tmp_path / "t.npz").frame
        assert list(frame.columns) == ["X0", "X1", "y"]
        np.testing.assert_array_equal(frame.to_numpy(), np.column_stack([X, y]))


def test_an_excel_sheet_need_not_start_in_its_corner(tmp_path: Path) -> None:
    path = tmp_path / "t.xlsx"
    day = pd.Timestamp("2024-05-01")
    rows = {"x": 4 * [None], "y": [None, "a", 1.5, "?"], "z": [None, "day", day, day]}
    pd.DataFrame(rows, dtype=object).to_excel(path, index=False, header=False)
    frame = read_table(path).frame
    assert frame["a"].tolist() == [1.5, "?"] and frame["day"].tolist() == [day, day]
    path.write_bytes(path.read_bytes()[:-200])
    refused(path, "should be an Excel file, but cannot be read")


def test_excel_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.xlsx").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(ImportError, match="needs openpyxl: pip install openpyxl"):
        read_table(tmp_path / "t.xlsx")


@given(values=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
@settings(max_examples=25, deadline=None)
def test_numbers_survive(values: list[float], tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("numbers") / "t.csv"
    pd.DataFrame({"x": values}).to_csv(path, index=False)
    texts = read_table(path).frame["x"]
    np.testing.assert_allclose(NumberFormat().read(list(texts)), values, rtol=1e-14)


def refused(path: Path, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read_table(path)
    assert str(path) in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a\n1\n")
    refused(tmp_path / "trian.csv", "There is no file .* Did you mean 'train.csv'")
    refused(tmp_path / "no" / "train.csv", "There is no file .*csv. Check the path")


def test_folder(tmp_path: Path) -> None:
    refused(tmp_path, "should be a file, but is a folder")


@pytest.mark.parametrize("name", ["t.docx", "t", "t.npy.gz", "t.csv.zip"])
def test_unsupported_ending(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("a,b\n1,2\n")
    refused(tmp_path / name, r"should end in .csv, .*xlsx or .npz, got '")


CSV_ERRORS = {
    "empty": (b"", "should start with a line of column names, but is empty"),
    "blank": (b"\n \n", "should start with a line of column names, but is empty"),
    "no rows": (b"a,b\n", "should hold rows of data, got none"),
    "long line": (b"a,b\n1,2\n1,2,3\n", "cannot be read .*Expected 2 fields in line 3, saw 3"),
    "all lines longer": (b"a,b\n1,2,3\n1,2,3\n", "as many values in each line .*cannot be read"),
    "open quote": (b'a,b\n1,"2\n3,4\n', "cannot be read .*EOF inside string"),
    "no header": (b"1,1,2\n1,2,3\n", "line of column names, got numbers: '1', '1', '2'. Add"),
    "zeros": (b"a,b\n1,2\n" + bytes(40), "should be text, but holds zero bytes"),
}


@pytest.mark.parametrize("case", CSV_ERRORS)
@pytest.mark.parametrize("packed", [False, True], ids=["csv", "csv.gz"])
def test_csv_errors(case: str, packed: bool, tmp_path: Path) -> None:
    data, message = CSV_ERRORS[case]
    path = tmp_path / ("t.csv.gz" if packed else "t.csv")
    path.write_bytes(gzip.compress(data) if packed else data)
    refused(path, message)


def test_truncated_gzip(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 1000)[:-12])
    refused(path, "cannot be unpacked .*damaged or was cut off")
    path.write_bytes(b"a,b\n1,2\n")
    refused(path, "should be a gzip file, but it cannot be unpacked")


def test_damaged_parquet(tmp_path: Path) -> None:
    path = write(FRAME, tmp_path / "t.parquet")
    whole = path.read_bytes()
    for data in (b"", b"PAR1", whole[:-20], whole[: len(whole) // 2], b"a,b\n1,2\n" * 10):
        path.write_bytes(data)
        refused(path, "should be a Parquet file, but cannot be read")


def test_parquet_with_two_columns_of_one_name(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table([[1], [2], [3]], names=["a", "b", "a"]), path)
    assert list(read_table(path).frame.columns) == ["a", "b", "a (2)"]


def test_empty_parquet(tmp_path: Path) -> None:
    refused(write(FRAME[:0], tmp_path / "t.parquet"), "should hold rows of data, got none")


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
        refused(path, "should be an NPZ file of plain numbers and texts, but cannot be read")


def test_npz_with_objects_is_not_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", X=np.array([{}, []], dtype=object))
    refused(tmp_path / "t.npz", "cannot be read .*allow_pickle=False")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"X": np.zeros((4, 2)), "y": np.zeros(3)}, "same number of rows, got 'X' 4, 'y' 3"),
        ({"X": np.zeros((4, 2, 2))}, r"got 'X' of shape \(4, 2, 2\). Reshape it"),
        ({"X": np.float64(1)}, r"got 'X' of shape \(\)"),
        ({"X": np.zeros((0, 2)), "y": np.zeros(0)}, "should hold rows of data, got none"),
        ({}, "should hold rows of data, got none"),
    ],
)
def test_npz_arrays_that_do_not_fit(
    arrays: dict[str, np.ndarray], message: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "t.npz", **arrays)
    refused(tmp_path / "t.npz", message)


def test_row_numbers_that_pandas_wrote_are_no_feature(tmp_path):
    frame = pd.DataFrame({"a": [1.5, 2.5], "b": [3, 4]})
    frame.to_csv(tmp_path / "t.csv")
    assert list(read_table(tmp_path / "t.csv").frame.columns) == ["a", "b"]
    (tmp_path / "t.csv").write_text(",a\n7,1\n9,2\n")
    assert list(read_table(tmp_path / "t.csv").frame.columns) == ["column 1", "a"]
