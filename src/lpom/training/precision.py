"""Products of a step in bfloat16, everything else in float32: half the memory of their factors."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lpom.checks import check_choice
from lpom.methods import LPOM, Batch, Method, State
from lpom.methods.backprop import Backprop
from lpom.methods.optimizers import OptimizerState

_aten = torch.ops.aten


class Bfloat16(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, products and convolutions of float32 have their factors rounded to bfloat16.

    Forwards and backwards, with autograd or without. Sums are made in float32, the result is
    rounded once and goes on in float32; so states, optimisers and weights never leave it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rounded = _ROUNDED.get(func)
        if rounded is None or args[0].dtype != torch.float32:
            return func(*args, **(kwargs or {}))
        return rounded(*args, **(kwargs or {}))


def _half(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16)


def _product(a: Tensor, b: Tensor) -> Tensor:
    return (_half(a) @ _half(b)).float()


def _product_out(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    return out.copy_(_half(a) @ _half(b))


def _added(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    made = _product(a, b)
    made = made if alpha == 1 else made.mul_(alpha)
    return made if beta == 0 else made.add_(c, alpha=beta)


def _added_in_place(
    c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return c.copy_(_added(c, a, b, beta=beta, alpha=alpha))


def _added_out(
    c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor
) -> Tensor:
    if beta != 0:
        return out.copy_(_added(c, a, b, beta=beta, alpha=alpha))
    return out.copy_(_half(a) @ _half(b)).mul_(alpha)


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    made: Tensor = _aten.convolution(_half(x), _half(weight), None, *options).float()
    return made if bias is None else made.add_(bias.view(-1, *[1] * (made.ndim - 2)))


def _convolution_back(R: Tensor, x: Tensor, weight: Tensor, *options: Any) -> Any:
    found = _aten.convolution_backward(_half(R), _half(x), _half(weight), *options)
    return tuple(None if one is None else one.float() for one in found)


_ROUNDED: dict[Any, Callable[..., Any]] = {
    _aten.mm.default: _product,
    _aten.bmm.default: _product,
    _aten.mm.out: _product_out,
    _aten.addmm.default: _added,
    _aten.baddbmm.default: _added,
    _aten.addmm.out: _added_out,
    _aten.addmm_.default: _added_in_place,
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_back,
}


def in_bfloat16(step: Callable[[Batch], Tensor | None]) -> Callable[[Batch], Tensor | None]:
    """A step with its products rounded."""

    def rounded(batch: Batch) -> Tensor | None:
        with Bfloat16():
            return step(batch)

    return rounded


def check_precision(
    precision: str | None, method: Method[Any], state: State, weights: list[Tensor]
) -> None:
    """Raise, and say why, where ``precision`` can't be had."""
    if precision is None:
        return
    check_choice("precision", precision, ("bf16",))
    known = isinstance(method, LPOM | Backprop) and getattr(method, "penalties", None) is None
    if not (known and isinstance(state, OptimizerState) and state.optimizer is not None):
        raise ValueError(
            "precision='bf16' is for methods whose weights an optimiser moves, 'lpom' with "
            "adaptive weights and without penalties, and back-propagation: linear systems and "
            f"proximal steps need float32. Leave precision out for {method!r}."
        )
    others = {str(W.dtype).removeprefix("torch.") for W in weights} - {"float32"}
    if others:
        raise ValueError(
            f"precision='bf16' is for a model in float32, and this one is in {others.pop()}. Use "
            "model.float(), with an estimator X.astype('float32'), or leave precision out."
        )
    check_processor(weights)


def check_processor(weights: Iterable[Tensor]) -> None:
    """Raise where weights are on a processor that can't multiply in bfloat16."""
    if any(W.device.type == "cpu" for W in weights) and (obstacle := why_not()):
        raise ValueError(
            f"precision='bf16' needs a processor that multiplies in bfloat16, and {obstacle}. "
            "Leave precision out."
        )


@cache
def why_not() -> str:
    """What keeps this processor from products in bfloat16, empty if nothing does.

    Tried in another process: an instruction that is not there would end this one.
    """
    tried = (
        "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); assert (a @ a == 64).all();"
        "x = torch.ones(2, 8, 4, 4, dtype=a.dtype); torch.conv2d(x, torch.ones(8, 8, 3, 3).to(x))"
    )
    done = subprocess.run([sys.executable, "-c", tried], capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    if done.returncode < 0:
        return f"here one ends the process ({signal.Signals(-done.returncode).name})"
    said = done.stderr.strip().splitlines() or ["nothing was said"]
    return f"here one fails ({said[-1]})"
