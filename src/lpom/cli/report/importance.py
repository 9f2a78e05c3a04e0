"""Which columns a network looks at: what it loses when one of them is shuffled."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.metrics import r2_score

from lpom.cli.report.judging import HeldBack
from lpom.datasets.base import Array
from lpom.predictor import Predictor
from lpom.tables.old import Features

ROWS, COLUMNS, TIMES, SHOWN = 1000, 200, 5, 20


def importances(predictor: Predictor, rows: HeldBack) -> list[dict[str, Any]]:
    """Accuracy or R2 lost by shuffling each column alone, the most important first.

    All inputs that a column makes are shuffled together, five times; ``spread`` is the standard
    deviation. Nothing for pictures, and for tables of very many columns.
    """
    features = predictor.features
    if not isinstance(features, Features) or rows.frame is None or len(features.names) > COLUMNS:
        return []
    rng = np.random.default_rng(0)
    chosen = np.sort(rng.permutation(len(rows.truth))[:ROWS])
    inputs, truth = rows.inputs[chosen], rows.truth[chosen]
    whole = _score(predictor, inputs, truth)
    found = []
    for name, places in features.inputs_of.items():
        lost = []
        for _ in range(TIMES):
            shuffled = inputs.copy()
            shuffled[:, places] = inputs[rng.permutation(len(inputs))][:, places]
            lost.append(whole - _score(predictor, shuffled, truth))
        found.append({"name": name, "lost": float(np.mean(lost)), "spread": float(np.std(lost))})
    return sorted(found, key=lambda column: -column["lost"])


def _score(predictor: Predictor, inputs: Array, truth: Array) -> float:
    said = predictor.estimator.predict(inputs)
    if predictor.target.task == "regression":
        return float(r2_score(truth, said))
    right = said == truth
    return float((right if right.ndim == 1 else right.all(1)).mean())
