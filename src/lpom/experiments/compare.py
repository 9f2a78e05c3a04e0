"""``lpom compare``: methods beside each other on the same network, weights and batches.

Every finished trial is a line of ``results.jsonl``; ``table.md`` and two pictures are made from
those lines. What is there already is not run again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lpom import activations, datasets, losses, methods
from lpom.checks import check_number
from lpom.datasets import Dataset
from lpom.experiments import plots, table
from lpom.experiments.records import Store, Trial
from lpom.experiments.trials import n_outputs, run
from lpom.files import write_atomically
from lpom.preparation import Prepared
from lpom.tables import Classes, Features
from lpom.training.history import Epoch
from lpom.training.tasks import Task

RESULTS, TABLE, BY_EPOCH, BY_SECOND = (
    "results.jsonl",
    "table.md",
    "by-epochs.png",
    "by-seconds.png",
)


@dataclass(frozen=True)
class Comparison:
    """What is compared. Methods of one seed start from the same weights and meet the same batches.

    ``settings`` are hyperparameters that differ from a method's defaults, ``epochs_of`` numbers
    of epochs that differ from ``epochs``, both by the method's name. The loss is the one
    that suits the task, which all methods can do. A known ``network``, with its ``options``, takes
    the place of the hidden layers; with ``augment`` its pictures are flipped and cropped.
    """

    methods: tuple[str, ...]
    hidden: tuple[int, ...] = (100,)
    activation: str = "relu"
    output: str = "identity"
    loss: str = "auto"
    epochs: int = 10
    batch_size: int = 100
    seeds: tuple[int, ...] = (0, 1, 2)
    network: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    augment: bool = False
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    epochs_of: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, values in (("methods", self.methods), ("seeds", self.seeds)):
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{what} must be one or more, each once, got {list(values)}.")
        for name in (*self.settings, *self.epochs_of):
            if name not in self.methods:
                known = ", ".join(self.methods)
                raise ValueError(f"{name!r} is set but not compared; the methods are {known}.")
        for name in self.methods:
            methods.get(name, **self.settings.get(name, {}))
        for epochs in (self.epochs, *self.epochs_of.values()):
            check_number("epochs", epochs, whole=True)
        check_number("batch_size", self.batch_size, whole=True)
        for width in self.hidden:
            check_number("a hidden layer's width", width, whole=True)
        # a mistake in these is not a method's inability
        activations.get(self.activation)
        activations.get(self.output)
        if self.loss != "auto":
            losses.get(self.loss)

    def trials(self, dataset: str) -> list[Trial]:
        """Seed by seed, so that an early end still has something of every method.

        A trial names all settings, defaults too: when those change, it is another trial.
        """
        return [
            Trial(
                dataset=dataset,
                hidden=self.hidden,
                method=name,
                params=methods.get(name, **self.settings.get(name, {})).plain(),
                activation=self.activation,
                output=self.output,
                loss=self.loss,
                epochs=self.epochs_of.get(name, self.epochs),
                batch_size=self.batch_size,
                seed=seed,
                network=self.network,
                options=dict(self.options),
                augment=self.augment,
            )
            for seed in self.seeds
            for name in self.methods
        ]


def compare(
    plan: Comparison,
    data: Dataset,
    folder: Path,
    *,
    on_epoch: Callable[[Trial, Epoch], None] = lambda trial, epoch: None,
    on_trial: Callable[[Trial, dict[str, Any]], None] = lambda trial, record: None,
) -> table.Summary:
    """Run what is missing in ``folder``, write table and pictures, and return the table.

    They are written too when it is interrupted; called again it goes on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store = Store(folder / RESULTS)
    trials = plan.trials(data.name)
    wanted = {trial.key for trial in trials}
    records = {record["key"]: record for record in store if record["key"] in wanted}
    try:
        for trial in trials:
            records[trial.key] = _attempt(trial, data, store, on_epoch)
            on_trial(trial, records[trial.key])
    finally:
        done = [records[trial.key] for trial in trials if trial.key in records]
        summary = _write(plan, data, folder, done)
    return summary


