"""Data sets by name.

================  =====================================================  ====================
name              what                                                   from
================  =====================================================  ====================
digits            handwritten digits, 8x8, 10 classes                    scikit-learn
iris              irises, 4 features, 3 classes                          scikit-learn
wine              wines, 13 features, 3 classes                          scikit-learn
breast-cancer     tumours, 30 features, 2 classes                        scikit-learn
diabetes          diabetes progression, 10 features, regression          scikit-learn
mnist             handwritten digits, 28x28, 10 classes                  files, or download
fashion-mnist     clothes, 28x28, 10 classes                             files, or download
cifar-10          photographs, 32x32 in colour, 10 classes               files, or download
svhn-0-2          house numbers 0 against 2, 648 HOG features            files, or download
svhn-0-2-extra    the same, trained on the "extra" set of the paper      files, or download
================  =====================================================  ====================

Files are read in the format they are published in, from `data_dir` or from the folder that the
environment variable ``LPOM_DATA`` names; what is not there is downloaded and checked. Tables of
your own are read with `read_table`.

Pictures come flat, one row each; ``load(name).pictures()`` has them as (n, channels, rows,
columns), and `augmented_loader` flips and shifts these while a network trains. `adversarial_loader`
moves rows of any kind to where the network errs; `whitened` takes the correlations out of a data
set.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lpom.datasets.adversarial import adversarial_loader
from lpom.datasets.augmentation import augmented_loader
from lpom.datasets.base import DataDir, Dataset
from lpom.datasets.bundled import load_bundled
from lpom.datasets.cifar10 import load_cifar10
from lpom.datasets.files import Table, read_table
from lpom.datasets.mnist import load_fashion_mnist, load_mnist
from lpom.datasets.preprocessing import whitened
from lpom.datasets.svhn import load_svhn_0_2
from lpom.exceptions import unknown_name

__all__ = [
    "Dataset",
    "Table",
    "adversarial_loader",
    "augmented_loader",
    "load",
    "names",
    "read_table",
    "whitened",
]


def _bundled(name: str) -> Callable[[DataDir], Dataset]:
    return lambda data_dir: load_bundled(name)


_LOADERS: dict[str, Callable[[DataDir], Dataset]] = {
    "digits": _bundled("digits"),
    "iris": _bundled("iris"),
    "wine": _bundled("wine"),
    "breast-cancer": _bundled("breast-cancer"),
    "diabetes": _bundled("diabetes"),
    "mnist": load_mnist,
    "fashion-mnist": load_fashion_mnist,
    "cifar-10": load_cifar10,
    "svhn-0-2": load_svhn_0_2,
    "svhn-0-2-extra": partial(load_svhn_0_2, extra=True),
}


def names() -> tuple[str, ...]:
    """The names that `load` knows."""
    return tuple(_LOADERS)


def load(name: str, data_dir: DataDir = None) -> Dataset:
    """Load a data set by name.

    Parameters
    ----------
    name : str
        One of `names`.
    data_dir : path, optional
        Folder that holds the files of the data set, itself or in a folder of its own (``mnist``,
        ``fashion-mnist``, ``cifar-10-batches-bin``, ``svhn``); the environment
        variable ``LPOM_DATA`` if it is not given. Files that are not there are downloaded.

    Examples
    --------
    >>> from lpom import datasets
    >>> iris = datasets.load("iris")
    >>> iris.x_train.shape, iris.x_test.shape, iris.classes
    ((120, 4), (30, 4), ('setosa', 'versicolor', 'virginica'))
    """
    if name not in _LOADERS:
        raise ValueError(unknown_name("data set", name, names()))
    return _LOADERS[name](data_dir)
