"""Settings: frozen values that compare equal, reached by name as scikit-learn does it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, Self, TypeVar

S = TypeVar("S", bound="Settings")


class Settings:
    """Base of frozen dataclasses whose fields are settings, some of which have settings themselves.

    >>> from lpom import LPOM
    >>> LPOM().with_params(weights__learning_rate=0.01).weights.learning_rate
    0.01
    """

    def __new__(cls, *args: Any, **params: Any) -> Self:
        for name in params:
            if place := cls.place(name):
                raise TypeError(f"{cls.__name__} has no setting {name!r}{place}.")
        return super().__new__(cls)

    @classmethod
    def place(cls, name: str) -> str:
        """Where the setting of this name is, if it is one of the settings within."""
        defaults = {f.name: f.default for f in fields(cls)}  # type: ignore[arg-type]
        for outer, inner in defaults.items():
            if name not in defaults and isinstance(inner, Settings):
                if name in inner.get_params(deep=False):
                    return f"; write {outer}={type(inner).__name__}({name}=...)"
        return ""

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
        """The same with other settings, ``weights__ridge=1.0`` for those within.

        A kind of settings may be chosen by its name along with what is in it,
        ``weights="exact", weights__ridge=1.0``.
        """
        known = self.get_params(deep=False)
        direct: dict[str, Any] = {}
        inner: dict[str, dict[str, Any]] = {}
        for name, value in params.items():
            outer, nested, key = name.partition("__")
            if outer not in known:
                raise self._unknown(name)
            if nested:
                inner.setdefault(outer, {})[key] = value
            else:
                direct[outer] = value
        made = replace(self, **direct)  # type: ignore[type-var]
        within: dict[str, Settings] = {}
        for outer, settings in inner.items():
            base = getattr(made, outer)
            if not isinstance(base, Settings):
                raise self._unknown(f"{outer}__{next(iter(settings))}")
            within[outer] = base.with_params(**settings)
        return replace(made, **within)  # type: ignore[type-var]

    def _unknown(self, name: str) -> ValueError:
        return ValueError(
            f"{type(self).__name__} has no setting {name!r}; it has {', '.join(self.get_params())}."
        )

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


def settings_text(plain: Mapping[str, Any]) -> str:
    """What :meth:`Settings.plain` made, without what is None, by the names that ``--set`` takes.

    >>> settings_text({"mu": 20.0, "weights": {"exact": {"ridge": 1.0}}, "penalties": None})
    'mu=20.0, weights=exact, weights.ridge=1.0'
    """
    return ", ".join(f"{name}={value}" for name, value in _dotted(plain) if value is not None)


def _dotted(plain: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in plain.items():
        if isinstance(value, Mapping) and len(value) == 1:
            ((kind, inner),) = value.items()
            if isinstance(inner, Mapping):
                yield name, kind
                yield from ((f"{name}.{key}", setting) for key, setting in _dotted(inner))
                continue
        yield name, value


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


def geometric(ends: tuple[float, float], progress: float) -> float:
    """Between the two ends, at this share of the run, by equal factors."""
    first, last = ends
    return first * math.pow(last / first, progress)
