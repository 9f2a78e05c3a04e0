"""Train a table or a data set of a known name, and keep the run in a folder."""

from __future__ import annotations

import json
import platform
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

import lpom
from lpom import losses, methods, plots
from lpom.checks import as_device
from lpom.exceptions import ModelFileError
from lpom.files import write_atomically
from lpom.folders import CONFIG, CURVES, HISTORY, MODEL, REPORT, check_folder
from lpom.methods import Method
from lpom.networks.mlp import mlp
from lpom.predictor import Predictor
from lpom.preparation import Prepared
from lpom.training import Callback, EarlyStopping, Result, evaluate, fit
from lpom.training.history import History


@final
@dataclass(frozen=True)
class Settings:
    """How to train; None leaves a choice to the size of the data."""

    hidden: tuple[int, ...] = (300, 100)
    activation: str = "relu"
    output_activation: str = "identity"
    method: str | Method[Any] = "lpom"
    loss: str = "auto"
    epochs: int | None = None
    batch_size: int | None = None
    seed: int = 0
    device: str = "auto"

    def planned(self, n: int) -> tuple[int | None, int]:
        """Batch size (None: all rows) and epochs for ``n`` rows to train on.

        Small tables get small batches, and epochs enough for about 2000 steps.
        """
        if methods.get(self.method).full_batch:
            if self.batch_size is not None:
                name = methods.get(self.method).name
                raise ValueError(
                    f"method {name!r} takes all rows in every step; leave the batch size out."
                )
            return None, 100 if self.epochs is None else self.epochs
        small = 32 if n < 10_000 else 100
        batch = min(n, small) if self.batch_size is None else self.batch_size
        enough = min(max(round(2000 * batch / n), 10), 100)
        return batch, enough if self.epochs is None else self.epochs


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
        return cls(Predictor.load(folder / MODEL), history, config)


def read_predictor(run: Path) -> Predictor:
    """What predicts, from the folder of a run or from a model file by itself."""
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
    """Train on the training rows, watch the validation rows, measure the test rows once.

    A regression keeps the weights of the epoch with the best R2 on the validation rows: small
    tables of numbers are soon overfitted. Accuracy is too coarse on few rows to choose by, so a
    classification keeps the last.
    """
    method = methods.get(settings.method)
    _check_loss(settings.loss, data)
    device = as_device(settings.device)
    batch_size, epochs = settings.planned(len(data.train[0]))
    sizes = [data.features.n_inputs, *settings.hidden, data.target.n_outputs]
    model = mlp(sizes, settings.activation, settings.output_activation, seed=settings.seed)
    watched = data.target.task == "regression" and data.validation is not None
    keep_best = EarlyStopping(patience=epochs) if watched else False  # never stops, only chooses
    started = datetime.now(UTC)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="training was interrupted")  # the status says it
        result = fit(
            model,
            *data.train,
            method=method,
            loss=settings.loss,
            epochs=epochs,
            batch_size=batch_size,
            validation_data=data.validation,
            seed=settings.seed,
            device=device,
            early_stopping=keep_best,
            progress=progress,
            callbacks=callbacks,
        )
    chosen = bool(keep_best) and result.status != "interrupted"
    scores = {
        part: dict(
            zip(("loss", "score"), evaluate(model, *rows, loss=result.task.loss), strict=True)
        )
        for part, rows in data.parts().items()
    }
    config = {
        "data": data.describe(),
        "network": {
            "sizes": sizes,
            "activation": settings.activation,
            "output_activation": settings.output_activation,
        },
        "method": {"name": method.name, **method.get_params(deep=False)},
        "loss": {"name": result.task.loss.name, **result.task.loss.params()},
        "epochs": epochs,
        "batch_size": batch_size,
        "seed": settings.seed,
        "device": str(device),
        "status": result.status,
        "weights": "of the best validation epoch" if chosen else "as they were at the end",
        "metric": result.task.metric,
        "results": scores,
        "timing": _timing(result, len(data.train[0]), started),
        "versions": {
            "lpom": lpom.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }
    predictor = Predictor(model.cpu(), data.features, data.target, result.task.loss)
    return Run(predictor, result.history, config)


def _check_loss(loss: str, data: Prepared) -> None:
    name = losses.get(loss).name if loss != "auto" else loss
    if data.target.task == "regression" and name != "auto" and losses.get(name).classifies:
        raise ValueError(
            f"the loss {name!r} is for classes, and {data.target.name!r} is a number; use "
            "'squared' or 'huber', or --task classification."
        )


def _timing(result: Result, n: int, started: datetime) -> dict[str, Any]:
    seconds = result.training_seconds
    return {
        "started": started.isoformat(timespec="seconds"),
        "seconds": result.seconds,
        "training_seconds": seconds,
        "samples_per_second": n * len(result.history) / seconds if seconds else None,
    }
