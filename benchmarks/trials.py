"""Run what is missing of an experiment; a run that was cut goes on from its checkpoint."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import data
import lpom
import networks
from data import Dataset
from data.adversarial import adversarial_loader
from data.augmentation import augmented_loader
from data.preprocessing import whitened
from lpom import activations, losses, methods
from lpom.compacting import compact
from lpom.exceptions import CheckpointError, ConvergenceWarning, LPOMError
from lpom.methods import LPOM
from lpom.training import Checkpoint, Epoch, evaluate, fit
from records import Record, Store, Trial, machine

#: Seconds of training that a cut may cost.
CUT_SECONDS = 60.0
#: Batches that the two networks of `remains` predict in turn, and rows of each.
ROUNDS, ROWS = 30, 1000


class Runner:
    """Runs trials of one table, and keeps their records in one file."""

    def __init__(self, table: str, folder: Path, *, quiet: bool = False, rows: int = 0) -> None:
        self.store, self.quiet, self.rows = Store(folder / f"{table}.jsonl"), quiet, rows
        self._loaded: dict[str, Dataset] = {}

    def run(
        self,
        trial: Trial,
        *,
        closely: bool = False,
        drawn: bool = False,
        options: Any = None,
        **place: Any,
    ) -> Record:
        """The record of a trial: from the file, or by running what of it is missing.

        A method that can't do the task gives a record with its ``reason`` instead of results.
        ``drawn`` runs keep their training curve; watched ``closely``, the rows to measure on are
        measured after every epoch too. ``options`` are those of the network that its row has
        anyway.
        """
        about = place | {"seed": trial.seed, "epochs": trial.epochs} | trial.texts(options)
        title = " ".join(str(about[k]) for k in ("column", "row", "method", "rate") if k in about)
        record = self.store.find(about)
        if record is None:
            checkpoint = self.store.path.parent / "unfinished" / self._folder(about)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)  # the record has the remarks
                warnings.filterwarnings("ignore", message="training was interrupted")
                try:
                    done = self._train(trial, checkpoint, title, closely)
                except CheckpointError:  # which says nothing about the method
                    raise
                except (ValueError, LPOMError) as error:
                    done = {"reason": str(error)}
            if not (closely or drawn):
                done.pop("curve", None)
            record = self.store.add(about | machine() | done)
            shutil.rmtree(checkpoint, ignore_errors=True)
            with suppress(OSError):  # others are not finished yet
                checkpoint.parent.rmdir()
        self.say(f"{title}, seed {trial.seed}: {outcome(record)}")
        return record

    def say(self, sentence: str) -> None:
        if not self.quiet:
            print(sentence, flush=True)

    def load(self, name: str, trial: Trial) -> Dataset:
        """The data of a trial: with pictures for a network of them, whitened, held out."""
        if name not in self._loaded:
            loaded = data.load(name)
            self._loaded[name] = loaded.first(self.rows) if self.rows else loaded
        found = self._loaded[name]
        if trial.network and found.image_shape is not None:
            found = found.pictures()
        found = whitened(found, trial.whiten) if trial.whiten else found
        return found.held_out() if trial.held_out else found

    def _folder(self, about: Record) -> str:
        words = [self.store.path.stem, *(str(about.get(k, "")) for k in _NAMES)]
        return "".join(c if c.isalnum() else "-" for c in "_".join(words))[:200]

    def _train(self, trial: Trial, checkpoint: Path, title: str, closely: bool) -> Record:
        rows = self.load(trial.dataset, trial)
        X, y, X_test, y_test = map(
            torch.from_numpy, (rows.x_train, rows.y_train, rows.x_test, rows.y_test)
        )
        model = make_model(trial, tuple(X.shape[1:]), rows.n_classes)
        method = methods.get(trial.method, **trial.params)
        loss: Any = trial.loss
        if trial.loss_params:
            loss = losses.get(trial.loss, **trial.loss_params)
        more: Record = {}

        def follow(epoch: Epoch) -> None:
            self.say(
                f"  {title} epoch {epoch.epoch}/{trial.epochs}: training {epoch.score:.2%}, loss "
                f"{epoch.loss:.4f}, {epoch.seconds:.1f} s"
            )

        result = fit(
            model,
            **_source(trial, model, method, X, y),
            method=method,
            loss=loss,
            epochs=trial.epochs,
            weight_decay=trial.weight_decay,
            averaging=trial.averaging,
            precision=trial.precision,
            validation_data=(X_test, y_test) if closely else None,
            seed=trial.seed,  # the same batches for every method
            callbacks=follow,
            progress=False,
            checkpoint=Checkpoint(checkpoint, every_minutes=CUT_SECONDS / 60),
        )
        if result.status == "interrupted":
            raise KeyboardInterrupt
        if trial.params.get("penalties"):
            more["remains"] = remains(model, X_test)
        measured, score = evaluate(model, X_test, y_test, loss=loss)
        curve: dict[str, Any] = {"score": [epoch.score for epoch in result.history]}
        if closely:
            curve["validation_score"] = [epoch.validation_score for epoch in result.history]
        return {
            "loss_value": measured,
            "score": score,
            "train_score": evaluate(model, X, y, loss=loss)[1],
            "seconds": result.training_seconds,
            "curve": curve,
            **({"remarks": remarks} if (remarks := list(result.state.remarks.values())) else {}),
            **more,
        }


_NAMES = ("kind", "row", "column", "rate", "seed", "epochs", "settings", "more")


def make_model(trial: Trial, shape: tuple[int, ...], n_outputs: int) -> nn.Module:
    """The network of a trial, its weights drawn from the trial's seed."""
    if trial.network:
        return networks.get(trial.network, shape, n_outputs, trial.seed, **trial.options)
    output = activations.get(trial.output, **trial.output_params)
    sizes = [*shape, *trial.hidden, n_outputs]
    return lpom.mlp(sizes, trial.activation, output, bias=trial.bias, seed=trial.seed)


