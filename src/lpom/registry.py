"""Things by name: activations, losses and methods are found in one way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, TypeVar, cast

from lpom.exceptions import unknown_name
from lpom.settings import Settings

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
    group: str = "",
) -> T:
    """What ``given`` names in ``table``, made with ``params``; an instance is returned as it is.

    Names are told apart by neither case nor hyphen or underscore. ``"package.module:Class"`` names
    a class written elsewhere, and so do the entry points in ``group`` of installed packages.
    ``hint`` ends the sentence about an unknown name.
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
    made: Any
    if ":" in given:
        made = _imported(kind, base, given)
    elif name in table:
        made = table[name]
    elif group and given in (elsewhere := outside(group)):
        made = _imported(kind, base, elsewhere[given])
    else:
        raise ValueError(
            unknown_name(kind, given, [*table, *(outside(group) if group else ())]) + hint
        )
    known = [field.name for field in fields(made)]
    if extra := sorted(set(params) - set(known)):
        place = made.place(extra[0]) if issubclass(made, Settings) else ""
        raise ValueError(
            f"{kind} {name!r} has no setting {', '.join(map(repr, extra))}; "
            f"it has {', '.join(known) or 'none'}{place}."
        )
    return cast(T, made(**params))


@cache
def outside(group: str) -> dict[str, str]:
    """Name and "package.module:Class" of what installed packages offer under an entry point."""
    return {point.name: point.value for point in entry_points(group=group)}


def _imported(kind: str, base: type[Any], path: str) -> Any:
    module, _, attribute = path.partition(":")
    try:
        made = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{kind} {path!r} cannot be imported ({error}). Expected package.module:Class, where "
            "Python finds the package."
        ) from error
    if not (isinstance(made, type) and issubclass(made, base)):
        raise TypeError(f"{kind} {path!r} should be a class derived from {base.__name__}.")
    if missing := sorted(getattr(made, "__abstractmethods__", ())):
        raise TypeError(
            f"{kind} {path!r} does not define {', '.join(missing)}, which every "
            f"{base.__name__} needs."
        )
    return made
