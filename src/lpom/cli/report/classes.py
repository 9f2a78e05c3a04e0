"""What a classifier makes of the test rows: hits and mistakes, thresholds, and how sure it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.metrics import auc as area
from sklearn.metrics import average_precision_score, precision_recall_curve, roc_curve

from lpom.cli.report.judging import MISTAKES, HeldBack, check_score, shown_columns
from lpom.cli.run import Run
from lpom.datasets.base import Array
from lpom.tables.old import Classes

_POINTS = 100  # of a curve
_CURVES = 10  # classes with one of their own
_BINS = 10  # of probabilities


def judge_classes(run: Run, rows: HeldBack, most_important: Sequence[str]) -> dict[str, Any]:
    """Counts by true and predicted class, the most confident mistakes, and curves.

    Raises
    ------
    DataError
        If the network is not as good on these rows as it was on those of the run.
    """
    target = run.predictor.target
    assert isinstance(target, Classes)
    answers = run.predictor.answers(rows.inputs, probabilities=True)
    said = target.encode(answers[["prediction"]].set_axis([target.column], axis=1))
    shares = answers.drop(columns="prediction").to_numpy()
    sure = shares[np.arange(len(said)), said]
    counts = np.zeros((len(target.classes), len(target.classes)), dtype=int)
    np.add.at(counts, (rows.truth, said), 1)
    wrong = np.flatnonzero(said != rows.truth)
    check_score(run, 1 - len(wrong) / len(said))
    worst = wrong[np.argsort(-sure[wrong], kind="stable")[:MISTAKES]]
    columns = shown_columns(rows, most_important)
    return {
        "kind": "classes",
        "classes": list(target.classes),
        "counts": counts.tolist(),
        "n": len(said),
        "n_wrong": len(wrong),
        "columns": columns,
        "mistakes": [
            {
                "row": int(k),
                "number": rows.number(k),
                "truth": int(rows.truth[k]),
                "said": int(said[k]),
                "share": float(sure[k]),
                "picture": rows.picture(k),
                "cells": rows.cells(k, columns),
            }
            for k in worst
        ],
        "curves": threshold_curves(rows.truth, shares, target.classes),
        "calibration": calibration(sure, said == rows.truth),
    }


def threshold_curves(truth: Array, shares: Array, classes: Sequence[str]) -> list[dict[str, Any]]:
    """ROC and precision-recall curves: of the second of two classes, or of each against the rest.

    Classes that no row has, or all have, are passed over; of many, the most frequent are kept.
    """
    number = np.bincount(truth, minlength=len(classes))
    chosen = [1] if len(classes) == 2 else np.sort(np.argsort(-number, kind="stable")[:_CURVES])
    made = []
    for k in chosen:
        if not 0 < number[k] < len(truth):
            continue
        is_k, share = truth == k, shares[:, k]
        false, true, _ = roc_curve(is_k, share)
        precision, recall, _ = precision_recall_curve(is_k, share)
        made.append(
            {
                "class": int(k),
                "auc": float(area(false, true)),
                "average_precision": float(average_precision_score(is_k, share)),
                "roc": thinned(false, true),
                "precision_recall": thinned(recall[::-1], precision[::-1]),
            }
        )
    return made


def calibration(sure: Array, right: Array) -> dict[str, Any]:
    """Of rows in bins of equal width by the probability of the answer: its mean, and how often it
    is right; ``error`` is the mean distance of the two over all rows (ECE)."""
    bins = np.minimum((sure * _BINS).astype(int), _BINS - 1)
    found = [bins == k for k in range(_BINS) if (bins == k).any()]
    means = [float(sure[rows].mean()) for rows in found]
    shares = [float(right[rows].mean()) for rows in found]
    counts = [int(rows.sum()) for rows in found]
    distances = np.abs(np.array(means) - np.array(shares))
    return {
        "sure": means,
        "right": shares,
        "counts": counts,
        "error": float(np.average(distances, weights=counts)),
    }


def thinned(x: Array, y: Array) -> dict[str, list[float]]:
    """A curve by at most so many of its points, the ends among them."""
    kept = np.unique(np.linspace(0, len(x) - 1, _POINTS).round().astype(int))
    return {"x": np.round(x[kept], 4).tolist(), "y": np.round(y[kept], 4).tolist()}
