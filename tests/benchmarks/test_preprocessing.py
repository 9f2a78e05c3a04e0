from __future__ import annotations

import numpy as np
import pytest

from data import Dataset
from data.preprocessing import hog_features, whitened


def correlated(n: int, seed: int) -> np.ndarray:
    """Small pictures whose pixels go together."""
    mixing = np.random.default_rng(0).normal(size=(12, 12)) * np.logspace(0, -1, 12)
    values = np.random.default_rng(seed).normal(size=(n, 12)) @ mixing.T + 3
    return values.astype(np.float32).reshape(n, 3, 2, 2)


def a_data_set(train: np.ndarray, test: np.ndarray) -> Dataset:
    y = np.zeros(len(train), dtype=np.int64)
    return Dataset("made", train, y, test, y[: len(test)], 1, (2, 2, 3), "Made.")


def test_whitened_data_have_no_correlations() -> None:
    made = a_data_set(correlated(4000, 1), correlated(500, 2))
    white = whitened(made, 1e-9)
    covariance = np.cov(white.x_train.reshape(4000, 12), rowvar=False)
    np.testing.assert_allclose(covariance, np.eye(12), atol=2e-3)
    assert white.x_train.shape == made.x_train.shape and white.x_train.dtype == np.float32
    assert "Whitened" in white.notes and white.x_test.shape == made.x_test.shape


def test_whitening_is_the_root_of_the_inverse_covariance() -> None:
    from scipy.linalg import inv, sqrtm

    made = a_data_set(correlated(300, 1), correlated(50, 2))
    rows, others = (x.reshape(len(x), 12).astype(float) for x in (made.x_train, made.x_test))
    covariance = np.cov(rows, rowvar=False, bias=True)
    matrix = inv(sqrtm(covariance + 0.1 * np.eye(12))).real
    expected = (rows - rows.mean(0)) @ matrix
    tested = (others - rows.mean(0)) @ matrix / expected.std()
    white = whitened(made, 0.1)
    np.testing.assert_allclose(
        white.x_train.reshape(300, 12), expected / expected.std(), rtol=1e-3, atol=1e-4
    )
    np.testing.assert_allclose(white.x_test.reshape(50, 12), tested, rtol=1e-3, atol=1e-4)


def noise(n: int, side: int = 32) -> np.ndarray:
    return np.random.default_rng(side).integers(0, 256, (n, side, side, 3), dtype=np.uint8)


@pytest.mark.parametrize("orientations, cell, block", [(18, 8, 2), (9, 8, 1), (7, 5, 3)])
def test_hog_without_signs_and_sharing_is_that_of_scikit_image(
    orientations: int, cell: int, block: int
) -> None:
    feature = pytest.importorskip("skimage.feature", reason="scikit-image is not installed")
    images = noise(3)
    features = hog_features(images, orientations, cell, block, signed=False, interpolate=False)
    for image, ours in zip(images, features, strict=True):
        theirs = feature.hog(
            image @ np.array([0.2125, 0.7154, 0.0721]) / 255,
            orientations=orientations,
            pixels_per_cell=(cell, cell),
            cells_per_block=(block, block),
        )
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_hog_votes_are_shared_as_dalal_and_triggs_share_them() -> None:
    """One pixel at a time, by the distances to the middles of cells and directions."""
    image, bins, cell = noise(1)[0], 18, 8
    grey = image @ np.array([0.2125, 0.7154, 0.0721]) / 255
    cells = np.zeros((6, 6, bins))  # with one cell around, which is dropped
    for r in range(1, 31):
        for c in range(32):
            down = grey[r + 1, c] - grey[r - 1, c]
            across = grey[r, c + 1] - grey[r, c - 1] if 0 < c < 31 else 0.0
            _vote(cells, r, c, down, across, cell)
    for r in (0, 31):
        for c in range(1, 31):
            _vote(cells, r, c, 0.0, grey[r, c + 1] - grey[r, c - 1], cell)
    blocks = []
    for r in range(1, 4):
        for c in range(1, 4):
            block = cells[r : r + 2, c : c + 2].ravel() / cell**2
            block = np.minimum(block / np.sqrt(block @ block + 1e-10), 0.2)
            blocks.append(block / np.sqrt(block @ block + 1e-10))
    np.testing.assert_allclose(hog_features(image[None])[0], np.concatenate(blocks), atol=1e-5)


def _vote(cells: np.ndarray, r: int, c: int, down: float, across: float, cell: int) -> None:
    bins = cells.shape[2]
    angle = np.degrees(np.arctan2(down, across)) % 360
    for i in range(6):
        for j in range(6):
            near = [1 - abs(x + 0.5 - cell * (k - 0.5)) / cell for x, k in ((r, i), (c, j))]
            if min(near) <= 0:
                continue
            for k in range(bins):
                apart = abs(angle - (k + 0.5) * 360 / bins)
                share = 1 - min(apart, 360 - apart) / (360 / bins)
                cells[i, j, k] += max(share, 0) * near[0] * near[1] * np.hypot(down, across)


def test_hog_tells_the_direction_of_an_edge() -> None:
    upright = np.zeros((32, 32, 3), dtype=np.uint8)
    upright[:, 16:] = 255
    images = np.stack([upright, upright.transpose(1, 0, 2), 255 - upright])
    signed = hog_features(images, interpolate=False).reshape(3, -1, 18).sum(axis=1)
    right, down, left = signed.argmax(axis=1)
    assert right == 0 and down == 4 and left == 9  # 0, 90 and 180 degrees, 20 to a direction
    unsigned = hog_features(images, signed=False).reshape(3, -1, 18).sum(axis=1)
    np.testing.assert_allclose(unsigned[0], unsigned[2], atol=1e-5)
