"""Settings: frozen values that compare equal, reached by name as scikit-learn does it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

S = TypeVar("S", bound="Settings")


class Settings:
    """Base of frozen dataclasses whose fields are settings, some of which have settings themselves.

    >>> from lpom import LPOM
    >>> LPOM().with_params(weights__learning_rate=0.01).weights.learning_rate
    0.01
    """

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Settings by name; deep: those of settings too, as ``weights__ridge``."""
        params = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        if deep:
            for name, value in list(params.items()):
                if isinstance(value, Settings):
                    inner = value.get_params()
                    params |= {f"{name}__{key}": setting for key, setting in inner.items()}
        return params

    def with_params(self: S, **params: Any) -> S:
        """The same with other settings, ``weights__ridge=1.0`` for those within."""
        known = self.get_params(deep=False)
        changed: dict[str, Any] = {}
        inner: dict[str, dict[str, Any]] = {}
        for name, value in params.items():
            outer, nested, key = name.partition("__")
            if outer not in known or (nested and not isinstance(known[outer], Settings)):
                raise ValueError(
                    f"{type(self).__name__} has no setting {name!r}; it has "
                    f"{', '.join(self.get_params())}."
                )
            if nested:
                inner.setdefault(outer, {})[key] = value
            else:
                changed[outer] = value
        for outer, settings in inner.items():
            base = changed.get(outer, known[outer])
            changed[outer] = base.with_params(**settings)
        return replace(self, **changed)  # type: ignore[type-var]

    def plain(self) -> dict[str, Any]:
        """The settings as JSON can hold them, each with the kind of those within."""
        return {name: _plain(value) for name, value in self.get_params(deep=False).items()}


def _plain(value: Any) -> Any:
    match value:
        case Settings():
            return {type(value).__name__.lower(): value.plain()}
        case Mapping():
            return {str(name): _plain(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
        case bool() | int() | float() | str() | None:
            return value
    return getattr(value, "__name__", repr(value))


def chosen(field: str, value: Any, kinds: Mapping[str, type[S]]) -> S:
    """One of several kinds of settings: itself, its name, or ``{name: {setting: value}}``."""
    for kind in kinds.values():
        if isinstance(value, kind):
            return value
    settings: Any = {}
    name = value
    if isinstance(value, Mapping) and len(value) == 1:
        ((name, settings),) = value.items()
    if isinstance(name, str) and name in kinds and isinstance(settings, Mapping):
        return kinds[name](**settings)
    raise ValueError(
        f"{field} should be {' or '.join(kind.__name__ for kind in kinds.values())}, or one of the "
        f"names {', '.join(map(repr, kinds))}; got {value!r}."
    )
