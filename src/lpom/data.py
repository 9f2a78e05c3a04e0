"""Batches, and where they come from: arrays, sparse or dense, or a torch ``DataLoader``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, final

import numpy as np
import torch
from scipy import sparse
from torch import Tensor
from torch.utils.data import DataLoader

from lpom.checks import check_number
from lpom.network import Lifted
from lpom.tasks import Task, as_tensor

#: Rows of one forward pass where nothing is trained; sparse rows become dense this many at a time.
ROWS = 4096
_ALL_ZERO = "sample_weight is zero for every sample; at least one must count."


@dataclass(frozen=True)
class Batch:
    """Rows of data: inputs (m, n0), coded targets (m, n_outputs), and a weight per row or none.

    ``whole`` says that these are all the rows there are.
    """

    inputs: Tensor
    target: Tensor
    weight: Tensor | None = None
    whole: bool = False

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def total_weight(self) -> Tensor:
        if self.weight is None:
            return self.inputs.new_tensor(float(len(self)))
        total = self.weight.sum()
        return torch.where(total > 0, total, 1)  # a batch that counts for nothing has no mean


class Source(ABC):
    """An endless supply of epochs of batches, in the network's dtype and on its device."""

    steps: int | None  # batches per epoch, None if that can't be known

    @abstractmethod
    def epoch(self) -> Iterator[Batch]: ...


def first_targets(X: Any, y: Any) -> tuple[Any, Iterator[Any] | None]:
    """The targets, or those of a loader's first batch: enough to tell what the task is.

    With them the loader's iterator, at its start again: not every data set can be read twice.
    """
    if isinstance(X, DataLoader):
        if y is not None:
            raise TypeError("a DataLoader brings its own targets; leave y out.")
        begun = iter(X)
        for item in begun:
            return _parts(item)[1], chain([item], begun)
        raise ValueError("the DataLoader gave no batch; at least one is needed.")
    if y is None:
        raise TypeError("y is missing; give the targets, or a DataLoader in place of X and y.")
    return y, None


def to_measure(
    X: Any, y: Any, task: Task, network: Lifted, weight: Any = None, begun: Any = None
) -> Source:
    """Rows that nothing is trained on, in batches as large as is good for a forward pass."""
    if isinstance(X, DataLoader):
        return Loader(X, task, network, begun)
    return Arrays(X, y, task, network, batch_size=min(ROWS, n_rows(X)) or None, weight=weight)


