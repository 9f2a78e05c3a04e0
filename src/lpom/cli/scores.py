"""How good predictions are, by scikit-learn's metrics, beside an answer that is always the same."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from sklearn import metrics
from sklearn.dummy import DummyClassifier, DummyRegressor

from lpom.tables import Target
from lpom.tables.values import Array


def scores(model: Any, X: Any, truth: Array, target: Target) -> dict[str, float]:
    """Every score that is defined for these rows; errors are in the unit of the target."""
    predicted = model.predict(X)
    if target.task == "regression":
        return _of_numbers(truth, predicted, target.names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # classes that are predicted and not there
        found = {"accuracy": metrics.accuracy_score(truth, predicted)}
        if truth.ndim == 1:
            found["balanced accuracy"] = metrics.balanced_accuracy_score(truth, predicted)
        found["F1"] = metrics.f1_score(truth, predicted, average="macro", zero_division=0.0)
    if truth.ndim == 1 and set(np.unique(truth)) == set(model.classes_):
        shares = model.predict_proba(X).astype(np.float64)
        shares = shares[:, 1] if shares.shape[1] == 2 else shares / shares.sum(1, keepdims=True)
        found["AUC"] = metrics.roc_auc_score(
            truth, shares, multi_class="ovr", labels=model.classes_
        )
    return {name: float(value) for name, value in found.items()}


def baseline(y: Array, truth: Array, target: Target) -> dict[str, Any]:
    """The same scores of the mean, or of the most frequent class."""
    X, X_test = np.zeros((len(y), 1)), np.zeros((len(truth), 1))
    if target.task == "regression":
        return {
            "answer": "always the mean",
            **scores(DummyRegressor().fit(X, y), X_test, truth, target),
        }
    model = DummyClassifier(strategy="most_frequent").fit(X, y)
    if y.ndim == 2:
        name = "always the most frequent"
    else:
        name = f"always {str(model.predict(X[:1])[0])!r}"
    return {"answer": name, **scores(model, X_test, truth, target)}


def _of_numbers(truth: Array, predicted: Array, names: tuple[str, ...]) -> dict[str, float]:
    if truth.ndim == 1:
        columns = {"": (truth, predicted)}
    else:
        columns = {f" of {name}": (truth[:, k], predicted[:, k]) for k, name in enumerate(names)}
    found = {}
    for which, pair in columns.items():
        found[f"MAE{which}"] = metrics.mean_absolute_error(*pair)
        found[f"RMSE{which}"] = metrics.root_mean_squared_error(*pair)
    if len(truth) > 1:
        found = {"R²": metrics.r2_score(truth, predicted), **found}
    return {name: float(value) for name, value in found.items()}
