"""What to look at before trusting a score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lpom.tables.values import Array

_ENOUGH, _MOST = 40, 2000  # rows
_ALONE = 0.995  # accuracy or R2 of one column


def alone(blocks: Mapping[str, Array], y: Any) -> list[str]:
    """A sentence for each column that a tree predicts nearly all of ``y`` from."""
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

    target = np.asarray(y)
    if len(blocks) < 2 or target.ndim != 1 or len(target) < _ENOUGH:
        return []
    rows = np.random.default_rng(0).permutation(len(target))[:_MOST]
    distinct, codes = np.unique(target, return_inverse=True)
    numbers = target.dtype.kind == "f" or (
        target.dtype.kind in "iu" and len(distinct) > min(20, len(target) / 2)
    )
    target = target[rows] if numbers else codes[rows]
    if not (np.isfinite(target).all() if numbers else np.bincount(target).max() < 0.9 * len(rows)):
        return []
    half = len(rows) // 2
    tree = DecisionTreeRegressor if numbers else DecisionTreeClassifier
    hints = []
    for name, block in blocks.items():
        part = block[rows]
        model = tree(random_state=0).fit(part[:half], target[:half])
        score = model.score(part[half:], target[half:])
        if score >= _ALONE:
            hints.append(
                f"column {name!r} alone predicts the target ({'R2' if numbers else 'accuracy'} "
                f"{score:.3f}): is it known before the target is? If not, ignore it."
            )
    return hints
