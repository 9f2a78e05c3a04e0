"""What the page says of a run, as plain values for JSON."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

from lpom.cli.report.classes import judge_classes
from lpom.cli.report.importance import SHOWN, importances
from lpom.cli.report.judging import HeldBack, Load, held_back
from lpom.cli.report.numbers import judge_labels, judge_numbers
from lpom.cli.report.pictures import first_layer
from lpom.cli.run import Run, network_text
from lpom.exceptions import LPOMError
from lpom.tables.old import Classes
from lpom.training.history import History

DIGITS = 6  # significant ones; a plot shows fewer
_ELSEWHERE = ("results", "timing", "versions", "model")  # parts of a config that are no settings
_NOTHING = "–"
_NO_ROWS = "The test rows could not be loaded again"
_UNREADABLE = (LPOMError, OSError, ValueError, ImportError)


def describe(name: str, run: Run, load: Load) -> dict[str, Any]:
    """Everything about one run; a part that cannot be shown becomes a note that says why."""
    config = run.config
    timing = config["timing"]
    rows: HeldBack | str
    try:
        rows = held_back(run, load)
    except _UNREADABLE as error:
        rows = f"{_NO_ROWS}: {error}"
    return {
        "name": name,
        "metric": run.history.metric,
        "data": config["data"]["name"],
        "target": config["data"]["target"],
        "method": config["method"]["name"],
        "seconds": timing["training_seconds"],
        "results": {
            part: {"rows": config["data"]["rows"][part], **values}
            for part, values in config["results"].items()
        },
        "summary": [
            f"network {network_text(config['network'])}",
            f"method {config['method']['name']}, {_epochs(run)} in "
            f"{timing['training_seconds']:.3g} s",
        ],
        "history": columns(run.history),
        "settings": settings(config),
        "timings": _timings(run),
        "test": _test(run, rows),
        "weights": _weights(run, rows),
    }


def _epochs(run: Run) -> str:
    done, planned, status = len(run.history), run.config["epochs"], run.config["status"]
    if status == "finished" and done == planned:
        return f"{done} epoch{'' if done == 1 else 's'}"
    return f"{done} of {planned} epochs ({status.replace('-', ' ')})"


def columns(history: History) -> dict[str, list[Any]]:
    """History column by column; ``gaps`` and ``rates`` are one column per layer.

    ``elapsed`` counts the seconds of training up to the end of each epoch.
    """
    names = ("epoch", "objective", "loss", "score", "validation_loss", "validation_score")
    made: dict[str, list[Any]] = {name: _rounded(history.column(name)) for name in names}
    made["elapsed"] = _rounded(accumulate(history.column("seconds")))
    for name in ("gaps", "rates"):
        made[name] = [_rounded(layer) for layer in history.by_layer(name)]
    return made


def settings(config: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Name and value of every setting in groups; what is in none is about training."""
    groups: dict[str, dict[str, str]] = {}
    for name, value in config.items():
        if name not in _ELSEWHERE:
            parts = value if isinstance(value, dict) else {name: value}
            if name == "data":  # a page goes to others: it names the table, not where it lies
                parts = {part: inner for part, inner in parts.items() if part != "source"}
            group = groups.setdefault(name if isinstance(value, dict) else "training", {})
            group.update({part.replace("_", " "): _text(inner) for part, inner in parts.items()})
    return groups


def _timings(run: Run) -> dict[str, dict[str, str]]:
    timing, n = run.config["timing"], len(run.history)
    speed, training = timing["samples_per_second"], timing["training_seconds"]
    return {
        "time": {
            "started": timing["started"],
            "training": f"{training:.3g} s",
            "training, per epoch": f"{training / n:.3g} s" if n else _NOTHING,
            "samples per second": _NOTHING if speed is None else f"{speed:,.0f}",
            "with measuring": f"{timing['seconds']:.3g} s",
        },
        "versions": run.config["versions"],
    }


def _test(run: Run, rows: HeldBack | str) -> dict[str, Any]:
    """What became of the test rows, and which columns mattered for it."""
    if isinstance(rows, str):
        return {"note": rows}
    target = run.predictor.target
    found = importances(run.predictor, rows)
    ranked = [column["name"] for column in found]
    try:
        if isinstance(target, Classes):
            judged = judge_classes(run, rows, ranked)
        elif target.task == "regression":
            judged = judge_numbers(run, rows, ranked)
        else:
            judged = judge_labels(run, rows)
    except _UNREADABLE as error:
        return {"note": f"{_NO_ROWS}: {error}"}
    return judged | {"importances": found[:SHOWN], "n_columns": len(found)}


def _weights(run: Run, rows: HeldBack | str) -> dict[str, Any] | None:
    """Pictures of what the first layer looks at, where it looks at pictures."""
    if isinstance(rows, str):
        return {"note": "The data set is not available, so the weights cannot be shown as images."}
    if rows.data is None or rows.data.image_shape is None:
        return None
    if next(run.predictor.model.parameters()).ndim != 2:
        return {"note": "The first layer is a convolution, so no unit of it looks at all pixels."}
    return first_layer(run.predictor, rows.data)


def _text(value: Any) -> str:
    if value is None or value == []:
        return _NOTHING
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_text(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _rounded(values: Any) -> list[float | int | None]:
    """To a few digits; what is missing or not finite is None, for which JSON has a word."""
    return [
        value
        if value is None or isinstance(value, int)
        else (float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None)
        for value in values
    ]
