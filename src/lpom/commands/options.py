"""Options that more than one sub-command takes, and how their texts are read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from lpom import datasets
from lpom.preparation import TEST_FRACTION

Data: TypeAlias = Annotated[
    str, typer.Argument(help=f"A CSV, Parquet or NPZ file, or {', '.join(datasets.names())}.")
]
TargetColumn: TypeAlias = Annotated[str | None, typer.Option(help="Column of a file to predict.")]
TaskName: TypeAlias = Annotated[
    str | None,
    typer.Option(help="classification or regression, else inferred from the target."),
]
Ignored: TypeAlias = Annotated[
    list[str] | None, typer.Option(help="Column of a file to leave out; may be repeated.")
]
TestFraction: TypeAlias = Annotated[
    float | None, typer.Option(help=f"Share of a file held out for testing ({TEST_FRACTION}).")
]
DataDir: TypeAlias = Annotated[
    Path | None, typer.Option(help="Folder with the files of a data set (else LPOM_DATA).")
]
Hidden: TypeAlias = Annotated[str, typer.Option(help="Widths of hidden layers, or none.")]
ActivationName: TypeAlias = Annotated[str, typer.Option(help="See lpom activations.")]
OutputActivation: TypeAlias = Annotated[str, typer.Option(help="Of the last layer.")]
AsNeeded: TypeAlias = Annotated[
    int | None, typer.Option(help="By default chosen from the size of the data.")
]
Threads: TypeAlias = Annotated[int | None, typer.Option(help="Threads of torch.", min=1)]


def numbers(option: str, text: str, kind: type) -> tuple[Any, ...]:
    """The numbers in a text like "300,100"."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        whole = "integers" if kind is int else "numbers"
        raise ValueError(f"{option} takes comma-separated {whole}, got {text!r}.") from None


def widths(text: str) -> tuple[int, ...]:
    """The hidden layers in a text like "300,100", or "none"."""
    return () if text == "none" else numbers("--hidden", text, int)
