"""Pictures kept as pictures: what makes a network's inputs of them, and a network that trains."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

import lpom
from lpom import datasets, networks
from lpom.datasets.base import Array, DataDir, pixel_names
from lpom.datasets.files import read_npz
from lpom.estimators.splits import split_rows
from lpom.exceptions import DataError, DivergenceError
from lpom.methods import Method, State
from lpom.parallel import Parallel
from lpom.preparation import Prepared
from lpom.tables import Classes
from lpom.training import Callback, Checkpoint, EarlyStopping, History, Result

_WATCHED = 0.1  # of the training rows
_ROWS = 500  # of a forward pass


@final
@dataclass(frozen=True)
class Pixels:
    """Flat rows of pixels to (n, channels, rows, columns); the counterpart of ``Features``.

    ``image_shape`` is what a flat row reshapes to, (rows, columns) or (rows, columns, channels),
    and each channel is divided by its ``deviation``, as `lpom.datasets.Dataset.pictures` does it.
    """

    image_shape: tuple[int, ...]
    deviations: tuple[float, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the pixels in a flat row."""
        return pixel_names(self.image_shape)

    @property
    def names(self) -> list[str]:
        """Names of the pixels in the order of the network's inputs."""
        grid = np.array(self.columns, dtype=object).reshape(*self.image_shape[:2], -1)
        return list(np.moveaxis(grid, 2, 0).reshape(-1))

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (len(self.deviations), *self.image_shape[:2])

    @property
    def n_inputs(self) -> int:
        return math.prod(self.image_shape)

    def encode(self, frame: pd.DataFrame, *, warn: bool = False) -> Array:
        """The inputs, (n, channels, rows, columns) float32."""
        missing = [name for name in self.columns if name not in frame.columns]
        if missing:
            raise DataError(
                f"the table lacks {missing[0]!r} and {len(missing) - 1} more of the "
                f"{self.n_inputs} pixels of a picture. Give a .npz file with an array X of flat "
                f"pictures, (n, {self.n_inputs}), or of shape (n, {_by(self.input_shape, ', ')})."
            )
        try:
            rows = frame[list(self.columns)].to_numpy(np.float32)
        except (ValueError, TypeError) as error:
            raise DataError(f"pixels must be numbers ({error}).") from error
        if not np.isfinite(rows).all():
            raise DataError("a pixel is missing or not finite; fill in such values first.")
        images = rows.reshape(len(rows), *self.image_shape[:2], -1)
        inputs: Array = np.moveaxis(images, 3, 1) / self._per_channel()
        return inputs

    def table(self, path: Path, target: Classes) -> pd.DataFrame:
        """Flat rows from an NPZ file: X flat or as pictures, and y, numbers of classes, if there.

        Flat rows are as `lpom.datasets.load` has them, pictures as its ``pictures()``.
        """
        arrays = read_npz(path)
        X = arrays.get("X")
        if X is None or X.shape[1:] not in ((self.n_inputs,), self.input_shape):
            got = f"one of shape {X.shape}" if X is not None else f"{', '.join(arrays) or 'none'}"
            raise DataError(
                f"{path} should hold an array X of pictures, (n, {self.n_inputs}) or "
                f"(n, {_by(self.input_shape, ', ')}), got {got}."
            )
        if X.ndim == 4:
            X = np.moveaxis(X * self._per_channel(), 1, 3).reshape(len(X), -1)
        frame = pd.DataFrame(X, columns=list(self.columns))
        y = arrays.get("y")
        if y is not None and y.shape == (len(X),):
            known = np.array([*target.classes, None], dtype=object)
            if np.issubdtype(y.dtype, np.integer):
                y = known[np.where((y >= 0) & (y < len(target.classes)), y, -1)]
            frame[target.column] = y
        return frame

    def to_json(self) -> dict[str, Any]:
        return {"image_shape": list(self.image_shape), "deviations": list(self.deviations)}

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> Pixels:
        shape = tuple(int(side) for side in state["image_shape"])
        deviations = tuple(float(value) for value in state["deviations"])
        if len(shape) not in (2, 3) or math.prod(shape) != math.prod(shape[:2]) * len(deviations):
            raise ValueError(f"{shape} is no shape of pictures with {len(deviations)} channels")
        return cls(shape, deviations)

    def _per_channel(self) -> Array:
        return np.array(self.deviations, dtype=np.float32)[:, None, None]


def prepare_pictures(data: str, data_dir: DataDir = None) -> Prepared:
    """A data set of pictures by name, ready to train a network on."""
    if data not in datasets.names():
        raise ValueError(
            f"--network trains on pictures of a data set with a name; {data!r} is none. Known: "
            f"{', '.join(datasets.names())}. Leave --network out for a table."
        )
    flat = datasets.load(data, data_dir)
    made = flat.pictures()
    n_channels = made.x_train.shape[1]
    deviations = np.broadcast_to(made.picture_scale / flat.picture_scale, n_channels)
    assert flat.image_shape is not None  # else there are no pictures
    return Prepared(
        made.name,
        Pixels(flat.image_shape, tuple(map(float, deviations))),
        Classes("target", made.classes),
        (made.x_train, made.y_train),
        (made.x_test, made.y_test),
        made.notes,
        {"data": data, "data_dir": None if data_dir is None else str(Path(data_dir).resolve())},
    )


