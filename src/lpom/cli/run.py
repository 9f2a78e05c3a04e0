"""Train a pipeline on a table, and keep the run in a folder."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import platform
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from sklearn.pipeline import Pipeline

import lpom
from lpom import methods
from lpom.cli.data import Data, Source, read
from lpom.cli.folder import (
    HISTORY,
    METRICS,
    MODEL,
    PREDICTIONS,
    REPORT,
    SETTINGS,
    begun,
    check_folder,
    forget_checkpoint,
)
from lpom.cli.scores import baseline, scores
from lpom.cli.settings import Estimator, Settings
from lpom.exceptions import DataError, DivergenceError, ModelFileError
from lpom.files import checksum, write_atomically
from lpom.tables import TableEncoder, Target
from lpom.tables.numbers import NumberFormat
from lpom.tables.values import Array, is_nothing
from lpom.training import Callback, Checkpoint, Result
from lpom.training.history import History

_FEW_ROWS = 8  # to try settings on
_KEPT_ROWS, _KEPT_COLUMNS = 2000, 100  # of the test rows, for the report
OF_LOWEST_LOSS = "of the lowest held-out loss"  # which weights a run that stops early keeps


@final
@dataclass(frozen=True, eq=False)
class Run:
    """A trained pipeline and what is known of it, as its folder has it.

    Attributes
    ----------
    model : Pipeline of a `TableEncoder` and an estimator
    settings : all that was asked for, and versions
    metrics : what came out
    predictions : of the test rows, column by column
    """

    model: Pipeline
    target: Target
    history: History
    settings: dict[str, Any]
    metrics: dict[str, Any]
    predictions: dict[str, list[Any]]

    @property
    def encoder(self) -> TableEncoder:
        return self.model[0]  # type: ignore[no-any-return]

    @property
    def estimator(self) -> Estimator:
        return self.model[-1]  # type: ignore[no-any-return]

    def write(self, folder: Path) -> None:
        """Write the files of a run, each whole or not at all; an old report goes.

        The metrics come last and have the checksum of the model: a folder with files of two runs,
        left by a process that was killed here, is told from a whole one.
        """
        (folder / REPORT).unlink(missing_ok=True)
        lpom.save(self.model, folder / MODEL)
        self.history.to_jsonl(folder / HISTORY)
        write_atomically(folder / PREDICTIONS, _as_csv(self.predictions).encode())
        settings = {**self.settings, "target": asdict(self.target)}
        _write_json(folder / SETTINGS, _moved(settings, lambda path: os.path.relpath(path, folder)))
        _write_json(folder / METRICS, {**self.metrics, "sha256": checksum(folder / MODEL)})

    @classmethod
    def read(cls, folder: Path) -> Run:
        """The run that :meth:`write` left in a folder."""
        check_folder(folder)
        model = lpom.load(folder / MODEL)
        try:
            settings = dict(json.loads((folder / SETTINGS).read_text(encoding="utf-8")))
            settings = _moved(settings, lambda path: os.path.normpath(folder / path))
            metrics = dict(json.loads((folder / METRICS).read_text(encoding="utf-8")))
            digest, metric = metrics.pop("sha256"), metrics["metric"]
            history = History.from_jsonl(folder / HISTORY, metric)
            target = _target(settings.pop("target"))
            text = (folder / PREDICTIONS).read_text(encoding="utf-8")
            header, *rows = csv.reader(io.StringIO(text))
            columns = zip(*rows, strict=True) if rows else ([] for _ in header)
            predictions = {k: list(v) for k, v in zip(header, columns, strict=True)}
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            OSError,
            RecursionError,
        ) as error:
            raise ModelFileError(
                f"{folder} is not a whole run: {SETTINGS}, {METRICS}, {HISTORY} or {PREDICTIONS} "
                f"is missing or damaged ({error}). Train again."
            ) from error
        if not isinstance(model, Pipeline):
            raise ModelFileError(f"{folder / MODEL} holds no pipeline. Train again.")
        if digest != checksum(folder / MODEL):
            raise ModelFileError(
                f"{folder} holds files of two runs: {METRICS} is not that of {MODEL}. "
                + (
                    f"`lpom train --resume {folder}` goes on with the later one."
                    if begun(folder)
                    else "Train again."
                )
            )
        return cls(model, target, history, settings, metrics, predictions)


def _target(plain: Mapping[str, Any]) -> Target:
    """A target from what JSON made of ``asdict``."""
    return Target(
        tuple(plain["names"]),
        plain["task"],
        tuple(NumberFormat(**form) for form in plain["formats"]),
        tuple(tuple(classes) for classes in plain["classes"]),
        tuple(plain["hints"]),
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False, default=str, allow_nan=False)
    write_atomically(path, (text + "\n").encode())


def _as_csv(columns: dict[str, list[Any]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return file.getvalue()


def _moved(settings: dict[str, Any], move: Callable[[str], str]) -> dict[str, Any]:
    """Settings with another path to the table: in a file it is relative to its folder."""
    data = settings["data"]
    if not data["sha256"]:
        return settings
    source = {**data["source"], "data": move(data["source"]["data"])}
    return {**settings, "data": {**data, "source": source}}


def notes_to_resume(data: Data, settings: Settings) -> dict[str, Any]:
    """All that :func:`again` needs to go on with a run, as JSON can hold it."""
    return {"run": asdict(settings), "settings": planned(data, settings)}


def again(notes: Mapping[str, Any]) -> tuple[Data, Settings]:
    """The data and the settings of a run that was begun; raises if the data is another."""
    settings, described = Settings.of(notes["run"]), notes["settings"]["data"]
    source = Source.of(described["source"])
    if described["sha256"]:
        if not Path(source.data).is_file():
            raise DataError(
                f"the run was begun with {source.data}, which is gone. Put it back to resume."
            )
        if checksum(Path(source.data)) != described["sha256"]:
            raise DataError(
                f"{source.data} has changed since the run was begun, so it can't go on. Put the "
                "file back as it was, or train anew."
            )
    return read(source, settings.seed), settings


def planned(data: Data, settings: Settings) -> dict[str, Any]:
    """The settings of a run before it is trained."""
    n = len(data.train[1])
    estimator = settings.estimator(data.target, n)
    method, batch = methods.get(estimator.method), estimator.batch_size
    if settings.learning_rate is not None:
        method = method.with_learning_rate(settings.learning_rate)
    return {
        "data": data.describe(),
        "network": {
            "sizes": sizes(data, settings.widths(n), settings.output_activation),
            "activation": settings.activation,
            "output_activation": settings.output_activation,
        },
        "method": {"name": method.name, **method.plain()},
        "loss": settings.loss,
        "learning_rate": settings.learning_rate,
        "alpha": estimator.alpha,
        "class_weight": settings.class_weight,
        "epochs": estimator.max_iter,
        "batch_size": None if batch == "auto" else batch,
        "early_stopping": estimator.early_stopping,
        "seed": settings.seed,
        "device": str(estimator.device),
        "precision": settings.precision,
        "compile": settings.compile,
        "versions": {
            "lpom": lpom.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }


def sizes(data: Data, hidden: tuple[int, ...], output_activation: str) -> list[int]:
    """Widths of all layers. Two classes have one output, or two that are compared."""
    target, n_inputs = data.target, len(data.encoder.get_feature_names_out())
    if len(target.names) > 1 or not target.classes:
        return [n_inputs, *hidden, len(target.names)]
    compares = not lpom.activations.get(output_activation).elementwise
    n_classes = len(target.classes[0])
    return [n_inputs, *hidden, n_classes if n_classes > 2 or compares else 1]


def network_text(network: Mapping[str, Any]) -> str:
    """The network in one line."""
    widths = "-".join(map(str, network["sizes"]))
    return f"{widths}, {network['activation']}, {network['output_activation']} output"


def train(
    data: Data,
    settings: Settings,
    *,
    progress: bool | None = None,
    callbacks: Iterable[Callback] = (),
    checkpoint: Path | None = None,
) -> Run:
    """Train on the training rows, measure the test rows once.

    The estimators of the library do it: of the training rows they hold out a tenth, stop when the
    loss on it stands still, and keep the weights for which it was lowest. A run that was kept in
    ``checkpoint`` goes on from there.
    """
    inputs = {part: _encoded(data.encoder, X) for part, (X, _) in data.parts().items()}
    y = data.train[1]
    estimator = settings.estimator(data.target, len(y))
    if checkpoint is not None:
        estimator.set_params(checkpoint=Checkpoint(checkpoint))
    started = datetime.now(UTC)
    diverged = ""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="training was interrupted")  # the status says it
        warnings.filterwarnings("ignore", message="training ended after max_iter")  # likewise
        warnings.filterwarnings("ignore", message="the held-out loss was lowest")  # a hint says it
        try:
            estimator.fit(inputs["train"], y, callbacks=callbacks, progress=progress)
        except DivergenceError as error:
            if error.estimator is None:
                raise
            estimator, diverged = error.estimator, str(error)
    estimator.set_params(checkpoint=None)
    result = estimator.result_
    chosen = estimator.early_stopping and result.status != "interrupted"
    try:
        results = {
            part: _results(estimator, inputs[part], truth, data.target)
            for part, (_, truth) in data.parts().items()
        }
    except DivergenceError:
        if checkpoint is not None:
            forget_checkpoint(checkpoint.parent)  # the run is at its end: it can't go on
        raise
    results["test"]["baseline"] = baseline(y, data.test[1], data.target)
    metrics = {
        "status": result.status,
        **({"diverged": diverged} if diverged else {}),
        "loss": {"name": result.task.loss.name, **result.task.loss.params()},
        "weights": OF_LOWEST_LOSS if chosen else "as they were at the end",
        "metric": result.task.metric,
        "results": results,
        "hints": [*data.target.hints, *data.encoder.hints_, *_hints(result, chosen)],
        "timing": _timing(result, estimator.t_, started),
    }
    model = Pipeline([("table", data.encoder), ("network", estimator)])
    kept = _predictions(data, estimator, inputs["test"])
    return Run(model, data.target, result.history, planned(data, settings), metrics, kept)


def _hints(result: Result, chosen: bool) -> list[str]:
    """What to think of where the first epoch was the best."""
    losses = result.history.column("validation_loss")
    if not chosen or len(losses) < 3 or min(losses) < losses[0]:
        return []
    return [
        "the held-out loss was lowest after the first epoch, so the weights are hardly trained: "
        "the held-out rows may be few or have an outlier. Try --no-early-stopping."
    ]


def _encoded(encoder: TableEncoder, X: Any) -> Array:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="unlike in training")  # as test rows may be
        return encoder.transform(X)


def _predictions(data: Data, estimator: Estimator, inputs: Array) -> dict[str, list[Any]]:
    """Of the test rows, or some of them, with their columns if there are not too many."""
    X, truth = data.test
    rows = np.sort(np.random.default_rng(0).permutation(len(truth))[:_KEPT_ROWS])
    inputs, truth = inputs[rows], truth[rows]
    said = data.target.answers(estimator.predict(inputs))
    actual = data.target.answers(truth)
    columns: dict[str, Any] = {"row": data.tested[rows]}
    for name, column in said.items():
        columns[name.replace("prediction", "truth", 1)] = actual[name]
        columns[name] = column
    if data.target.task == "classification" and truth.ndim == 1:
        columns["probability"] = estimator.predict_proba(inputs).max(axis=1).astype(float)
    used = [name for name, column in data.encoder.columns_.items() if column.kind != "dropped"]
    if len(used) <= _KEPT_COLUMNS:
        for k, name in enumerate(data.encoder.columns_):
            if name in used:
                values = X[name].iloc[rows] if hasattr(X, "iloc") else X[rows, k]
                columns[f"column {name}"] = ["" if is_nothing(v) else v for v in values]
    return {name: [_plain(value) for value in column] for name, column in columns.items()}


def _plain(value: Any) -> Any:
    return f"{float(value):.9g}" if isinstance(value, float | np.floating) else value


def check_settings(data: Data, settings: Settings) -> None:
    """Raise now what training would raise of its settings: one step on a few rows."""
    X, y = data.train
    rows = np.unique(y, axis=0, return_index=True)[1][:_FEW_ROWS]
    plain = replace(settings, early_stopping=False)
    estimator = plain.estimator(data.target, len(y))
    if data.target.task == "regression" or y.ndim > 1:
        rows = np.sort(rows)
    elif len(rows) < 2:
        return  # which training says better
    if isinstance(estimator.class_weight if hasattr(estimator, "class_weight") else None, dict):
        estimator.set_params(class_weight=None)  # of classes that may not be among the few rows
    few = X.iloc[rows] if hasattr(X, "iloc") else X[rows]
    with warnings.catch_warnings(), suppress(ArithmeticError):
        warnings.simplefilter("ignore")
        estimator.set_params(max_iter=1).fit(data.encoder.transform(few), y[rows])
        if estimator.result_.status == "interrupted":
            raise KeyboardInterrupt


def _results(estimator: Estimator, inputs: Array, truth: Array, target: Target) -> dict[str, Any]:
    known: Any = slice(None)
    if target.task == "classification" and truth.ndim == 1:
        known = np.isin(truth, estimator.classes_)
    loss, score = estimator.evaluate(inputs[known], truth[known])  # a class never met has no loss
    if not math.isfinite(loss):
        raise _blown_up(estimator, f"the loss is {loss}")
    with np.errstate(over="ignore", invalid="ignore"):
        values = scores(estimator, inputs, truth, target)
    for name, value in values.items():
        if not math.isfinite(value):
            raise _blown_up(estimator, f"{name} is {value}")
    return {"loss": loss, "score": values.get("accuracy", score), **values}


def _blown_up(estimator: Any, what: str) -> DivergenceError:
    """Of a network whose weights are finite and whose answers are beyond all use, and all JSON."""
    advice = ", or ".join(methods.get(estimator.method).steadier)
    return DivergenceError(
        f"{what} after training, although all weights are finite: nothing is kept."
        + (f" Try {advice}." if advice else "")
    )


def _timing(result: Result, seen: int, started: datetime) -> dict[str, Any]:
    seconds = result.training_seconds
    return {
        "started": started.isoformat(timespec="seconds"),
        "seconds": result.seconds,
        "training_seconds": seconds,
        "samples_per_second": seen / seconds if seconds else None,
    }
