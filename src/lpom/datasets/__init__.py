"""The small data sets that come with scikit-learn by name, and tables of the user from files.

=============  =====================================================
name           what
=============  =====================================================
digits         handwritten digits, 8x8, 10 classes
iris           irises, 4 features, 3 classes
wine           wines, 13 features, 3 classes
breast-cancer  tumours, 30 features, 2 classes
diabetes       diabetes progression, 10 features, regression
=============  =====================================================
"""

from __future__ import annotations

from typing import Any

from lpom.datasets.base import Dataset
from lpom.datasets.bundled import load_bundled
from lpom.datasets.files import Table, read_table
from lpom.exceptions import unknown_name

__all__ = ["Dataset", "Table", "load", "names", "read_table"]

_NAMES = ("digits", "iris", "wine", "breast-cancer", "diabetes")


def names() -> tuple[str, ...]:
    """The names that `load` knows."""
    return _NAMES


def load(name: str, data_dir: Any = None) -> Dataset:
    """Load a data set by name; ``data_dir`` is not looked at, as scikit-learn brings them.

    >>> from lpom import datasets
    >>> iris = datasets.load("iris")
    >>> iris.x_train.shape, iris.x_test.shape, iris.classes
    ((120, 4), (30, 4), ('setosa', 'versicolor', 'virginica'))
    """
    if name not in _NAMES:
        raise ValueError(unknown_name("data set", name, names()))
    return load_bundled(name)
