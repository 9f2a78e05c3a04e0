"""Tables become inputs and targets; what is ambiguous is asked about."""

from __future__ import annotations

import datetime
import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.linear_model import RidgeCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import lpom
from lpom.estimators.data import split_rows
from lpom.exceptions import DataError
from lpom.tables import TableEncoder, Target
from lpom.tables.columns import MISSING, OTHER, Category
from lpom.tables.dates import CYCLES, DateFormat, cycles_of, cyclic, date_format
from lpom.tables.encodings import Scaling
from lpom.tables.numbers import NumberFormat, number_format
from lpom.tables.values import values_of

TABLE = pd.DataFrame(
    {
        "age": [20, 30, 40, 50],
        "colour": ["red", "blue", "red", "green"],
        "member": [True, False, True, True],
        "height": [1.5, 1.7, 1.9, 1.7],
        "site": ["x", "x", "x", "x"],
        "one": [7, 7, 7, 7],
    }
)


@parametrize_with_checks([TableEncoder()])
def test_scikit_learn_checks(estimator, check):
    check(estimator)


# -- numbers and dates in texts -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "expected", "form"),
    [
        (["1", "-2", "3.5", "+4", ".5", "1e3"], [1, -2, 3.5, 4, 0.5, 1000], (".", "")),
        (["1,234.5", "12", "1,000,000"], [1234.5, 12, 1e6], (".", ",")),
        (["1.234,5", "12", "1.000.000", "29.477"], [1234.5, 12, 1e6, 29477], (",", ".")),
        (["2,5", "3,25", "7"], [2.5, 3.25, 7], (",", "")),
        (["29,477", "2,5"], [29.477, 2.5], (",", "")),
        (["29,477", "1,234,567"], [29477, 1234567], (".", ",")),
        (["29,477", "0,125"], [29.477, 0.125], (",", "")),
        (
            ["$3.50", "€ 4", "5 %", "-£6", "(7)", "8 EUR", "$-9"],
            [3.5, 4, 0.05, -6, -7, 8, -9],
            (".", ""),
        ),
        (["1 234", "12\u00a0345,5", "1\u202f000"], [1234, 12345.5, 1000], (",", " ")),
        (["1'234", "5’678.5"], [1234, 5678.5], (".", "'")),
        (["−3", "4"], [-3, 4], (".", "")),
        (["29.477", "1.5"], [29.477, 1.5], (".", "")),
    ],
)
def test_numbers_in_texts(texts, expected, form):
    found = number_format(texts)
    assert found == NumberFormat(*form)
    np.testing.assert_allclose(found.read(texts), expected)


def test_what_is_no_number_is_not_one():
    read = NumberFormat(".", ",").read(["2,5", "1,2345", "one", "", "1,234", "inf", "1_0"])
    np.testing.assert_array_equal(read, [np.nan] * 4 + [1234, np.nan, np.nan])
    assert number_format(["red", "blue"]) is None
    assert number_format(["007", "12"]) is None  # a code


def test_a_comma_that_may_be_either_is_asked_for():
    texts = ["29,477", "1,200"]
    with pytest.raises(DataError, match="'29,477'.*--thousands"):
        number_format(texts)
    assert number_format(texts, thousands=",") == NumberFormat(".", ",")
    assert number_format(texts, decimal=",") == NumberFormat(",", "")
    with pytest.raises(DataError, match="uses ',' both"):
        number_format(["1,234,567", "2,5"])
    with pytest.raises(DataError, match="decimal points and decimal commas"):
        number_format(["1.5", "2,5"])


