"""Train on a table or a data set of a known name, and keep the run in a folder."""

from __future__ import annotations

import json
import math
import os
import platform
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias, final

import numpy as np
import torch

import lpom
from lpom import methods
from lpom.checks import as_device, check_number
from lpom.cli.folder import (
    CONFIG,
    HISTORY,
    MODEL,
    REPORT,
    begun,
    check_folder,
    forget_checkpoint,
)
from lpom.estimators import MLPClassifier, MLPRegressor
from lpom.exceptions import DataError, DivergenceError, ModelFileError, unknown_name
from lpom.files import checksum, write_atomically
from lpom.methods import Method
from lpom.predictor import Predictor
from lpom.preparation import Prepared, prepare
from lpom.settings import Settings as SettingsOf
from lpom.tables.old import Classes, Target
from lpom.tables.scores import always, majority
from lpom.training import Callback, Checkpoint, Result
from lpom.training.history import History

_PATIENCE = 10  # epochs without a lower held-out loss, at least, before training stops
_FEW_ROWS = 8  # to try settings on
_ENOUGH_TO_WATCH = 40  # rows; of fewer a tenth tells nothing
OF_LOWEST_LOSS = "of the lowest held-out loss"  # which weights a run that stops early keeps

Estimator: TypeAlias = MLPClassifier | MLPRegressor


