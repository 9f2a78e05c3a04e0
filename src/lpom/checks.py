"""Checks of settings, and of libraries that are not always installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from numbers import Real
from typing import Any

import torch

from lpom.exceptions import unknown_name


def check_choice(what: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise if ``value`` is not one of the words that a setting may be."""
    if value not in choices:
        raise ValueError(unknown_name(what, str(value), choices))


def check_number(
    what: str, value: Any, *, low: float = 0.0, strict: bool = True, whole: bool = False
) -> None:
    """Raise unless ``value`` is a finite number above (or at) ``low``, an integer if it must be."""
    fits = isinstance(value, Real) and low <= float(value) < float("inf")
    fits = fits and (not strict or float(value) > low) and (not whole or float(value).is_integer())
    if not fits:
        kind = "an integer" if whole else "a number"
        raise ValueError(
            f"{what} must be {kind} {'above' if strict else 'of at least'} {low:g}, got {value!r}."
        )


def check_pair(name: str, pair: Sequence[float]) -> tuple[float, float]:
    """Two positive numbers: what a setting is at the start of a run, and at its end."""
    if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
        raise ValueError(f"{name} should be a pair of numbers, (first, last), got {pair!r}.")
    first, last = pair
    check_number(f"{name}'s first number", first)
    check_number(f"{name}'s last number", last)
    return first, last


def require(module: str, purpose: str, install: str = "") -> Any:
    """Import an optional module, or say what it is for and which packages to install for it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{purpose} needs {package}: pip install {install or package}") from error


def as_device(name: str | torch.device) -> torch.device:
    """The device of this name, "auto" being the first GPU if there is one; or what to use."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, ImportError) as error:  # torch raises either
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"there is no device {name!r} here ({reason}). Use 'cpu', 'auto', or one that torch "
            "knows, e.g. 'cuda:0'."
        ) from error