@pytest.mark.parametrize(
    ("texts", "form"),
    [
        (["2024-01-31", "2023-12-01"], "ISO8601"),
        (["2024-01-31 12:30", "2023-12-01 00:00:07.25"], "ISO8601"),
        (["2024-01-31T12:30:00Z", "2023-12-01T01:00:00+02:00"], "ISO8601"),
        (["31.01.2024", "01.12.2023"], "%d.%m.%Y"),
        (["01.02.2024", "03.04.2023"], "%d.%m.%Y"),
        (["31/01/2024", "01/12/2023"], "%d/%m/%Y"),
        (["01/31/2024", "12/01/2023"], "%m/%d/%Y"),
        (["31/01/24 08:15", "01/12/23 17:00"], "%d/%m/%y %H:%M"),
        (["31 Jan 2024", "1 Dec 2023"], "%d %b %Y"),
        (["January 31, 2024", "December 1, 2023"], "%B %d, %Y"),
    ],
)
def test_dates_in_texts(texts, form):
    assert date_format(texts) == DateFormat(form)
    expected = pd.to_datetime(
        pd.Series(texts), format=form if "%" in form else "ISO8601", utc=True
    ).dt.tz_localize(None)
    days = (expected - pd.Timestamp(0)) / pd.Timedelta(days=1)
    np.testing.assert_allclose(DateFormat(form).read(texts), days, rtol=1e-12)


def test_days_and_months_that_may_change_places_are_asked_for():
    texts = ["03/04/2024", "05/06/2024"]
    with pytest.raises(DataError, match="'03/04/2024'.*--date-order"):
        date_format(texts)
    assert date_format(texts, "dmy").form == "%d/%m/%Y"
    assert date_format(texts, "mdy").form == "%m/%d/%Y"
    for words in (["red", "blue"], ["10-12", "13-15"], ["A-1", "B-2"], ["12:30", "13:00"]):
        assert date_format(words) is None


def test_a_date_has_places_in_its_cycles():
    moments = pd.Series(pd.date_range("2024-01-01", periods=400, freq="25h"))
    days = values_of(moments, "t").numbers
    assert cycles_of(days) == tuple(CYCLES)
    waves = cyclic(days, ("week", "day"))
    hours = (moments.dt.hour + moments.dt.minute / 60) / 24
    np.testing.assert_allclose(waves[:, 2], np.sin(2 * np.pi * hours), atol=1e-9)
    np.testing.assert_array_equal(np.floor((days - 4) % 7), moments.dt.day_of_week)  # from a Monday
    np.testing.assert_array_equal(cyclic(np.array([np.nan]), ("week",)), [[0, 0]])


def test_the_year_9999_is_no_date_and_far_ones_are():
    written = ["2020-01-01", "9999-12-31", "1600-05-05", "2021-03-04"] * 15
    expected = [(np.datetime64(day) - np.datetime64("1970-01-01")).astype(float) for day in written]
    expected = [np.nan if days > 2e6 else days for days in expected]
    assert date_format(list(dict.fromkeys(written))) is not None
    np.testing.assert_array_equal(DateFormat().read(written), expected)
    moments = pd.Series(written).astype("datetime64[s]")
    np.testing.assert_array_equal(values_of(moments, "until").numbers, expected)


# -- values --------------------------------------------------------------------------------------


def test_the_same_column_from_any_container_is_the_same():
    pa = pytest.importorskip("pyarrow")
    moments = pd.date_range("2020-01-01", periods=60, freq="7h")
    days = (moments - pd.Timestamp(0)) / pd.Timedelta(days=1)
    for column in (
        moments.to_series(),
        moments.tz_localize("UTC").to_series(),
        moments.to_series().astype(pd.ArrowDtype(pa.timestamp("us"))),
        [moment.to_pydatetime() for moment in moments],
        [moment.to_pydatetime().replace(tzinfo=datetime.UTC) for moment in moments],
    ):
        found = values_of(column, "t")
        assert found.form == "date"
        np.testing.assert_allclose(found.numbers, days)
    dates = pd.Series(moments).astype(pd.ArrowDtype(pa.date32()))
    np.testing.assert_allclose(values_of(dates, "t").numbers, np.floor(days))
    for column in ([1, None, 3], pd.array([1, None, 3], "Int64"), np.array([1, np.nan, 3])):
        np.testing.assert_array_equal(values_of(column, "n").numbers, [1, np.nan, 3])
    for column in (
        ["a", None, " b "],
        pd.array(["a", pd.NA, "b"]),
        pd.Categorical(["a", None, "b"]),
    ):
        assert values_of(pd.Series(column), "w").texts.listed() == ["a", None, "b"]
    assert values_of([1.0, 2.5, None], "x").texts.listed() == ["1", "2.5", None]
    for durations in (pd.Series(moments - moments[0]), [datetime.timedelta(1)], [1j]):
        with pytest.raises(DataError, match="turn them into numbers"):
            values_of(durations, "w")


