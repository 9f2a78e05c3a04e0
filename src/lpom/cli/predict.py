"""``lpom predict``: a table in, a table of predictions out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer

from lpom.cli import options
from lpom.cli.data import Source
from lpom.cli.run import Run
from lpom.cli.scores import scores
from lpom.cli.tables import written
from lpom.exceptions import DataError, unknown_name
from lpom.files import write_atomically
from lpom.tables.reading import STDIN, read_table
from lpom.tables.values import Array


def predict(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    file: Annotated[
        str,
        typer.Argument(help="A table with the same columns, or - for a CSV from standard input."),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CSV to write (else to standard output).")
    ] = None,
    proba: Annotated[
        bool, typer.Option("--proba", help="The probability of every class as well.")
    ] = False,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Column to write beside the predictions, or all; may be repeated."
        ),
    ] = None,
    encoding: options.Encoding = None,
    separator: options.Separator = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file in --out.")] = False,
) -> None:
    """Predict the rows of a file, as CSV with a column prediction.

    Unknown categories and missing values are taken as in training, with a warning; columns that
    training did not use are not looked at. Where the target is there, the score is printed too.

    Examples:

        lpom predict runs/flats-1 new.csv --keep id --out predictions.csv
        cat new.csv | lpom predict runs/churn-1 - --proba
    """
    if out is not None and out.exists():
        if file != STDIN and Path(file).exists() and out.samefile(file):
            raise ValueError(f"--out names the table to predict, {file}; name another file.")
        if not force:
            raise ValueError(f"{out} is there already. Name another file, or use --force.")
    kept_run = Run.read(run)
    source = Source.of(kept_run.settings["data"]["source"])
    frame = read_table(
        file, encoding=encoding or source.encoding, separator=separator or source.separator
    ).frame
    frame = frame.set_axis(frame.columns.astype(str), axis=1)
    kept = _kept(frame, keep or [])
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        inputs = kept_run.encoder.transform(_in_order(frame, kept_run))
    answers = _answers(kept_run, inputs, proba)
    shown = _short(_no_formulas(answers))
    table = pd.concat([kept.reset_index(drop=True), shown], axis=1)
    text = table.to_csv(index=False, lineterminator="\n")
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_atomically(out, text.encode())
    _say(kept_run, frame, inputs, out)


def _short(answers: pd.DataFrame) -> pd.DataFrame:
    """Numbers with the digits that float32 has, in which networks compute: of what differs."""
    numbers = answers.select_dtypes("number")
    return answers.assign(**{name: numbers[name].map(_form(numbers[name])) for name in numbers})


def _form(numbers: pd.Series) -> Callable[[float], str]:
    """How numbers are written that lie far from zero and near to each other, or not."""
    size, spread = float(numbers.abs().max()), float(numbers.std(ddof=0))
    far = math.log10(size / spread) if spread > 0 and math.isfinite(size / spread) else 0.0
    return f"{{:.{min(17, max(9, 7 + math.ceil(far)))}g}}".format


def _no_formulas(answers: pd.DataFrame) -> pd.DataFrame:
    """Names of classes that a spreadsheet would take for formulas get an apostrophe before them."""
    texts = answers.select_dtypes(["object", "string"])
    risky = texts.apply(lambda column: column.astype(str).str.match(r"[=+\-@\t\r]"))
    risky &= texts.apply(lambda column: pd.to_numeric(column, errors="coerce").isna())
    if not risky.to_numpy().any():
        return answers
    note = "names that begin with =, +, - or @ have a ' before them: spreadsheets would run them"
    typer.echo(note, err=True)
    return answers.assign(**texts.mask(risky, "'" + texts.astype(str)))


def _kept(frame: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    if "all" in names and "all" not in frame.columns:
        return frame
    unknown = [name for name in names if name not in frame.columns]
    if unknown:
        raise DataError(" ".join(unknown_name("column to keep", n, frame.columns) for n in unknown))
    return frame[names]


def _in_order(frame: pd.DataFrame, run: Run) -> pd.DataFrame:
    """Columns without names, as of an array, stand for those of training in their order."""
    names = list(run.encoder.columns_)
    nameless = [f"X{k}" for k in range(len(names))]
    if list(frame.columns) == nameless and set(names) != set(nameless):
        return frame.set_axis(names, axis=1)
    return frame


def _answers(run: Run, inputs: Array, proba: bool) -> pd.DataFrame:
    answers = run.target.answers(run.estimator.predict(inputs))
    if proba:
        if not hasattr(run.estimator, "predict_proba"):
            raise ValueError(
                f"{run.target.name!r} is a number, and a number has no probabilities of classes. "
                "Leave --proba out."
            )
        target = run.target
        shares = run.estimator.predict_proba(inputs).astype(float)
        if len(target.names) == 1:  # a column also for a class that no row to train on had
            columns = [list(target.classes[0]).index(label) for label in run.estimator.classes_]
            whole = np.zeros((len(inputs), len(target.classes[0])))
            whole[:, columns] = shares
            shares = whole
        answers |= target.probabilities(shares)
    return pd.DataFrame(answers)


def _say(run: Run, frame: pd.DataFrame, inputs: Array, out: Path | None) -> None:
    target = run.target
    if out is not None:
        typer.echo(f"wrote {len(frame):,} predictions of {target.name} to {out}", err=True)
    if not set(target.names) <= set(frame.columns):
        return
    y, known = target.read(frame)
    if target.task == "classification" and y.ndim == 1:
        met = np.isin(y, run.estimator.classes_)
        known[np.flatnonzero(known)[~met]] = False
        y = y[met]
    given = frame[list(target.names)].notna().all(axis=1).to_numpy()
    if known.any():
        values = scores(run.estimator, inputs[known], y, target)
        text = ", ".join(f"{name} {written(name, value)}" for name, value in values.items())
        rows = "rows that have" if (known == given).all() else "rows with a known"
        typer.echo(f"{text} on the {int(known.sum()):,} {rows} {target.name}", err=True)
    if (strange := given & ~known).any():
        example = frame[list(target.names)][strange].iloc[0].tolist()
        typer.echo(
            f"{int(strange.sum()):,} rows have a {target.name} that training never met or that "
            f"can't be read, and are not scored: {', '.join(map(repr, map(str, example)))}, "
            "for example",
            err=True,
        )