@final
@dataclass(eq=False)
class PictureClassifier:
    """A network by name that trains on pictures and tells classes, as ``MLPClassifier`` does.

    With early stopping a tenth of the pictures is watched, and the weights with the lowest loss on
    it are kept. ``augment``: flip and crop at random whatever is trained on.
    """

    network: str
    n_classes: int
    options: Mapping[str, Any] = field(default_factory=dict)
    method: str | Method[Any] = "lpom"
    loss: str = "auto"
    augment: bool = False
    batch_size: int | str = "auto"
    max_iter: int = 10
    early_stopping: bool = True
    n_iter_no_change: int = 10
    random_state: int = 0
    device: str | torch.device | None = None
    precision: str | None = None
    compile: bool = False
    checkpoint: Checkpoint | None = None
    alpha: None = None  # no penalty is added to the loss

    result_: Result = field(init=False, repr=False)
    t_: int = field(init=False, default=0)
    n_features_in_: int = field(init=False)
    _model: nn.Module = field(init=False, repr=False)

    @property
    def classes_(self) -> Array:
        return np.arange(self.n_classes)

    @property
    def n_outputs(self) -> int:
        return self.n_classes if self.n_classes > 2 else 1

    def set_params(self, **params: Any) -> PictureClassifier:
        for name, value in params.items():
            setattr(self, name, value)
        return self

    def fit(
        self,
        X: Array,
        y: Array,
        *,
        callbacks: Iterable[Callback] = (),
        progress: bool | None = False,
        parallel: Parallel | None = None,
    ) -> PictureClassifier:
        """Train on pictures (n, channels, rows, columns) and numbers of classes."""
        shape, seed = X.shape[1:], self.random_state
        model = networks.get(self.network, shape, self.n_outputs, seed, **self.options)
        watched = None
        if self.early_stopping:
            kept, held_out = split_rows(len(X), _WATCHED, np.random.default_rng(seed), y)
            watched = X[held_out], y[held_out]
            X, y = X[kept], y[kept]
        rows = None if isinstance(self.batch_size, str) else min(self.batch_size, len(X))
        source: Any = {"X": X, "y": y, "batch_size": rows}
        if self.augment:
            if parallel is not None:
                raise ValueError(
                    "pictures that are flipped and cropped at random are not shared among ranks; "
                    "add --no-augment, or train on one rank."
                )
            source = {"X": datasets.augmented_loader(X, y, rows or len(X), seed=seed)}
        diverged: DivergenceError | None = None
        try:
            self.result_ = lpom.fit(
                model,
                **source,
                validation_data=watched,
                method=self.method,
                loss=self.loss,
                epochs=self.max_iter,
                seed=seed,
                device=self.device,
                precision=self.precision,
                compile=self.compile,
                callbacks=callbacks,
                early_stopping=EarlyStopping(self.n_iter_no_change, watch="loss")
                if self.early_stopping
                else False,
                progress=progress,
                checkpoint=self.checkpoint,
                parallel=parallel,
            )
        except DivergenceError as error:
            if error.result is None:
                raise
            self.result_, error.estimator, diverged = error.result, self, error
        self._model, self.n_features_in_ = model, math.prod(shape)
        self._shape = tuple(shape)
        self.t_ = len(self.result_.history) * len(X)
        if diverged is not None:
            raise diverged
        return self

    def to_torch(self) -> nn.Module:
        """The network: a copy, yours to change."""
        return deepcopy(self._model)

    def evaluate(self, X: Array, y: Array) -> tuple[float, float]:
        """Mean loss, and accuracy."""
        return lpom.evaluate(self._model, X, y, loss=self.result_.task.loss)

    def predict(self, X: Array) -> Array:
        """The likeliest class of each picture, by its number."""
        return self.result_.task.decide(self._outputs(X)).numpy()

    def predict_proba(self, X: Array) -> Array:
        """Probabilities of the classes; for losses other than the entropies not calibrated."""
        outputs = self._outputs(X)
        shares: Array = self.result_.task.loss.probabilities(outputs).numpy()
        if self.n_outputs == 1:
            return np.hstack([1 - shares, shares])
        nothing = shares.sum(1) == 0  # every output squeezed to zero: the largest takes it all
        shares[nothing, outputs.numpy()[nothing].argmax(1)] = 1
        shares /= shares.sum(1, keepdims=True)
        return shares

    def _to_saved(self) -> dict[str, Any]:
        """The name of the network and its weights, and whatever else predictions need."""
        return {
            "network": Path(self.network).name,
            "n_classes": self.n_classes,
            "options": dict(self.options),
            "shape": self._shape,
            "weights": self._model.state_dict() if self.network in networks.names() else None,
            "model": None if self.network in networks.names() else self._model,
            "task": self.result_.task,
        }

    @classmethod
    def _from_saved(cls, saved: dict[str, Any]) -> PictureClassifier:
        task, shape = saved["task"], saved["shape"]
        made = cls(saved["network"], saved["n_classes"], saved["options"], loss=task.loss.name)
        made._model = saved["model"]
        if made._model is None:
            made._model = networks.get(made.network, shape, made.n_outputs, 0, **made.options)
            made._model.load_state_dict(saved["weights"])
        made._model.eval()
        made.result_ = Result(History(task.metric), "loaded", 0.0, 0.0, task, State())
        made._shape, made.n_features_in_ = shape, math.prod(shape)
        return made

    @torch.inference_mode()
    def _outputs(self, X: Array) -> Tensor:
        like = next(self._model.parameters())
        self._model.eval()
        inputs = torch.from_numpy(np.ascontiguousarray(X))
        parts = (inputs[start : start + _ROWS] for start in range(0, len(inputs), _ROWS))
        return torch.cat([self._model(part.to(like)).cpu() for part in parts])


def _by(shape: Iterable[int], sign: str) -> str:
    return sign.join(map(str, shape))