def test_tables_without_pandas_and_arrays():
    table = {"price": ["€1,200", "€80", "?"], "colour": ["red", "blue", "red"]}
    for X in (table, pd.DataFrame(table)):
        encoder = TableEncoder(thousands=",").fit(X)
        names = ["price", "price is missing", "colour = blue", "colour = red"]
        assert list(encoder.get_feature_names_out()) == names
    x = np.random.default_rng(0).normal(size=(30, 2))
    encoder = TableEncoder().fit(x)
    np.testing.assert_allclose(encoder.transform(x).mean(0), 0, atol=1e-6)
    named = TableEncoder().fit(pd.DataFrame(x, columns=["a", "b"]))
    with pytest.warns(UserWarning, match="valid feature names"):
        np.testing.assert_array_equal(named.transform(x), encoder.transform(x))
    for wrong, word in (
        (pd.DataFrame(x, columns=["a", "a"]), "more than one column 'a'"),
        ({"a": [1, 2], "b": [1]}, "as many rows"),
        ({}, "0 columns"),
    ):
        with pytest.raises(DataError, match=word):
            TableEncoder().fit(wrong)


# -- what a column is -----------------------------------------------------------------------------


def kinds(frame, **options):
    return {name: kind for name, kind, _ in TableEncoder(**options).fit(frame).plan()}


def table_of(n=60, **columns):
    rng = np.random.default_rng(0)
    return pd.DataFrame({"x": rng.normal(size=n), **{k: list(v) for k, v in columns.items()}})


def test_each_kind_of_column_is_told_from_its_values():
    assert kinds(TABLE) == {
        "age": "number", "colour": "category", "member": "yes/no", "height": "number",
        "site": "dropped", "one": "dropped",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("values", "kind", "why"),
    [
        (range(1, 61), "dropped", "counts the rows"),
        (np.arange(60) ** 2 % 61, "number", ""),
        ([f"person {k}" for k in range(60)], "dropped", "an identifier: 60 different values in 60"),
        ([f"all is said about {k} here" for k in range(60)], "dropped", "free text: 60 different"),
        ([f"{'red green blue'.split()[k % 3]} box no {k}" for k in range(60)], "text", "by its"),
        ([None] * 60, "dropped", "empty"),
        (["n/a", ""] * 30, "dropped", "empty"),
        (["5", "5.0"] * 30, "dropped", "'5' in every row"),
        (["x"] * 60, "dropped", "'x' in every row"),
        (["x", None] * 30, "category", "1: 'x'; missing in 30 rows"),
        ([3.5] * 60, "dropped", "3.5 in every row"),
        ([3.5, None] * 30, "number", "missing in 30 rows"),
        ([*(f"{k}.5" for k in range(58)), "?", "unknown"], "number", "'?', 'unknown' taken as mis"),
        (["yes", "no", ""] * 20, "yes/no", "missing in 20 rows"),
        (["01067", "10115", "80331"] * 20, "category", "3: '01067', '10115', '80331'"),
        (["A12", "7", "1.50"] * 20, "category", "3: '1.50', '7', 'A12'"),
        ([f"v{k % 25}" for k in range(60)], "category", "the 10 most frequent of 25, the others"),
        (pd.Categorical([1, 2, 3, 4] * 15), "category", "4: '1', '2', '3', '4'"),
    ],
)
def test_a_column_is_told_from_its_values(values, kind, why):
    frame = table_of()
    frame["c"] = values
    (_, (name, found, remark)) = TableEncoder().fit(frame).plan()
    assert (name, found) == ("c", kind) and remark.startswith(why)


