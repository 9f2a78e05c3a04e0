"""Where batches come from: arrays, dense, mapped or sparse, or a torch ``DataLoader``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lpom.checks import as_tensor, check_number, check_targets_finite, check_weights
from lpom.methods import Batch
from lpom.methods.base import Inputs, tensors_of
from lpom.parallel import Ranks
from lpom.training.interface import (
    TARGETS,
    Interface,
    check_inputs,
    map_inputs,
    n_rows,
    target_of,
)
from lpom.training.task import Task

#: Rows of one forward pass where nothing is trained; sparse rows become dense this many at a time.
ROWS = 4096
_AHEAD = 2**16  # numbers of rows that are brought together for several batches
_ALL_ZERO = "sample_weight is zero for every sample; at least one must count."


class Source(ABC):
    """An endless supply of epochs of batches, in the network's dtype and on its device.

    ``generators`` are those that the order of the batches is drawn from, ``steps`` the batches
    per epoch, None if that can't be known.
    """

    steps: int | None
    generators: list[torch.Generator]

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
        """What must be the same for a run to resume with this data."""

    def rewind(self, epochs: int = 0) -> None:
        """Forget what was read ahead: so many epochs are done, the generators stand elsewhere."""
        return None


@final
class Arrays(Source):
    """Rows that can be reached in any order, reshuffled every epoch if there is a generator.

    X is held once: as it was given if it has the network's dtype and device and rows one after
    the other, else as a copy that has. Memory maps stay on disk and sparse rows sparse; their
    rows are brought together a batch at a time. A tuple or dictionary of arrays holds the
    arguments of a model. All ``ranks`` have the same rows and draw the same order, and each takes
    its part of every batch.
    """

    def __init__(
        self,
        X: Any,
        y: Any,
        task: Task,
        interface: Interface,
        *,
        batch_size: int | None = None,
        weight: Any = None,
        generator: torch.Generator | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.interface, self.ranks = interface, ranks
        like = interface.like
        X = map_inputs(lambda part: check_inputs(part, interface), X)
        self.n = n = n_rows(X)
        check_targets_finite(y, like.dtype)
        self.target = task.place(task.target(y), like)
        self.counts = task.counts(self.target)
        if len(self.target) != n:
            raise ValueError(
                f"X and y must have the same number of rows: X has {n}, y has {len(self.target)}."
            )
        self.weight = None if weight is None else check_weights(weight, n, like.dtype).to(like)
        if self.weight is not None and not bool((self.weight > 0).any()):
            raise ValueError(_ALL_ZERO)
        self.X = map_inputs(lambda X: interface.stored(X) if isinstance(X, Tensor) else X, X)
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
        return replace(self._batch(slice(None)), whole=True)

    def epoch(self, skip: int = 0) -> Iterator[Batch]:
        order = None
        if self.generators and self.steps != 1:
            order = torch.randperm(self.n, generator=self.generators[0])
        if self.ranks is None or self.ranks.parallel.data == 1:
            return self._batches(order, skip)
        return self._shares(self.ranks, order, skip)

    def in_order(self) -> Iterator[Batch]:
        if self.ranks is None:
            return self._batches(None, 0)
        return self._part(self.ranks.rank, self.ranks.size)

    def probe(self) -> Batch:
        return next(self._batches(None, 0))

    def describe(self) -> dict[str, Any]:
        return {"rows": self.n, "batch_size": self.batch_size, "content": self._content}

    @cached_property
    def _content(self) -> str:
        rows = torch.linspace(0, self.n - 1, min(self.n, 1000)).long()
        return self._batch(rows).fingerprint

    def _batches(self, order: Tensor | None, skip: int) -> Iterator[Batch]:
        if self.steps == 1:
            return iter([self.whole][skip:])
        return chain.from_iterable(self._brought(order, skip))

    def _brought(self, order: Tensor | None, skip: int) -> Iterator[list[Batch]]:
        """Batches; where rows are small, one call brings those of several."""
        size = self.batch_size
        ahead = size * max(1, _AHEAD // (size * self.interface.numbers))
        for start in range(skip * size, self.n, ahead):
            stop = min(start + ahead, self.n)
            rows = self._batch(slice(start, stop) if order is None else order[start:stop])
            if ahead == size:
                yield [rows]
            else:
                yield [_rows_of(rows, slice(k, k + size)) for k in range(0, len(rows), size)]

    def _places(self, skip: int = 0) -> Iterator[tuple[int, int]]:
        """Where each batch but the first ones begins and ends."""
        for start in range(skip * self.batch_size, self.n, self.batch_size):
            yield start, min(start + self.batch_size, self.n)

    def _shares(self, ranks: Ranks, order: Tensor | None, skip: int) -> Iterator[Batch]:
        """This rank's share of every batch."""
        for start, stop in self._places(skip):
            rows = torch.arange(start, stop) if order is None else order[start:stop]
            parts = rows.tensor_split(ranks.parallel.data)
            total: float | Tensor = float(len(rows))
            if self.weight is not None or self.counts is not None:
                weight = None if self.weight is None else self.weight[rows]
                counts = None if self.counts is None else self.counts[rows]
                total = Batch(rows, self.target[rows[:1]], weight, counts).total_weight
            share = ranks.share([len(part) for part in parts], total)
            yield replace(self._batch(parts[ranks.row]), share=share)

    def _part(self, place: int, of: int) -> Iterator[Batch]:
        """One of so many parts of all rows."""
        for start, stop in self._places():
            rows = torch.arange(start, stop).tensor_split(of)[place]
            if len(rows):
                yield self._batch(rows)

    def _batch(self, rows: Any) -> Batch:
        if isinstance(rows, Tensor):
            rows = rows.to(self.interface.like.device)
        return Batch(
            self.interface.inputs(map_inputs(lambda part: dense_rows(part, rows), self.X)),
            dense_rows(self.target, rows),
            None if self.weight is None else self.weight[rows],
            None if self.counts is None else self.counts[rows],
        )


