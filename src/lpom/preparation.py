"""Data ready to train on: a file or a data set of a known name, encoded and split."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lpom import datasets
from lpom.exceptions import DataError, unknown_name
from lpom.tables import Classes, Features, Quantity, Target, fit_target, split_rows
from lpom.tables.columns import listed

Part: TypeAlias = tuple[NDArray[Any], NDArray[Any]]  # inputs, targets

TEST_FRACTION = 0.2
VALIDATION_FRACTION = 0.1


@final
@dataclass(frozen=True, eq=False)
class Prepared:
    """Inputs and targets of the rows to train on, to watch (if there are enough) and to test."""

    name: str
    features: Features
    target: Target
    train: Part
    validation: Part | None
    test: Part
    notes: str
    source: dict[str, Any]  # what `prepare` takes, besides the seed, to make it again

    def parts(self) -> dict[str, Part]:
        held = {} if self.validation is None else {"validation": self.validation}
        return {"train": self.train, **held, "test": self.test}

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "target": self.target.name,
            "task": self.target.task,
            "columns": len(self.features.columns),
            "rows": {part: len(X) for part, (X, _) in self.parts().items()},
            "notes": self.notes,
            "source": self.source,
        }


def prepare(
    data: str,
    *,
    target: str | None = None,
    task: str | None = None,
    ignore: tuple[str, ...] = (),
    test_fraction: float | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    seed: int = 0,
) -> Prepared:
    """Read, encode and split ``data``: the name of a data set, or a CSV, Parquet or NPZ file.

    A data set has its own target and test part. A file needs ``target``, and ``test_fraction`` of
    its rows, 20 % by default, are held out for testing. Of the rows to train on 10 % are only
    watched. The seed decides which.
    """
    rng = np.random.default_rng(seed)
    if data in datasets.names():
        given = {"target": target, "task": task, "ignore": ignore, "test fraction": test_fraction}
        for option, value in given.items():
            if value:
                raise ValueError(
                    f"the data set {data!r} brings its own columns, target and test part; the "
                    f"option {option} is for files. Leave it out."
                )
        folder = None if data_dir is None else str(Path(data_dir).resolve())
        return _from_dataset(datasets.load(data, data_dir), folder, rng)
    path = Path(data)
    if not path.suffix and not path.exists():
        raise DataError(
            unknown_name("data set", data, datasets.names())
            + " A file of your own ends in .csv, .tsv, .parquet or .npz."
        )
    return _from_file(path, target, task or "auto", ignore, test_fraction, rng)


def _from_dataset(data: datasets.Dataset, folder: str | None, rng: np.random.Generator) -> Prepared:
    classes = data.y_train if data.classes else None
    kept, watched = split_rows(len(data.x_train), VALIDATION_FRACTION, rng, classes)
    frame = pd.DataFrame(data.x_train, columns=list(data.feature_names))
    test = pd.DataFrame(data.x_test, columns=list(data.feature_names))
    target: Target
    if data.classes:
        target = Classes("target", data.classes)
        y_train, y_test = data.y_train, data.y_test
    else:
        target = Quantity.fit(pd.Series(data.y_train, name="target"), kept)
        y_train, y_test = (target.encode(pd.Series(y)) for y in (data.y_train, data.y_test))
    # pictures with values in [0, 1] are as they should be; other numbers are standardised
    ready = data.image_shape is not None and data.picture_scale == 1
    features = Features.unscaled(data.feature_names) if ready else Features.fit(frame, kept)
    X = features.encode(frame)
    return Prepared(
        data.name,
        features,
        target,
        (X[kept], y_train[kept]),
        (X[watched], y_train[watched]) if len(watched) else None,
        (features.encode(test), y_test),
        data.notes,
        {"data": data.name, "data_dir": folder},
    )


def _from_file(
    path: Path,
    column: str | None,
    task: str,
    ignore: tuple[str, ...],
    test_fraction: float | None,
    rng: np.random.Generator,
) -> Prepared:
    table = datasets.read_table(path, column, ignore=ignore)
    if table.target is None:
        raise DataError(
            f"which column of {path} is to be predicted? Name it with --target; the columns are "
            f"{listed(map(str, table.features.columns))}."
        )
    fraction = TEST_FRACTION if test_fraction is None else test_fraction
    if not 0 < fraction < 1:
        raise ValueError(f"the test fraction must lie between 0 and 1, got {fraction:g}.")
    n = len(table.features)
    target = fit_target(table.target, task)
    y = target.encode(table.target)
    classes = y if target.task == "classification" else None
    rest, tested = split_rows(n, fraction, rng, classes)
    if not len(tested) or len(rest) < 2:
        raise DataError(
            f"{path} has {n} rows: {len(tested)} to test and {len(rest)} to train on, and at least "
            "1 and 2 are needed. Use a larger table, or another test fraction."
        )
    kept, watched = split_rows(
        len(rest), VALIDATION_FRACTION, rng, None if classes is None else classes[rest]
    )
    kept, watched = rest[kept], rest[watched]
    target = fit_target(table.target, target.task, kept)  # a quantity's scale: training rows alone
    y = target.encode(table.target)
    features = Features.fit(table.features, kept, ignore)
    X = features.encode(table.features)
    kind = "stratified" if classes is not None else "random"
    return Prepared(
        path.name,
        features,
        target,
        (X[kept], y[kept]),
        (X[watched], y[watched]) if len(watched) else None,
        (X[tested], y[tested]),
        f"{path.name}; {kind} split, {fraction:.0%} of the rows held out for testing.",
        {
            "data": str(path.resolve()),
            "target": target.name,
            "task": target.task,
            "ignore": list(ignore),
            "test_fraction": fraction,
        },
    )
