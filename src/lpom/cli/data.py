"""What a run trains on: a file or a bundled table, split into rows to train on and to test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, final

import numpy as np

from lpom.checks import check_choice, check_number
from lpom.estimators.data import split_rows
from lpom.exceptions import DataError, unknown_name
from lpom.files import checksum
from lpom.tables import TableEncoder, Target
from lpom.tables.reading import STDIN, read_table
from lpom.tables.values import Array, listed

BUNDLED = ("digits", "iris", "wine", "breast-cancer", "diabetes")  # by scikit-learn
TEST_FRACTION = 0.2


@final
@dataclass(frozen=True)
class Source:
    """Which table, and what was said of it; JSON holds it."""

    data: str
    target: tuple[str, ...] = ()
    task: str | None = None
    ignore: tuple[str, ...] = ()
    kinds: Mapping[str, str] = field(default_factory=dict)
    encoding: str | None = None
    separator: str | None = None
    decimal: str | None = None
    thousands: str | None = None
    date_order: str | None = None
    test_fraction: float | None = None

    def __post_init__(self) -> None:
        for name in ("decimal", "thousands"):
            if getattr(self, name) not in (None, ".", ",", "'", " "):
                raise ValueError(f"--{name} takes '.' or ',', got {getattr(self, name)!r}.")
        if self.decimal is not None and self.decimal == self.thousands:
            raise ValueError(f"--decimal and --thousands are both {self.decimal!r}.")
        if self.date_order not in (None, "dmy", "mdy"):
            raise ValueError(f"--date-order takes dmy or mdy, got {self.date_order!r}.")

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Source:
        """What JSON made of one."""
        lists = {name: tuple(plain[name]) for name in ("target", "ignore")}
        return cls(**{**plain, **lists})

    def encoder(self) -> TableEncoder:
        if self.data in BUNDLED:
            return TableEncoder(scale=self.data != "digits")  # whose pixels are all in one unit
        return TableEncoder(
            ignore=self.ignore,
            kinds=dict(self.kinds),
            decimal=self.decimal,
            thousands=self.thousands,
            date_order=self.date_order,
        )


@final
@dataclass(frozen=True, eq=False)
class Data:
    """Rows to train on and rows to test, as they stand in the table, and their targets.

    Attributes
    ----------
    tested : places of the test rows in the table, counted from 1
    sha256 : checksum of the file, where it is one
    """

    source: Source
    name: str
    target: Target
    encoder: TableEncoder
    train: tuple[Any, Array]
    test: tuple[Any, Array]
    tested: Array
    notes: str
    sha256: str | None = None

    def parts(self) -> dict[str, tuple[Any, Array]]:
        return {"train": self.train, "test": self.test}

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "target": self.target.name,
            "task": self.target.task,
            "columns": len(self.encoder.columns_),
            "rows": {part: len(y) for part, (_, y) in self.parts().items()},
            "notes": self.notes,
            "source": asdict(self.source),
            "sha256": self.sha256,
        }


def read(source: Source, seed: int = 0) -> Data:
    """Read a table, tell what its columns are, and split its rows."""
    check_number("--seed", seed, strict=False, whole=True)
    if source.data in BUNDLED:
        return _bundled(source)
    path = Path(source.data)
    if source.data != STDIN and not path.suffix and not path.exists():
        raise DataError(
            unknown_name("data set", source.data, BUNDLED)
            + " A file of your own ends in .csv, .tsv, .parquet, .xlsx or .npz."
        )
    check_choice("task", source.task or "auto", ("auto", "classification", "regression"))
    fraction = TEST_FRACTION if source.test_fraction is None else source.test_fraction
    if not 0 < fraction < 1:
        raise ValueError(f"--test-fraction must lie between 0 and 1, got {fraction:g}.")
    table = read_table(source.data, encoding=source.encoding, separator=source.separator)
    frame, notes = table.frame, list(table.notes)
    frame = frame.set_axis(frame.columns.astype(str), axis=1)
    names = source.target
    if not names and source.data.endswith(".npz") and "y" in frame and len(frame.columns) > 1:
        names = ("y",)
    inputs = frame.drop(columns=list(names), errors="ignore")
    said = {"decimal": source.decimal, "thousands": source.thousands}
    try:
        _check_targets(source.data, names, list(frame.columns))
        target = Target.fit(frame, names, source.task or "auto", **said)
    except DataError as error:  # all that is wrong with a file comes at once
        raise DataError(f"{error} {_problems(source, inputs)}".strip()) from error
    y, known = target.read(frame)
    if not known.all():
        left_out = len(frame) - int(known.sum())
        notes.append(f"{left_out:,} row{'' if left_out == 1 else 's'} without a target left out")
    places = np.flatnonzero(known)
    is_classes = target.task == "classification" and y.ndim == 1
    strata = np.unique(y, return_inverse=True)[1] if is_classes else None
    kept, tested = split_rows(len(y), fraction, np.random.default_rng(seed), strata)
    if not len(tested) or len(kept) < 2:
        raise DataError(
            f"{source.data} has {len(y)} rows: {len(tested)} to test and {len(kept)} to train on, "
            "and at least 1 and 2 are needed. Use a larger table, or another test fraction."
        )
    if is_classes and not np.isin(y[tested], y[kept]).any():
        raise DataError(
            f"no row to test has a class of {target.name!r} that is among the {len(kept)} rows to "
            f"train on: there are {len(target.classes[0])} classes in {len(y)} rows, and each "
            "needs several."
        )
    train = inputs.iloc[places[kept]]
    encoder = source.encoder().fit(train, y[kept])
    how = "stratified" if is_classes else "random"
    notes.append(f"{how} split, {fraction:.0%} of the rows held out for testing")
    is_file = source.data != STDIN
    return Data(
        replace(source, data=str(path.resolve()) if is_file else STDIN, target=names),
        path.name if is_file else "standard input",
        target,
        encoder,
        (train, y[kept]),
        (inputs.iloc[places[tested]], y[tested]),
        places[tested] + 1,
        f"{'; '.join(notes)}.",
        checksum(path) if is_file else None,
    )


def _bundled(source: Source) -> Data:
    given = {
        "target": source.target,
        "task": source.task,
        "ignore": source.ignore,
        "as": source.kinds,
        "test-fraction": source.test_fraction,
    }
    for option, value in given.items():
        if value:
            raise ValueError(
                f"the data set {source.data!r} brings its own columns, target and test part; "
                f"--{option} is for files. Leave it out."
            )
    from sklearn import datasets

    table = getattr(datasets, f"load_{source.data.replace('-', '_')}")()
    y = table.target
    is_classes = hasattr(table, "target_names") and y.dtype.kind == "i"
    if is_classes:
        y = np.asarray(table.target_names)[y]
    X: Any = table.data.astype(np.float32)
    strata = table.target if is_classes else None
    kept, tested = split_rows(len(y), TEST_FRACTION, np.random.default_rng(0), strata)
    names = [str(name) for name in table.feature_names]
    if source.data != "digits":
        import pandas as pd

        X = pd.DataFrame(X, columns=names)
    rows = X.iloc if hasattr(X, "iloc") else X
    target = replace(Target.fit({"target": y}, "target"), hints=())
    y, _ = target.read({"target": y})
    return Data(
        source,
        source.data,
        target,
        source.encoder().fit(rows[kept]),
        (rows[kept], y[kept]),
        (rows[tested], y[tested]),
        tested + 1,
        f"the copy in scikit-learn; {'stratified' if is_classes else 'random'} split, "
        f"{TEST_FRACTION:.0%} of the rows held out for testing.",
    )


def _problems(source: Source, inputs: Any) -> str:
    """What can't be told of the columns to learn from, or nothing."""
    try:
        if len(inputs.columns):
            source.encoder().fit(inputs)
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