@final
@dataclass(frozen=True)
class Settings:
    """How to train; None leaves a choice to the size of the data.

    ``method_settings`` are those of the method by name, ``{"mu": 5.0}``; ``class_weight`` is
    "balanced" or a weight per name of a class.
    """

    hidden: tuple[int, ...] | None = None
    activation: str = "relu"
    output_activation: str = "identity"
    method: str | Method[Any] = "lpom"
    method_settings: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float | None = None
    loss: str = "auto"
    alpha: float = MLPClassifier.alpha
    class_weight: str | Mapping[str, float] | None = None
    epochs: int | None = None
    batch_size: int | None = None
    early_stopping: bool = True
    seed: int = 0
    device: str = "auto"
    precision: str | None = None
    compile: bool = False

    def planned(self, n: int) -> tuple[int | None, int]:
        """Batch size (None: all rows) and most epochs for ``n`` rows to train on.

        Small tables get small batches, and epochs enough for about 4000 steps.
        """
        for name in ("epochs", "batch_size"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), whole=True)
        if methods.get(self.method).full_batch:
            if self.batch_size is not None:
                name = methods.get(self.method).name
                raise ValueError(
                    f"method {name!r} takes all rows in every step; leave the batch size out."
                )
            return None, 100 if self.epochs is None else self.epochs
        small = 32 if n < 10_000 else 100
        batch = min(n, small) if self.batch_size is None else self.batch_size
        enough = min(max(round(4000 * batch / n), 10), 300)
        return batch, enough if self.epochs is None else self.epochs

    def widths(self, n: int) -> tuple[int, ...]:
        """Hidden layers for ``n`` rows to train on."""
        if self.hidden is not None:
            return self.hidden
        return (50,) if n < 500 else (100,) if n < 5000 else (300, 100)

    def estimator(self, data: Prepared) -> Estimator:
        """The estimator that a user of Python would make for this data."""
        n, target = len(data.train[0]), data.target
        batch, epochs = self.planned(n)
        made: MLPClassifier | MLPRegressor
        made = MLPRegressor() if target.task == "regression" else MLPClassifier()
        made.set_params(
            hidden_layer_sizes=self.widths(n),
            activation=self.activation,
            output_activation=self.output_activation,
            method=self.method,
            loss=self.loss,
            alpha=self.alpha,
            batch_size="auto" if batch is None else batch,
            learning_rate_init=self.learning_rate,
            max_iter=epochs,
            early_stopping=self.early_stopping and n >= _ENOUGH_TO_WATCH,
            n_iter_no_change=max(_PATIENCE, epochs // 10) if self.early_stopping else epochs,
            random_state=self.seed,
            device=as_device(self.device),
            precision=self.precision,
            compile=self.compile,
            diagnostics=True,  # for the report
        )
        if self.class_weight is not None:
            made.set_params(class_weight=_class_weight(self.class_weight, target))
        if self.method_settings:
            made.set_params(
                **{f"method__{name}": value for name, value in self.method_settings.items()}
            )
        return made

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Settings:
        """Settings from what JSON made of ``asdict``."""
        hidden = plain["hidden"]
        return cls(**{**plain, "hidden": None if hidden is None else tuple(hidden)})


def method_settings(method: Method[Any]) -> dict[str, Any]:
    """Settings of a method, those of settings by names with a dot."""
    found = method.get_params(deep=True)
    plain = {name: value for name, value in found.items() if not isinstance(value, SettingsOf)}
    return {name.replace("__", "."): value for name, value in plain.items()}


@final
@dataclass(frozen=True, eq=False)
class Run:
    """A trained predictor, its history, and ``config``: every setting, versions and results."""

    predictor: Predictor
    history: History
    config: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Write the files of a run, each whole or not at all; an old report goes.

        The config comes last and has the checksum of the model: a folder with files of two runs,
        left by a process that was killed here, is told from a whole one.
        """
        (folder / REPORT).unlink(missing_ok=True)
        self.predictor.save(folder / MODEL)
        self.config["model"] = {"sha256": checksum(folder / MODEL)}
        self.history.to_jsonl(folder / HISTORY)
        config = _moved(self.config, lambda path: os.path.relpath(path, folder))
        text = json.dumps(config, indent=2, ensure_ascii=False, default=str, allow_nan=False)
        write_atomically(folder / CONFIG, (text + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> Run:
        """The run that :meth:`write` left in a folder."""
        check_folder(folder)
        try:
            config = dict(json.loads((folder / CONFIG).read_text(encoding="utf-8")))
            config = _moved(config, lambda path: os.path.normpath(folder / path))
            history = History.from_jsonl(folder / HISTORY, config.get("metric", "accuracy"))
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            OSError,
            RecursionError,
        ) as error:
            raise ModelFileError(
                f"{folder} is not a whole run: {CONFIG} or {HISTORY} is missing or damaged "
                f"({error}). Train again."
            ) from error
        predictor = Predictor.load(folder / MODEL, history)
        if "model" in config and config["model"] != {"sha256": checksum(folder / MODEL)}:
            raise ModelFileError(
                f"{folder} holds files of two runs: {CONFIG} is not that of {MODEL}. "
                + (
                    f"`lpom train --resume {folder}` goes on with the later one."
                    if begun(folder)
                    else "Train again."
                )
            )
        return cls(predictor, history, config)


def _moved(config: dict[str, Any], move: Callable[[str], str]) -> dict[str, Any]:
    """A config with other paths to its data: in a file they are relative to its folder."""
    source = config.get("data", {}).get("source")
    if not source:
        return config
    source = dict(source)
    if config["data"].get("sha256"):
        source["data"] = move(source["data"])
    elif source.get("data_dir") is not None:
        source["data_dir"] = move(source["data_dir"])
    return {**config, "data": {**config["data"], "source": source}}


def notes_to_resume(data: Prepared, settings: Settings) -> dict[str, Any]:
    """All that :func:`again` needs to go on with a run, as JSON can hold it."""
    assert data.source is not None  # standard input can't be read again
    files = [data.source["data"]] if data.name != data.source["data"] else []
    return {
        "source": data.source,
        "settings": asdict(settings),
        "files": digests(files),
        "config": planned(data, settings),
    }


def again(notes: Mapping[str, Any]) -> tuple[Prepared, Settings]:
    """The data and the settings of a run that was begun; raises if the data is another."""
    check_files(notes["files"])
    settings, source = Settings.of(notes["settings"]), dict(notes["source"])
    data = prepare(**{**source, "ignore": tuple(source.get("ignore", ()))}, seed=settings.seed)
    if json.loads(json.dumps(data.describe())) != notes["config"]["data"]:
        raise DataError(
            f"{data.name} is not what it was when the run was begun, so it can't go on. Use the "
            "same files, or train anew."
        )
    return data, settings


def digests(files: Iterable[str]) -> dict[str, str]:
    """Checksums of files, for :func:`check_files`."""
    return {file: checksum(Path(file)) for file in files}


def check_files(known: Mapping[str, str]) -> None:
    """Raise if a file is gone or is no longer what it was when the run was begun."""
    for file, digest in known.items():
        if not Path(file).is_file():
            raise DataError(f"the run was begun with {file}, which is gone. Put it back to go on.")
        if checksum(Path(file)) != digest:
            raise DataError(
                f"{file} has changed since the run was begun, so it can't go on. Put the file back "
                "as it was, or train anew."
            )


def planned(data: Prepared, settings: Settings) -> dict[str, Any]:
    """The config of a run before it is trained."""
    estimator = settings.estimator(data)
    method, batch = methods.get(estimator.method), estimator.batch_size
    if settings.learning_rate is not None:
        method = method.with_learning_rate(settings.learning_rate)
    (_, trained), (_, tested) = data.train, data.test
    if isinstance(data.target, Classes) and not np.isin(tested, trained).any():
        raise DataError(
            f"no row to test has a class of {data.target.name!r} that is among the "
            f"{len(trained)} rows to train on: there are {len(data.target.classes)} classes in "
            f"{len(trained) + len(tested)} rows, and each needs several."
        )
    return {
        "data": data.describe(),
        "network": network(data, settings),
        "method": {"name": method.name, **method.plain()},
        "learning_rate": settings.learning_rate,
        "alpha": estimator.alpha,
        "class_weight": settings.class_weight,
        "epochs": estimator.max_iter,
        "batch_size": None if batch == "auto" else batch,
        "seed": settings.seed,
        "device": str(estimator.device),
        "precision": settings.precision,
        "compile": settings.compile,
        "status": "running",
        "versions": {
            "lpom": lpom.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }


def network_text(described: Mapping[str, Any]) -> str:
    """What the config says of a network, in one line."""
    sizes = "-".join(map(str, described["sizes"]))
    return f"{sizes}, {described['activation']}, {described['output_activation']} output"


def network(data: Prepared, settings: Settings) -> dict[str, Any]:
    widths = settings.widths(len(data.train[0]))
    outputs = data.n_outputs(settings.output_activation)
    return {
        "sizes": [data.features.n_inputs, *widths, outputs],
        "activation": settings.activation,
        "output_activation": settings.output_activation,
    }


def train(
    data: Prepared,
    settings: Settings,
    *,
    progress: bool | None = None,
    callbacks: Iterable[Callback] = (),
    checkpoint: Path | None = None,
) -> Run:
    """Train on the training rows, measure the test rows once.

    The very estimators of the library do it: of the training rows they hold out a tenth, stop
    when the loss on it stands still, and keep the weights for which it was lowest. A run that was
    kept in ``checkpoint`` goes on from there.
    """
    X, y = data.train
    estimator = settings.estimator(data)
    if checkpoint is not None:
        estimator.set_params(checkpoint=Checkpoint(checkpoint))
    started = datetime.now(UTC)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="training was interrupted")  # the status says it
        warnings.filterwarnings("ignore", message="training ended after max_iter")  # likewise
        try:
            estimator.fit(X, y, callbacks=callbacks, progress=progress)
        except DivergenceError as error:
            if error.estimator is None:
                raise
            estimator, diverged = error.estimator, str(error)
        else:
            diverged = ""
    result = estimator.result_
    chosen = estimator.early_stopping and result.status != "interrupted"
    predictor = Predictor(estimator, data.features, data.target, data.reading)
    try:
        results = {part: _results(predictor, *rows) for part, rows in data.parts().items()}
    except DivergenceError:
        if checkpoint is not None:
            forget_checkpoint(checkpoint.parent)  # the run is at its end: it can't go on
        raise
    results["test"]["baseline"] = _baseline(data)
    config = {
        **planned(data, settings),
        "loss": {"name": result.task.loss.name, **result.task.loss.params()},
        "status": result.status,
        **({"diverged": diverged} if diverged else {}),
        "weights": OF_LOWEST_LOSS if chosen else "as they were at the end",
        "metric": result.task.metric,
        "results": results,
        "timing": _timing(result, estimator.t_, started),
    }
    return Run(predictor, result.history, config)


def check_settings(data: Prepared, settings: Settings) -> None:
    """Raise now what training would raise of its settings: one step on a few rows."""
    X, y = data.train
    rows = np.unique(y, axis=0, return_index=True)[1][:_FEW_ROWS]
    estimator = replace(settings, early_stopping=False).estimator(data)
    if not isinstance(data.target, Classes):
        rows = np.sort(rows)
    elif len(rows) < 2:
        return  # which training says better
    with warnings.catch_warnings(), suppress(ArithmeticError):
        warnings.simplefilter("ignore")
        estimator.set_params(max_iter=1).fit(X[rows], y[rows])
        if estimator.result_.status == "interrupted":
            raise KeyboardInterrupt


def _results(predictor: Predictor, X: Any, y: Any) -> dict[str, Any]:
    estimator = predictor.estimator
    known: Any = slice(None)
    if isinstance(predictor.target, Classes):
        known = np.isin(y, estimator.classes_)
    loss, score = estimator.evaluate(X[known], y[known])  # a class never trained on has no loss
    if not math.isfinite(loss):
        raise _blown_up(estimator, f"the loss is {loss}")
    with np.errstate(over="ignore", invalid="ignore"):
        scores = predictor.scores(X, y)
    for name, value in scores.items():
        if not math.isfinite(value):
            raise _blown_up(estimator, f"{name} is {value}")
    return {"loss": loss, "score": scores.get("accuracy", score), **scores}


def _blown_up(estimator: Any, what: str) -> DivergenceError:
    """Of a network whose weights are finite and whose answers are beyond all use, and all JSON."""
    advice = ", or ".join(methods.get(estimator.method).steadier)
    return DivergenceError(
        f"{what} after training, although all weights are finite: nothing is kept."
        + (f" Try {advice}." if advice else "")
    )


def _baseline(data: Prepared) -> dict[str, Any]:
    """The same scores of an answer that is always the same."""
    (_, y), (_, truth) = data.train, data.test
    if isinstance(data.target, Classes):
        most, scores = majority(y, truth, len(data.target.classes))
        return {"answer": f"always {data.target.classes[most]!r}", **scores}
    name = "always the mean" if data.target.task == "regression" else "always the most frequent"
    return {"answer": name, **always(y, truth, data.target.task, data.target.names)}


def _class_weight(given: str | Mapping[str, float], target: Target) -> Any:
    if not isinstance(target, Classes):
        raise ValueError(
            f"class weights are for one column of classes; {target.name!r} is none. Leave it out."
        )
    if isinstance(given, str):
        return given
    for name in given:
        if name not in target.classes:
            raise ValueError(unknown_name(f"class of {target.name!r}", name, target.classes))
    return {k: given.get(name, 1.0) for k, name in enumerate(target.classes)}


def _timing(result: Result, seen: int, started: datetime) -> dict[str, Any]:
    seconds = result.training_seconds
    return {
        "started": started.isoformat(timespec="seconds"),
        "seconds": result.seconds,
        "training_seconds": seconds,
        "samples_per_second": seen / seconds if seconds else None,
    }
