from __future__ import annotations

import sys

import numpy as np
import pytest

from lpom.datasets.preprocessing import (
    hog_features,
    scale_bytes,
    select_digits,
    subtract_channel_means,
)


def test_scale_bytes_maps_0_to_255_onto_0_to_1() -> None:
    images = np.arange(256, dtype=np.uint8).reshape(4, 64)
    scaled = scale_bytes(images)
    assert scaled.dtype == np.float32
    np.testing.assert_array_equal(scaled, images.astype(np.float32) / np.float32(255))
    assert images[3, 63] == 255  # the input is left alone


def test_scale_bytes_refuses_what_is_scaled_already() -> None:
    with pytest.raises(TypeError, match=r"takes bytes \(uint8\), got float32"):
        scale_bytes(np.ones((2, 3), dtype=np.float32))


def test_subtract_channel_means_uses_the_training_means_only() -> None:
    rng = np.random.default_rng(0)
    train = rng.random((5, 4, 3, 3), dtype=np.float32)
    test = rng.random((2, 4, 3, 3), dtype=np.float32)
    new_train, new_test = train.copy(), test.copy()
    means = subtract_channel_means(new_train, new_test)
    expected = [train[..., channel].astype(np.float64).mean() for channel in range(3)]
    np.testing.assert_allclose(means, expected, rtol=1e-6)
    np.testing.assert_allclose(new_train.mean(axis=(0, 1, 2)), 0, atol=1e-6)
    np.testing.assert_array_equal(new_test, test - means)
    assert new_train.dtype == new_test.dtype == means.dtype == np.float32

    np.testing.assert_array_equal(means, subtract_channel_means(train, test + 100))


def test_subtract_channel_means_wants_images() -> None:
    images = np.zeros((2, 4, 4, 3), dtype=np.float32)
    with pytest.raises(ValueError, match=r"test should be .* got float32 of shape \(2, 48\)"):
        subtract_channel_means(images, images.reshape(2, 48))
    with pytest.raises(ValueError, match="train should be floating-point images .* got uint8"):
        subtract_channel_means(images.astype(np.uint8), images)


def test_select_digits_keeps_order_and_numbers_the_classes() -> None:
    labels = np.array([2, 0, 1, 9, 0, 2])
    images = np.arange(6)
    chosen, classes = select_digits(images, labels, (0, 2))
    np.testing.assert_array_equal(chosen, [0, 1, 4, 5])
    np.testing.assert_array_equal(classes, [1, 0, 0, 1])
    assert classes.dtype == np.int64
    np.testing.assert_array_equal(select_digits(images, labels, (2, 0))[1], [0, 1, 1, 0])


def test_hog_features_are_those_of_scikit_image() -> None:
    feature = pytest.importorskip("skimage.feature", reason="scikit-image is not installed")
    images = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    features = hog_features(images)
    assert features.shape == (3, 648)
    assert features.dtype == np.float32
    grey = images[1] @ np.array([0.2125, 0.7154, 0.0721]) / 255  # ITU-R BT.709
    expected = feature.hog(grey, orientations=18, pixels_per_cell=(8, 8), cells_per_block=(2, 2))
    np.testing.assert_allclose(features[1], expected, atol=1e-5)


def test_hog_tells_the_direction_of_an_edge() -> None:
    pytest.importorskip("skimage.feature", reason="scikit-image is not installed")
    upright = np.zeros((32, 32, 3), dtype=np.uint8)
    upright[:, 16:] = 255
    lying = upright.transpose(1, 0, 2)
    features = hog_features(np.stack([upright, lying])).reshape(2, -1, 18).sum(axis=1)
    assert features[0].argmax() != features[1].argmax()
    # An edge falls into one direction, and its transpose into another a quarter turn (9) away.
    assert (features[1].argmax() - features[0].argmax()) % 18 == 9


def test_hog_of_no_images() -> None:
    pytest.importorskip("skimage.feature", reason="scikit-image is not installed")
    assert hog_features(np.empty((0, 32, 32, 3), dtype=np.uint8)).shape == (0, 648)


def test_hog_wants_colour_images() -> None:
    with pytest.raises(ValueError, match=r"should have shape .* got \(2, 32, 32\)"):
        hog_features(np.zeros((2, 32, 32), dtype=np.uint8))


def test_hog_without_scikit_image_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skimage.feature", None)
    with pytest.raises(ImportError, match=r"HOG features needs skimage: pip install 'lpom\[data\]"):
        hog_features(np.zeros((1, 32, 32, 3), dtype=np.uint8))