def test_words_for_nothing_are_missing_in_numbers_and_in_texts():
    frame = table_of(n=60, a=["1.5", "NA", "2.5"] * 20, b=["p", "NA", "q"] * 20)
    encoder = TableEncoder().fit(frame)
    names = list(encoder.get_feature_names_out())
    assert names[1:] == ["a", "a is missing", "b = p", "b = q", f"b = {MISSING}"]
    X = encoder.transform(frame)
    np.testing.assert_array_equal(X[:, 2], X[:, 5])


def test_numbers_that_name_the_rows_go_by_their_column_too():
    values = np.random.default_rng(0).permutation(10_000)[:60]
    for name in ("id", "PassengerId", "customer_id", "ID", "order no"):
        assert kinds(table_of(**{name: values}))[name] == "dropped"
    for name in ("width", "paid", "grid", "valid"):
        assert kinds(table_of(**{name: values}))[name] == "number"


def test_the_user_knows_better():
    frame = table_of(code=np.arange(60) % 5, id=range(60), note=[f"n{k}" for k in range(60)])
    asked = {"code": "category", "id": "number", "note": "category", "x": "dropped"}
    assert kinds(frame, kinds=asked) == {
        "x": "dropped", "code": "category", "id": "number", "note": "category",
    }  # fmt: skip
    assert kinds(frame, kinds={"note": "text"})["note"] == "text"
    assert kinds(frame, ignore=["code"])["code"] == "dropped"
    assert kinds(frame, ignore="x")["x"] == "dropped"
    with pytest.raises(DataError, match="column 'note' should be a number.*'n0'"):
        TableEncoder(kinds={"note": "number"}).fit(frame)


def test_all_problems_come_at_once():
    frame = table_of(
        a=["29,477", "1,200"] * 30, b=["03/04/2024", "05/06/2024"] * 30, c=[1e308] * 60
    )
    frame.loc[0, "c"] = -1e308
    with pytest.raises(DataError) as caught:
        TableEncoder(ignore=["y"], kinds={"x": "nmber"}).fit(frame)
    for part in ("'29,477'", "'b' holds dates", "'c' holds values", "column 'y'", "'nmber'"):
        assert part in str(caught.value)


def test_points_are_asked_for_where_another_column_has_decimal_commas():
    frame = table_of(a=["2,5", "3,25"] * 30, b=["1.234", "29.477"] * 30)
    with pytest.raises(DataError, match="column 'b' holds '1.234'.*'a'"):
        TableEncoder().fit(frame)
    for options, expected in (({"thousands": "."}, 1234), ({"decimal": "."}, 1.234)):
        column = TableEncoder(**options).fit(frame).columns_["b"]
        assert column.read(values_of(frame["b"], "b"))[0] == expected


def test_nothing_to_learn_from():
    with pytest.raises(DataError, match="no column to learn from.*'site': 'x' in every row"):
        TableEncoder().fit(TABLE[["site", "one"]])


# -- inputs ---------------------------------------------------------------------------------------


def test_each_kind_of_column_is_encoded():
    encoder = TableEncoder().fit(TABLE)
    X = encoder.transform(TABLE)
    numbers = TABLE[["age", "member", "height"]].to_numpy(float)
    standard = (numbers - numbers.mean(0)) / numbers.std(0)
    np.testing.assert_allclose(X[:, [0, 4, 5]], standard, rtol=1e-6)
    np.testing.assert_array_equal(X[:, 1:4], [[0, 0, 1], [1, 0, 0], [0, 0, 1], [0, 1, 0]])
    assert X.dtype == np.float32
    assert encoder.inputs_of_["colour"] == range(1, 4) and len(encoder.inputs_of_["site"]) == 0
    raw = TableEncoder(scale=False).fit_transform(TABLE)
    np.testing.assert_array_equal(raw[:, [0, 4, 5]], numbers.astype(np.float32))


