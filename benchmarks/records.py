"""A training run: its settings, as values to run it and as the text its record has of them.

A record is one line of a file in ``results/``: where it belongs (``kind``, ``row``, ``column``), an
``id`` that never changes, its settings in words, and what was measured. Pages are made of these
fields alone, so that they stay true when a name or a default of the library changes.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch

import lpom
from lpom import methods

Record: TypeAlias = dict[str, Any]

RESULTS = Path(__file__).parent / "results"

#: What names a run: two records of one file with the same values here are of the same run.
PLACE = ("kind", "row", "column", "seed", "epochs", "rate")
#: Its settings, in words.
TEXTS = ("method", "data", "network", "batch", "loss", "output", "settings", "more")


@dataclass(frozen=True)
class Trial:
    """All settings of one run.

    Attributes
    ----------
    held_out : measure on a sixth of the training rows; the test rows are then not touched
    network : one of `networks`, with ``options``, in place of a chain of ``hidden`` layers
    augment : pictures are flipped and cropped, or changed in the ways it names for
        `data.augmentation.augmented_loader`
    whiten : what `data.preprocessing.whitened` adds to each variance; 0 leaves the data alone
    adversarial : how far `data.adversarial.adversarial_loader` moves rows, in the direction that
        the method itself finds
    """

    dataset: str
    hidden: tuple[int, ...]
    method: str
    params: Mapping[str, Any] = field(default_factory=dict)
    activation: str = "relu"
    output: str = "identity"
    output_params: Mapping[str, float] = field(default_factory=dict)
    bias: bool = True
    loss: str = "auto"
    loss_params: Mapping[str, float] = field(default_factory=dict)
    epochs: int = 17
    batch_size: int = 100
    seed: int = 0
    held_out: bool = False
    network: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    augment: bool | Mapping[str, Any] = False
    weight_decay: float = 0.0
    averaging: float = 0.0
    precision: str | None = None
    whiten: float = 0.0
    adversarial: float = 0.0

    def texts(self, options: Mapping[str, Any] | None = None) -> dict[str, str]:
        """The settings in words; with ``options`` those of the network that its row has anyway."""
        usual = self.options if options is None else options
        own = {name: value for name, value in self.options.items() if name not in usual}
        chain = "-".join(map(str, self.hidden))
        return {
            "method": self.method,
            "data": self.dataset,
            "network": ", ".join([self.network, *_options(usual)]) if self.network else chain,
            "batch": "all rows at once"
            if methods.METHODS[self.method].full_batch
            else f"batch {self.batch_size}",
            "loss": self.loss,
            "output": " ".join([self.output, *(f"{v:g}" for v in self.output_params.values())]),
            "settings": text(self.params),
            "more": ", ".join([*_options(own), *self._unusual()]),
        }

    def _unusual(self) -> Iterator[str]:
        """Settings that most runs don't have."""
        for name, usual in _USUAL.items():
            value = getattr(self, name)
            if value != usual:
                yield text(value if isinstance(value, Mapping) else {name: value})


_USUAL: dict[str, Any] = {
    "activation": "relu",
    "batch_size": 100,
    "bias": True,
    "augment": False,
    "loss_params": {},
    "weight_decay": 0.0,
    "averaging": 0.0,
    "precision": None,
    "whiten": 0.0,
    "adversarial": 0.0,
}


def text(settings: Mapping[str, Any]) -> str:
    """Names and values in one line.

    >>> text({"mu": 20.0, "weights": {"exact": {"iterations": 3, "ridge": [1.0, 1000.0]}}})
    'mu 20, weights exact, iterations 3, ridge 1 to 1000'
    """
    return ", ".join(_setting(name, value) for name, value in sorted(settings.items()))


def _setting(name: str, value: Any) -> str:
    match value:
        case float():
            return f"{name} {value:g}"
        case [float(first), float(last)] | (
            float(first),
            float(last),
        ):  # one that grows over the run
            return f"{name} {first:g} to {last:g}"
        case dict() if len(value) == 1:  # one kind of settings, and those within
            ((kind, inner),) = value.items()
            return ", ".join([f"{name} {kind}", *[text(inner)] * bool(inner)])
    return f"{name} {value}"


def _options(options: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} {'-'.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in sorted(options.items())
    ]


class Store:
    """The records of one file, one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[Record]:
        if not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines, 1):
            try:
                if line.strip():
                    yield json.loads(line)
            except json.JSONDecodeError as error:
                if number < len(lines):  # a last line that was cut is passed over
                    raise ValueError(
                        f"{self.path}, line {number}, is no record: {error}"
                    ) from error

    def select(self, **fields: Any) -> list[Record]:
        """Records that have these values."""
        return [r for r in self if all(r.get(name) == value for name, value in fields.items())]

    def find(self, about: Mapping[str, Any]) -> Record | None:
        """The record of this run, if there is one.

        Raises
        ------
        ValueError
            If there is one in its place that was made with other settings.
        """
        place = {name: about.get(name) for name in PLACE}
        for record in self.select(**place):
            other = [name for name in TEXTS if record.get(name, "") != about.get(name, "")]
            if not other:
                return record
            if about["kind"] not in ("tried", "other"):  # which has all settings that were tried
                name = other[0]
                raise ValueError(
                    f"{self.path}, id {record['id']}, is this run with another {name}: expected "
                    f"{about.get(name)!r}, got {record.get(name)!r}. Remove the line, or write to "
                    "another folder by --out."
                )
        return None

    def add(self, record: Mapping[str, Any]) -> Record:
        """Write a record behind the others, with an id of its own."""
        named = {"id": secrets.token_hex(8), **record}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = not self.path.exists() or self.path.read_bytes()[-1:] in (b"", b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write(("" if whole else "\n") + json.dumps(named, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return named


def machine() -> dict[str, Any]:
    """Where and with what a result was made."""
    return {
        "made": f"lpom {lpom.__version__}, torch {torch.__version__}",
        "python": platform.python_version(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    """The processor's name where the system tells it, else its kind."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
