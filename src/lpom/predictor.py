"""A fitted estimator together with what makes its inputs of a table and answers of its outputs."""

from __future__ import annotations

import os
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import pandas as pd
from torch import nn

from lpom import saving
from lpom.estimators import MLPClassifier, MLPRegressor
from lpom.exceptions import DataError, ModelFileError
from lpom.pictures import PictureClassifier, Pixels
from lpom.preparation import Reading
from lpom.tables.old import Classes, Features, Target, target_from_json
from lpom.tables.plan import named
from lpom.tables.scores import class_scores, label_scores, number_scores
from lpom.tables.values import Array
from lpom.training.history import History


@final
@dataclass(frozen=True, eq=False)
class Predictor:
    """Goes from a data frame to predictions; a model file holds all of it.

    Attributes
    ----------
    estimator : MLPClassifier, MLPRegressor or, of a network on pictures, PictureClassifier
        The network, as scikit-learn knows it; ``estimator.to_torch()`` is a torch module.
    features : Features or, of pictures, Pixels
        What is done with each column: ``print(predictor.features.plan)``.
    target : Target
        What is predicted.
    reading : Reading
        How the file was read, for the next one of its kind.
    """

    estimator: MLPClassifier | MLPRegressor | PictureClassifier
    features: Features | Pixels
    target: Target
    reading: Reading = field(default_factory=Reading)

    def __repr__(self) -> str:
        return (
            f"<Predictor: {self.target.task} of {self.target.name} by "
            f"{type(self.estimator).__name__}, {self.features.n_inputs} inputs>"
        )

    @property
    def model(self) -> nn.Module:
        return self.estimator.to_torch()

    @property
    def classes_(self) -> Array:
        """Names of the classes, in the order of the columns of :meth:`predict_proba`."""
        if not isinstance(self.target, Classes):
            raise AttributeError("only a model of one column of classes has classes_.")
        return np.array(self.target.classes, dtype=object)

    def predict(self, frame: pd.DataFrame) -> Array:
        """Names of classes, or numbers in the unit of the target; a column for each target.

        Columns that training did not use are not looked at, the target's too. Unknown categories
        and missing values are taken as in training, with a warning. An array is taken column by
        column in the order of training.
        """
        answers: Array = self.answers(self.encode(frame)).to_numpy()
        return answers[:, 0] if answers.shape[1] == 1 else answers

    def predict_proba(self, frame: pd.DataFrame) -> Array:
        """The probability of every class, (n, classes); of every label by itself if several."""
        return np.asarray(self.target.shares(self._shares(self.encode(frame))))

    def score(self, frame: pd.DataFrame, y: Any = None) -> dict[str, float]:
        """Accuracy and the like, or errors in the target's unit, of rows that have the target.

        Or that are given it as ``y``, in the words of the table.
        """
        if y is not None:
            names = list(self.target.names)
            frame = pd.DataFrame(frame).drop(columns=names, errors="ignore")
            values = np.asarray(y, dtype=object).reshape(len(frame), len(names))
            given = pd.DataFrame(values, columns=names, index=frame.index)
            frame = pd.concat([frame, given.infer_objects()], axis=1)
        if not set(self.target.names) <= set(frame.columns):
            raise DataError(f"the table has no column {self.target.name!r} to compare with.")
        known = self.target.known(frame)
        if not known.any():
            raise DataError(f"no row has a known value of {self.target.name!r}.")
        frame = frame[known]
        return self.scores(self.encode(frame), self.target.encode(frame))

    def table(
        self, file: str, *, encoding: str | None = None, separator: str | None = None
    ) -> pd.DataFrame:
        """The rows of a file, read as that of the training was."""
        if isinstance(self.features, Pixels) and file.endswith(".npz"):
            assert isinstance(self.target, Classes)
            return self.features.table(Path(file), self.target)
        reading = replace(
            self.reading,
            encoding=encoding or self.reading.encoding,
            separator=separator or self.reading.separator,
        )
        return named(reading.table(file).frame)

    def encode(self, frame: pd.DataFrame) -> Array:
        """The inputs of the network."""
        if not isinstance(frame, pd.DataFrame):
            frame = pd.DataFrame(np.asarray(frame)).add_prefix("X")
        columns = self.features.columns
        nameless = [f"X{k}" for k in range(len(columns))]
        if list(frame.columns) == nameless and set(columns) != set(nameless):
            frame = frame.set_axis(columns, axis=1)
        return self.features.encode(frame, warn=True)

    def answers(self, inputs: Array, *, probabilities: bool = False) -> pd.DataFrame:
        """Predictions for inputs that are encoded already, with probabilities if asked for."""
        answers = self.target.answers(self.estimator.predict(inputs))
        if not probabilities:
            return answers
        return pd.concat([answers, self.target.shares(self._shares(inputs))], axis=1)

    def scores(self, inputs: Array, truth: Array) -> dict[str, float]:
        """The same as :meth:`score`, for inputs and targets that are encoded already."""
        said = self.estimator.predict(inputs)
        if self.target.task == "regression":
            return number_scores(truth, said, self.target.names)
        if truth.ndim == 2:
            return label_scores(truth, said)
        return class_scores(truth, said, self._shares(inputs))

    def _shares(self, inputs: Array) -> Array:
        """A column for each class, also for those that no row to train on had."""
        if isinstance(self.estimator, MLPRegressor):
            return np.asarray(self.target.shares(np.empty(0)))  # which says that there are none
        found: Array = self.estimator.predict_proba(inputs).astype(np.float64)
        if not isinstance(self.target, Classes):
            return found
        shares = np.zeros((len(found), len(self.target.classes)))
        shares[:, self.estimator.classes_] = found
        return shares

    def _to_saved(self) -> dict[str, Any]:
        """All that predictions need; the history stands beside it in the folder of a run."""
        estimator = copy(self.estimator)
        history = History(estimator.result_.task.metric)
        estimator.result_ = replace(
            estimator.result_, history=history, seconds=0.0, training_seconds=0.0
        )
        if not isinstance(estimator, PictureClassifier):
            estimator.history_ = history
        return {
            "estimator": estimator,
            "features": self.features.to_json(),
            "target": self.target.to_json(),
            "reading": asdict(self.reading),
        }

    @classmethod
    def _from_saved(cls, saved: dict[str, Any]) -> Predictor:
        estimator = saved["estimator"]
        pictures = isinstance(estimator, PictureClassifier)
        features = (Pixels if pictures else Features).from_json(saved["features"])
        if estimator.n_features_in_ != features.n_inputs:
            raise ValueError(
                f"a network with {estimator.n_features_in_} inputs for a table that makes "
                f"{features.n_inputs}"
            )
        target = target_from_json(saved["target"])
        return cls(estimator, features, target, Reading(**saved["reading"]))

    def save(self, path: str | os.PathLike[str]) -> None:
        saving.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], history: History | None = None) -> Predictor:
        """What :meth:`save` wrote; ``history`` if that of the training is known."""
        made = saving.load(path)
        if not isinstance(made, cls):
            raise ModelFileError(
                f"{path} holds no model of a table, but {type(made).__name__}. Load it with "
                "lpom.load instead."
            )
        if history is not None:
            estimator = made.estimator
            estimator.result_ = replace(estimator.result_, history=history)
            if not isinstance(estimator, PictureClassifier):
                estimator.history_ = history
        return made
