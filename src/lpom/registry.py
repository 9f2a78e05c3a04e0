"""Things by name: activations, losses and methods are found in one way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from lpom.exceptions import unknown_name

T = TypeVar("T")


def build(
    kind: str,
    base: type[Any],
    table: Mapping[str, type[T]],
    given: str | T,
    params: Mapping[str, Any],
    *,
    aliases: Mapping[str, str] | None = None,
    separator: str = "-",
    hint: str = "",
) -> T:
    """What ``given`` names in ``table``, made with ``params``; an instance is returned as it is.

    Names are told apart by neither case nor hyphen or underscore. ``hint`` ends the sentence about
    an unknown one.
    """
    if isinstance(given, base):
        if params:
            raise TypeError(f"parameters go with a name, but {given!r} already has its own.")
        found: T = given
        return found
    if not isinstance(given, str):
        raise TypeError(
            f"{kind} must be a name or an instance of {base.__name__}, got "
            f"{type(given).__name__}; names are {', '.join(table)}.{hint}"
        )
    name = given.lower().replace("_", separator).replace("-", separator)
    name = (aliases or {}).get(name, name)
    if name not in table:
        raise ValueError(unknown_name(kind, given, table) + hint)
    made = table[name]
    known = [field.name for field in fields(made)]  # type: ignore[arg-type]
    if extra := sorted(set(params) - set(known)):
        raise ValueError(
            f"{kind} {name!r} has no setting {', '.join(map(repr, extra))}; "
            f"it has {', '.join(known) or 'none'}."
        )
    return made(**params)
