"""What a run makes of the test rows where it predicts numbers, or labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.metrics import r2_score

from lpom.cli.report.judging import MISTAKES, HeldBack, check_score, shown_columns
from lpom.cli.run import Run
from lpom.datasets.base import Array

_POINTS = 1000  # rows that are drawn
_WITHIN = 0.9  # share of the rows whose error is told
_DIGITS = 6


def judge_numbers(run: Run, rows: HeldBack, most_important: Sequence[str]) -> dict[str, Any]:
    """For each target: predicted against true, errors in its unit, and the rows with the largest.

    Raises
    ------
    DataError
        If the network is not as good on these rows as it was on those of the run.
    """
    said = run.predictor.estimator.predict(rows.inputs)
    check_score(run, float(r2_score(rows.truth, said)))
    columns = shown_columns(rows, most_important)
    names = run.predictor.target.names
    truths = rows.truth.reshape(len(said), -1)
    answers = said.reshape(len(said), -1)
    return {
        "kind": "numbers",
        "columns": columns,
        "targets": [
            {"name": name, **_target(truths[:, j], answers[:, j], rows, columns)}
            for j, name in enumerate(names)
        ],
    }


def _target(truth: Array, said: Array, rows: HeldBack, columns: list[str]) -> dict[str, Any]:
    error = said - truth
    drawn = np.random.default_rng(0).permutation(len(truth))[:_POINTS]
    worst = np.argsort(-np.abs(error), kind="stable")[:MISTAKES]
    return {
        "truth": _rounded(truth[drawn]),
        "said": _rounded(said[drawn]),
        "errors": errors(truth, said),
        "n": len(truth),
        "mistakes": [
            {
                "number": rows.number(k),
                "truth": float(truth[k]),
                "said": float(said[k]),
                "cells": rows.cells(k, columns),
            }
            for k in worst
        ],
    }


def errors(truth: Array, said: Array) -> dict[str, float]:
    """Errors in the unit of the target."""
    error = said.astype(np.float64) - truth
    size = np.abs(error)
    return {
        "mean absolute error": float(size.mean()),
        "root mean squared error": float(np.sqrt((error**2).mean())),
        "median absolute error": float(np.median(size)),
        f"{_WITHIN:.0%} of the errors are below": float(np.quantile(size, _WITHIN)),
        "largest error": float(size.max()),
        "mean error (predicted - true)": float(error.mean()),
    }


def judge_labels(run: Run, rows: HeldBack) -> dict[str, Any]:
    """For each label how often it is there, found and rightly said."""
    said = run.predictor.estimator.predict(rows.inputs).astype(bool)
    truth = rows.truth.astype(bool)
    check_score(run, float((said == truth).all(1).mean()))
    both = (said & truth).sum(0)
    return {
        "kind": "labels",
        "labels": [
            {
                "name": name,
                "rows": int(truth[:, j].sum()),
                "recall": _share(both[j], truth[:, j].sum()),
                "precision": _share(both[j], said[:, j].sum()),
            }
            for j, name in enumerate(run.predictor.target.names)
        ],
    }


def _share(part: int, whole: int) -> float | None:
    return float(part / whole) if whole else None


def _rounded(values: Array) -> list[float]:
    return [float(f"{value:.{_DIGITS}g}") for value in values]
