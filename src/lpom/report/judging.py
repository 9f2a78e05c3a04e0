"""What a run makes of the rows it was tested on: hits and mistakes, class by class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from lpom import datasets
from lpom.datasets import Dataset
from lpom.datasets.base import Array
from lpom.exceptions import DataError
from lpom.files import checksum
from lpom.preparation import prepare
from lpom.report.pictures import png
from lpom.runs import Run
from lpom.tables import Classes

MISTAKES = 24  # shown of a run
_SAME = 0.005  # two scores of the same rows; another device may decide a few ties otherwise

#: A data set by name, from the folder that the run had it from unless another is named.
Load: TypeAlias = Callable[[str, str | None], Dataset]


@dataclass(frozen=True, eq=False)
class HeldBack:
    """Inputs as the network takes them, true classes, and the data set they are from, if named."""

    inputs: Array
    truth: Array
    data: Dataset | None = None

    def picture(self, row: int) -> str | None:
        """What a row looks like, or None if it is no image."""
        if self.data is None or self.data.image_shape is None:
            return None
        return png(self.data.picture(self.data.x_test[row]))


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
        return HeldBack(predictor.features.encode(frame), data.y_test, data)
    # nobody learns from a page what is in a file that was not trained on
    path = Path(source["data"])
    if not path.is_file() or checksum(path) != run.config["data"].get("sha256"):
        raise DataError(f"{path} is gone or was changed since the run.")
    # the same seed makes the same split
    ready = prepare(**{**source, "ignore": tuple(source["ignore"])}, seed=run.config["seed"])
    if (ready.features, ready.target) != (predictor.features, predictor.target):
        raise DataError(
            f"{source['data']} was changed since the run, so its test split cannot be reproduced."
        )
    return HeldBack(*ready.test)


def judge(run: Run, rows: HeldBack) -> dict[str, Any]:
    """Counts by true and predicted class, and the most confident mistakes, worst first.

    Raises
    ------
    DataError
        If the network is not as good on these rows as it was on those of the run.
    """
    target = run.predictor.target
    assert isinstance(target, Classes)
    answers = run.predictor.answers(rows.inputs, probabilities=True)
    said = target.encode(answers[["prediction"]].set_axis([target.column], axis=1))
    answers = answers.drop(columns="prediction")
    shares = answers.to_numpy()[np.arange(len(said)), said]
    counts = np.zeros((len(target.classes), len(target.classes)), dtype=int)
    np.add.at(counts, (rows.truth, said), 1)
    wrong = np.flatnonzero(said != rows.truth)
    score, then = 1 - len(wrong) / len(said), run.config["results"]["test"]["score"]
    if abs(score - then) > _SAME:
        raise DataError(
            f"these are other rows: {score:.2%} of them are right, and {then:.2%} were in the run."
        )
    worst = wrong[np.argsort(-shares[wrong], kind="stable")[:MISTAKES]]
    return {
        "classes": list(target.classes),
        "counts": counts.tolist(),
        "n": len(said),
        "n_wrong": len(wrong),
        "mistakes": [
            {
                "row": int(k),
                "truth": int(rows.truth[k]),
                "said": int(said[k]),
                "share": float(shares[k]),
                "picture": rows.picture(k),
            }
            for k in worst
        ],
    }
