"""Contestants take turns in one process, and what is reported is their ratio.

Machines are noisy, so a time alone means nothing. Each round gives every contestant one turn, in an
order that rotates; ratios are taken within a round, and their median and quartiles are kept. With
one thread the clock is that of the processor, so that other programs matter less; with several it
is the wall's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from lpom.experiments.records import machine
from lpom.training.fit import keep_freed_memory


@dataclass(frozen=True)
class Row:
    """One line of a table: what a contestant needs in a case, and how much of the reference's.

    ``low`` and ``high`` are the quartiles of the ratio over the rounds.
    """

    case: str
    contestant: str
    amount: float | None
    unit: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Report:
    """A part of the benchmark, as a table and as plain values."""

    part: str
    settings: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        about = {"part": self.part, "settings": self.settings, "clock": clock_name()}
        return about | {"machine": machine(), "rows": [asdict(row) for row in self.rows]}


def contest(
    case: str,
    contestants: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 1,
    unit: str = "ms",
    per: float = 1e-3,
) -> list[Row]:
    """Time each contestant once a round; the first is what ratios refer to.

    Amounts are seconds divided by ``per``: the size of a unit, times the turns in a call.
    """
    keep_freed_memory()  # whoever goes first
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
        Row(case, name, statistics.median(taken) / per, unit, *spread(taken, times[names[0]]))
        for name, taken in times.items()
    ]


def spread(times: Sequence[float], reference: Sequence[float]) -> tuple[float, float, float]:
    """Median and quartiles of the ratios within rounds."""
    ratios = sorted(a / b for a, b in zip(times, reference, strict=True))
    return (
        statistics.median(ratios),
        ratios[(len(ratios) - 1) // 4],
        ratios[-1 - (len(ratios) - 1) // 4],
    )


def counted(case: str, amounts: Mapping[str, float], unit: str) -> list[Row]:
    """Rows of what is counted and not timed: there is no spread."""
    reference = next(iter(amounts.values()))
    return [
        Row(case, name, amount, unit, amount / reference if reference else None)
        for name, amount in amounts.items()
    ]


def rates(rows: Iterable[Row], per_call: float, unit: str) -> list[Row]:
    """Seconds of a call as so many things a second; a ratio above one stays slower."""
    return [replace(row, amount=per_call / (row.amount or 1e-9), unit=unit) for row in rows]


class Stopwatch:
    """Adds up the seconds between its starts and stops."""

    def __init__(self) -> None:
        self.seconds, self._clock = 0.0, _clock()

    def start(self) -> None:
        self._begun = self._clock()

    def stop(self) -> None:
        self.seconds += self._clock() - self._begun


def clock_name() -> str:
    return "processor" if torch.get_num_threads() == 1 else "wall"


def _clock() -> Callable[[], float]:
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter
