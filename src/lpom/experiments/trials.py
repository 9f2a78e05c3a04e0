"""One training run of an experiment, and what is kept of it.

Finished trials are lines of a JSON-lines file; a trial that was cut goes on from its checkpoint.
"""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lpom import activations, losses, methods, networks
from lpom.datasets import Dataset, adversarial_loader, augmented_loader, whitened
from lpom.exceptions import CheckpointError, ConvergenceWarning, LPOMError
from lpom.experiments.memory import peak_bytes
from lpom.experiments.records import Store, Trial, machine
from lpom.experiments.remains import remains
from lpom.lifting import lift
from lpom.methods import LPOM, Batch, Method, Problem
from lpom.networks.mlp import mlp
from lpom.training import Checkpoint, evaluate, fit
from lpom.training.history import Epoch
from lpom.training.task import Task

#: Share of the training data held out when a trial is for tuning.
VALIDATION_SHARE = 1 / 6
#: Seconds of training that a cut may cost.
CUT_SECONDS = 60.0


def run(
    trial: Trial,
    data: Dataset,
    store: Store,
    *,
    on_epoch: Callable[[Epoch], None] = lambda epoch: None,
    closely: bool = False,
) -> dict[str, Any]:
    """The record of a trial: from the store, or by running what of it is missing.

    A method that can't do the task gives a record with its ``reason`` instead of results. What a
    method has to say about its run is kept as ``remarks``. Watched ``closely``, the rows to
    measure on are measured after every epoch, and ``peak_bytes`` is what a step takes.
    """
    settings = _settings(trial)
    found = store.find(trial)
    if found is not None:
        if _read(found.get("settings", settings), trial) != _read(settings, trial):
            raise LPOMError(
                f"{store.path} has this {trial.method} run with other defaults of the method than "
                "today's. Remove the line, or write to another folder."
            )
        if found.get("notes", data.notes) != data.notes:
            raise LPOMError(
                f"{store.path} has this {trial.method} run on data that was prepared in another "
                f"way: {found['notes']} Remove the line, or write to another folder."
            )
        return found
    record: dict[str, Any] = {"key": trial.key, **asdict(trial)}
    record |= {"settings": settings, "machine": machine()}
    folder = store.path.parent / "unfinished" / trial.key
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the record has the remarks
        warnings.filterwarnings("ignore", message="training was interrupted")
        try:
            record |= _train(trial, data, folder, on_epoch, closely)
        except CheckpointError:  # which says nothing about the method
            raise
        except (ValueError, LPOMError) as error:
            record |= {"reason": str(error), "remarks": []}
    store.add(record)
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # others are not finished yet
        folder.parent.rmdir()
    return record


def _settings(trial: Trial) -> dict[str, Any]:
    """Every parameter of the trial's method, defaults too, as JSON gives it back."""
    try:
        settings = methods.get(trial.method, **trial.params).plain()
    except (TypeError, ValueError):  # which the run itself will say
        settings = trial.params
    made: dict[str, Any] = json.loads(json.dumps(settings, default=repr))
    return made


def _read(settings: dict[str, Any], trial: Trial) -> dict[str, Any]:
    """The settings that a run looks at.

    `jumps` is for networks that have some; what is off is as if there were no such setting, as
    there was none when some records were made.
    """
    hidden = activations.get(trial.options.get("activation", trial.activation))
    jumps = hidden.jumps or activations.get(trial.output).jumps
    return {k: v for k, v in settings.items() if v is not None and (jumps or k != "jumps")}


def _train(
    trial: Trial, data: Dataset, folder: Path, on_epoch: Callable[[Epoch], None], closely: bool
) -> dict[str, Any]:
    shaped = trial.network and data.image_shape is not None
    shown = data.pictures() if shaped else data
    shown = whitened(shown, trial.whiten) if trial.whiten else shown
    (X, y), (X_test, y_test) = parts(shown, trial.part)
    outputs = n_outputs(data)
    output = activations.get(trial.output, **trial.output_params)
    model = make_model(trial, tuple(X.shape[1:]), outputs)
    method = methods.get(trial.method, **trial.params)
    loss = losses.get(trial.loss, **trial.loss_params) if trial.loss_params else trial.loss
    task = Task.infer(y, outputs, loss, output)
    size = min(trial.batch_size, len(X))
    more: dict[str, Any] = {}
    if closely:
        rows = slice(None) if method.full_batch else slice(size)
        more["peak_bytes"] = _peak_bytes(method, model, task, X[rows], y[rows])

    source: dict[str, Any] = {"X": X, "y": y, "batch_size": size}
    if trial.adversarial and trial.augment:
        raise ValueError("a trial is adversarial or augmented, not both.")
    if trial.adversarial:
        found_by = lift(model) if isinstance(method, LPOM) else model
        loader = adversarial_loader(
            found_by, X, y, size, size=trial.adversarial, precision=trial.precision
        )
        source = {"X": loader}
    elif trial.augment:
        ways = trial.augment if isinstance(trial.augment, dict) else {}
        source = {"X": augmented_loader(X, y, size, **ways)}
    result = fit(
        model,
        **source,
        method=method,
        loss=loss,
        epochs=trial.epochs,
        weight_decay=trial.weight_decay,
        averaging=trial.averaging,
        precision=trial.precision,
        validation_data=(X_test, y_test) if closely else None,
        seed=trial.seed,  # the same batches for every method
        callbacks=on_epoch,
        progress=False,
        checkpoint=Checkpoint(folder, every_minutes=CUT_SECONDS / 60),
    )
    if result.status == "interrupted":
        raise KeyboardInterrupt
    if trial.params.get("penalties"):
        more["remains"] = remains(model, X_test)
    measured, score = evaluate(model, X_test, y_test, loss=loss)
    return {
        "loss_value": measured,
        "score": score,
        "train_score": evaluate(model, X, y, loss=loss)[1],
        "seconds": result.training_seconds,
        "curve": [asdict(epoch) for epoch in result.history],
        "remarks": list(result.state.remarks.values()),
        "notes": data.notes,
        **more,
    }


def n_outputs(data: Dataset) -> int:
    """One for each class, or for each column to predict."""
    return len(data.classes) or (1 if data.y_train.ndim == 1 else data.y_train.shape[1])


def make_model(trial: Trial, shape: tuple[int, ...], n_outputs: int) -> nn.Module:
    """The network of a trial, its weights drawn from the trial's seed."""
    if trial.network:
        return networks.get(trial.network, shape, n_outputs, trial.seed, **trial.options)
    output = activations.get(trial.output, **trial.output_params)
    sizes = [*shape, *trial.hidden, n_outputs]
    return mlp(sizes, trial.activation, output, bias=trial.bias, seed=trial.seed)


def _peak_bytes(
    method: Method[Any], model: nn.Module, task: Task, inputs: Tensor, y: Tensor
) -> int:
    problem = Problem(copy.deepcopy(model), task.loss, inputs)
    return peak_bytes(method, problem, Batch(inputs, task.target(y).to(inputs)))


def parts(data: Dataset, part: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training rows, and the rows to measure on: the test set, or a fixed share of training."""
    X, y = torch.from_numpy(data.x_train), torch.from_numpy(data.y_train)
    if part == "test":
        return (X, y), (torch.from_numpy(data.x_test), torch.from_numpy(data.y_test))
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(X)))
    held = int(len(X) * VALIDATION_SHARE)
    return (X[order[held:]], y[order[held:]]), (X[order[:held]], y[order[:held]])
