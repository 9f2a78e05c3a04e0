"""What is known of a training run: its settings, which name it, and its record in a file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

import lpom


@dataclass(frozen=True)
class Trial:
    """All settings of one run. ``part`` is "test", or "validation" for tuning.

    On "validation" a sixth of the training data is held out and measured in place of the test
    data, which is then not touched. ``network`` is one of `lpom.networks`, with ``options``, in
    place of a chain of ``hidden`` layers; ``augment`` flips and crops its pictures, or changes
    them in the ways that it names for `lpom.datasets.augmented_loader`. ``whiten`` is what
    `lpom.datasets.whitened` adds to each variance; at 0 the data stay as they are. ``adversarial``
    is how far `lpom.datasets.adversarial_loader` moves rows, in the direction that the method
    itself finds.
    """

    dataset: str
    hidden: tuple[int, ...]
    method: str
    params: dict[str, Any] = field(default_factory=dict)
    activation: str = "relu"
    output: str = "identity"
    output_params: dict[str, float] = field(default_factory=dict)
    bias: bool = True
    loss: str = "auto"
    epochs: int = 17
    batch_size: int = 100
    seed: int = 0
    part: str = "test"
    network: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    augment: bool | dict[str, Any] = False
    loss_params: dict[str, float] = field(default_factory=dict)
    weight_decay: float = 0.0
    averaging: float = 0.0
    precision: str | None = None
    whiten: float = 0.0
    adversarial: float = 0.0

    @property
    def key(self) -> str:
        settings = asdict(self)
        for name, default in _YOUNGER.items():
            if settings[name] == default:
                del settings[name]
        text = json.dumps(settings, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Store:
    """Finished trials of one file, one JSON object per line.

    A last line that was cut is passed over; another one that is no record is warned about.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        for number, line in enumerate(lines, 1):
            record = _record(line)
            if record is not None:
                yield record
            elif line.strip() and number < len(lines):
                warnings.warn(
                    f"{self.path}, line {number}, is not the record of a run and is passed over.",
                    stacklevel=2,
                )

    def find(self, trial: Trial) -> dict[str, Any] | None:
        return next((record for record in self if record["key"] == trial.key), None)

    def add(self, record: dict[str, Any]) -> None:
        add_line(self.path, record)


def add_line(path: Path, record: dict[str, Any]) -> None:
    """Write a record behind those of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
    line = ("" if whole else "\n") + json.dumps(record, sort_keys=True) + "\n"
    with path.open("a", encoding="utf-8") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def find_line(path: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The first record of a file that has these settings, if there is one."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        record: dict[str, Any] = json.loads(line)
        if all(record.get(name) == value for name, value in settings.items()):
            return record
    return None


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    whole = isinstance(record, dict) and _ALWAYS <= record.keys()
    # a run has a score, or a reason why not
    return record if whole and not record.keys().isdisjoint(("score", "reason")) else None


def machine() -> dict[str, Any]:
    """Where and with what a result was made."""
    return {
        "lpom": lpom.__version__,
        "source": _source(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": os.cpu_count(),
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


@cache
def _source() -> str:
    """A hash of the library's code, since one version has many states."""
    digest = hashlib.sha256()
    folder = Path(lpom.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


#: Settings younger than the first stored runs, whose keys stay.
_YOUNGER: dict[str, Any] = {
    "bias": True,
    "network": "",
    "options": {},
    "augment": False,
    "loss_params": {},
    "weight_decay": 0.0,
    "averaging": 0.0,
    "precision": None,
    "whiten": 0.0,
    "adversarial": 0.0,
}
#: What every record has, whatever came of the run.
_ALWAYS = {"key", "machine", *Trial.__dataclass_fields__} - _YOUNGER.keys()
