"""Checks of settings, of arrays of numbers, and of libraries that are not always installed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from importlib import import_module
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lpom.exceptions import unknown_name

_CHUNK = 2**17  # numbers looked at together when all of an array is checked


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


def as_array(values: Any, name: str, advice: str = "") -> np.ndarray[Any, Any]:
    """An array of real numbers in a form that torch can read; copied only if it is not."""
    check_unmasked(values, name)
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{name} must hold numbers, got {array.dtype}.{advice}")
    if array.dtype.itemsize > 8:
        return array.astype(np.float64)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def check_unmasked(values: Any, name: str) -> None:
    """Raise if the mask of an array, which nothing here reads, hides some of its values."""
    if np.ma.isMaskedArray(values) and np.ma.is_masked(values):
        raise ValueError(f"{name} has masked values. Fill or remove them first.")


def plain_tensor(X: Tensor, name: str) -> Tensor:
    """The tensor without its graph, if it is one of real numbers that are all there."""
    odd = "complex" if X.is_complex() else "quantised" if X.is_quantized else ""
    odd = odd or ("meta" if X.is_meta else "sparse" if X.layout != torch.strided else "")
    if odd:
        raise TypeError(f"{name} must be a dense tensor of real numbers, got a {odd} one.")
    return X.detach()


def as_tensor(array: np.ndarray[Any, Any]) -> Tensor:
    """A tensor that shares the array's memory where it can; nobody here writes to it.

    Arrays that are read-only (memory maps, columns of a data frame) are as good as others, so
    torch's warning about them is kept from the user; reversed ones, and columns of records, are
    copied.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        if any(stride < 0 or stride % array.itemsize for stride in array.strides):
            array = array.copy()
        return torch.as_tensor(np.asarray(array))


def check_targets_finite(y: Any, dtype: torch.dtype) -> None:
    """Raise if targets are floats and not finite, in the model's dtype too."""
    values: Any = plain_tensor(y, "y") if isinstance(y, Tensor) else np.asarray(y)
    if isinstance(values, Tensor) or values.dtype.kind == "f":
        check_finite(values, "y", "Remove such rows first", dtype)


def check_weights(weight: Any, n: int, dtype: torch.dtype) -> Tensor:
    """Weights of ``n`` samples, which may all be zero: other batches may count."""
    name = "sample_weight"
    weights: Tensor = (
        plain_tensor(weight, name)
        if isinstance(weight, Tensor)
        else as_tensor(as_array(weight, name))
    )
    if weights.shape != (n,):
        raise ValueError(
            f"sample_weight needs shape ({n},), one per sample; got {tuple(weights.shape)}."
        )
    if not bool(torch.isfinite(weights.to(dtype)).all()) or bool((weights < 0).any()):
        raise ValueError("sample_weight must be finite and not negative.")
    if not bool(torch.isfinite(weights.to(dtype).sum())):
        raise ValueError(
            f"sample_weight adds up to {float(weights.double().sum()):.3g}, beyond the range of "
            f"the model's {str(dtype).removeprefix('torch.')}. Divide it by its mean."
        )
    return weights


def check_finite(
    values: Any, name: str, advice: str, dtype: torch.dtype | None = None, rows: bool = True
) -> float:
    """The largest size of any number; raise if one is not finite, or not so in ``dtype``.

    A chunk of rows at a time.
    """
    largest = 0.0
    length = max(1, _CHUNK // max(1, int(np.prod(values.shape[1:]))))
    for start in range(0, len(values), length):
        part = values[start : start + length]
        part = part if isinstance(part, Tensor) else as_tensor(part)
        used = part if dtype is None else part.to(dtype)
        if not used.numel():
            continue
        low, high = (float(end) for end in torch.aminmax(used))  # NaN goes through both
        if math.isfinite(low) and math.isfinite(high):
            largest = max(largest, -low, high)
            continue
        bad = ~torch.isfinite(used).reshape(len(used), -1).all(1)
        row = int(bad.nonzero()[0, 0])
        where = f", first in row {start + row}" if rows else ""
        if bool(torch.isfinite(part[row]).all()):
            raise ValueError(
                f"{name} holds values up to {float(part[row].abs().max()):.3g}, beyond the range "
                f"of the model's {str(dtype).removeprefix('torch.')}{where}. Scale {name}, or use "
                "a model with dtype=torch.float64."
            )
        raise ValueError(f"{name} holds NaN or infinity{where}. {advice}.")
    return largest
