"""Runs beside those that an experiment shows: the way to its settings, and other ones."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from lpom.experiments.records import Store

#: Beside the results: records of trials on held-out data, each with the ``experiment`` it was for.
TRIED = "tried.jsonl"
#: The same of trials that were measured on the test set beside those that are shown.
OTHERS = "others.jsonl"

#: Settings of a run that are only told where they differ from these.
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


class Tried(Store):
    """Where trials on held-out data go: with the experiment each was for, and without its curve."""

    def __init__(self, folder: Path, experiment: str) -> None:
        super().__init__(folder / TRIED)
        self.experiment = experiment

    def add(self, record: dict[str, Any]) -> None:
        kept = {name: value for name, value in record.items() if name != "curve"}
        super().add(kept | {"experiment": self.experiment})


_HEADS = ["training", "data", "method", "network", "epochs", "loss", "settings"]


def tried(experiment: str, folder: Path) -> list[str]:
    """What was measured on held-out training data to choose settings: a table to unfold."""
    return _table(experiment, folder / TRIED, "validation", "held out", "Tried on held-out data")


def others(experiment: str, folder: Path) -> list[str]:
    """What was measured on the test set with other settings, most of it before: to unfold."""
    return _table(experiment, folder / OTHERS, "test", "test", "Other settings, on the test set")


def _table(experiment: str, path: Path, part: str, measured: str, title: str) -> list[str]:
    """A table in Markdown that can be folded, best first, seeds averaged; empty if none was.

    Raises
    ------
    ValueError
        If a run was measured on another part: one on the test set may choose nothing.
    """
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for record in Store(path):
        if record.get("experiment") == experiment:
            if record["part"] != part:
                raise ValueError(f"{path.name} has a run on other data: {record['key']}.")
            groups.setdefault(_settings(record), []).append(record)
    if not groups:
        return []
    ranked = sorted(groups.items(), key=lambda group: -_mean(group[1], "score"))
    rows = [
        [_cell(records, "score"), _cell(records, "train_score"), *settings]
        for settings, records in ranked
    ]
    count = sum(len(records) for records in groups.values())
    heads = [measured, *_HEADS]
    return [
        f"<details><summary>{title}: {count} runs</summary>",
        "",
        *("| " + " | ".join(row) + " |" for row in [heads, ["---"] * len(heads), *rows]),
        "",
        "</details>",
    ]


def _settings(record: dict[str, Any]) -> tuple[str, ...]:
    params = record["params"] | {"output": output_text(record)} | unusual(record)
    return (
        record["dataset"],
        record["method"],
        network_text(record),
        str(record["epochs"]),
        record["loss"],
        params_text(params),
    )


def unusual(record: dict[str, Any]) -> dict[str, Any]:
    """Settings of a run, beside network, loss and method, that most runs don't have."""
    found: dict[str, Any] = {}
    for name, usual in _USUAL.items():
        value = record.get(name, usual)
        if value != usual:
            found |= value if isinstance(value, dict) else {name: value}
    return found


def network_text(record: dict[str, Any]) -> str:
    """The hidden layers of a record, or its network with its options."""
    if not record.get("network"):
        return "-".join(map(str, record["hidden"]))
    return ", ".join([record["network"], *options_text(record["options"])])


def options_text(options: dict[str, Any]) -> list[str]:
    """Options of a network, each as a name and a value."""
    return [
        f"{name} {'-'.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in options.items()
    ]


def output_text(record: dict[str, Any]) -> str:
    """The output activation of a record, with its parameters."""
    return " ".join([record["output"], *(f"{v:g}" for v in record["output_params"].values())])


def params_text(params: dict[str, Any]) -> str:
    """Names and values in one line.

    >>> params_text({"mu": 20.0, "weights": {"exact": {"iterations": 3, "ridge": [1.0, 1000.0]}}})
    'mu 20, weights exact, iterations 3, ridge 1 to 1000'
    """
    return ", ".join(_param_text(name, value) for name, value in params.items())


def _param_text(name: str, value: Any) -> str:
    match value:
        case float():
            return f"{name} {value:g}"
        case [float(first), float(last)]:  # as JSON has the pair of one that grows over the run
            return f"{name} {first:g} to {last:g}"
        case dict() if len(value) == 1:  # one kind of settings, and those within
            ((kind, inner),) = value.items()
            return ", ".join([f"{name} {kind}", *[params_text(inner)] * bool(inner)])
    return f"{name} {value}"


def _mean(records: list[dict[str, Any]], name: str) -> float:
    return statistics.mean(100 * float(record.get(name, 0.0)) for record in records)


def _cell(records: list[dict[str, Any]], name: str) -> str:
    if any(name not in record for record in records):
        return "failed"
    several = f" ({len(records)})" if len(records) > 1 else ""
    return f"{_mean(records, name):.2f}{several}"
