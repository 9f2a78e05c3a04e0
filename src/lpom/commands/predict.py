"""``lpom predict``: a table in, a table of predictions out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lpom.datasets import read_table
from lpom.files import write_atomically
from lpom.runs import read_predictor


def predict(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or a model file.")],
    file: Annotated[Path, typer.Argument(help="CSV, Parquet or NPZ with the same columns.")],
    out: Annotated[Path | None, typer.Option(help="CSV file to write (else stdout).")] = None,
    proba: Annotated[
        bool, typer.Option("--proba", help="The probability of every class as well.")
    ] = False,
) -> None:
    """Predict the rows of a file, as CSV with a column prediction."""
    if out is not None and out.exists() and file.exists() and out.samefile(file):
        raise ValueError(f"--out names the table to predict, {file}; name another file.")
    predictor = read_predictor(run)
    features = predictor.features
    unused = {predictor.target.name, *features.columns} - set(features.names)
    table = read_table(file, ignore=unused, texts=features.categories)
    answers = predictor.predict(table.features, probabilities=proba)
    text = answers.to_csv(index=False, lineterminator="\n")
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_atomically(out, text.encode())