def test_columns_are_found_by_name_in_any_order_and_unit_of_text():
    encoder = clone(TableEncoder()).fit(TABLE)
    expected = encoder.transform(TABLE)
    for table in (
        TABLE.drop(columns=["site", "one"]),
        TABLE.assign(one=1e9, site="y", extra=1),
        TABLE[TABLE.columns[::-1]],
        TABLE.astype({"age": str, "height": str}),
        TABLE.to_dict("list"),
    ):
        np.testing.assert_array_equal(encoder.transform(table), expected)
    with pytest.raises(DataError, match="lacks 'age', 'colour'"):
        encoder.transform(TABLE.drop(columns=["age", "colour"]))


def test_what_is_unlike_training_is_taken_so_with_a_warning():
    encoder = TableEncoder().fit(TABLE)
    other = TABLE.assign(colour=["red", "mauve", None, "red"], age=[20, None, 40, 50])
    with pytest.warns(UserWarning) as said:
        X = encoder.transform(other)
    for part in ("'age' has no value in 1 row", "'colour' holds 'mauve'", "'colour' has no value"):
        assert part in str(said[0].message)
    np.testing.assert_array_equal(X[1:3, 1:4], 0)  # no category is there
    assert X[1, 0] == pytest.approx(0)  # the median
    with pytest.warns(UserWarning, match="'height' holds 1e\\+300 in row 1"):
        X = encoder.transform(TABLE.assign(height=1e300))
    assert np.abs(X).max() < 10


def test_one_typing_error_changes_nothing():
    rng = np.random.default_rng(0)
    width = rng.uniform(4, 9, 2000)
    typo = width.copy()
    typo[7] = 5890.0
    plain, clipped = (Scaling.fit(x).inputs(x) for x in (width, typo))
    kept = np.arange(2000) != 7
    np.testing.assert_allclose(clipped[kept, 0], plain[kept, 0], atol=0.08)
    assert np.abs(clipped).max() < 15


def test_a_number_has_a_curve_where_there_are_rows_enough():
    x = np.linspace(0, 1, 1000)
    scaling = Scaling.fit(x)
    hats = scaling.inputs(x)[:, 1:]
    np.testing.assert_allclose(hats.sum(1), 0.5)  # a partition
    fitted = hats @ np.linalg.lstsq(hats, np.sin(6 * x), rcond=None)[0]
    assert np.abs(fitted - np.sin(6 * x)).max() < 0.05
    assert Scaling.fit(x[::10]).knots == ()
    assert Scaling.fit(np.arange(1000) % 5.0).knots == (0, 1, 2, 3, 4)


def test_rare_and_new_values_share_an_input():
    frame = table_of(c=[f"v{k % 25}" for k in range(60)])
    encoder = TableEncoder().fit(frame)
    names = list(encoder.get_feature_names_out())
    other, often = names.index(f"c = {OTHER}"), names.index("c, how frequent")
    with pytest.warns(UserWarning, match="every row of column 'c'"):
        X = encoder.transform(frame.assign(c="never seen"))
    np.testing.assert_array_equal(X[:, other], 1)
    np.testing.assert_array_equal(X[:, 1:].sum(1), 1)
    np.testing.assert_array_equal(X[:, often], 0)


def test_categories_as_frequent_as_each_other_are_cut_together():
    words = np.repeat([f"w{k:03}" for k in range(500)], [10] * 200 + [3] * 300)
    column = TableEncoder().fit(table_of(len(words), c=words)).columns_["c"]
    assert isinstance(column, Category) and len(column.values) == 200 + 1
    column = TableEncoder(max_categories=600).fit(table_of(len(words), c=words)).columns_["c"]
    assert len(column.values) == 500


def test_words_of_the_library_may_be_values():
    words = ["(other)", "(missing)", None] * 4 + [f"v{k % 24}" for k in range(96)]
    frame = table_of(len(words), c=words)
    encoder = TableEncoder().fit(frame)
    X = encoder.transform(frame)
    assert X.shape[1] == len(encoder.get_feature_names_out()) and set(X[:, 1:].sum(1)) == {1}


