"""The rows that a run was tested on, loaded again, and what of them to show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from lpom import datasets
from lpom.cli.report.pictures import png
from lpom.cli.run import Run
from lpom.datasets import Dataset
from lpom.datasets.base import Array
from lpom.exceptions import DataError
from lpom.files import checksum
from lpom.preparation import prepare

MISTAKES = 24  # shown of a run
COLUMNS = 6  # shown of a row
_SAME = 0.005  # two scores of the same rows; another device may decide a few ties otherwise
_LONGEST = 40  # characters of a cell

#: A data set by name, from the folder that the run had it from unless another is named.
Load: TypeAlias = Callable[[str, str | None], Dataset]


@dataclass(frozen=True, eq=False)
class HeldBack:
    """Inputs as the network takes them, targets, and the rows as people know them.

    ``frame`` has the columns of the rows, where they are no pictures; its index is the place of a
    row in its file. ``data`` is the data set they are from, if it has a name.
    """

    inputs: Array
    truth: Array
    frame: pd.DataFrame | None = None
    data: Dataset | None = None

    def picture(self, row: int) -> str | None:
        """What a row looks like, or None if it is no image."""
        if self.data is None or self.data.image_shape is None:
            return None
        return png(self.data.picture(self.data.x_test[row]))

    def cells(self, row: int, columns: Sequence[str]) -> list[str]:
        """What a row holds in these columns."""
        if self.frame is None:
            return []
        return [_cell(self.frame[name].iloc[row]) for name in columns]

    def number(self, row: int) -> int:
        """The place of a row in its file, or among the test rows, counted from 1."""
        return 1 + int(row if self.frame is None else self.frame.index[row])


def held_back(run: Run, load: Load) -> HeldBack:
    """The rows that were held back in training, loaded again.

    Raises
    ------
    DataError
        If the run does not say what they were, or they are not what they were.
    """
    predictor = run.predictor
    source = run.config["data"].get("source")
    if source is None:
        raise DataError("the run does not say where its data came from.")
    if source["data"] in datasets.names():
        data = load(source["data"], source.get("data_dir"))
        frame = pd.DataFrame(data.x_test, columns=list(data.feature_names))
        shown = frame if data.image_shape is None else None
        return HeldBack(predictor.features.encode(frame), data.y_test, shown, data)
    # nobody learns from a page what is in a file that was not trained on
    path = Path(source["data"])
    if not path.is_file() or checksum(path) != run.config["data"].get("sha256"):
        raise DataError(f"{path.name} is gone or was changed since the run.")
    # the same seed makes the same split
    ready = prepare(**{**source, "ignore": tuple(source["ignore"])}, seed=run.config["seed"])
    if (ready.features, ready.target) != (predictor.features, predictor.target):
        raise DataError(
            f"{source['data']} was changed since the run, so its test split cannot be reproduced."
        )
    return HeldBack(*ready.test, ready.tested)


def check_score(run: Run, score: float) -> None:
    """Raise if the network is not as good on these rows as it was on those of the run."""
    test = run.config["results"]["test"]
    then = test.get("R²", test["score"])
    if abs(score - then) > _SAME:
        raise DataError(
            f"these are other rows: {run.history.metric} is {score:.4f} on them, and was "
            f"{then:.4f} in the run."
        )


def shown_columns(rows: HeldBack, most_important: Sequence[str]) -> list[str]:
    """The columns that tell most about a row: those that matter, the first of them if unknown."""
    if rows.frame is None:
        return []
    known = [name for name in most_important if name in rows.frame.columns]
    return (known or list(rows.frame.columns))[:COLUMNS]


def _cell(value: Any) -> str:
    if pd.isna(value):
        return "–"
    text = f"{value:.4g}" if isinstance(value, float | np.floating) else str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
