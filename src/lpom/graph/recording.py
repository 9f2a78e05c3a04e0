"""Functions that torch.fx records as one call, whatever they do inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from torch import fx

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