def _source(trial: Trial, model: nn.Module, method: Any, X: Tensor, y: Tensor) -> dict[str, Any]:
    """What `fit` takes its rows from."""
    size = min(trial.batch_size, len(X))
    if trial.adversarial and trial.augment:
        raise ValueError("a trial is adversarial or augmented, not both.")
    if trial.adversarial:
        direction = lpom.lift(model) if isinstance(method, LPOM) else model
        loader = adversarial_loader(
            direction, X, y, size, size=trial.adversarial, precision=trial.precision
        )
        return {"X": loader}
    if trial.augment:
        ways = dict(trial.augment) if not isinstance(trial.augment, bool) else {}
        return {"X": augmented_loader(X, y, size, **ways)}
    return {"X": X, "y": y, "batch_size": size}


def on_held_out(trial: Trial) -> Trial:
    return replace(trial, held_out=True)


def outcome(record: Record) -> str:
    """What came of a trial, in a few words."""
    if "reason" in record:
        return f"not possible: {record['reason']}"
    return f"{record['score']:.2%} ({record['seconds']:.0f} s)"


@torch.no_grad()
def remains(model: nn.Module, inputs: Tensor) -> dict[str, float]:
    """What penalties have left of a trained network, as shares.

    ``nonzero``: of the numbers in matrices and kernels, those that are not zero. ``weights``,
    ``multiplications``: of the compacted network to the whole one. ``bytes``: of the compacted
    network's model file to the numbers of the whole one. ``time``: for a batch of ``inputs`` by
    the compacted network to the whole one, the two in turn, by the medians.
    """
    matrices = [p for p in model.parameters() if p.ndim > 1]
    nonzero = sum(int(torch.count_nonzero(p)) for p in matrices)
    small, report = compact(model, inputs[:1])
    before, after = report.before, report.after
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors.gz"
        lpom.save(small, path)
        written = path.stat().st_size
    assert before.multiplications is not None and after.multiplications is not None
    return {
        "nonzero": nonzero / sum(p.numel() for p in matrices),
        "weights": after.weights / before.weights,
        "multiplications": after.multiplications / before.multiplications,
        "bytes": written / before.bytes,
        "time": _time_ratio(small.eval(), model.eval(), inputs[:ROWS]),
    }


def _time_ratio(small: nn.Module, whole: nn.Module, inputs: Tensor) -> float:
    seconds: dict[nn.Module, list[float]] = {small: [], whole: []}
    for k in range(ROUNDS + 2):
        for model, taken in seconds.items():
            begun = time.process_time()
            model(inputs)
            if k >= 2:  # the first ones reserve memory
                taken.append(time.process_time() - begun)
    return statistics.median(seconds[small]) / statistics.median(seconds[whole])
