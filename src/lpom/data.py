"""Where batches come from: arrays in memory, sparse or dense, or a torch ``DataLoader``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, final

import numpy as np
import torch
from scipy import sparse
from torch import Tensor
from torch.utils.data import DataLoader

from lpom.methods.base import Batch
from lpom.tasks import Task, as_tensor

ALL_ZERO = "sample_weight is zero for every sample; at least one must count."


class Source(ABC):
    """An endless supply of epochs of batches, in the model's dtype and on its device."""

    steps: int | None  # batches per epoch, None if that can't be known

    @abstractmethod
    def epoch(self) -> Iterator[Batch]: ...


@final
class Arrays(Source):
    """Rows in memory, reshuffled every epoch; sparse rows become dense a batch at a time."""

    def __init__(
        self,
        X: Any,
        y: Any,
        task: Task,
        like: Tensor,
        *,
        n_features: int,
        batch_size: int | None = None,
        weight: Any = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.X = check_inputs(X, n_features)
        n = self.X.shape[0]
        check_targets_finite(y)
        self.target = task.target(y).to(like)
        if len(self.target) != n:
            raise ValueError(f"X and y need as many rows: X has {n}, y has {len(self.target)}.")
        self.weight = None if weight is None else check_weights(weight, n).to(like)
        if self.weight is not None and not bool((self.weight > 0).any()):
            raise ValueError(ALL_ZERO)
        if isinstance(self.X, Tensor):
            self.X = self.X.to(like)
        self.like, self.generator, self.n = like, generator, n
        if batch_size is not None and not 1 <= batch_size <= n:
            raise ValueError(
                f"batch_size must lie between 1 and the number of samples, {n}; got {batch_size}."
            )
        self.batch_size = batch_size or n
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
        like: Tensor,
        n_features: int,
        begun: Iterator[Any] | None = None,
    ) -> None:
        self.loader, self.task, self.like, self.n_features = loader, task, like, n_features
        self.begun = begun  # an iterator that the first epoch is to take
        try:
            self.steps = len(loader)
        except TypeError:  # an iterable data set without a length
            self.steps = None

    def epoch(self) -> Iterator[Batch]:
        items, self.begun = self.begun or self.loader, None
        total = None
        for item in items:
            if not isinstance(item, list | tuple) or len(item) not in (2, 3):
                raise TypeError(
                    f"a DataLoader must yield (X, y) or (X, y, weight), got {type(item).__name__}."
                )
            X, y, *weight = item
            X = check_inputs(X, self.n_features)
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
            raise ValueError(ALL_ZERO)


def dense_rows(X: Any, rows: Any, like: Tensor) -> Tensor:
    """Some rows of a tensor or CSR matrix, dense, in the dtype and on the device of ``like``."""
    if isinstance(X, Tensor):
        return X[rows].to(like)
    picked = X[rows.cpu().numpy() if isinstance(rows, Tensor) else rows]
    return torch.from_numpy(picked.toarray()).to(like)


def check_inputs(X: Any, n_features: int) -> Any:
    """A tensor (m, n_features) or a CSR matrix, finite, with at least one row."""
    if sparse.issparse(X):
        X = X.tocsr()
        values: Tensor = torch.as_tensor(X.data)
    else:
        if not isinstance(X, Tensor):
            array = np.asarray(X)
            if array.dtype.kind not in "biuf":
                raise TypeError(f"X must hold numbers, got {array.dtype}.")
            X = as_tensor(array)
        values = X
    if X.ndim != 2 or X.shape[1] != n_features:
        raise ValueError(
            f"X needs shape (n_samples, {n_features}), as the first Linear layer says; "
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
