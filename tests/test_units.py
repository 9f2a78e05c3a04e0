"""Columns of any size: estimators learn from them as from those near 1, and answer in raw units."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier as SklearnMLP

import lpom
from lpom.estimators.data import divided, units

pytestmark = pytest.mark.filterwarnings("ignore:training ended after max_iter")


@pytest.fixture(scope="module")
def digits():
    X, y = load_digits(return_X_y=True)
    return train_test_split(X / 16, y, test_size=0.5, random_state=0, stratify=y)


def test_columns_of_usual_size_stay_as_they_are(digits):
    assert units(digits[0]) is None
    assert divided(digits[0], None) is digits[0]


@pytest.mark.parametrize("kind", [np.asarray, csr_matrix])
def test_a_whole_table_is_divided_by_one_number_and_odd_columns_by_their_own(kind):
    X = np.random.default_rng(0).normal(size=(500, 4)) * [1e5, 2e5, 3e5, 1e-9]
    X[:, 0] = 0
    size = abs(X).max(0)
    found = units(kind(X))
    np.testing.assert_allclose(found, [np.median(size[1:])] * 3 + [size[3]])
    scaled = divided(kind(X), found)
    dense = scaled.toarray() if kind is csr_matrix else scaled
    np.testing.assert_allclose(dense, X / found, rtol=1e-12)
    assert np.isfinite(units(np.array([[1e200, 1.0], [3e200, 2.0]]))).all()


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e3, 1e6])
def test_unscaled_data_scores_no_less_than_with_scikit_learn(scale, digits):
    X, X_test, y, y_test = digits
    options = {"hidden_layer_sizes": (30,), "max_iter": 30, "random_state": 0}
    own = lpom.MLPClassifier(**options).fit(X * scale, y).score(X_test * scale, y_test)
    plain = lpom.MLPClassifier(**options).fit(X, y).score(X_test, y_test)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)
        other = SklearnMLP(**options).fit(X * scale, y).score(X_test * scale, y_test)
    assert own >= other - 0.02
    assert own == pytest.approx(plain, abs=0.03)


def test_the_network_takes_the_raw_columns(digits):
    X, X_test, y, _ = digits
    X, X_test = (X * 1e4).astype(np.float32), (X_test * 1e4).astype(np.float32)
    model = lpom.MLPClassifier((10,), max_iter=5, random_state=0).fit(X, y)
    logits = model.to_torch()(torch.from_numpy(X_test)).detach()
    assert (model.classes_[logits.argmax(1)] == model.predict(X_test)).all()


def test_going_on_is_the_same_in_any_unit(digits):
    X, _, y, _ = digits
    scores = []
    for scale in (1.0, 2.0**30):  # a power of two: nothing is rounded
        model = lpom.MLPClassifier((10,), random_state=0)
        for _ in range(3):
            model.partial_fit(X * scale, y, classes=np.unique(y))
        scores.append(model.predict_proba(X * scale))
    np.testing.assert_allclose(*scores, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("size", [11.0, 50.0, 99.0, 1e4])
def test_a_table_of_ages_or_per_cents_is_brought_near_1(size):
    X = np.random.default_rng(0).uniform(-1, 1, (50, 3)) * size
    assert abs(divided(X, units(X))).max() == pytest.approx(1, rel=0.1)


def test_a_long_tail_is_no_unit():
    X = np.random.default_rng(0).normal(size=(500, 4))
    X[0, 2] = 60.0
    assert units(X) is None


def test_scaling_is_a_parameter(digits):
    X, _, y, _ = digits
    options = {"hidden_layer_sizes": (10,), "max_iter": 3, "random_state": 0}
    scaled, raw, like = (
        lpom.MLPClassifier(scaling=scaling, **options).fit(factor * X, y)
        for scaling, factor in (("auto", 1e4), (None, 1e4), (None, 1.0))
    )
    assert raw.loss_curve_[0] > 10 * scaled.loss_curve_[0]
    np.testing.assert_allclose(like.loss_curve_[0], scaled.loss_curve_[0], rtol=0.5)
    with pytest.raises(ValueError, match="scaling"):
        lpom.MLPClassifier(scaling="always").fit(X, y)