def test_texts_are_compared_by_what_they_share():
    rng = np.random.default_rng(0)
    towns, kinds_of = (
        rng.choice(["Ulm", "Köln", "Bonn", "Jena"], 1200),
        rng.choice(["pub", "bar"], 1200),
    )
    names = [f"{t}er {k} nr {n}" for n, (t, k) in enumerate(zip(towns, kinds_of, strict=True))]
    frame = table_of(1200, name=names)
    y = np.where(kinds_of == "pub", 5.0, 0.0) + 3 * (towns == "Ulm")
    model = make_pipeline(TableEncoder(n_components=10), StandardScaler(), RidgeCV())
    assert model.fit(frame[:1000], y[:1000]).score(frame[1000:], y[1000:]) > 0.9
    encoder = model[0]
    assert len(encoder.inputs_of_["name"]) == 10
    gaps = frame[1000:].assign(name=None)
    with pytest.warns(UserWarning, match="'name' has no value in 200 rows"):
        np.testing.assert_array_equal(
            encoder.transform(gaps)[:, 1 + len(encoder.inputs_of_["x"]) :], 0
        )


def test_codes_that_lost_their_zeros_are_said():
    codes = [f"0{1000 + k % 50}" for k in range(400)]
    frame = pd.DataFrame({"zip": codes, "x": np.arange(400) % 7 + 0.5})
    encoder = TableEncoder().fit(frame)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoder.transform(frame)
    with pytest.warns(UserWarning, match="texts such as '01000' and holds numbers here"):
        encoder.transform(frame.assign(zip=list(map(int, codes))))


def test_a_flag_is_0_or_1():
    encoder = TableEncoder().fit({"f": [True, False] * 30, "x": np.arange(60) % 7 + 0.5})
    with pytest.warns(UserWarning, match="'f' holds '5' in row 2, which is no yes/no"):
        encoder.transform({"f": [1, 5, 0], "x": [1.5, 2.5, 0.5]})


def test_a_column_that_gives_the_answer_away_is_remarked():
    frame = table_of(200, price=np.random.default_rng(1).uniform(1, 9, 200))
    for y in (frame["price"] * 1.19, frame["price"] > 5):
        hints = TableEncoder().fit(frame, y).hints_
        assert len(hints) == 1 and "'price' alone" in hints[0]
    assert TableEncoder().fit(frame, np.random.default_rng(2).normal(size=200)).hints_ == []


def test_an_encoder_and_a_target_are_saved_whole(tmp_path):
    texts = [f"{'red green blue'.split()[k % 3]} box no {k}" for k in range(60)]
    frame = table_of(
        t=texts, d=pd.date_range("2024", periods=60).astype(str), c=["a", "b", None] * 20
    )
    encoder = TableEncoder(ignore=("q",)).set_params(ignore=()).fit(frame)
    target = Target.fit(frame.assign(y=["$1,5", "$3,25"] * 30), "y")
    lpom.save({"encoder": encoder, "target": target}, tmp_path / "both.safetensors")
    again = lpom.load(tmp_path / "both.safetensors")
    np.testing.assert_array_equal(again["encoder"].transform(frame), encoder.transform(frame))
    assert again["encoder"].plan() == encoder.plan() and again["target"] == target