@final
class Arrays(Source):
    """Rows in memory, reshuffled every epoch; sparse rows become dense a batch at a time."""

    def __init__(
        self,
        X: Any,
        y: Any,
        task: Task,
        network: Lifted,
        *,
        batch_size: int | None = None,
        weight: Any = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.like = network.parameters[0].detach()
        self.X = check_inputs(X, network.n_inputs, network.flattens)
        self.n = n = self.X.shape[0]
        check_targets_finite(y)
        self.target = task.target(y).to(self.like)
        if len(self.target) != n:
            raise ValueError(
                f"X and y must have the same number of rows: X has {n}, y has {len(self.target)}."
            )
        self.weight = None if weight is None else check_weights(weight, n).to(self.like)
        if self.weight is not None and not bool((self.weight > 0).any()):
            raise ValueError(_ALL_ZERO)
        if isinstance(self.X, Tensor):
            self.X = self.X.to(self.like)
        if batch_size is not None:
            check_number("batch_size", batch_size, whole=True)
            if batch_size > n:
                raise ValueError(
                    "batch_size must lie between 1 and the number of samples, "
                    f"{n}; got {batch_size}."
                )
        self.generator = generator
        self.batch_size = int(batch_size or n)
        self.steps = -(-n // self.batch_size)

    def epoch(self) -> Iterator[Batch]:
        if self.steps == 1:
            yield Batch(self._rows(slice(None)), self.target, self.weight, whole=True)
            return
        order = None
        if self.generator is not None:
            order = torch.randperm(self.n, generator=self.generator)
        for start in range(0, self.n, self.batch_size):
            stop = min(start + self.batch_size, self.n)
            rows: Any = slice(start, stop) if order is None else order[start:stop]
            if isinstance(rows, Tensor):
                rows = rows.to(self.like.device)
            weight = None if self.weight is None else self.weight[rows]
            yield Batch(self._rows(rows), self.target[rows], weight)

    def _rows(self, rows: Any) -> Tensor:
        return dense_rows(self.X, rows, self.like)


@final
class Loader(Source):
    """Batches of a ``DataLoader`` that yields ``(X, y)`` or ``(X, y, weight)``."""

    def __init__(
        self,
        loader: DataLoader[Any],
        task: Task,
        network: Lifted,
        begun: Iterator[Any] | None = None,
    ) -> None:
        self.loader, self.task, self.network = loader, task, network
        self.like = network.parameters[0].detach()
        self.begun = begun  # an iterator that the first epoch is to take
        try:
            self.steps = len(loader)
        except TypeError:  # an iterable data set without a length
            self.steps = None

    def epoch(self) -> Iterator[Batch]:
        items, self.begun = self.begun or self.loader, None
        total = None
        for item in items:
            X, y, *weight = _parts(item)
            X = check_inputs(X, self.network.n_inputs, self.network.flattens)
            check_targets_finite(y)
            batch = Batch(
                X.to(self.like),
                self.task.target(y).to(self.like),
                check_weights(weight[0], len(X)).to(self.like) if weight else None,
                whole=self.steps == 1,
            )
            yield batch
            counted = len(batch) if batch.weight is None else float(batch.weight.sum())
            total = counted + (total or 0.0)
        if total == 0:
            raise ValueError(_ALL_ZERO)


def _parts(item: Any) -> Sequence[Any]:
    if not isinstance(item, list | tuple) or len(item) not in (2, 3):
        count = f" of {len(item)}" if isinstance(item, list | tuple) else ""
        raise TypeError(
            f"a DataLoader must yield (X, y) or (X, y, weight), got {type(item).__name__}{count}."
        )
    return item


def dense_rows(X: Any, rows: Any, like: Tensor) -> Tensor:
    """Some rows of a tensor or CSR matrix, dense, in the dtype and on the device of ``like``."""
    if isinstance(X, Tensor):
        return X[rows].to(like)
    picked = X[rows.cpu().numpy() if isinstance(rows, Tensor) else rows]
    return torch.from_numpy(picked.toarray()).to(like)


def check_inputs(X: Any, n_features: int, flatten: bool = False) -> Any:
    """A tensor (m, n_features) or a CSR matrix, finite, with at least one row.

    ``flatten``: samples may have several dimensions, which become one.
    """
    if sparse.issparse(X):
        X = X.tocsr()
        values: Tensor = torch.as_tensor(X.data)
    else:
        if not isinstance(X, Tensor):
            array = np.asarray(X)
            if array.dtype.kind not in "biuf":
                raise TypeError(f"X must hold numbers, got {array.dtype}.")
            X = as_tensor(array)
        X = X.detach()
        values = X = X.flatten(1) if flatten and X.ndim > 2 else X
    if X.ndim != 2 or X.shape[1] != n_features:
        raise ValueError(
            f"X needs shape (n_samples, {n_features}) to match the first Linear layer; "
            f"got {tuple(X.shape)}."
        )
    if X.shape[0] == 0:
        raise ValueError("X has no rows; at least one sample is needed.")
    if values.is_floating_point() and not bool(torch.isfinite(values).all()):
        where = "" if sparse.issparse(X) else f", first in row {_first_bad_row(values)}"
        raise ValueError(f"X holds NaN or infinity{where}. Remove or impute such values first.")
    return X


def check_targets_finite(y: Any) -> None:
    values = y if isinstance(y, Tensor) else np.asarray(y)
    if isinstance(values, np.ndarray):
        if values.dtype.kind != "f":
            return
        values = as_tensor(values)
    if values.is_floating_point() and not bool(torch.isfinite(values).all()):
        raise ValueError(
            f"y holds NaN or infinity, first in row {_first_bad_row(values)}. "
            "Remove such rows first."
        )


def check_weights(weight: Any, n: int) -> Tensor:
    """Weights of ``n`` samples, which may all be zero: other batches may count."""
    weights: Tensor = weight if isinstance(weight, Tensor) else as_tensor(np.asarray(weight))
    if weights.shape != (n,):
        raise ValueError(
            f"sample_weight needs shape ({n},), one per sample; got {tuple(weights.shape)}."
        )
    if not bool(torch.isfinite(weights).all()) or bool((weights < 0).any()):
        raise ValueError("sample_weight must be finite and not negative.")
    return weights


def _first_bad_row(values: Tensor) -> int:
    bad = ~torch.isfinite(values).reshape(len(values), -1).all(1)
    return int(bad.nonzero()[0, 0])


def n_rows(X: Any) -> int:
    return int(X.shape[0]) if hasattr(X, "shape") else len(X)
