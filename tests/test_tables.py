"""Tables become inputs and targets, answers come back in the table's own words."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch

from lpom import losses
from lpom.exceptions import DataError
from lpom.tables import Classes, Features, Quantity, fit_target, split_rows, target_from_json

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


def test_each_kind_of_column_is_encoded():
    features = Features.fit(TABLE)
    X = features.encode(TABLE)
    numbers = TABLE[["age", "height"]].to_numpy()
    np.testing.assert_allclose(X[:, :2], (numbers - numbers.mean(0)) / numbers.std(0), rtol=1e-6)
    np.testing.assert_array_equal(X[:, 2], [1, 0, 1, 1])
    # blue, green, red
    np.testing.assert_array_equal(X[:, 3:], [[0, 0, 1], [1, 0, 0], [0, 0, 1], [0, 1, 0]])
    assert X.dtype == np.float32 and X.shape == (4, features.n_inputs)


def test_scales_are_those_of_the_training_rows_and_categories_of_all():
    features = Features.fit(TABLE, [0, 1, 2])
    assert features.numbers["age"] == (30.0, pytest.approx(np.std([20, 30, 40])))
    assert features.categories == {"colour": ("blue", "green", "red")}
    X = features.encode(TABLE)
    np.testing.assert_allclose(X[:3].mean(0)[:2], 0, atol=1e-6)


def test_columns_that_do_not_vary_are_not_needed():
    features = Features.fit(TABLE)
    assert features.names == ["age", "height", "member", "colour"]
    without = TABLE.drop(columns=["site", "one"])
    changed = TABLE.assign(one=1e9, site="y")
    for table in (without, changed, TABLE[TABLE.columns[::-1]]):
        np.testing.assert_array_equal(features.encode(table), features.encode(TABLE))


def test_the_state_goes_through_json_exactly():
    frame = TABLE.assign(odd=np.random.default_rng(0).normal(size=4) / 3)
    features = Features.fit(frame)
    again = Features.from_json(json.loads(json.dumps(features.to_json())))
    assert again == features
    np.testing.assert_array_equal(again.encode(frame), features.encode(frame))


def test_unscaled_numbers_enter_as_they_are():
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    frame = pd.DataFrame(x, columns=["a", "b", "c"])
    np.testing.assert_array_equal(Features.unscaled(["a", "b", "c"]).encode(frame), x)


@pytest.mark.parametrize(
    "member", [[1, 0, 1, 1], ["true", "False", "TRUE", "1"], [1.0, 0.0, 1.0, 1.0]]
)
def test_flags_may_be_written_in_several_ways(member):
    features = Features.fit(TABLE)
    encoded = features.encode(TABLE.assign(member=member))
    np.testing.assert_array_equal(encoded, features.encode(TABLE))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.drop(columns="age"), "the table lacks 'age'; the columns expected are 'age'"),
        (lambda t: t.assign(extra=1), "has 'extra', which training never saw"),
        (lambda t: t.rename(columns={"age": "Age"}), "lacks 'age' and has 'Age'"),
        (
            lambda t: t.assign(colour=["red", "blue", "violet", "red"]),
            "column 'colour' holds 'violet' in row 3.*expected one of 'blue', 'green', 'red'",
        ),
        (lambda t: t.assign(age=["1", "2", "old", "4"]), "column 'age' holds 'old' in row 3"),
        (lambda t: t.assign(age=[1.0, np.nan, 2.0, 3.0]), "column 'age' holds nan in row 2"),
        (lambda t: t.assign(height=[1.0, 2.0, 1e300, 3.0]), "column 'height' holds 1e.300 in row"),
        (lambda t: t.assign(member=[1, 0, 2, 1]), "'member' holds '2' in row 3; expected true or"),
    ],
)
def test_a_table_that_does_not_fit_is_told_why(change, sentence):
    with pytest.raises(DataError, match=sentence):
        Features.fit(TABLE).encode(change(TABLE))


@pytest.mark.parametrize(
    ("frame", "ignored", "sentence"),
    [
        (TABLE[["site", "one"]], [], "no column differs from row to row"),
        (TABLE, ["hight"], "unknown column to ignore 'hight'; did you mean 'height'"),
        (
            pd.DataFrame({"id": [f"row {k}" for k in range(50)]}),
            [],
            r"'id' holds 50 different texts in 50 rows.*--ignore id",
        ),
        (
            pd.DataFrame({"day": pd.date_range("2020", periods=4)}),
            [],
            "'day' holds values of type datetime64.*--ignore day",
        ),
        (pd.DataFrame({"a": [1e308, -1e308, 0.0]}), [], "'a' holds values up to 1e.308"),
    ],
)
def test_a_table_nothing_can_be_learnt_from(frame, ignored, sentence):
    with pytest.raises(DataError, match=sentence):
        Features.fit(frame, ignored=ignored)


def test_ignored_columns_may_come_or_stay_away():
    features = Features.fit(TABLE, ignored=["age"])
    assert "age" not in features.names
    expected = features.encode(TABLE)
    np.testing.assert_array_equal(features.encode(TABLE.drop(columns="age")), expected)


@pytest.mark.parametrize(
    ("values", "task", "expected"),
    [
        (["b", "a", "b"], "auto", Classes("t", ("a", "b"))),
        ([True, False, True], "auto", Classes("t", ("False", "True"))),
        ([10, 9, 10, 9, 2, 2], "auto", Classes("t", ("2", "9", "10"))),
        ([1, 2, 3, 4], "auto", Quantity("t", 2.5, np.std([1, 2, 3, 4]))),
        ([1.0, 2.0, 1.0, 2.0], "auto", Quantity("t", 1.5, 0.5)),
        ([1.0, 2.0, 1.0, 2.0], "classification", Classes("t", ("1", "2"))),
        ([0, 1, 1, 0], "regression", Quantity("t", 0.5, 0.5)),
    ],
)
def test_what_a_target_is(values, task, expected):
    target = fit_target(pd.Series(values, name="t"), task)
    assert target == expected
    assert target_from_json(json.loads(json.dumps(target.to_json()))) == target


@pytest.mark.parametrize(
    ("values", "task", "sentence"),
    [
        (["a", "a"], "auto", "'t' has one class only, 'a'"),
        ([3, 3, 3], "auto", "'t' has one class only, '3'"),
        ([0.5, 0.5], "auto", "'t' is 0.5 in every row"),
        ([f"name {k}" for k in range(30)], "auto", "30 different values in 30 rows, too many"),
        (["a", "b", "a"], "regression", "column 't' holds 'a' in row 1; expected a number"),
        (["a", None, "b"], "auto", "'t' has no value in row 2"),
        ([1e200, 2e200, 4e200], "regression", "goes from 1e.200 to 4e.200.*another unit"),
        ([1e-200, 2e-200, 4e-200], "regression", "can't be computed with"),
    ],
)
def test_targets_that_cannot_be_learnt(values, task, sentence):
    with pytest.raises(DataError, match=sentence):
        fit_target(pd.Series(values, name="t"), task)
    with pytest.raises(ValueError, match="unknown task 'clasification'; did you mean"):
        fit_target(pd.Series(values, name="t"), "clasification")


def test_classes_are_coded_and_answered_by_name():
    target = Classes.fit(pd.Series(["b", "a", "c"], name="t"))
    assert list(target.encode(pd.Series(["c", "a"]))) == [2, 0]
    with pytest.raises(DataError, match="the target 't' holds 'd' in row 2"):
        target.encode(pd.Series(["a", "d"]))
    outputs = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 0.0]])
    answers = target.answers(outputs, losses.get("cross-entropy"), probabilities=True)
    assert list(answers["prediction"]) == ["b", "a"]
    assert list(answers.columns[1:]) == ["probability_a", "probability_b", "probability_c"]
    np.testing.assert_allclose(answers.iloc[:, 1:], torch.softmax(outputs.double(), 1))


@pytest.mark.parametrize("loss", ["squared", "binary-cross-entropy", "hinge", "huber"])
def test_probabilities_sum_to_one_and_agree_with_the_answer(loss):
    target = Classes("t", ("a", "b", "c"))
    outputs = torch.tensor([[-5.0, -3.0, -4.0], [0.2, 0.9, 0.1]])
    answers = target.answers(outputs, losses.get(loss), probabilities=True)
    shares = answers.iloc[:, 1:].to_numpy()
    np.testing.assert_allclose(shares.sum(1), 1)
    assert list(answers["prediction"]) == ["b", "b"] and list(shares.argmax(1)) == [1, 1]


def test_a_quantity_is_answered_in_its_own_unit():
    values = pd.Series([100.0, 300.0, 200.0, 1e6], name="price")
    target = Quantity.fit(values, [0, 1, 2])
    coded = target.encode(values)
    assert coded[:3].mean() == pytest.approx(0, abs=1e-6)
    back = target.answers(torch.from_numpy(coded)[:, None], losses.get("squared"))
    np.testing.assert_allclose(back["prediction"], values, rtol=1e-6)
    with pytest.raises(ValueError, match="probabilities belong to classes"):
        target.answers(torch.zeros(1, 1), losses.get("squared"), probabilities=True)


def test_splits_are_stratified_seeded_and_whole():
    classes = np.repeat([0, 1, 2], [50, 30, 20])
    keep, hold = split_rows(100, 0.2, np.random.default_rng(3), classes)
    assert sorted([*keep, *hold]) == list(range(100))
    assert list(np.bincount(classes[hold])) == [10, 6, 4]
    again = split_rows(100, 0.2, np.random.default_rng(3), classes)[1]
    other = split_rows(100, 0.2, np.random.default_rng(4), classes)[1]
    assert list(hold) == list(again) != list(other)
    assert len(split_rows(3, 0.1, np.random.default_rng(0))[1]) == 0


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ([*range(20), "n/a?", *range(21, 60)], "holds 'n/a\\?' in row 21, where most .* numbers"),
        ([f"{k}.5" for k in range(60)], "numbers that are stored as texts"),
        ([f"{k},5" for k in range(60)], "numbers with a decimal comma, like '0,5'"),
        ([f"2024-{1 + k // 28:02}-{1 + k % 28:02}" for k in range(60)], "dates, like '2024-01-01'"),
        ([f"person {k}" for k in range(60)], "60 different texts in 60 rows.*--ignore a"),
    ],
)
def test_a_column_of_texts_that_all_differ_is_told_what_it_is(values, sentence):
    frame = pd.DataFrame({"a": [str(value) for value in values], "b": range(60)})
    with pytest.raises(DataError, match=f"column 'a' .*{sentence}"):
        Features.fit(frame)
