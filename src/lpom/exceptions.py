"""Errors and warnings of the library, and the wording they share."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class LPOMError(Exception):
    """Base of every error that is the library's own."""


class DivergenceError(LPOMError, ArithmeticError):
    """Training produced values that are not finite, or an objective that explodes.

    Attributes
    ----------
    result : what `lpom.fit` would have returned of the epochs before, status "diverged"; the model
        has the weights that were restored. None if no epoch was finished
    estimator : the estimator that has them, where one was trained; the one that `fit` was called of
        stays as it was
    """

    result: Any = None
    estimator: Any = None


class DataError(LPOMError, ValueError):
    """Data, labels or targets do not fit what the network or the loss expects."""


class UntrainableError(LPOMError, ValueError):
    """A model holds something that the method can't train."""


class ModelFileError(LPOMError, ValueError):
    """A model file or checkpoint cannot be read, or does not fit the model."""


class CheckpointError(LPOMError, ValueError):
    """A checkpoint is damaged, in use, or belongs to another run."""


class LostRankError(LPOMError, RuntimeError):
    """A process of a parallel run has ended or does not answer."""


class DeviceError(LPOMError, RuntimeError):
    """A device that an activation is read from has failed, or its budget is spent."""


class DeviceWarning(UserWarning):
    """A device that an activation is read from does not behave as before."""


class ConvergenceWarning(UserWarning):
    """Training or an inner iteration stopped before it converged."""


def warn(message: str, category: type[Warning]) -> None:
    """Warn about the line outside of this library that led here."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("lpom."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Message for a name that is not in a table, with the nearest names that are.

    >>> unknown_name("activation", "rleu", ["relu", "tanh"])
    "unknown activation 'rleu'; did you mean 'relu'? Known: relu, tanh."
    """
    known = sorted(known)
    near = get_close_matches(name, known, n=2, cutoff=0.6)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
    return f"unknown {kind} {name!r}{hint} Known: {', '.join(known)}."
