"""The table of data sets, the bundled ones, and what every data set has in common."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_digits

from lpom import datasets
from lpom.checks import require
from lpom.datasets.base import Dataset, pixel_names

BUNDLED = {
    # name: (train, test, features, classes)
    "digits": (1437, 360, 64, 10),
    "iris": (120, 30, 4, 3),
    "wine": (142, 36, 13, 3),
    "breast-cancer": (455, 114, 30, 2),
    "diabetes": (353, 89, 10, 0),
}


def test_every_name_is_in_the_documented_table() -> None:
    assert {"mnist", "fashion-mnist", "cifar-10", "svhn-0-2"} < set(datasets.names())
    for name in datasets.names():
        assert f"\n{name} " in (datasets.__doc__ or "")


def test_unknown_name_says_what_is_near() -> None:
    with pytest.raises(ValueError, match="unknown data set 'minst'; did you mean 'mnist'"):
        datasets.load("minst")


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


def test_grey_pictures_are_the_rows_in_another_shape() -> None:
    data, table = datasets.load("digits"), load_digits()
    pictures = data.pictures()
    assert pictures.x_train.shape == (1437, 1, 8, 8) and pictures.x_test.shape == (360, 1, 8, 8)
    np.testing.assert_array_equal(pictures.x_train.reshape(1437, 64), data.x_train)
    assert (pictures.x_test[0, 0] == table.images).all(axis=(1, 2)).any()
    np.testing.assert_array_equal(
        pictures.picture(pictures.x_test[5]), data.picture(data.x_test[5])
    )
    assert pictures.pictures() is pictures


def test_colours_of_pictures_come_first_and_are_normalised() -> None:
    rng = np.random.default_rng(0)
    images = rng.random((50, 4, 5, 3)).astype(np.float32) * np.float32([0.9, 0.5, 0.1])
    means = images.mean(axis=(0, 1, 2))
    x = (images - means).reshape(50, 60)
    y = np.zeros(50, dtype=np.int64)
    shown = dict(image_shape=(4, 5, 3), picture_offset=means)
    data = Dataset("made", x[:40], y[:40], x[40:], y[40:], ("a",), ("",) * 60, **shown)
    before = x.copy()
    pictures = data.pictures()
    deviations = images[:40].astype(np.float64).std(axis=(0, 1, 2))
    for n in range(10):
        for c in range(3):
            expected = (images[40 + n, :, :, c] - means[c]) / deviations[c]
            np.testing.assert_allclose(pictures.x_test[n, c], expected, atol=1e-5)
    np.testing.assert_allclose(pictures.x_train.std(axis=(0, 2, 3)), 1.0, atol=1e-5)
    np.testing.assert_allclose(pictures.picture(pictures.x_test[3]), images[43], atol=1e-6)
    np.testing.assert_array_equal(x, before)
    assert pictures.x_train.dtype == np.float32 and pictures.x_train.flags.c_contiguous


def test_a_table_does_not_become_pictures() -> None:
    with pytest.raises(ValueError, match="iris has no pictures: its rows are 4 features"):
        datasets.load("iris").pictures()


def test_pixel_names_follow_the_pixels() -> None:
    assert pixel_names((1, 2)) == ("pixel_0_0", "pixel_0_1")
    assert pixel_names((1, 1, 3)) == ("pixel_0_0_red", "pixel_0_0_green", "pixel_0_0_blue")


def test_a_missing_package_says_how_to_install_it() -> None:
    with pytest.raises(ImportError, match="Flying needs no_such_wings: pip install no_such_wings"):
        require("no_such_wings.left", "Flying")
