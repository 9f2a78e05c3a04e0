"""Functions that torch.fx records as one call, whatever they do inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch.nn.functional as F
from torch import Tensor, fx, nn

P = ParamSpec("P")
R = TypeVar("R")


def recorded(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Record calls of a function under a name that `lpom.graph.operations` has in its table.

    For what asks tensors about more than their sizes: their dtype, say.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        function.__name__ = name

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return cast(R, record(function, *args, **kwargs))

        return call

    return decorate


def record(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function; with a proxy among its arguments it becomes a node of the trace."""
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, fx.Proxy):
            return arg.tracer.create_proxy("call_function", function, args, kwargs)
    return function(*args, **kwargs)


class Dropping:
    """Dropout with the rate and in the mode that a module has when it is called."""

    __name__ = "dropout"
    __qualname__ = "dropout"

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: Tensor) -> Tensor:
        return F.dropout(x, float(self.module.dropout), self.module.training)  # type: ignore[arg-type]


def dropout_of(module: nn.Module, x: Tensor) -> Tensor:
    """``x`` after the dropout of a module that has its rate as ``module.dropout``."""
    dropped: Tensor = record(Dropping(module), x)
    return dropped
