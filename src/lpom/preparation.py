"""Data ready to train on: a file or a data set of a known name, encoded and split."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lpom import activations, datasets
from lpom.datasets.files import STDIN
from lpom.estimators.splits import split_rows
from lpom.exceptions import DataError, unknown_name
from lpom.files import checksum
from lpom.tables.old import Classes, Features, Locale, Quantity, Target, fit_target
from lpom.tables.plan import ColumnPlan, named
from lpom.tables.values import listed
from lpom.training.randomness import as_seed

if TYPE_CHECKING:
    from lpom.pictures import Pixels

Part: TypeAlias = tuple[NDArray[Any], NDArray[Any]]  # inputs, targets

TEST_FRACTION = 0.2


@final
@dataclass(frozen=True)
class Reading:
    """How a file is read, where it does not tell by itself."""

    encoding: str | None = None
    separator: str | None = None
    decimal: str | None = None
    thousands: str | None = None
    date_order: str | None = None

    def __post_init__(self) -> None:
        for name in ("decimal", "thousands"):
            if getattr(self, name) not in (None, ".", ",", "'", " "):
                raise ValueError(f"--{name} takes '.' or ',', got {getattr(self, name)!r}.")
        if self.decimal is not None and self.decimal == self.thousands:
            raise ValueError(f"--decimal and --thousands are both {self.decimal!r}.")
        if self.date_order not in (None, "dmy", "mdy"):
            raise ValueError(f"--date-order takes dmy or mdy, got {self.date_order!r}.")

    @property
    def locale(self) -> Locale:
        return Locale(self.decimal, self.thousands, self.date_order)

    def table(self, path: str | os.PathLike[str]) -> datasets.Table:
        return datasets.read_table(path, encoding=self.encoding, separator=self.separator)


@final
@dataclass(frozen=True, eq=False)
class Prepared:
    """Inputs and targets of the rows to train on (estimators hold some out) and to test."""

    name: str
    features: Features | Pixels
    target: Target
    train: Part
    test: Part
    notes: str
    source: dict[str, Any] | None  # what `prepare` takes, besides the seed, to make it again
    reading: Reading = field(default_factory=Reading)
    tested: pd.DataFrame | None = None  # the test rows of a file, as they stand in it
    checksum: str | None = None  # of the file, where it is one

    def n_outputs(self, output_activation: str = "identity") -> int:
        """Numbers that a network must give: one for a quantity, a label or two classes.

        Two for these where outputs are compared with each other.
        """
        if isinstance(self.target, Classes):
            compares = not activations.get(output_activation).elementwise
            return len(self.target.classes) if len(self.target.classes) > 2 or compares else 1
        return len(self.target.names)

    def parts(self) -> dict[str, Part]:
        return {"train": self.train, "test": self.test}

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "target": self.target.name,
            "task": self.target.task,
            "columns": len(self.features.columns),
            "rows": {part: len(X) for part, (X, _) in self.parts().items()},
            "notes": self.notes,
            "source": self.source,
            "sha256": self.checksum,
        }


def prepare(
    data: str,
    *,
    target: str | Sequence[str] | None = None,
    task: str | None = None,
    ignore: Sequence[str] = (),
    kinds: Mapping[str, str] | None = None,
    reading: Reading | Mapping[str, str | None] | None = None,
    test_fraction: float | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    seed: int = 0,
) -> Prepared:
    """Read, split and encode ``data``: the name of a data set, or a file.

    A data set has its own target and test part. A file needs ``target``, one column or several,
    and ``test_fraction`` of its rows, 20 % by default, are held out for testing. The seed decides
    which. What is done with each column is decided from the rows to train on.
    """
    rng = np.random.default_rng(as_seed(seed))
    if data in datasets.names():
        given = {
            "target": target,
            "task": task,
            "ignore": ignore,
            "kind of column": kinds,
            "test fraction": test_fraction,
        }
        for option, value in given.items():
            if value:
                raise ValueError(
                    f"the data set {data!r} brings its own columns, target and test part; the "
                    f"option {option} is for files. Leave it out."
                )
        folder = None if data_dir is None else str(Path(data_dir).resolve())
        return _from_dataset(datasets.load(data, data_dir), folder)
    path = Path(data)
    if not path.suffix and not path.exists() and data != STDIN:
        raise DataError(
            unknown_name("data set", data, datasets.names())
            + " A file of your own ends in .csv, .tsv, .parquet, .xlsx or .npz."
        )
    if not isinstance(reading, Reading):
        reading = Reading(**(reading or {}))
    targets = (target,) if isinstance(target, str) else tuple(target or ())
    plan = {"ignore": tuple(ignore), "kinds": dict(kinds or {})}
    return _from_file(data, reading, targets, task or "auto", plan, test_fraction, rng)


def _from_dataset(data: datasets.Dataset, folder: str | None) -> Prepared:
    frame = pd.DataFrame(data.x_train, columns=list(data.feature_names))
    test = pd.DataFrame(data.x_test, columns=list(data.feature_names))
    target = Classes("target", data.classes) if data.classes else Quantity("target")
    # pictures with values in [0, 1] are as they should be; other numbers are standardised
    ready = data.image_shape is not None and data.picture_scale == 1
    features = Features.fit(frame, scale=not ready)
    return Prepared(
        data.name,
        features,
        target,
        (features.encode(frame), data.y_train),
        (features.encode(test), data.y_test),
        data.notes,
        {"data": data.name, "data_dir": folder},
    )


def _from_file(
    data: str,
    reading: Reading,
    targets: tuple[str, ...],
    task: str,
    plan: dict[str, Any],
    test_fraction: float | None,
    rng: np.random.Generator,
) -> Prepared:
    fraction = TEST_FRACTION if test_fraction is None else test_fraction
    if not 0 < fraction < 1:
        raise ValueError(f"the test fraction must lie between 0 and 1, got {fraction:g}.")
    table = reading.table(data)
    frame, notes = named(table.frame), list(table.notes)
    columns = list(frame.columns)
    if not targets and data.endswith(".npz") and "y" in columns and len(columns) > 1:
        targets = ("y",)
    try:
        _check_targets(data, targets, columns)
        target = fit_target(frame, targets, task, reading.locale)
    except DataError as error:  # all that is wrong with a file comes at once
        inputs = frame.drop(columns=list(targets), errors="ignore")
        raise DataError(f"{error} {_problems(inputs, reading.locale, plan)}".strip()) from error
    labelled = target.known(frame)
    if not labelled.all():
        left_out = len(frame) - int(labelled.sum())
        notes.append(f"{left_out:,} row{'' if left_out == 1 else 's'} without a target left out")
        frame = frame[labelled]
    n, y = len(frame), target.encode(frame)
    stratified = isinstance(target, Classes)
    kept, tested = split_rows(n, fraction, rng, y if stratified else None)
    if not len(tested) or len(kept) < 2:
        raise DataError(
            f"{data} has {n} rows: {len(tested)} to test and {len(kept)} to train on, and at least "
            "1 and 2 are needed. Use a larger table, or another test fraction."
        )
    inputs = frame.drop(columns=list(targets))
    features = Features.fit(inputs.iloc[kept], locale=reading.locale, **plan)
    kind = "stratified" if stratified else "random"
    name = Path(data).name if data != STDIN else "standard input"
    notes.append(f"{kind} split, {fraction:.0%} of the rows held out for testing")
    return Prepared(
        name,
        features,
        target,
        (features.encode(inputs.iloc[kept]), y[kept]),
        (features.encode(inputs.iloc[tested]), y[tested]),
        f"{name}; {'; '.join(notes)}.",
        None
        if data == STDIN
        else {
            "data": str(Path(data).resolve()),
            "target": list(targets),
            "task": task,
            "ignore": list(plan["ignore"]),
            "kinds": plan["kinds"],
            "reading": asdict(reading),
            "test_fraction": fraction,
        },
        reading,
        frame.iloc[tested],
        None if data == STDIN else checksum(Path(data)),
    )


def _problems(inputs: pd.DataFrame, locale: Locale, plan: dict[str, Any]) -> str:
    """What can't be told of the columns to learn from, or nothing."""
    try:
        if len(inputs.columns):
            ColumnPlan.decide(inputs, locale=locale, **plan)
    except DataError as error:
        return str(error)
    return ""


def _check_targets(data: str, targets: tuple[str, ...], columns: list[str]) -> None:
    if not targets:
        raise DataError(
            f"which column of {data} is to be predicted? Name it with --target; its columns are "
            f"{listed(columns)}."
        )
    unknown = [name for name in targets if name not in columns]
    if unknown:
        raise DataError(
            " ".join(unknown_name("column to predict", name, columns) for name in unknown)
        )
    if len(set(targets)) < len(targets):
        raise DataError(f"the targets {listed(targets)} name a column more than once.")
    if len(columns) == len(targets):
        raise DataError(
            f"{data} should have columns besides the target {listed(targets)} to predict it from, "
            "got none."
        )