# -- targets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "task", "classes"),
    [
        (["b", "a", "b"], "auto", ("a", "b")),
        ([True, False, True], "auto", ("False", "True")),
        ([10, 9, 10, 9, 2, 2], "auto", (2, 9, 10)),
        (["10", "9", "10", "9", "2", "2"], "auto", (2, 9, 10)),
        ([1, 2, 3, 4], "auto", None),
        ([1.0, 2.0, 1.0, 2.0], "auto", None),
        ([1.0, 2.0, 1.0, 2.0], "classification", (1, 2)),
        (["1.200,5", "3,25", None, "7"], "auto", None),
        ([0, 1, 1, 0], "regression", None),
        (["none", "a", "none", "?"], "auto", ("a", "none")),
        (["01", "2", "01", "2"], "classification", ("01", "2")),
    ],
)
def test_what_a_target_is(values, task, classes):
    target = Target.fit({"t": values}, "t", task)
    assert target.task == ("regression" if classes is None else "classification")
    assert target.classes == (() if classes is None else (classes,))
    y, known = target.read({"t": values})
    np.testing.assert_array_equal(known, [value not in (None, "?") for value in values])
    if classes:
        assert set(y.tolist()) == set(classes)
    elif task == "auto" and isinstance(values[0], str):
        np.testing.assert_array_equal(y, [1200.5, 3.25, 7])


@pytest.mark.parametrize(
    ("values", "task", "words"),
    [
        (["a", "a"], "auto", "one class only"),
        ([3, 3, 3], "auto", "one class only"),
        ([0.5, 0.5], "auto", "0.5 in every row"),
        ([f"name {k}" for k in range(30)], "auto", "30 different values"),
        (["a", "b", "a"], "regression", "'a' in row 1"),
        ([None, None], "auto", "no value"),
        ([*map(str, range(40)), "oh"], "auto", "'oh' in row 41 .*--task classification"),
        (["1,200", "29,477"], "auto", "'1,200', which may be 1200 or 1.200"),
        ([1e200, 2e200, 4e200], "regression", "another unit"),
        ([datetime.timedelta(1), datetime.timedelta(2)], "auto", "turn them into numbers"),
    ],
)
def test_targets_that_cannot_be_learnt(values, task, words):
    with pytest.raises(DataError, match=words):
        Target.fit({"t": values}, "t", task)
    with pytest.raises(ValueError, match="'clasification'.*classification"):
        Target.fit({"t": values}, "t", "clasification")
    with pytest.raises(DataError, match="'s'"):
        Target.fit({"t": values}, "s")


def test_classes_of_numbers_come_with_a_hint():
    assert "task='regression'" in Target.fit({"t": [1, 2, 3, 4] * 9}, "t").hints[0]
    assert not Target.fit({"t": [0, 1] * 9}, "t").hints
    assert not Target.fit({"t": ["a", "b"] * 9}, "t").hints


def test_several_targets_are_all_numbers_or_all_pairs_of_classes():
    table = {"u": ["a", "b", None, "a"] * 3, "v": [1, 0, 1, 1] * 3, "w": [1.5, 2.5, 3.5, 4.5] * 3}
    target = Target.fit(table, ["u", "v"])
    y, known = target.read(table)
    np.testing.assert_array_equal(y[:3], [[0, 1], [1, 0], [0, 1]])
    assert known.sum() == 9
    assert target.answers(y)["prediction_u"].tolist()[:3] == ["a", "b", "a"]
    assert list(target.probabilities(y / 1.0)) == ["probability_u_b", "probability_v_1"]
    numbers = Target.fit(table, ["w", "v"], "regression")
    assert numbers.read(table)[0].shape == (12, 2)
    assert list(numbers.answers(np.ones((2, 2)))) == ["prediction_w", "prediction_v"]
    with pytest.raises(DataError, match="several targets.*'w' is a number"):
        Target.fit(table, ["u", "w"])


# -- splits ---------------------------------------------------------------------------------------


def test_splits_are_stratified_seeded_and_whole():
    classes = np.repeat([0, 1, 2], [50, 30, 20])
    keep, hold = split_rows(100, 0.2, np.random.default_rng(3), classes)
    assert sorted([*keep, *hold]) == list(range(100))
    assert list(np.bincount(classes[hold])) == [10, 6, 4]
    again = split_rows(100, 0.2, np.random.default_rng(3), classes)[1]
    other = split_rows(100, 0.2, np.random.default_rng(4), classes)[1]
    assert list(hold) == list(again) != list(other)
    assert len(split_rows(3, 0.1, np.random.default_rng(0))[1]) == 0
