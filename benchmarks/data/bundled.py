"""Small tables that come with scikit-learn."""

from __future__ import annotations

import numpy as np
import sklearn.datasets
from sklearn.model_selection import train_test_split

from data.base import Dataset


def load_bundled(name: str) -> Dataset:
    """Digits or iris, split 80/20 in a fixed way that keeps the shares of the classes."""
    table = getattr(sklearn.datasets, f"load_{name}")()
    y = table.target.astype(np.int64)
    x_train, x_test, y_train, y_test = train_test_split(
        table.data.astype(np.float32), y, test_size=0.2, random_state=0, stratify=y
    )
    shape = table.images.shape[1:] if name == "digits" else None
    return Dataset(name, x_train, y_train, x_test, y_test, len(table.target_names), shape)