@final
class Loader(Source):
    """Batches of a ``DataLoader``: ``(X, y)``, ``(X, y, weight)`` or a dictionary.

    X may be a tensor, a tuple of the model's arguments or a dictionary of them; a dictionary
    alone has the targets among its entries. Not every data set can be read twice: the iterator
    whose first batch tells what the task is serves the first epoch. Each of several ``ranks`` has
    a loader with rows of its own, and a batch is what all of them give in a step; who has no more
    has an empty share of it.
    """

    task: Task
    interface: Interface

    def __init__(self, loader: DataLoader[Any], ranks: Ranks | None = None) -> None:
        self.loader, self.ranks = loader, ranks
        self._epochs = 0  # that were begun
        self._example: Batch | None = None
        self.generators = loader_generators(loader)
        self._begun: Iterator[Any] | None = None
        try:
            self.steps = len(loader)
        except TypeError:  # an iterable data set without a length
            self.steps = None
        if ranks is not None:
            steps = ranks.gather(self.steps)
            self.steps = None if None in steps else max(n or 0 for n in steps)

    def of(self, interface: Interface, task: Task) -> Loader:
        """The same, now that it is known what the model takes and what is asked of it."""
        self.interface, self.task = interface, task
        return self

    def first(self) -> tuple[Inputs, Any, Any]:
        """Inputs and targets of the first batch, and all of it: they tell what the task is."""
        batch = self._first()
        X, y, _ = parts_of(batch)
        return X, y, batch

    def epoch(self, skip: int = 0) -> Iterator[Batch]:
        if self._begun is None and isinstance(self.loader.sampler, DistributedSampler):
            self.loader.sampler.set_epoch(self._epochs)
        self._epochs += 1
        items, self._begun = self._begun or iter(self.loader), None
        skipped = sum(1 for _ in islice(items, skip))
        if skipped < skip:
            raise ValueError(
                f"the run stood after batch {skip} of an epoch, but the DataLoader gave only "
                f"{skipped}; it must give the same batches again to resume."
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
            like = self.interface.like
            sizes = torch.stack(ranks.of_rows(like.new_tensor(size, dtype=torch.float64)))
            if bool((sizes[:, 0] < 0).all()):
                return
            if batch is None:
                assert last is not None  # the run has asked for a probe
                batch = _rows_of(last, slice(0))
            last = batch
            rows = [int(n) for n in sizes[:, 0].clamp_min(0)]
            yield replace(batch, share=ranks.share(rows, float(sizes[:, 1].sum())))

    def _batch(self, item: Any) -> Batch:
        X, y, weight = parts_of(item)
        interface, like = self.interface, self.interface.like
        rows = map_inputs(
            lambda part: dense_rows(check_inputs(part, interface), slice(None)),
            dict(item) if interface.own_loss and isinstance(item, Mapping) else X,
        )
        if y is None and interface.own_loss:
            y = torch.zeros(n_rows(rows))
        check_targets_finite(y, like.dtype)
        target = self.task.place(self.task.target(y), like)
        return Batch(
            interface.inputs(rows),
            target,
            None if weight is None else check_weights(weight, n_rows(rows), like.dtype).to(like),
            self.task.counts(target),
            whole=self.steps == 1,
        )


def to_measure(
    X: Any,
    y: Any,
    task: Task,
    interface: Interface,
    weight: Any = None,
    ranks: Ranks | None = None,
) -> Source:
    """Rows that nothing is trained on, in batches as large as is good for a forward pass."""
    if isinstance(X, DataLoader):
        return Loader(X).of(interface, task)
    size = min(ROWS, n_rows(X)) or None
    return Arrays(X, y, task, interface, batch_size=size, weight=weight, ranks=ranks)


def _rows_of(batch: Batch, rows: slice) -> Batch:
    return Batch(
        map_inputs(lambda part: part[rows], batch.inputs),
        batch.target[rows],
        None if batch.weight is None else batch.weight[rows],
        None if batch.counts is None else batch.counts[rows],
    )


def loader_generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """The generators that a loader and its samplers draw from, each once."""
    sampler = getattr(loader, "sampler", None)
    batches = getattr(loader, "batch_sampler", None)
    owners = (loader, sampler, batches, getattr(batches, "sampler", None))
    generators = [getattr(owner, "generator", None) for owner in owners]
    return list({id(g): g for g in generators if isinstance(g, torch.Generator)}.values())


def parts_of(item: Any) -> tuple[Inputs, Any, Any]:
    """Inputs, targets and weights of what a loader yields; None for those it does not have."""
    if isinstance(item, Mapping):
        name = target_of(item)
        inputs = {key: value for key, value in item.items() if key != name}
        if not tensors_of(inputs):
            raise TypeError(
                "a dictionary from a DataLoader must hold the model's inputs by name, and the "
                f"targets as one of {', '.join(TARGETS)}; got {', '.join(map(str, item))}."
            )
        return inputs, None if name is None else item[name], None
    if not isinstance(item, list | tuple) or len(item) not in (2, 3):
        count = f" of {len(item)}" if isinstance(item, list | tuple) else ""
        raise TypeError(
            "a DataLoader must yield (X, y), (X, y, weight) or a dictionary, got "
            f"{type(item).__name__}{count}."
        )
    X, y, *weight = item
    X = tuple(X) if isinstance(X, list) and all(isinstance(x, Tensor) for x in X) else X
    return X, y, weight[0] if weight else None


def dense_rows(X: Any, rows: Any) -> Tensor:
    """Some rows of a tensor, an array or a CSR matrix."""
    if isinstance(X, Tensor):
        return X.index_select(0, rows) if isinstance(rows, Tensor) else X[rows]
    picked = X[rows.cpu().numpy() if isinstance(rows, Tensor) else rows]
    return as_tensor(picked if isinstance(picked, np.ndarray) else picked.toarray())
