"""A trained network together with what turns a table into its inputs and outputs into answers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import final

import pandas as pd
import torch
from torch import nn

from lpom import losses, saving
from lpom.exceptions import ModelFileError
from lpom.graph import chain, trace
from lpom.losses import Loss
from lpom.tables import Features, Target, target_from_json
from lpom.tables.columns import Array
from lpom.training.sources import ROWS


@final
@dataclass(frozen=True, eq=False)
class Predictor:
    """Goes from a table to a table; a model file holds all of it."""

    model: nn.Module
    features: Features
    target: Target
    loss: Loss

    def predict(self, frame: pd.DataFrame, *, probabilities: bool = False) -> pd.DataFrame:
        """A column ``prediction``, and the probability of every class if asked for.

        The target column may be there and is not looked at. A table without names, the array
        ``X`` of an NPZ file, is taken column by column in the order of training.
        """
        if self.target.name not in self.features.names:
            frame = frame.drop(columns=[self.target.name], errors="ignore")
        columns = self.features.columns
        nameless = [f"X{k}" for k in range(len(columns))]
        if list(frame.columns) == nameless and set(columns) != set(nameless):
            frame = frame.set_axis(columns, axis=1)
        return self.answers(self.features.encode(frame), probabilities=probabilities)

    @torch.no_grad()
    def answers(self, inputs: Array, *, probabilities: bool = False) -> pd.DataFrame:
        """The same, for inputs that are encoded already."""
        parts = torch.split(torch.from_numpy(inputs), ROWS)
        outputs = torch.cat([self.model(rows) for rows in parts])
        return self.target.answers(outputs, self.loss, probabilities)

    def save(self, path: str | os.PathLike[str]) -> None:
        metadata = {
            "features": self.features.to_json(),
            "target": self.target.to_json(),
            "loss": {"name": self.loss.name, "parameters": self.loss.params()},
        }
        saving.save(path, self.model, metadata=metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Predictor:
        model, metadata = saving.load(path)
        try:
            features = Features.from_json(metadata["features"])
            target = target_from_json(metadata["target"])
            loss = losses.get(metadata["loss"]["name"], **metadata["loss"]["parameters"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelFileError(
                f"{path} holds a network, but not what `lpom train` keeps beside it, the columns "
                f"and the target of its table ({type(error).__name__}: {error}). Load it with "
                "lpom.saving.load instead."
            ) from error
        layers = chain(trace(model))
        ends = layers[0].map.n_inputs, layers[-1].map.n_outputs
        if ends != (features.n_inputs, target.n_outputs):
            raise ModelFileError(
                f"{path} holds a network with {ends[0]} inputs and {ends[1]} "
                f"outputs for a table that makes {features.n_inputs} and {target.n_outputs}. "
                "Use the original file, or train again."
            )
        return cls(model, features, target, loss)
