"""The table of data sets, the bundled ones, and what every data set has in common."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_digits

from lpom import datasets
from lpom.checks import require
from lpom.datasets.base import Dataset

BUNDLED = {
    # name: (train, test, features, classes)
    "digits": (1437, 360, 64, 10),
    "iris": (120, 30, 4, 3),
    "wine": (142, 36, 13, 3),
    "breast-cancer": (455, 114, 30, 2),
    "diabetes": (353, 89, 10, 0),
}


def test_every_name_is_in_the_documented_table() -> None:
    assert set(BUNDLED) == set(datasets.names())
    for name in datasets.names():
        assert f"\n{name} " in (datasets.__doc__ or "")


def test_unknown_name_says_what_is_near() -> None:
    with pytest.raises(ValueError, match="unknown data set 'digit'; did you mean 'digits'"):
        datasets.load("digit")


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled(name: str) -> None:
    n_train, n_test, n_features, n_classes = BUNDLED[name]
    data = datasets.load(name)
    assert data.name == name
    assert data.x_train.shape == (n_train, n_features)
    assert data.x_test.shape == (n_test, n_features)
    assert data.x_train.dtype == data.x_test.dtype == np.float32
    assert data.y_train.dtype == data.y_test.dtype == (np.int64 if n_classes else np.float32)
    assert len(data.feature_names) == n_features
    assert len(data.classes) == n_classes
    assert "seed 0" in data.notes
    np.testing.assert_array_equal(data.x_test, datasets.load(name).x_test)


@pytest.mark.parametrize("name", [name for name, row in BUNDLED.items() if row[3]])
def test_bundled_split_keeps_the_shares_of_the_classes(name: str) -> None:
    data = datasets.load(name)
    train, test = np.bincount(data.y_train), np.bincount(data.y_test)
    np.testing.assert_allclose(test, (train + test) * 0.2, atol=1.0)


def test_bundled_split_loses_no_row() -> None:
    data, table = datasets.load("digits"), load_digits()
    rows = np.concatenate([data.x_train, data.x_test])
    np.testing.assert_array_equal(
        rows[np.lexsort(rows.T)], table.data[np.lexsort(table.data.T)].astype(np.float32)
    )


def test_picture_of_a_digit_is_its_image_in_0_1() -> None:
    data, table = datasets.load("digits"), load_digits()
    picture = data.picture(data.x_test[0])
    assert picture.shape == (8, 8)
    assert (picture == table.images / 16).all(axis=(1, 2)).any()


def test_picture_adds_the_offset_back_and_stays_in_0_1() -> None:
    x = np.array([[-0.5, 0.0, 0.25, 0.9]], dtype=np.float32)
    y = np.zeros(1, dtype=np.int64)
    data = Dataset("made", x, y, x, y, ("a",), (), image_shape=(2, 2), picture_offset=0.5)
    np.testing.assert_array_equal(data.picture(x[0]), [[0.0, 0.5], [0.75, 1.0]])


def test_a_table_has_no_pictures() -> None:
    data = datasets.load("iris")
    with pytest.raises(ValueError, match="iris has no pictures: its rows are 4 features"):
        data.picture(data.x_test[0])


def test_a_missing_package_says_how_to_install_it() -> None:
    with pytest.raises(ImportError, match="Flying needs no_such_wings: pip install no_such_wings"):
        require("no_such_wings.left", "Flying")
