"""How a step runs the model: plainly, through torch's compiler, or with products in bfloat16."""

from __future__ import annotations

import signal
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lpom.checks import check_choice
from lpom.exceptions import warn
from lpom.methods import Method
from lpom.methods.base import Runner, main_output, tensors_of

#: Numbers drawn in a step (dropout) come from torch's generator, as without the compiler.
_OPTIONS: dict[str, Any] = {"fallback_random": True}


class Compiled:
    """A model through ``torch.compile``, compiled at the first batch for inputs of its shapes.

    Inputs of other shapes, as the last batch of an epoch may have, go through the plain model. So
    do all where the compiler can't be had or fails, and a warning says why.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.run: Runner | None = None
        self.shapes: list[torch.Size] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        shapes = [part.shape for part in tensors_of((*args, *kwargs.values()))]
        if self.run is None:
            self.run, self.shapes = self._compiled(args, kwargs), shapes
        return (self.run if shapes == self.shapes else self.model)(*args, **kwargs)

    def _compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Runner:
        try:
            with warnings.catch_warnings(), _untouched(self.model), torch.enable_grad():
                warnings.simplefilter("ignore")
                fast: Runner = torch.compile(self.model, dynamic=False, options=_OPTIONS)
                main_output(fast(*args, **kwargs)).sum().backward()
        except Exception as error:  # the compiler's own, and whatever it could not follow
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            warn(
                f"the step could not be compiled ({reason[:300]}); the uncompiled step is used. "
                "torch.compile needs a compiler for C++, and a model whose Python does not depend "
                "on values of tensors; leave compile out.",
                UserWarning,
            )
            return self.model
        return fast


class Rounded:
    """A model under ``torch.autocast``: factors of its products are rounded to bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.device = next(model.parameters()).device.type

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device, torch.bfloat16):
            return self.model(*args, **kwargs)


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Buffers, gradients and random numbers are afterwards what they were."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def check_runner(
    compile: bool, precision: str | None, method: Method[Any], weights: list[Tensor]
) -> None:
    """Raise, and say why, where ``compile`` or ``precision`` can't be had with this method."""
    if not compile and precision is None:
        return
    if compile and precision is not None:
        raise ValueError(
            "compile=True is for steps in the precision of the weights; leave compile or "
            "precision out."
        )
    wanted = (
        "is for methods whose step runs the model: back-propagation, and 'lpom' without mu, with "
        f"one sweep and adaptive weights; got {method!r}."
    )
    if compile:
        if not method.runs_model:
            warn(f"compile=True {wanted} The uncompiled step is used.", UserWarning)
        return
    check_choice("precision", precision, ("bf16",))
    if not method.runs_model:
        raise ValueError(f"precision={precision!r} {wanted}")
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
    program = (
        "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); assert (a @ a == 64).all();"
        "x = torch.ones(2, 8, 4, 4, dtype=a.dtype); torch.conv2d(x, torch.ones(8, 8, 3, 3).to(x))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    if done.returncode < 0:
        return f"here one ends the process ({signal.Signals(-done.returncode).name})"
    errors = done.stderr.strip().splitlines() or ["without a message"]
    return f"here one fails ({errors[-1]})"