def own_folder(plan: Comparison, data: Dataset, name: str) -> Path:
    """Every setting has its own, so that no table is written over by that of another."""
    settings = json.dumps([data.name, data.notes, asdict(plan)], sort_keys=True)
    return Path("comparisons") / f"{name}-{hashlib.sha256(settings.encode()).hexdigest()[:6]}"


def as_dataset(prepared: Prepared, source: str) -> Dataset:
    """Prepared data for any method, numbers to predict standardised.

    A table of the user is named by its file and its content, so that results of an earlier
    version of it are not taken for those of this one.
    """
    (x_train, y_train), (x_test, y_test) = prepared.train, prepared.test
    if prepared.target.task == "regression":
        mean, scale = y_train.mean(0), y_train.std(0)
        y_train, y_test = ((y - mean) / scale for y in (y_train, y_test))
    name = prepared.name
    if source not in datasets.names():
        digest = hashlib.sha256()
        for array in (x_train, y_train, x_test, y_test):
            digest.update(np.ascontiguousarray(array).tobytes())
        name = f"{name}-{digest.hexdigest()[:8]}"
    target, features = prepared.target, prepared.features
    assert isinstance(features, Features)  # of a table
    scaled = any(scale != (0.0, 1.0) for scale in features.numbers.values())
    return Dataset(
        name=name,
        x_train=x_train,
        y_train=y_train,
        x_test=x_test,
        y_test=y_test,
        classes=target.classes if isinstance(target, Classes) else (),
        feature_names=tuple(prepared.features.names),
        notes=prepared.notes + (" Inputs standardised." if scaled else ""),
    )


def _attempt(
    trial: Trial, data: Dataset, store: Store, on_epoch: Callable[[Trial, Epoch], None]
) -> dict[str, Any]:
    """A record in any case: a failure that another machine may not have is not stored."""
    try:
        return run(trial, data, store, on_epoch=lambda epoch: on_epoch(trial, epoch), closely=True)
    except (RuntimeError, MemoryError) as error:  # torch: out of memory, a factor that failed
        reason = " ".join(str(error).split()) or "out of memory"
        return {"key": trial.key, "method": trial.method, "seed": trial.seed, "reason": reason}


def _write(
    plan: Comparison, data: Dataset, folder: Path, records: list[dict[str, Any]]
) -> table.Summary:
    score = "R²" if np.issubdtype(data.y_train.dtype, np.floating) else "accuracy"
    rows = [
        table.Row(name, [record for record in records if record["method"] == name])
        for name in plan.methods
    ]
    summary = table.summary(_network(plan, data), rows, len(plan.seeds), score)
    page = f"# {data.name}\n\n{summary}\n"
    write_atomically(folder / TABLE, page.encode())
    lines = [row for row in rows if row.finished]
    if lines:
        title, n_test = f"{data.name}, {_sizes(plan, data)}", len(data.y_test)
        plots.draw(lines, folder / BY_EPOCH, title, score, n_test, "epochs")
        plots.draw(lines, folder / BY_SECOND, title, score, n_test, "seconds")
    return summary


def _sizes(plan: Comparison, data: Dataset) -> str:
    if plan.network:
        options = ", ".join(f"{name} {value}" for name, value in plan.options.items())
        return plan.network + (f" ({options})" if options else "")
    return "-".join(map(str, (data.x_train.shape[1], *plan.hidden, n_outputs(data))))


def _network(plan: Comparison, data: Dataset) -> str:
    layers = "" if plan.network else f", {plan.activation}, output {plan.output}"
    output = None if plan.network else activations.get(plan.output)
    loss = Task.infer(data.y_train, n_outputs(data), plan.loss, output).loss.name
    pictures = ", flipped and cropped" if plan.augment else ""
    return (
        f"Network {_sizes(plan, data)}{layers}{pictures}, "
        f"{loss} loss, {plan.epochs} epochs, batches of {plan.batch_size}; "
        f"{len(data.x_train)} rows to train on, {len(data.x_test)} to test; "
        f"seed{'' if len(plan.seeds) == 1 else 's'} {', '.join(map(str, plan.seeds))}. {data.notes}"
    )
