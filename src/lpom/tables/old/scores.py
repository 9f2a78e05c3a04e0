"""How good predictions are, in several words, beside what needs no model at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn import metrics

from lpom.tables.old.columns import Array


def class_scores(truth: Array, said: Array, shares: Array) -> dict[str, float]:
    """Of class numbers, and the share of every class in each row; AUC only where it is defined."""
    found = {
        "accuracy": metrics.accuracy_score(truth, said),
        "balanced accuracy": float(
            np.mean([(said[truth == c] == c).mean() for c in np.unique(truth)])
        ),
        "F1": metrics.f1_score(truth, said, average="macro", zero_division=0.0),
    }
    present = np.unique(truth)
    if len(present) == shares.shape[1] == 2:
        found["AUC"] = metrics.roc_auc_score(truth, shares[:, 1])
    elif 2 < len(present) == shares.shape[1]:
        total = shares / shares.sum(1, keepdims=True)
        found["AUC"] = metrics.roc_auc_score(truth, total, multi_class="ovr")
    return {name: float(value) for name, value in found.items()}


def number_scores(truth: Array, said: Array, names: Sequence[str] = ()) -> dict[str, float]:
    """Of numbers in their own unit, (n,) or (n, outputs).

    Errors of several outputs stand by their ``names``: a mean over different units says nothing.
    """
    if truth.ndim == 1:
        columns = {"": (truth, said)}
    else:
        columns = {f" of {name}": (truth[:, k], said[:, k]) for k, name in enumerate(names)}
    found = {}
    for which, pair in columns.items():
        found[f"MAE{which}"] = metrics.mean_absolute_error(*pair)
        found[f"RMSE{which}"] = metrics.root_mean_squared_error(*pair)
    if len(truth) > 1:
        found = {"R²": metrics.r2_score(truth, said), **found}
    return {name: float(value) for name, value in found.items()}


def label_scores(truth: Array, said: Array) -> dict[str, float]:
    """Of a 0/1 matrix, one column per label."""
    return {
        "accuracy": float((truth == said).all(1).mean()),
        "F1": float(metrics.f1_score(truth, said, average="macro", zero_division=0.0)),
    }


def majority(train: Array, truth: Array, n_classes: int) -> tuple[int, dict[str, float]]:
    """The most frequent class of ``train``, and how good it is as an answer to everything."""
    most = int(np.bincount(train, minlength=n_classes).argmax())
    shares = np.bincount(train, minlength=n_classes) / len(train)
    constant = np.tile(shares, (len(truth), 1))
    return most, class_scores(truth, np.full(len(truth), most), constant)


def always(train: Array, truth: Array, task: str, names: Sequence[str] = ()) -> dict[str, Any]:
    """The mean of numbers, or the more frequent value of each label, as an answer to everything."""
    mean = train.mean(0)
    if task == "regression":
        return number_scores(truth, np.broadcast_to(mean, truth.shape), names)
    return label_scores(truth, np.broadcast_to((mean > 0.5).astype(int), truth.shape))
