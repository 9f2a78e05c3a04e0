"""How the function that makes a network is called, and found in a file of the user."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from lpom.exceptions import unknown_name


def call(
    name: str,
    make: Callable[..., Any],
    offered: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Any:
    """``make`` with what it takes of the things offered, and with all of the options."""
    signature = inspect.signature(make)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds
    given = {key: offered[key] for key in offered if takes_all or key in signature.parameters}
    try:
        signature.bind(**given, **options)
    except TypeError as error:
        own = [key for key in signature.parameters if key not in offered]
        raise ValueError(
            f"network {name}: {error}. Its options are {', '.join(own) or 'none'}; "
            f"{', '.join(offered)} are given to it where it asks for them."
        ) from error
    return make(**given, **options)


def from_file(
    where: str, input_shape: Sequence[int], n_outputs: int, seed: int = 0, **options: Any
) -> nn.Module:
    """Import a Python file and call the function in it that makes the network.

    Parameters
    ----------
    where : "path.py:function"
        The function takes what it needs of `input_shape`, `n_outputs` and `seed` by name, besides
        the `options`, and returns a ``torch.nn.Module``. A class of modules will do as well.
    input_shape, n_outputs : shape of one sample, and how many numbers are predicted for it
    seed : torch's global generator starts from it while the file and the function run, and is put
        back afterwards

    Notes
    -----
    The file is run: name only files that you trust.
    """
    path, function = _split(where)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        make = _function(_imported(path), function, path)
        offered = {"input_shape": tuple(input_shape), "n_outputs": n_outputs, "seed": seed}
        model = call(where, make, offered, options)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{where} should return a torch.nn.Module, got {type(model).__name__}. Return the "
            "network itself."
        )
    return model


def _split(where: str) -> tuple[Path, str]:
    path, _, function = where.rpartition(":")
    if not path.endswith(".py") or not function.isidentifier():
        raise ValueError(
            f"a network of your own is named by its file and the function that makes it, e.g. "
            f"'path.py:make', got {where!r}."
        )
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path}. Check the path before the colon in {where!r}.")
    return Path(path), function


def _imported(path: Path) -> ModuleType:
    name = f"lpom_network_{path.stem}"
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # it ends in .py
    module = module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and torch look for the code of its classes
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _function(module: ModuleType, name: str, path: Path) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if not callable(found):
        there = [
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == module.__name__
        ]
        raise ValueError(f"{path}: " + unknown_name("function", name, there))
    made: Callable[..., Any] = found
    return made
