"""Options that more than one sub-command takes, and how their texts are read."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, TypeAlias

import typer

from lpom import activations, losses, methods
from lpom.cli.data import BUNDLED, TEST_FRACTION, Data, Source, read

TABLE, NETWORK, TRAINING, RUN = "The table", "The network", "Training", "The run"  # of --help


def completing(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """For the shell's completion: the names that begin with what was typed."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return complete


def option(
    panel: str, metavar: str | None, text: str, *names: str, among: Any = None, **more: Any
) -> Any:
    """An option in its panel of --help; ``among`` gives the names that complete it."""
    complete = None if among is None else completing(among)
    return typer.Option(
        *names, metavar=metavar, help=text, rich_help_panel=panel, autocompletion=complete, **more
    )


Table: TypeAlias = Annotated[
    str,
    typer.Argument(
        help="A CSV, Parquet, Excel or NPZ file, - for a CSV from standard input, or "
        f"{', '.join(BUNDLED)}.",
        autocompletion=completing(lambda: BUNDLED),
    ),
]
TargetColumn: TypeAlias = Annotated[
    list[str] | None, option(TABLE, "NAME", "Column to predict; may be repeated.")
]
TaskName: TypeAlias = Annotated[
    str | None,
    option(
        TABLE,
        "NAME",
        "classification or regression, else told from the target.",
        among=lambda: ("classification", "regression"),
    ),
]
Ignored: TypeAlias = Annotated[
    list[str] | None, option(TABLE, "NAME", "Column to leave out; may be repeated.")
]
Kinds: TypeAlias = Annotated[
    list[str] | None,
    option(
        TABLE,
        "NAME=KIND",
        "number, yes/no, category, text, date or dropped, where values mislead; may be repeated.",
        "--as",
    ),
]
Encoding: TypeAlias = Annotated[
    str | None, option(TABLE, "NAME", "Of a CSV file, e.g. cp1252 (else UTF-8).")
]
Separator: TypeAlias = Annotated[
    str | None,
    option(TABLE, "SIGN", "Of a CSV file (else , ; | or tab, as its first line has it)."),
]
Decimal: TypeAlias = Annotated[
    str | None, option(TABLE, "SIGN", "Of decimals, where values leave it open.")
]
Thousands: TypeAlias = Annotated[
    str | None, option(TABLE, "SIGN", "Of thousands, where values leave it open.")
]
DateOrder: TypeAlias = Annotated[
    str | None,
    option(TABLE, "ORDER", "dmy or mdy, where dates leave it open.", among=lambda: ("dmy", "mdy")),
]
TestFraction: TypeAlias = Annotated[
    float | None, option(TABLE, "SHARE", f"Of the rows, held out for testing ({TEST_FRACTION}).")
]
Hidden: TypeAlias = Annotated[str, option(NETWORK, "WIDTHS", "Of hidden layers, 300,100, or none.")]
HiddenAsNeeded: TypeAlias = Annotated[
    str | None,
    option(
        NETWORK,
        "WIDTHS",
        "Of hidden layers, 300,100, or none (else as the size of the data asks for).",
    ),
]
ActivationName: TypeAlias = Annotated[
    str, option(NETWORK, "NAME", "See lpom activations.", among=activations.names)
]
OutputActivation: TypeAlias = Annotated[
    str, option(NETWORK, "NAME", "Of the last layer.", among=activations.names)
]
AsNeeded: TypeAlias = Annotated[
    int | None, option(TRAINING, "N", "Else as the size of the data asks for.")
]
MethodName: TypeAlias = Annotated[
    str, option(TRAINING, "NAME", "See lpom methods.", among=methods.names)
]
LossName: TypeAlias = Annotated[
    str, option(TRAINING, "NAME", "Else as the target asks for.", among=losses.names)
]
ClassWeight: TypeAlias = Annotated[
    str | None,
    option(
        TRAINING,
        "WEIGHTS",
        "balanced, or one per class: yes=3,no=1.",
        among=lambda: ("balanced",),
    ),
]
Seed: TypeAlias = Annotated[int, option(TRAINING, "N", "Of weights, batches and splits.")]
Device: TypeAlias = Annotated[str, option(TRAINING, "NAME", "cpu, cuda, ..., or auto.")]


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


def class_weight(text: str | None) -> str | dict[str, float] | None:
    """Weights of classes in a text like "yes=3,no=1", or "balanced"."""
    if text in (None, "balanced"):
        return text
    found = pairs("--class-weight", "yes=3,no=1, or balanced", text.split(","))
    weights = {name: numbers("--class-weight", part, float)[0] for name, part in found.items()}
    for name, weight in weights.items():
        if not 0 <= weight < math.inf:
            raise ValueError(f"--class-weight takes weights from 0 on, got {name}={weight:g}.")
    return weights


def method_settings(method: str, texts: Sequence[str] | None) -> dict[str, Any]:
    """What --set says of a method, by the names of Python; refused now if it has no such."""
    given = pairs("--set", "states.max_sweeps=3", texts)
    settings = {name.replace(".", "__"): value(text) for name, text in given.items()}
    try:
        methods.get(method).with_params(**settings)
    except ValueError as error:  # by the names that the shell has for them
        raise ValueError(str(error).replace("__", ".")) from error
    return settings


def pairs(option: str, example: str, texts: Sequence[str] | None) -> dict[str, str]:
    """NAME=VALUE texts as a mapping."""
    made = {}
    for text in texts or ():
        name, sign, value = text.rpartition("=") if option == "--as" else text.partition("=")
        if not (name and sign and value):
            raise ValueError(f"{option} takes NAME=VALUE, e.g. {example}, got {text!r}.")
        made[name] = value
    return made


def given(context: typer.Context) -> dict[str, Any]:
    """What the user wrote: values by the option as it is spelled, an argument by its name."""
    found = {}
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            spelled = [option for option in parameter.opts if option.startswith("--")]
            found[spelled[0] if spelled else name.upper()] = context.params[name]
    return found


def read_data(context: typer.Context, seed: int = 0) -> Data:
    """The data that a command's options about tables ask for."""
    chosen = context.params
    alike = ("data", "task", "encoding", "separator", "decimal", "thousands", "date_order")
    source = Source(
        **{name: chosen[name] for name in (*alike, "test_fraction")},
        target=tuple(chosen["target"] or ()),
        ignore=tuple(chosen["ignore"] or ()),
        kinds=pairs("--as", "zip=category", chosen["kinds"]),
    )
    return read(source, seed)


def value(text: str) -> Any:
    """A number, list or truth value where the text is one, else the text."""
    try:
        return ast.literal_eval(text.title() if text.lower() in ("true", "false") else text)
    except (ValueError, SyntaxError):
        return text
