"""Train a table or a data set of a known name, and keep the run in a folder."""

from __future__ import annotations

import json
import os
import platform
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

import lpom
from lpom import methods, plots
from lpom.checks import as_device, check_number
from lpom.estimators import MLPClassifier, MLPRegressor
from lpom.exceptions import ModelFileError, unknown_name
from lpom.files import write_atomically
from lpom.folders import CONFIG, CURVES, HISTORY, MODEL, REPORT, check_folder
from lpom.methods import Method
from lpom.predictor import Predictor
from lpom.preparation import Prepared
from lpom.settings import Settings as MethodSettings
from lpom.tables import Classes, Target
from lpom.tables.scores import always, majority
from lpom.training import Callback, Result
from lpom.training.history import History

_PATIENCE = 10  # epochs without a lower held-out loss, at least, before training stops
_FEW_ROWS = 8  # to try settings on
_ENOUGH_TO_WATCH = 40  # rows; of fewer a tenth tells nothing


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
    alpha: float | None = None
    class_weight: str | Mapping[str, float] | None = None
    epochs: int | None = None
    batch_size: int | None = None
    early_stopping: bool = True
    seed: int = 0
    device: str = "auto"

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

    def estimator(self, target: Target, n: int) -> MLPClassifier | MLPRegressor:
        """The estimator that a user of Python would make for ``n`` rows and this target."""
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
            n_iter_no_change=max(_PATIENCE, epochs // 10),
            random_state=self.seed,
            device=as_device(self.device),
        )
        if self.class_weight is not None:
            made.set_params(class_weight=_class_weight(self.class_weight, target))
        if self.method_settings:
            made.set_params(
                **{f"method__{name}": value for name, value in self.method_settings.items()}
            )
        return made


def method_settings(estimator: MLPClassifier | MLPRegressor) -> dict[str, Any]:
    """Settings of the estimator's method, those of settings by names with a dot."""
    found = methods.get(estimator.method).get_params(deep=True)
    plain = {name: value for name, value in found.items() if not isinstance(value, MethodSettings)}
    return {name.replace("__", "."): value for name, value in plain.items()}


@final
@dataclass(frozen=True, eq=False)
class Run:
    """A trained predictor, its history, and ``config``: every setting, versions and results."""

    predictor: Predictor
    history: History
    config: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Write the four files of a run, each whole or not at all; an old report goes."""
        (folder / REPORT).unlink(missing_ok=True)
        self.predictor.save(folder / MODEL)
        self.history.to_jsonl(folder / HISTORY)
        plots.curves(self.history, folder / CURVES)
        config = json.dumps(self.config, indent=2, ensure_ascii=False, default=str)
        write_atomically(folder / CONFIG, (config + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> Run:
        """The run that :meth:`write` left in a folder."""
        check_folder(folder)
        try:
            config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            history = History.from_jsonl(folder / HISTORY, config.get("metric", "accuracy"))
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise ModelFileError(
                f"{folder} is not a whole run: {CONFIG} or {HISTORY} is missing or damaged "
                f"({error}). Train again."
            ) from error
        return cls(Predictor.load(folder / MODEL, history), history, config)


def load(run: str | os.PathLike[str]) -> Predictor:
    """What ``lpom train`` left in a folder, or a model file by itself: predicts data frames.

    ``predict``, ``predict_proba`` and ``score`` take the columns of the training table;
    ``estimator`` is the :class:`~lpom.MLPClassifier` or :class:`~lpom.MLPRegressor` in it.
    """
    run = Path(run)
    if run.is_file():
        return Predictor.load(run)
    check_folder(run)
    return Predictor.load(run / MODEL)


def train(
    data: Prepared,
    settings: Settings,
    *,
    progress: bool | None = None,
    callbacks: Iterable[Callback] = (),
) -> Run:
    """Train on the training rows, measure the test rows once.

    The very estimators of the library do it: of the training rows they hold out a tenth, stop
    when the loss on it stands still, and keep the weights for which it was lowest.
    """
    X, y = data.train
    estimator = settings.estimator(data.target, len(X))
    started = datetime.now(UTC)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="training was interrupted")  # the status says it
        warnings.filterwarnings("ignore", message="training ended after max_iter")  # likewise
        estimator.fit(X, y, callbacks=callbacks, progress=progress)
    result, batch, method = estimator.result_, estimator.batch_size, estimator._trained_by
    assert method is not None  # it was trained just now
    chosen = estimator.early_stopping and result.status != "interrupted"
    predictor = Predictor(estimator, data.features, data.target, data.reading)
    results = {part: _results(predictor, *rows) for part, rows in data.parts().items()}
    results["test"]["baseline"] = _baseline(data)
    config = {
        "data": data.describe(),
        "network": {
            "sizes": list(estimator._design.sizes),
            "activation": settings.activation,
            "output_activation": settings.output_activation,
        },
        "method": {"name": method.name, **method.plain()},
        "loss": {"name": result.task.loss.name, **result.task.loss.params()},
        "alpha": estimator.alpha,
        "class_weight": settings.class_weight,
        "epochs": estimator.max_iter,
        "batch_size": None if batch == "auto" else batch,
        "seed": settings.seed,
        "device": str(estimator.device),
        "status": result.status,
        "weights": "of the lowest held-out loss" if chosen else "as they were at the end",
        "metric": result.task.metric,
        "results": results,
        "timing": _timing(result, estimator.t_, started),
        "versions": {
            "lpom": lpom.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }
    return Run(predictor, result.history, config)


def rehearse(data: Prepared, settings: Settings) -> None:
    """Raise now what training would raise of its settings: one step on a few rows."""
    X, y = data.train
    rows = np.unique(y, axis=0, return_index=True)[1][:_FEW_ROWS]
    estimator = replace(settings, early_stopping=False).estimator(data.target, len(X))
    if not isinstance(data.target, Classes):
        rows = np.sort(rows)
    elif len(rows) < 2:
        return  # which training says better
    with warnings.catch_warnings(), suppress(ArithmeticError):
        warnings.simplefilter("ignore")
        estimator.set_params(max_iter=1).fit(X[rows], y[rows])


def _results(predictor: Predictor, X: Any, y: Any) -> dict[str, Any]:
    estimator = predictor.estimator
    known: Any = slice(None)
    if isinstance(predictor.target, Classes):
        known = np.isin(y, estimator.classes_)
    loss, score = estimator.evaluate(X[known], y[known])  # a class never trained on has no loss
    scores = predictor.scores(X, y)
    return {"loss": loss, "score": scores.get("accuracy", score), **scores}


def _baseline(data: Prepared) -> dict[str, Any]:
    """The same scores of an answer that is always the same."""
    (_, y), (_, truth) = data.train, data.test
    if isinstance(data.target, Classes):
        most, scores = majority(y, truth, len(data.target.classes))
        return {"answer": f"always {data.target.classes[most]!r}", **scores}
    name = "always the mean" if data.target.task == "regression" else "always the most frequent"
    return {"answer": name, **always(y, truth, data.target.task)}


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
