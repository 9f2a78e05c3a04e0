"""Tables become inputs and targets, answers come back in the table's own words."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.metrics import balanced_accuracy_score, f1_score, roc_auc_score

from lpom.estimators.splits import split_rows
from lpom.exceptions import DataError
from lpom.tables.old import (
    Classes,
    ColumnPlan,
    Features,
    Locale,
    Quantity,
    Several,
    TableEncoder,
    fit_target,
    target_from_json,
)
from lpom.tables.old.dates import DateFormat, date_format
from lpom.tables.old.numbers import NumberFormat, number_format
from lpom.tables.old.scores import always, class_scores, majority, number_scores

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


def through_json(made):
    return type(made).from_json(json.loads(json.dumps(made.to_json())))


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
    found = number_format(pd.Series(texts))
    assert found == NumberFormat(*form)
    np.testing.assert_allclose(found.read(pd.Series(texts)), expected)


def test_what_is_no_number_is_not_one():
    read = NumberFormat(".", ",").read(pd.Series(["2,5", "1,2345", "one", "", "1,234", "inf"]))
    np.testing.assert_array_equal(read, [np.nan, np.nan, np.nan, np.nan, 1234, np.nan])
    assert number_format(pd.Series(["red", "blue"])) is None
    assert number_format(pd.Series(["007", "12"])) is None  # a code


def test_a_comma_that_may_be_either_is_asked_for():
    texts = pd.Series(["29,477", "1,200"])
    with pytest.raises(DataError, match="'29,477', which may be 29477 or 29.477: say --thousands"):
        number_format(texts)
    assert number_format(texts, thousands=",") == NumberFormat(".", ",")
    assert number_format(texts, decimal=",") == NumberFormat(",", "")
    with pytest.raises(DataError, match="uses ',' both before decimals and between thousands"):
        number_format(pd.Series(["1,234,567", "2,5"]))
    with pytest.raises(DataError, match="decimal points and decimal commas"):
        number_format(pd.Series(["1.5", "2,5"]))


@pytest.mark.parametrize(
    ("texts", "form"),
    [
        (["2024-01-31", "2023-12-01"], "ISO8601"),
        (["2024-01-31 12:30", "2023-12-01 00:00"], "ISO8601"),
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
    found = date_format(pd.Series(texts))
    assert found == DateFormat(form)
    days = found.read(pd.Series(texts))
    assert int(days[0] // 1) in (19753, 19754) or texts[0].startswith("01.02")  # 2024-01-31
    assert days[0] > days[1]


def test_days_and_months_that_may_change_places_are_asked_for():
    texts = pd.Series(["03/04/2024", "05/06/2024"])
    with pytest.raises(DataError, match="'03/04/2024'.*--date-order dmy or mdy"):
        date_format(texts)
    assert date_format(texts, "dmy").form == "%d/%m/%Y"
    assert date_format(texts, "mdy").form == "%m/%d/%Y"
    for words in (["red", "blue"], ["10-12", "13-15"], ["A-1", "B-2"], ["12:30", "13:00"]):
        assert date_format(pd.Series(words)) is None


def test_a_date_becomes_days_and_its_cycles():
    moments = pd.Series(pd.date_range("2024-01-01", periods=400, freq="25h"))
    form = DateFormat().with_cycles(DateFormat().read(moments))
    assert form.cycles == ("year", "week", "day")
    made = form.inputs("t", form.read(moments))
    assert list(made) == ["t"] + [f"t, {c} {f}" for c in form.cycles for f in ("sin", "cos")]
    hours = (moments.dt.hour + moments.dt.minute / 60) / 24
    np.testing.assert_allclose(made["t, day sin"], np.sin(2 * np.pi * hours), atol=1e-9)
    week = (made["t"] - 4) % 7  # 1970-01-05 was a Monday
    np.testing.assert_array_equal(np.floor(week), moments.dt.day_of_week)
    missing = form.inputs("t", pd.Series([np.nan]))
    assert np.isnan(missing["t"][0]) and missing["t, week cos"][0] == 0


# -- plans ----------------------------------------------------------------------------------------


def kinds(frame, **options):
    return {column.name: column.kind for column in ColumnPlan.decide(frame, **options).columns}


def test_each_kind_of_column_is_told_from_its_values():
    assert kinds(TABLE) == {
        "age": "number", "colour": "category", "member": "yes/no", "height": "number",
        "site": "dropped", "one": "dropped",
    }  # fmt: skip


def rows(n=60, **columns):
    rng = np.random.default_rng(0)
    return pd.DataFrame({"x": rng.normal(size=n), **{k: list(v) for k, v in columns.items()}})


@pytest.mark.parametrize(
    ("values", "kind", "why"),
    [
        (range(1, 61), "dropped", "counts the rows"),
        (np.arange(60) ** 2 % 61, "number", ""),
        ([f"person {k}" for k in range(60)], "dropped", "an identifier: 60 different values in 60"),
        ([f"all is said about {k} here" for k in range(60)], "dropped", "free text: 60 different"),
        ([None] * 60, "dropped", "empty"),
        (["n/a", ""] * 30, "dropped", "empty"),
        (["5", "5.0"] * 30, "dropped", "'5' in every row"),
        (["x"] * 60, "dropped", "'x' in every row"),
        ([3.5] * 60, "dropped", "3.5 in every row"),
        ([3.5, None] * 30, "number", "missing in 30 rows"),
        ([*(f"{k}.5" for k in range(58)), "?", "unknown"], "number", "'?', 'unknown' taken as mis"),
        (["yes", "no", ""] * 20, "yes/no", "missing in 20 rows"),
        (["01067", "10115", "80331"] * 20, "category", "3: '01067', '10115', '80331'"),
        (["A12", "7", "1.50"] * 20, "category", "3: '1.50', '7', 'A12'"),
        ([f"v{k % 25}" for k in range(60)], "category", "the 10 most frequent of 25, the others"),
    ],
)
def test_a_column_is_told_from_its_values(values, kind, why):
    (_, (name, found, said)) = ColumnPlan.decide(rows(c=values)).rows()
    assert (name, found) == ("c", kind) and said.startswith(why)


def test_numbers_that_name_the_rows_go_by_their_column_too():
    values = np.random.default_rng(0).permutation(10_000)[:60]
    for name in ("id", "PassengerId", "customer_id", "ID", "order no"):
        assert kinds(rows(**{name: values}))[name] == "dropped"
    for name in ("width", "paid", "grid", "valid"):
        assert kinds(rows(**{name: values}))[name] == "number"


def test_the_user_knows_better():
    frame = rows(code=np.arange(60) % 5, id=range(60), note=[f"n{k}" for k in range(60)])
    asked = {"code": "category", "id": "number", "note": "category", "x": "dropped"}
    assert kinds(frame, kinds=asked) == {
        "x": "dropped", "code": "category", "id": "number", "note": "category",
    }  # fmt: skip
    assert kinds(frame, ignore=["code"])["code"] == "dropped"
    with pytest.raises(DataError, match="column 'note' should be a number, as asked for.*'n0'"):
        ColumnPlan.decide(frame, kinds={"note": "number"})


def test_all_problems_come_at_once():
    frame = rows(a=["29,477", "1,200"] * 30, b=["03/04/2024", "05/06/2024"] * 30, c=[1e308] * 60)
    frame.loc[0, "c"] = -1e308
    with pytest.raises(DataError) as caught:
        ColumnPlan.decide(frame, ignore=["y"], kinds={"x": "nmber"})
    for part in (
        "column 'a' holds '29,477'",
        "column 'b' holds dates",
        "column 'c' holds values up",
    ):
        assert part in str(caught.value)
    assert "unknown column 'y'" in str(caught.value) and "kind of column 'nmber'" in str(
        caught.value
    )


def test_points_are_asked_for_where_another_column_has_decimal_commas():
    frame = rows(a=["2,5", "3,25"] * 30, b=["1.234", "29.477"] * 30)
    with pytest.raises(DataError, match="column 'b' holds '1.234', which may be 1234 since .*'a'"):
        ColumnPlan.decide(frame)
    plan = ColumnPlan.decide(frame, locale=Locale(thousands="."))
    np.testing.assert_array_equal(plan.read(frame)["b"][:2], [1234, 29477])
    plan = ColumnPlan.decide(frame, locale=Locale(decimal="."))
    np.testing.assert_array_equal(plan.read(frame)["b"][:2], [1.234, 29.477])


def test_a_plan_prints_itself():
    assert str(ColumnPlan.decide(TABLE)).splitlines()[1:3] == [
        "colour  category  3: 'blue', 'green', 'red'",
        "member  yes/no    ",
    ]


# -- features -------------------------------------------------------------------------------------


def test_each_kind_of_column_is_encoded():
    features = Features.fit(TABLE)
    X = features.encode(TABLE)
    numbers = TABLE[["age", "member", "height"]].to_numpy(float)
    np.testing.assert_allclose(X[:, :3], (numbers - numbers.mean(0)) / numbers.std(0), rtol=1e-6)
    # blue, green, red
    np.testing.assert_array_equal(X[:, 3:], [[0, 0, 1], [1, 0, 0], [0, 0, 1], [0, 1, 0]])
    assert X.dtype == np.float32 and X.shape == (4, features.n_inputs)
    assert features.names == ["age", "member", "height", "colour"]


def test_missing_values_become_medians_and_are_told():
    frame = pd.DataFrame({"a": [1.0, np.nan, 3.0, 8.0], "c": ["u", None, "v", "u"]})
    features = Features.fit(frame)
    assert features.input_names == ["a", "a is missing", "c = u", "c = v", "c = (missing)"]
    X = features.encode(frame)
    filled = np.array([1.0, 3.0, 3.0, 8.0])
    np.testing.assert_allclose(X[:, 0], (filled - filled.mean()) / filled.std(), rtol=1e-6)
    np.testing.assert_allclose(X[:, 1], (np.eye(4)[1] - 0.25) / np.std(np.eye(4)[1]), rtol=1e-6)
    np.testing.assert_array_equal(X[:, 2:], [[1, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0]])


def everything(n=60):
    rng = np.random.default_rng(1)
    days = pd.Series(pd.date_range("2020-01-01", periods=n, freq="11D"))
    return pd.DataFrame(
        {
            "odd": rng.normal(size=n) / 3,
            "price": [f"€{x:,.2f}" for x in rng.uniform(1, 5000, n)],
            "hole": np.where(rng.random(n) < 0.2, np.nan, rng.normal(size=n)),
            "kind": rng.choice(["a", "b", None], n),
            "many": [f"v{k * k % 23}" for k in range(n)],
            "flag": rng.choice(["yes", "no"], n),
            "day": days.dt.strftime("%d.%m.%Y"),
            "stamp": days,
            "id": range(n),
        }
    )


def test_the_state_goes_through_json_exactly():
    frame = everything()
    features = Features.fit(frame)
    again = through_json(features)
    assert again == features and again.plan == through_json(features.plan)
    np.testing.assert_array_equal(again.encode(frame), features.encode(frame))
    X = features.encode(frame)
    n_numbers = X.shape[1] - sum("=" in name for name in features.input_names)
    np.testing.assert_allclose(X[:, :n_numbers].mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(X[:, :n_numbers].std(0), 1, atol=1e-5)


def test_unscaled_numbers_enter_as_they_are():
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    features = Features.fit(pd.DataFrame(x, columns=["a", "b", "c"]), scale=False)
    np.testing.assert_array_equal(features.encode(pd.DataFrame(x, columns=["a", "b", "c"])), x)
    assert through_json(features) == features


@pytest.mark.parametrize(
    "member", [[1, 0, 1, 1], ["true", "False", "TRUE", "1"], [1.0, 0.0, 1.0, 1.0]]
)
def test_flags_may_be_written_in_several_ways(member):
    features = Features.fit(TABLE)
    encoded = features.encode(TABLE.assign(member=member), warn=True)
    np.testing.assert_array_equal(encoded, features.encode(TABLE))


def test_columns_not_in_use_may_come_change_or_stay_away():
    features = Features.fit(TABLE)
    expected = features.encode(TABLE)
    for table in (
        TABLE.drop(columns=["site", "one"]),
        TABLE.assign(one=1e9, site="y", extra=1),
        TABLE[TABLE.columns[::-1]],
        TABLE.astype({"age": str, "height": str}),
    ):
        np.testing.assert_array_equal(features.encode(table, warn=True), expected)
    with pytest.raises(DataError, match="the table lacks 'age', 'colour'; the columns expected"):
        features.encode(TABLE.drop(columns=["age", "colour"]))


def test_what_is_unlike_training_is_taken_so_with_a_warning():
    features = Features.fit(TABLE)
    other = TABLE.assign(colour=["red", "mauve", None, "red"], age=[20, None, 40, 50])
    with pytest.warns(UserWarning) as said:
        X = features.encode(other, warn=True)
    assert str(said[0].message) == (
        "unlike in training: column 'age' has no value in 1 row; column 'colour' holds 'mauve'; "
        "column 'colour' has no value in 1 row."
    )
    np.testing.assert_array_equal(X[1:3, 3:], 0)  # no category is there
    assert X[1, 0] == pytest.approx((35 - 35) / np.std([20, 30, 40, 50]))  # the median
    with pytest.raises(DataError, match="column 'height' is too far from all of training in row 1"):
        features.encode(TABLE.assign(height=1e300))


def test_rare_and_new_values_share_an_input():
    frame = rows(c=[f"v{k % 25}" for k in range(60)])
    features = Features.fit(frame)
    assert features.input_names[-1] == "c = (other)"
    with pytest.warns(UserWarning, match="every row of column 'c'"):
        X = features.encode(frame.assign(c="never seen"), warn=True)
    np.testing.assert_array_equal(X[:, 1:-1], 0)
    np.testing.assert_array_equal(X[:, -1], 1)


def test_words_of_the_library_may_be_values():
    words = ["(other)", "(missing)", None] * 4 + [f"v{k % 24}" for k in range(96)]
    features = Features.fit(rows(len(words), c=words))
    X = features.encode(rows(len(words), c=words))
    assert X.shape[1] == len(set(features.input_names)) and np.isin(X[:, 1:].sum(1), 1).all()


def test_arrays_and_frames_with_repeated_names():
    x = np.random.default_rng(0).normal(size=(30, 2))
    np.testing.assert_allclose(TableEncoder().fit_transform(x).mean(0), 0, atol=1e-6)
    with pytest.raises(DataError, match="more than one column 'a'"):
        Features.fit(pd.DataFrame(x, columns=["a", "a"]))


def test_nothing_to_learn_from():
    with pytest.raises(
        DataError, match="no column to learn from .*'site': 'x' in every row; 'one'"
    ):
        Features.fit(TABLE[["site", "one"]])


def test_the_encoder_is_a_transformer_of_scikit_learn():
    encoder = TableEncoder(ignore=["age"], kinds={"height": "category"})
    X = clone(encoder).fit_transform(TABLE)
    assert X.shape == (4, 1 + 3 + 3)
    made = encoder.fit(TABLE)
    assert list(made.get_feature_names_out())[:2] == ["member", "colour = blue"]
    np.testing.assert_array_equal(made.transform(TABLE), X)


# -- targets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "task", "expected"),
    [
        (["b", "a", "b"], "auto", Classes("t", ("a", "b"))),
        ([True, False, True], "auto", Classes("t", ("False", "True"))),
        ([10, 9, 10, 9, 2, 2], "auto", Classes("t", ("2", "9", "10"))),
        (["10", "9", "10", "9", "2", "2"], "auto", Classes("t", ("2", "9", "10"))),
        ([1, 2, 3, 4], "auto", Quantity("t")),
        ([1.0, 2.0, 1.0, 2.0], "auto", Quantity("t")),
        ([1.0, 2.0, 1.0, 2.0], "classification", Classes("t", ("1", "2"))),
        (["1.200,5", "3,25", None, "7"], "auto", Quantity("t", NumberFormat(",", "."))),
        ([0, 1, 1, 0], "regression", Quantity("t")),
        (["none", "a", "none", "?"], "auto", Classes("t", ("a", "none"))),
    ],
)
def test_what_a_target_is(values, task, expected):
    frame = pd.DataFrame({"t": values})
    target = fit_target(frame, ["t"], task)
    assert target == expected
    assert target_from_json(json.loads(json.dumps(target.to_json()))) == target
    gaps = [value is None or value == "?" for value in values]
    np.testing.assert_array_equal(target.known(frame), np.logical_not(gaps))


@pytest.mark.parametrize(
    ("values", "task", "sentence"),
    [
        (["a", "a"], "auto", "'t' has one class only, 'a'"),
        ([3, 3, 3], "auto", "'t' has one class only, '3'"),
        ([0.5, 0.5], "auto", "'t' is 0.5 in every row"),
        ([f"name {k}" for k in range(30)], "auto", "30 different values in 30 rows, too many"),
        (["a", "b", "a"], "regression", "'t' holds 'a' in row 1"),
        ([None, None], "auto", "'t' has no value in any row"),
        ([*map(str, range(40)), "oh"], "auto", "'t' holds 'oh' in row 41 .*--task classification"),
        (["1,200", "29,477"], "auto", "'t' holds '1,200', which may be 1200 or 1.200"),
        ([1e200, 2e200, 4e200], "regression", "goes from 1e.200 to 4e.200.*another unit"),
        ([1.0, np.inf, 2.0], "auto", "'t' is infinite in some rows"),
    ],
)
def test_targets_that_cannot_be_learnt(values, task, sentence):
    frame = pd.DataFrame({"t": values})
    with pytest.raises(DataError, match=sentence):
        fit_target(frame, ["t"], task)
    with pytest.raises(ValueError, match="unknown task 'clasification'; did you mean"):
        fit_target(frame, ["t"], "clasification")


def test_targets_are_coded_and_answered_in_their_own_words():
    classes = Classes("t", ("a", "b", "c"))
    frame = pd.DataFrame({"t": ["c", "a", "d", None]})
    assert list(classes.encode(frame)) == [2, 0, -1, -1]
    assert list(classes.known(frame)) == [True, True, False, False]
    assert list(classes.answers(np.array([1, 0]))["prediction"]) == ["b", "a"]
    assert list(classes.shares(np.eye(3))) == ["probability_a", "probability_b", "probability_c"]
    both = fit_target(pd.DataFrame({"u": [1.5, 2.5], "v": [3.5, 4.5]}), ["u", "v"])
    assert isinstance(both, Several) and both.task == "regression" and both.name == "u, v"
    again = target_from_json(json.loads(json.dumps(both.to_json())))
    assert again == both
    with pytest.raises(ValueError, match="probabilities belong to classes"):
        both.shares(np.zeros((1, 2)))


# -- splits and scores ----------------------------------------------------------------------------


def test_splits_are_stratified_seeded_and_whole():
    classes = np.repeat([0, 1, 2], [50, 30, 20])
    keep, hold = split_rows(100, 0.2, np.random.default_rng(3), classes)
    assert sorted([*keep, *hold]) == list(range(100))
    assert list(np.bincount(classes[hold])) == [10, 6, 4]
    again = split_rows(100, 0.2, np.random.default_rng(3), classes)[1]
    other = split_rows(100, 0.2, np.random.default_rng(4), classes)[1]
    assert list(hold) == list(again) != list(other)
    assert len(split_rows(3, 0.1, np.random.default_rng(0))[1]) == 0


@pytest.mark.parametrize("n_classes", [2, 3])
def test_scores_are_those_of_scikit_learn(n_classes):
    rng = np.random.default_rng(0)
    truth = rng.integers(0, n_classes, 50)
    shares = rng.dirichlet(np.ones(n_classes), 50)
    said = shares.argmax(1)
    found = class_scores(truth, said, shares)
    assert found["accuracy"] == np.mean(truth == said)
    assert found["balanced accuracy"] == pytest.approx(balanced_accuracy_score(truth, said))
    assert found["F1"] == pytest.approx(f1_score(truth, said, average="macro"))
    given = shares[:, 1] if n_classes == 2 else shares
    assert found["AUC"] == pytest.approx(roc_auc_score(truth, given, multi_class="ovr"))
    assert "AUC" not in class_scores(truth[:1], said[:1], shares[:1])


def test_baselines_answer_always_the_same():
    most, scores = majority(np.array([1, 1, 0]), np.array([1, 0, 0, 1]), 2)
    assert most == 1 and scores["accuracy"] == scores["balanced accuracy"] == scores["AUC"] == 0.5
    truth = np.array([1.0, 3.0])
    found = always(np.array([4.0, 6.0]), truth, "regression")
    assert found == {"R²": -9.0, "MAE": 3.0, "RMSE": pytest.approx(np.sqrt(10))}
    assert number_scores(truth[:1], truth[:1]) == {"MAE": 0, "RMSE": 0}
    two = np.array([[1.0, 1000.0], [3.0, 3000.0]])
    found = number_scores(two, two + [1.0, 500.0], ["rooms", "price"])
    assert found["MAE of rooms"] == found["RMSE of rooms"] == 1.0
    assert found["MAE of price"] == found["RMSE of price"] == 500.0
    assert found["R²"] == pytest.approx(((1 - 2 / 2) + (1 - 0.5e6 / 2e6)) / 2)


def test_the_year_9999_is_no_date_and_far_ones_are():
    written = pd.Series(["2020-01-01", "9999-12-31", "1600-05-05", "2021-03-04"] * 15)
    for column in (written, written.astype("datetime64[s]")):
        frame = pd.DataFrame({"until": column, "x": np.arange(60) % 7 + 0.5})
        days = ColumnPlan.decide(frame).read(frame)["until"]
        since = [(np.datetime64(day) - np.datetime64("1970-01-01")).astype(int) for day in written]
        assert days.isna().tolist() == (written == "9999-12-31").tolist()
        np.testing.assert_array_equal(days.dropna(), [d for d in since if d < 2_900_000])


def test_dates_of_pyarrow_are_dates():
    pa = pytest.importorskip("pyarrow")
    moments = pd.Series(pd.date_range("2020-01-01", periods=60, freq="7h"))
    kinds = {"day": pa.date32(), "time": pa.timestamp("ns"), "there": pa.timestamp("s", "UTC")}
    arrow = {name: moments.astype(pd.ArrowDtype(kind)) for name, kind in kinds.items()}
    frame = pd.DataFrame({**arrow, "x": np.arange(60) % 7 + 0.5})
    plan = ColumnPlan.decide(frame)
    assert [column.kind for column in plan.columns] == ["date"] * 3 + ["number"]
    wanted = (moments - pd.Timestamp(0)) / pd.Timedelta(days=1)
    read = plan.read(frame)
    np.testing.assert_allclose(read["time"], wanted)
    np.testing.assert_allclose(read["there"], wanted, atol=1e-4)
    np.testing.assert_allclose(read["day"], np.floor(wanted))
    lasting = (moments - moments[0]).astype(pd.ArrowDtype(pa.duration("ns")))
    with pytest.raises(DataError, match="'w' holds values of type duration"):
        ColumnPlan.decide(frame.assign(w=lasting))


def test_what_is_said_to_be_a_category_is_one():
    frame = pd.DataFrame({"ward": pd.Categorical([1, 2, 3, 4] * 15), "x": np.arange(60) % 7 + 0.5})
    ward, x = ColumnPlan.decide(frame).columns
    assert (ward.kind, ward.values) == ("category", ("1", "2", "3", "4")) and x.kind == "number"


def test_one_name_to_ignore_is_not_its_letters():
    frame = pd.DataFrame({name: np.arange(60) % 7 + 0.5 for name in ("a", "b", "ab")})
    kinds = {c.name: c.kind for c in ColumnPlan.decide(frame, ignore="ab").columns}
    assert kinds == {"a": "number", "b": "number", "ab": "dropped"}


def test_categories_that_lost_their_zeros_or_are_all_rare_are_said():
    codes = [f"0{1000 + k % 50}" for k in range(400)]
    plan = ColumnPlan.decide(pd.DataFrame({"zip": codes, "x": np.arange(400) % 7 + 0.5}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan.read(pd.DataFrame({"zip": codes, "x": 0.0}), warn=True)
    with pytest.warns(UserWarning, match="texts such as '01000' and holds numbers here"):
        plan.read(pd.DataFrame({"zip": list(map(int, codes)), "x": 0.0}), warn=True)
    with pytest.warns(UserWarning, match="every row of column 'zip'.*rare or absent, e.g. 'q'"):
        plan.read(pd.DataFrame({"zip": ["q"] * 12, "x": 0.0}), warn=True)


def test_a_flag_is_0_or_1():
    plan = ColumnPlan.decide(pd.DataFrame({"f": [True, False] * 30, "x": np.arange(60) % 7 + 0.5}))
    with pytest.warns(UserWarning, match="'f' holds '5' in row 2, which is no yes/no"):
        read = plan.read(pd.DataFrame({"f": [1, 5, 0], "x": 0.0}), warn=True)
    np.testing.assert_array_equal(read["f"], [1, np.nan, 0])
