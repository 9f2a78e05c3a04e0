"""Options that more than one sub-command takes, and how their texts are read."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from lpom import datasets
from lpom.preparation import TEST_FRACTION

Data: TypeAlias = Annotated[
    str,
    typer.Argument(
        help="A CSV, Parquet, Excel or NPZ file, - for a CSV from standard input, or "
        f"{', '.join(datasets.names())}."
    ),
]
TargetColumn: TypeAlias = Annotated[
    list[str] | None, typer.Option(help="Column of a file to predict; may be repeated.")
]
Kinds: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--as", help="NAME=KIND: number, yes/no, category, date or dropped; may be repeated."
    ),
]
Encoding: TypeAlias = Annotated[
    str | None, typer.Option(help="Of a CSV file, e.g. cp1252 (else UTF-8).")
]
Separator: TypeAlias = Annotated[
    str | None, typer.Option(help="Of a CSV file (else , ; | or tab, as its first line has it).")
]
Decimal: TypeAlias = Annotated[
    str | None, typer.Option(help="Decimal sign, where values leave it open: , or .")
]
Thousands: TypeAlias = Annotated[
    str | None, typer.Option(help="What separates thousands, where values leave it open.")
]
DateOrder: TypeAlias = Annotated[
    str | None, typer.Option(help="dmy or mdy, where dates leave it open.")
]
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
HiddenAsNeeded: TypeAlias = Annotated[
    str | None,
    typer.Option(help="Widths of hidden layers, or none; else chosen from the size of the data."),
]
ActivationName: TypeAlias = Annotated[str, typer.Option(help="See lpom activations.")]
OutputActivation: TypeAlias = Annotated[str, typer.Option(help="Of the last layer.")]
AsNeeded: TypeAlias = Annotated[
    int | None, typer.Option(help="By default chosen from the size of the data.")
]
Network: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Train on pictures a network by its name (see lpom networks), or one of your own: "
        "path.py:function."
    ),
]
NetworkOptions: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--network-option", help="OPTION=VALUE of the network, e.g. width=0.25; may be repeated."
    ),
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


def pairs(option: str, example: str, texts: Sequence[str] | None) -> dict[str, str]:
    """NAME=VALUE texts as a mapping."""
    made = {}
    for text in texts or ():
        name, sign, value = text.rpartition("=") if option == "--as" else text.partition("=")
        if not (name and sign and value):
            raise ValueError(f"{option} takes NAME=VALUE, e.g. {example}, got {text!r}.")
        made[name] = value
    return made


def value(text: str) -> Any:
    """A number, list or truth value where the text is one, else the text."""
    try:
        return ast.literal_eval(text.title() if text.lower() in ("true", "false") else text)
    except (ValueError, SyntaxError):
        return text
