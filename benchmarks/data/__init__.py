"""Data sets by name: MNIST, Fashion-MNIST, CIFAR-10, SVHN, and digits and iris of scikit-learn.

Files are read as they are published, from the folder that the environment variable ``LPOM_DATA``
names, itself or a folder of the data set's own (``mnist``, ``fashion-mnist``,
``cifar-10-batches-bin``, ``svhn``). What is not there is downloaded into ``~/.cache/lpom``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from data.base import Dataset
from data.bundled import load_bundled
from data.cifar10 import load_cifar10
from data.mnist import load_mnist
from data.svhn import load_svhn

__all__ = ["LOADERS", "Dataset", "load"]

LOADERS: dict[str, Callable[[], Dataset]] = {
    "digits": partial(load_bundled, "digits"),
    "iris": partial(load_bundled, "iris"),
    "mnist": load_mnist,
    "fashion-mnist": partial(load_mnist, "fashion-mnist"),
    "cifar-10": load_cifar10,
    "svhn-0-2": load_svhn,
    "svhn-0-2-extra": partial(load_svhn, extra=True),
}


def load(name: str) -> Dataset:
    """The data set of this name, one of `LOADERS`."""
    if name not in LOADERS:
        raise ValueError(f"unknown data set {name!r}; there are {', '.join(LOADERS)}.")
    return LOADERS[name]()
