"""What things cost: contestants take turns in one process, and their ratio is what counts.

Machines are noisy, so a time alone means nothing. Each round gives every contestant one turn, in an
order that rotates; ratios are taken within a round, and their median and quartiles are kept. With
one thread the clock is that of the processor, so that other programs matter less; with several it
is the wall's.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from records import Record


def contest(
    case: str,
    contestants: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 1,
) -> list[Record]:
    """Time each contestant once a round; the first is what ratios refer to."""
    names, clock = list(contestants), _clock()
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(-warmup, rounds):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            start = clock()
            contestants[name]()
            seconds = clock() - start
            if round_ >= 0:
                times[name].append(seconds)
    return [
        line(case, name, 1e3 * statistics.median(taken), "ms", *spread(taken, times[names[0]]))
        for name, taken in times.items()
    ]


def line(
    case: str,
    contestant: str,
    amount: float | None,
    unit: str,
    ratio: float | None = None,
    low: float | None = None,
    high: float | None = None,
    note: str = "",
) -> Record:
    """What a contestant needs in a case, and how much of the reference's, with quartiles."""
    about = {"case": case, "contestant": contestant, "amount": amount, "unit": unit}
    return about | {"ratio": ratio, "low": low, "high": high, "note": note}


def spread(times: Sequence[float], reference: Sequence[float]) -> tuple[float, float, float]:
    """Median and quartiles of the ratios within rounds."""
    ratios = sorted(a / b for a, b in zip(times, reference, strict=True))
    quarter = (len(ratios) - 1) // 4
    return statistics.median(ratios), ratios[quarter], ratios[-1 - quarter]


def counted(case: str, amounts: Mapping[str, float], unit: str) -> list[Record]:
    """Lines of what is counted and not timed: there is no spread."""
    reference = next(iter(amounts.values()))
    return [
        line(case, name, amount, unit, amount / reference if reference else None)
        for name, amount in amounts.items()
    ]


def clock_name() -> str:
    return "processor" if torch.get_num_threads() == 1 else "wall"


def _clock() -> Callable[[], float]:
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of all storages that operations make, until they are freed.

    What an operation allocates for itself and frees before it returns is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for tensor in _tensors(made):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given | self._known.keys():
                self._hold(storage.data_ptr(), storage)
        return made

    def _hold(self, address: int, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self.held += size
        self.peak = max(self.peak, self.held)

        def free(_: Any) -> None:
            self.held -= size
            del self._known[address]

        self._known[address] = weakref.ref(storage, free)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
