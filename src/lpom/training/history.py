"""What :func:`lpom.fit` records, epoch by epoch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpom.files import write_atomically
from lpom.methods import State
from lpom.training.task import Task

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Epoch:
    """One epoch. Objective, loss and gaps are per sample; ``score`` is accuracy or R2.

    ``loss`` and ``score`` are those of the training data, as the network stood when it met each
    batch (after the epoch, where a method does not feed forward with the true activations).
    ``objective`` and ``gaps`` (one per layer) are those of one and the same batch, the probe, after
    each epoch: the first rows, or a loader's first batch, or all rows for a method that takes all
    at once. ``rates`` are the factors by which the plain state iteration contracts, one per layer.
    A run without diagnostics has none of these three.
    """

    epoch: int
    seconds: float
    samples_per_second: float
    objective: float | None
    loss: float
    score: float
    validation_loss: float | None = None
    validation_score: float | None = None
    gaps: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()

    @classmethod
    def of(cls, record: dict[str, Any]) -> Epoch:
        """An epoch from its fields as JSON has them: lists, and texts for numbers it lacks."""
        return cls(**{name: _read(value) for name, value in record.items()})


@dataclass(repr=False)
class History:
    """The epochs so far; ``metric`` names what ``score`` is: accuracy or r2.

    >>> History("accuracy", [Epoch(1, 0.5, 200.0, 1.2, loss=1.1, score=0.62)])
    <History: 1 epoch, loss 1.1, accuracy 0.62>
    """

    metric: str
    epochs: list[Epoch] = field(default_factory=list)

    def __repr__(self) -> str:
        n = len(self.epochs)
        text = f"<History: {n} epoch{'' if n == 1 else 's'}"
        if self.epochs:
            last = self.epochs[-1]
            text += f", loss {last.loss:.4g}, {self.metric} {last.score:.4g}"
            if last.validation_loss is not None and last.validation_score is not None:
                text += f", validation loss {last.validation_loss:.4g}"
                text += f", validation {self.metric} {last.validation_score:.4g}"
        return f"{text}>"

    def __len__(self) -> int:
        return len(self.epochs)

    def __iter__(self) -> Iterator[Epoch]:
        return iter(self.epochs)

    def __getitem__(self, i: int) -> Epoch:
        return self.epochs[i]

    def column(self, name: str) -> list[Any]:
        """One value per epoch, e.g. ``history.column("validation_score")``."""
        if name not in {f.name for f in fields(Epoch)}:
            known = ", ".join(f.name for f in fields(Epoch))
            raise ValueError(f"history has no column {name!r}; it has {known}.")
        return [getattr(epoch, name) for epoch in self.epochs]

    def by_layer(self, name: str) -> list[list[Any]]:
        """``gaps`` or ``rates``, for each layer one value per epoch; None where it has none."""
        epochs = self.column(name)
        layers = range(max(map(len, epochs), default=0))
        return [[values[i] if values else None for values in epochs] for i in layers]

    def to_dict(self) -> dict[str, list[Any]]:
        """Column by column."""
        return {f.name: self.column(f.name) for f in fields(Epoch)}

    def to_frame(self) -> pd.DataFrame:
        """A row per epoch, which is its index; gaps and rates one column per layer, ``gap 1``."""
        import pandas

        columns = self.to_dict()
        for name in ("gaps", "rates"):
            del columns[name]
            for i, values in enumerate(self.by_layer(name), 1):
                columns[f"{name.removesuffix('s')} {i}"] = values
        return pandas.DataFrame(columns).set_index("epoch")

    def to_jsonl(self, path: str | Path) -> None:
        """One JSON object per line and epoch, the metric in each.

        Numbers that JSON does not have are written as texts, "inf" and "nan".
        """
        lines = []
        for epoch in self.epochs:
            record = {name: _written(value) for name, value in asdict(epoch).items()}
            lines.append(json.dumps({"metric": self.metric} | record, allow_nan=False) + "\n")
        write_atomically(path, "".join(lines).encode())

    @classmethod
    def from_jsonl(cls, path: str | Path, metric: str = "accuracy") -> History:
        """What :meth:`to_jsonl` wrote; ``metric`` is that of a file without epochs."""
        history = cls(metric)
        for line in Path(path).read_text().splitlines():
            record = json.loads(line)
            history.metric = record.pop("metric")
            history.epochs.append(Epoch.of(record))
        return history


@dataclass(repr=False)
class Result:
    """What a run leaves beside the trained module.

    ``status`` is finished, stopped-early, stopped (by a callback) or interrupted; ``seconds`` is
    split into ``training_seconds`` and the rest, which went into measuring. Give ``state`` back
    to :func:`lpom.fit` for another run that begins with it.
    """

    history: History
    status: str
    seconds: float
    training_seconds: float
    task: Task
    state: State

    def __repr__(self) -> str:
        return f"<Result: {self.status} after {self.seconds:.3g} s, {self.history!r}>"


def _written(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_written(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _read(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_read, value))
    return float(value) if isinstance(value, str) else value
