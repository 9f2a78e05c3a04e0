"""One training run of an experiment: how it is run in pieces, and what is kept of it.

Finished trials are lines of a JSON-lines file; a trial that was cut goes on from an epoch that was
finished shortly before.
"""

from __future__ import annotations

import copy
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lpom import activations, methods
from lpom.datasets import Dataset
from lpom.exceptions import ConvergenceWarning, DivergenceError, LPOMError
from lpom.experiments.cuts import read_cut, under, write_cut
from lpom.experiments.memory import peak_bytes
from lpom.experiments.records import Store, Trial, machine
from lpom.history import Epoch
from lpom.methods import Batch, Method, Problem
from lpom.network import Lifted, mlp
from lpom.tasks import Task
from lpom.training import evaluate, fit

#: Share of the training data held out when a trial is for tuning.
VALIDATION_SHARE = 1 / 6
#: Seconds of training that a cut may cost, beside the epoch it came in.
CUT_SECONDS = 10.0


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
        if found.get("settings", settings) != settings:
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
    cut = store.path.parent / "unfinished" / f"{trial.key}.safetensors"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            record |= _train(trial, data, cut, on_epoch, closely)
        except (ValueError, LPOMError) as error:
            record["reason"] = str(error)
    remarks = [str(s.message) for s in said if issubclass(s.category, ConvergenceWarning)]
    record["remarks"] = list(dict.fromkeys(remarks))
    store.add(record)
    cut.unlink(missing_ok=True)
    return record


def _settings(trial: Trial) -> dict[str, Any]:
    """Every parameter of the trial's method, defaults too, as JSON gives it back."""
    try:
        params = methods.get(trial.method, **trial.params).get_params(deep=False)
    except ValueError:  # which the run itself will say
        params = trial.params
    settings: dict[str, Any] = json.loads(json.dumps(params, default=repr))
    return settings


def _train(
    trial: Trial, data: Dataset, cut: Path, on_epoch: Callable[[Epoch], None], closely: bool
) -> dict[str, Any]:
    (X, y), (X_test, y_test) = parts(data, trial.part)
    n_outputs = len(data.classes) or 1
    output = activations.get(trial.output, **trial.output_params)
    sizes = [X.shape[1], *trial.hidden, n_outputs]
    model = mlp(sizes, trial.activation, output, bias=trial.bias, seed=trial.seed)
    method = methods.get(trial.method, **trial.params)
    task = Task.infer(y, n_outputs, trial.loss, output)
    size = min(trial.batch_size, len(X))
    more: dict[str, Any] = {}
    if closely:
        rows = slice(None) if method.full_batch else slice(size)
        more["peak_bytes"] = _peak_bytes(method, model, task, X[rows], y[rows])

    kept = read_cut(cut)
    curve, state = kept.curve, None
    if curve:
        model.load_state_dict(under("model.", kept.tensors))
        state = method.init(Problem(Lifted.from_module(model), task.loss))
        state.load_tensors(under("state.", kept.tensors))
        state.remarks = kept.remarks  # said once more, and so kept with the record
    written = time.monotonic()
    for epoch in range(len(curve), trial.epochs):
        try:
            result = fit(
                model,
                X,
                y,
                method=method,
                loss=trial.loss,
                epochs=1,
                batch_size=size,
                validation_data=(X_test, y_test) if closely else None,
                seed=100_003 * trial.seed + epoch,  # the same batches for every method
                state=state,
                span=(epoch / trial.epochs, (epoch + 1) / trial.epochs),
                progress=False,
            )
        except DivergenceError as error:  # which knows of this one epoch only
            raise DivergenceError(
                f"weights became NaN or infinite in epoch {epoch + 1} of {trial.epochs}. "
                "Use a smaller learning rate, or a larger mu or ridge."
            ) from error
        if result.status == "interrupted":
            raise KeyboardInterrupt
        state = result.state
        last = result.history[-1]
        curve.append(Epoch(**{**asdict(last), "epoch": epoch + 1}))
        on_epoch(curve[-1])
        if epoch + 1 < trial.epochs and time.monotonic() - written >= CUT_SECONDS:
            write_cut(cut, model, state, curve)
            written = time.monotonic()
    loss, score = evaluate(model, X_test, y_test, loss=trial.loss)
    return {
        "loss_value": loss,
        "score": score,
        "train_score": evaluate(model, X, y, loss=trial.loss)[1],
        "seconds": sum(epoch.seconds for epoch in curve),
        "curve": [asdict(epoch) for epoch in curve],
        "notes": data.notes,
        **more,
    }


def _peak_bytes(
    method: Method[Any], model: nn.Module, task: Task, inputs: Tensor, y: Tensor
) -> int:
    problem = Problem(Lifted.from_module(copy.deepcopy(model)), task.loss)
    return peak_bytes(method, problem, Batch(inputs, task.target(y).to(inputs)))


def parts(data: Dataset, part: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training rows, and the rows to measure on: the test set, or a fixed share of training."""
    X, y = torch.from_numpy(data.x_train), torch.from_numpy(data.y_train)
    if part == "test":
        return (X, y), (torch.from_numpy(data.x_test), torch.from_numpy(data.y_test))
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(X)))
    held = int(len(X) * VALIDATION_SHARE)
    return (X[order[held:]], y[order[held:]]), (X[order[:held]], y[order[:held]])
