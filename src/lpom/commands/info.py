"""``lpom info``: what a run is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lpom import datasets
from lpom.commands import text
from lpom.commands.show import plan_table, results_table, scores_table, training_line
from lpom.compacting import compact, size
from lpom.exceptions import CheckpointError, ModelFileError
from lpom.folders import CHECKPOINT, MODEL, begun, begun_folder, read_begun
from lpom.runs import Run, network_text
from lpom.settings import settings_text
from lpom.tables.old import Classes, Features, Target


def info(run: Annotated[Path, typer.Argument(help="Folder of a run.")]) -> None:
    """Show the network, data, method, settings and results of a run; checks its model file."""
    console = Console(highlight=False)
    if begun(run) and not (run / MODEL).is_file():
        _print(console, _begun_facts(run))
        return
    of_text = text.facts(run)
    if of_text is not None:
        _print(console, of_text)
        return
    kept = Run.read(run)
    try:
        facts = _facts(kept, run)
        shown = results_table(kept.config), training_line(kept), scores_table(kept.config)
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(
            f"{run / 'config.json'} lacks what `lpom train` writes ({error!r}). Train again."
        ) from error
    if begun(run):
        facts["go on"] = f"lpom train --resume {run}"
    _print(console, facts)
    features = kept.predictor.features
    if kept.config["data"]["name"] not in datasets.names() and isinstance(features, Features):
        console.print(plan_table(features.plan))
    for part in shown:
        console.print(part, soft_wrap=isinstance(part, str))


def _print(console: Console, facts: dict[str, str]) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in facts.items():
        table.add_row(name, Text(value))
    console.print(table)


def _begun_facts(folder: Path) -> dict[str, str]:
    """Of a run that has not come to its end."""
    try:
        with begun_folder(folder) as notes:
            state = "stopped before its end"
    except CheckpointError:
        notes, state = read_begun(folder), "training now"
    try:
        config = notes["config"]
        data, method = config["data"], dict(config["method"])
        return {
            "data": f"{data['name']} ({data['notes']})",
            "network": network_text(config["network"]),
            "method": f"{method.pop('name')} ({settings_text(method)})",
            "training": f"{state}; {config['epochs']} epochs planned, batch size "
            f"{config['batch_size'] or 'all'}, seed {config['seed']}, on {_place(config)}",
            "go on": f"lpom train --resume {folder}",
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(
            f"{folder / CHECKPOINT} lacks what `lpom train` writes ({error!r}). Train again."
        ) from error


def _facts(run: Run, folder: Path) -> dict[str, str]:
    config, data = run.config, run.config["data"]
    target, features = run.predictor.target, run.predictor.features
    n_inputs, n_columns = features.n_inputs, len(features.names)
    method = dict(config["method"])
    timing, versions = config["timing"], config["versions"]
    return {
        "data": f"{data['name']} ({data['notes']})",
        "inputs": f"{n_inputs}, from {n_columns} of {data['columns']} columns",
        "target": f"{data['target']}: {target.task}{_classes(target)}",
        "network": f"{network_text(config['network'])}; {_size(run, folder)}",
        "method": f"{method.pop('name')} ({settings_text(method)})",
        "loss": config["loss"]["name"],
        "training": f"{len(run.history)} of {config['epochs']} epochs, batch size "
        f"{config['batch_size'] or 'all'}, seed {config['seed']}, on {_place(config)}; "
        f"{config['status']}",
        "started": timing["started"],
        "versions": ", ".join(f"{name} {value}" for name, value in versions.items()),
    }


def _place(config: Mapping[str, Any]) -> str:
    precision = config.get("precision")  # which older runs have not
    place = f"{config['device']} in {precision}" if precision else str(config["device"])
    return f"{place}, compiled" if config.get("compile") else place


def _size(run: Run, folder: Path) -> str:
    """Weights, bytes and multiplications; with penalties also what they have left of them."""
    model = run.predictor.model
    example = torch.zeros(1, *run.predictor.features.input_shape)
    whole = size(model, example)
    written = (folder / MODEL).stat().st_size
    text = (
        f"{whole.weights:,} weights in {whole.bytes:,} bytes ({written:,} in the model file), "
        f"{whole.multiplications:,} multiplications a row"
    )
    if not run.config["method"].get("penalties"):
        return text
    nonzero = sum(int(torch.count_nonzero(parameter)) for parameter in model.parameters())
    left = compact(model, example)[1].after
    return (
        f"{text}; {nonzero:,} weights are not zero, and compacted {left.weights:,} weights and "
        f"{left.multiplications:,} multiplications are left"
    )


def _classes(target: Target) -> str:
    return f", {len(target.classes)} classes" if isinstance(target, Classes) else ""
