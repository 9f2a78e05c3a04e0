"""Where batches come from: arrays, dense, mapped or sparse, or a torch ``DataLoader``."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice, repeat
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lpom.checks import check_number
from lpom.exceptions import warn
from lpom.methods import Batch
from lpom.parallel import Ranks
from lpom.training.signature import Signature, has_lengths
from lpom.training.tasks import Task, as_array, as_tensor, plain_tensor

#: Rows of one forward pass where nothing is trained; sparse rows become dense this many at a time.
ROWS = 4096
_CHUNK = 2**17  # numbers looked at together when all of X is checked
_AHEAD = 2**16  # numbers of rows that are brought together for several batches
_LARGE = 1e6  # numbers in X beyond this are said to be unscaled
_ALL_ZERO = "sample_weight is zero for every sample; at least one must count."


class Source(ABC):
    """An endless supply of epochs of batches, in the network's dtype and on its device.

    ``generators`` are those that the order of the batches is drawn from, ``steps`` the batches
    per epoch, None if that can't be known.
    """

    steps: int | None
    generators: list[torch.Generator]
    like: Tensor  # a tensor with that dtype and device

    @abstractmethod
    def epoch(self, skip: int = 0) -> Iterator[Batch]:
        """The batches of one epoch but the first ``skip``; the order is drawn at once."""

    @abstractmethod
    def in_order(self) -> Iterator[Batch]:
        """All rows once, to be measured."""

    @abstractmethod
    def probe(self) -> Batch:
        """The batch on which the objective is measured in every epoch of a run."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What must be the same for a run to go on with this data."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Tells whether two processes have the same rows."""

    def rewind(self, epochs: int = 0) -> None:
        """Forget what was read ahead: so many epochs are done, the generators stand elsewhere."""
        return None


def to_measure(
    X: Any,
    y: Any,
    task: Task,
    takes: Signature,
    weight: Any = None,
    ranks: Ranks | None = None,
) -> Source:
    """Rows that nothing is trained on, in batches as large as is good for a forward pass."""
    if isinstance(X, DataLoader):
        return Loader(X, takes, task)
    size = min(ROWS, n_rows(X)) or None
    return Arrays(X, y, task, takes, batch_size=size, weight=weight, ranks=ranks)


@final
class Arrays(Source):
    """Rows that can be reached in any order, reshuffled every epoch if there is a generator.

    X is held once: as it was given if it has the network's dtype and device and rows one after
    the other, else as a copy that has. Memory maps stay on disk and sparse rows sparse; their
    rows are brought together a batch at a time. All ``ranks`` have the same rows and draw the same
    order, and each takes its part of every batch.
    """

    def __init__(
        self,
        X: Any,
        y: Any,
        task: Task,
        takes: Signature,
        *,
        batch_size: int | None = None,
        weight: Any = None,
        generator: torch.Generator | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.takes, self.like, self.ranks = takes, takes.like, ranks
        dtype = self.like.dtype
        self.X = check_inputs(X, takes)
        self.n = n = self.X.shape[0]
        check_targets_finite(y, dtype)
        self.target = task.target(y, takes.there(self.X)).to(self.like)
        self.counts = task.counts(self.target)
        if len(self.target) != n:
            raise ValueError(
                f"X and y must have the same number of rows: X has {n}, y has {len(self.target)}."
            )
        self.weight = None if weight is None else check_weights(weight, n, dtype).to(self.like)
        if self.weight is not None and not bool((self.weight > 0).any()):
            raise ValueError(_ALL_ZERO)
        if isinstance(self.X, Tensor):
            self.X = takes.stored(self.X)
        # rows that only need to be picked; pictures change their layout
        self._ready = isinstance(self.X, Tensor) and self.X.ndim != 4
        if batch_size is not None:
            check_number("batch_size", batch_size, whole=True)
            if batch_size > n:
                raise ValueError(
                    "batch_size must lie between 1 and the number of samples, "
                    f"{n}; got {batch_size}."
                )
        self.generators = [] if generator is None else [generator]
        self.batch_size = int(batch_size or n)
        self.steps = -(-n // self.batch_size)

    @cached_property
    def whole(self) -> Batch:
        """All rows at once: one and the same batch in every epoch."""
        return Batch(self._rows(slice(None)), self.target, self.weight, self.counts, whole=True)

    def epoch(self, skip: int = 0) -> Iterator[Batch]:
        order = None
        if self.generators and self.steps != 1:
            order = torch.randperm(self.n, generator=self.generators[0])
        if self.ranks is None:
            return self._batches(order, skip)
        return self._shares(self.ranks, order, skip)

    def in_order(self) -> Iterator[Batch]:
        if self.ranks is None:
            return self._batches(None, 0)
        return self._part(self.ranks.rank, self.ranks.size)

    def probe(self) -> Batch:
        return next(self._batches(None, 0))

    def fingerprint(self) -> str:
        rows = torch.linspace(0, self.n - 1, min(self.n, 1000)).long()
        return self._batch(rows).fingerprint

    def describe(self) -> dict[str, Any]:
        return {"rows": self.n, "batch_size": self.batch_size, "content": self._content}

    @cached_property
    def _content(self) -> str:
        return self.fingerprint()

    def _batches(self, order: Tensor | None, skip: int) -> Iterator[Batch]:
        if self.steps == 1:
            return iter([self.whole][skip:])
        return chain.from_iterable(self._brought(order, skip))

    def _brought(self, order: Tensor | None, skip: int) -> Iterator[list[Batch]]:
        """Batches, as many at a time as are brought together."""
        each = self.batch_size
        numbers = each * math.prod(self.takes.shape)
        ahead = each * max(1, _AHEAD // max(1, numbers))  # one call brings several small batches
        for start in range(skip * each, self.n, ahead):
            stop = min(start + ahead, self.n)
            rows = self._batch(slice(start, stop) if order is None else order[start:stop])
            parts = [
                repeat(None) if part is None else torch.split(part, each)
                for part in (rows.inputs, rows.target, rows.weight, rows.counts)
            ]
            yield [Batch(*part) for part in zip(*parts, strict=False)]

    def _places(self, skip: int = 0) -> Iterator[tuple[int, int]]:
        """Where each batch but the first ones begins and ends."""
        for start in range(skip * self.batch_size, self.n, self.batch_size):
            yield start, min(start + self.batch_size, self.n)

    def _shares(self, ranks: Ranks, order: Tensor | None, skip: int) -> Iterator[Batch]:
        """This rank's share of every batch."""
        for start, stop in self._places(skip):
            every = torch.arange(start, stop) if order is None else order[start:stop]
            parts = every.tensor_split(ranks.parallel.data)
            total: float | Tensor = float(len(every))
            if self.weight is not None or self.counts is not None:
                total = self._totals(every)
            share = ranks.share([len(part) for part in parts], total)
            yield replace(self._batch(parts[ranks.row]), share=share)

    def _part(self, place: int, of: int) -> Iterator[Batch]:
        """One of so many parts of all rows."""
        for start, stop in self._places():
            rows = torch.arange(start, stop).tensor_split(of)[place]
            if len(rows):
                yield self._batch(rows)

    def _totals(self, rows: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight[rows]
        counts = None if self.counts is None else self.counts[rows]
        return Batch(rows, self.target[rows[:1]], weight, counts).total_weight

    def _batch(self, rows: Any) -> Batch:
        if isinstance(rows, Tensor):
            rows = rows.to(self.like.device)
        weight = None if self.weight is None else self.weight[rows]
        counts = None if self.counts is None else self.counts[rows]
        return Batch(self._rows(rows), dense_rows(self.target, rows), weight, counts)

    def _rows(self, rows: Any) -> Tensor:
        found = dense_rows(self.X, rows)
        return found if self._ready else self.takes.inputs(found)


@final
class Loader(Source):
    """Batches of a ``DataLoader`` that yields ``(X, y)`` or ``(X, y, weight)``.

    Not every data set can be read twice: the iterator whose first batch tells what the task is
    serves the first epoch. Each of several ``ranks`` has a loader with rows of its own, and a batch
    is what all of them give in a step; who has no more has an empty share of it.
    """

    task: Task

    takes: Signature

    def __init__(
        self,
        loader: DataLoader[Any],
        takes: Signature | None = None,
        task: Task | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.loader, self.ranks = loader, ranks
        self._epochs = 0  # that were begun
        self._example: Batch | None = None
        if takes is not None:
            self.takes = takes
        self.generators = loader_generators(loader)
        self._begun: Iterator[Any] | None = None
        if task is not None:
            self.task = task
        try:
            self.steps = len(loader)
        except TypeError:  # an iterable data set without a length
            self.steps = None
        if ranks is not None:
            found = ranks.gather(self.steps)
            self.steps = None if None in found else max(steps or 0 for steps in found)

    def first(self) -> tuple[Any, Any]:
        """Inputs and targets of the first batch: enough to tell what the task is."""
        X, y, *_ = _parts(self._first())
        return X, y

    def epoch(self, skip: int = 0) -> Iterator[Batch]:
        if self._begun is None and isinstance(self.loader.sampler, DistributedSampler):
            self.loader.sampler.set_epoch(self._epochs)
        self._epochs += 1
        items, self._begun = self._begun or iter(self.loader), None
        skipped = sum(1 for _ in islice(items, skip))
        if skipped < skip:
            raise ValueError(
                f"the run stood after batch {skip} of an epoch, but the DataLoader gave only "
                f"{skipped}; it must give the same batches again to go on."
            )
        batches = self._batches(items, whole_epoch=skip == 0)
        return batches if self.ranks is None else self._shares(self.ranks, batches)

    def in_order(self) -> Iterator[Batch]:
        items, self._begun = self._begun or iter(self.loader), None
        return self._batches(items, whole_epoch=True)

    def probe(self) -> Batch:
        self._example = self._batch(self._first())
        return self._example

    def rewind(self, epochs: int = 0) -> None:
        self._begun, self._epochs = None, epochs

    def fingerprint(self) -> str:
        return self.probe().fingerprint

    def describe(self) -> dict[str, Any]:
        return {"batches": self.steps}

    def _first(self) -> Any:
        items = self._begun or iter(self.loader)
        for item in items:
            self._begun = chain([item], items)
            return item
        raise ValueError("the DataLoader gave no batch; at least one is needed.")

    def _batches(self, items: Iterator[Any], whole_epoch: bool) -> Iterator[Batch]:
        counted: float | None = None
        for item in items:
            batch = self._batch(item)
            weight = len(batch) if batch.weight is None else float(batch.weight.sum())
            counted = weight + (counted or 0.0)
            yield batch
        if counted == 0 and whole_epoch:
            raise ValueError(_ALL_ZERO)

    def _shares(self, ranks: Ranks, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Batches that all ranks have a share of, until none has any more."""
        last = self._example
        while True:
            batch = next(batches, None)
            size = (-1.0, 0.0) if batch is None else (float(len(batch)), float(batch.total_weight))
            found = torch.stack(
                ranks.of_rows(self.takes.like.new_tensor(size, dtype=torch.float64))
            )
            if bool((found[:, 0] < 0).all()):
                return
            if batch is None:
                assert last is not None  # the run has asked for a probe
                batch = _first_rows(last, 0)
            last = batch
            rows = [int(n) for n in found[:, 0].clamp_min(0)]
            yield replace(batch, share=ranks.share(rows, float(found[:, 1].sum())))

    def _batch(self, item: Any) -> Batch:
        X, y, *weight = _parts(item)
        like = self.takes.like
        X = check_inputs(X, self.takes)
        check_targets_finite(y, like.dtype)
        target = self.task.target(y, self.takes.there(X)).to(like)
        return Batch(
            self.takes.inputs(dense_rows(X, slice(None))),
            target,
            check_weights(weight[0], len(X), like.dtype).to(like) if weight else None,
            self.task.counts(target),
            whole=self.steps == 1,
        )


def _first_rows(batch: Batch, n: int) -> Batch:
    return Batch(
        batch.inputs[:n],
        batch.target[:n],
        None if batch.weight is None else batch.weight[:n],
        None if batch.counts is None else batch.counts[:n],
    )


def loader_generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """The generators that a loader and its samplers draw from, each once."""
    sampler = getattr(loader, "sampler", None)
    batches = getattr(loader, "batch_sampler", None)
    owners = (loader, sampler, batches, getattr(batches, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    kept = {
        id(generator): generator for generator in found if isinstance(generator, torch.Generator)
    }
    return list(kept.values())


def _parts(item: Any) -> Sequence[Any]:
    if not isinstance(item, list | tuple) or len(item) not in (2, 3):
        count = f" of {len(item)}" if isinstance(item, list | tuple) else ""
        raise TypeError(
            f"a DataLoader must yield (X, y) or (X, y, weight), got {type(item).__name__}{count}."
        )
    return item


def dense_rows(X: Any, rows: Any) -> Tensor:
    """Some rows of a tensor, an array or a CSR matrix."""
    if isinstance(X, Tensor):
        return X.index_select(0, rows) if isinstance(rows, Tensor) else X[rows]
    picked = X[rows.cpu().numpy() if isinstance(rows, Tensor) else rows]
    return as_tensor(picked if isinstance(X, np.ndarray) else picked.toarray())


def check_inputs(X: Any, takes: Signature) -> Any:
    """A tensor, a memory-mapped array or a CSR matrix of samples that the model can take.

    Numbers must be finite, also in the model's dtype. Nothing is copied, but what torch can't read
    and sequences with lengths.
    """
    X = takes.joined(X)
    mapped = isinstance(X, np.memmap)
    sparse = hasattr(X, "tocsr")
    if sparse:
        X = X.tocsr()
    elif isinstance(X, Tensor):
        X = plain_tensor(X, "X")
    else:
        X = as_array(X, "X")
    if not sparse and takes.flattens and X.ndim > 2:
        X = X.reshape(len(X), -1)
    steps = () if takes.there(X) is None else X.shape[1:2]  # may be more than at first
    if tuple(X.shape[1:]) != (*steps, *takes.shape[len(steps) :]):
        wanted = ", ".join(["n_samples", *map(str, takes.shape)])
        raise ValueError(f"X needs shape ({wanted}), as the model takes it; got {tuple(X.shape)}.")
    if X.shape[0] == 0:
        raise ValueError("X has no rows; at least one sample is needed.")
    dtype = takes.like.dtype
    largest = check_finite(
        X.data if sparse else X, "X", "Remove or impute such values first", dtype, not sparse
    )
    if largest > _LARGE and not takes.indices:
        warn(
            f"X holds values up to {largest:.3g}, and networks learn from numbers near 1: such "
            "columns drown all others. Standardise X, for example by scikit-learn's "
            "StandardScaler.",
            UserWarning,
        )
    return X if sparse or mapped or isinstance(X, Tensor) else as_tensor(X)


def check_targets_finite(y: Any, dtype: torch.dtype) -> None:
    values = plain_tensor(y, "y") if isinstance(y, Tensor) else np.asarray(y)
    if isinstance(values, Tensor) or values.dtype.kind == "f":
        check_finite(values, "y", "Remove such rows first", dtype)


def check_weights(weight: Any, n: int, dtype: torch.dtype) -> Tensor:
    """Weights of ``n`` samples, which may all be zero: other batches may count."""
    name = "sample_weight"
    weights: Tensor = (
        plain_tensor(weight, name)
        if isinstance(weight, Tensor)
        else as_tensor(as_array(weight, name))
    )
    if weights.shape != (n,):
        raise ValueError(
            f"sample_weight needs shape ({n},), one per sample; got {tuple(weights.shape)}."
        )
    if not bool(torch.isfinite(weights.to(dtype)).all()) or bool((weights < 0).any()):
        raise ValueError("sample_weight must be finite and not negative.")
    if not bool(torch.isfinite(weights.to(dtype).sum())):
        raise ValueError(
            f"sample_weight adds up to {float(weights.double().sum()):.3g}, beyond the range of "
            f"the model's {str(dtype).removeprefix('torch.')}. Divide it by its mean."
        )
    return weights


def check_finite(
    values: Any, name: str, advice: str, dtype: torch.dtype | None = None, rows: bool = True
) -> float:
    """The largest size of any number; raise if one is not finite, or not so in ``dtype``.

    A chunk of rows at a time.
    """
    largest = 0.0
    length = max(1, _CHUNK // max(1, int(np.prod(values.shape[1:]))))
    for start in range(0, len(values), length):
        part = values[start : start + length]
        part = part if isinstance(part, Tensor) else as_tensor(part)
        used = part if dtype is None else part.to(dtype)
        if not used.numel():
            continue
        low, high = (float(end) for end in torch.aminmax(used))  # NaN goes through both
        if math.isfinite(low) and math.isfinite(high):
            largest = max(largest, -low, high)
            continue
        bad = ~torch.isfinite(used).reshape(len(used), -1).all(1)
        row = int(bad.nonzero()[0, 0])
        where = f", first in row {start + row}" if rows else ""
        if bool(torch.isfinite(part[row]).all()):
            raise ValueError(
                f"{name} holds values up to {float(part[row].abs().max()):.3g}, beyond the range "
                f"of the model's {str(dtype).removeprefix('torch.')}{where}. Scale {name}, or use "
                "a model with dtype=torch.float64."
            )
        raise ValueError(f"{name} holds NaN or infinity{where}. {advice}.")
    return largest


def n_rows(X: Any) -> int:
    if has_lengths(X):
        return int(X.batch_sizes[0]) if hasattr(X, "batch_sizes") else n_rows(X[0])
    return int(X.shape[0]) if hasattr(X, "shape") else len(X)
