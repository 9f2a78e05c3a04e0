"""Random modules, run by torch or by any other way to treat the functions that bend.

A program is a list of steps over a growing list of values (rows, width). What bends goes through a
`Functions`; `Plain` calls torch as users do, in many spellings, in place and on views.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 5
#: Elementwise functions, each in all the ways that torch has to call it.
SPELLINGS: dict[str, list[Callable[[Tensor], Tensor]]] = {
    "tanh": [torch.tanh, Tensor.tanh, F.tanh, nn.Tanh(), lambda z: z.clone().tanh_()],
    "sigmoid": [torch.sigmoid, nn.Sigmoid(), lambda z: torch.sigmoid_(z.clone())],
    "relu": [F.relu, torch.relu, nn.ReLU(), lambda z: nn.ReLU(inplace=True)(z.clone())],
    "gelu": [F.gelu, nn.GELU()],
    "gelu-tanh": [lambda z: F.gelu(z, approximate="tanh"), nn.GELU("tanh")],
    "silu": [F.silu, nn.SiLU(), lambda z: F.silu(z.clone(), inplace=True)],
    "softplus": [F.softplus, nn.Softplus()],
    "elu": [F.elu, nn.ELU()],
    "leaky_relu": [lambda z: F.leaky_relu(z, 0.2), nn.LeakyReLU(0.2)],
    "mish": [F.mish, nn.Mish()],
    "hardswish": [F.hardswish, nn.Hardswish()],
    "sin": [torch.sin, Tensor.sin],
    "exp": [lambda z: torch.exp(0.3 * z)],
    "abs": [torch.abs, abs],
    "atan": [torch.atan],
    "sqrt": [lambda z: torch.sqrt(z.sigmoid())],
}
#: Of those, the ones with three continuous derivatives.
SMOOTH = {"tanh", "sigmoid", "gelu", "gelu-tanh", "silu", "softplus", "mish", "sin", "atan"}


@dataclass(frozen=True)
class Step:
    """``values.append(kind(values[i] for i in inputs))`` with what else it needs."""

    kind: str
    inputs: tuple[int, ...]
    detail: Any = None


class Functions:
    """What bends, to be overridden."""

    def elementwise(self, name: str, spelling: int, z: Tensor) -> Tensor:
        raise NotImplementedError

    def part_in_place(self, name: str, z: Tensor, width: int) -> Tensor:
        """``z`` with the function on its first columns."""
        raise NotImplementedError

    def softmax(self, z: Tensor) -> Tensor:
        raise NotImplementedError

    def layer_norm(self, z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        raise NotImplementedError

    def rms_norm(self, z: Tensor, weight: Tensor) -> Tensor:
        raise NotImplementedError


class Plain(Functions):
    """Torch itself."""

    def elementwise(self, name: str, spelling: int, z: Tensor) -> Tensor:
        ways = SPELLINGS[name]
        return ways[spelling % len(ways)](z)

    def part_in_place(self, name: str, z: Tensor, width: int) -> Tensor:
        whole = z.clone()
        part = whole[:, :width]
        part.tanh_() if name == "tanh" else part.relu_()
        return whole

    def softmax(self, z: Tensor) -> Tensor:
        return torch.softmax(z, -1)

    def layer_norm(self, z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(z, z.shape[-1:], weight, bias)

    def rms_norm(self, z: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(z, z.shape[-1:], weight, 1e-6)


class Program(nn.Module):
    """A random network with 4 to 14 steps, of 6 inputs and 3 outputs, in float64."""

    def __init__(self, seed: int, *, smooth: bool = False, norms: bool = True) -> None:
        super().__init__()
        self.draw = np.random.default_rng(seed)
        self.functions: Functions = Plain()
        self.weights = nn.ParameterDict()
        self.steps: list[Step] = []
        self.names = sorted(SMOOTH) if smooth else sorted(SPELLINGS)
        self.in_place, self.norms = ["tanh"] if smooth else ["tanh", "relu"], norms
        self.widths, self.unread = [6], {0}
        self._linear(0, 8)
        for _ in range(self.draw.integers(4, 14)):
            self._extend()
        unread = tuple(sorted(self.unread))
        self._add("cat", unread, sum(self.widths[i] for i in unread))
        self._linear(len(self.widths) - 1, 3)
        del self.draw

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, self.functions)

    def run(self, x: Tensor, functions: Functions) -> Tensor:
        values = [x]
        for step in self.steps:
            values.append(self._value(step, [values[i] for i in step.inputs], functions))
        return values[-1]

    def _value(self, step: Step, inputs: list[Tensor], functions: Functions) -> Tensor:
        x, detail = inputs[0], step.detail
        match step.kind:
            case "linear":
                return F.linear(x, self.weights[f"{detail}w"], self.weights[f"{detail}b"])
            case "elementwise":
                return functions.elementwise(*detail, x)
            case "in place":
                return functions.part_in_place(*detail[:1], x, detail[1])
            case "piece":
                return x.chunk(2, 1)[detail]
            case "columns":
                return x[:, detail]
            case "cat":
                return torch.cat(inputs, 1)
            case "add":
                return x + inputs[1]
            case "add in place":
                value = x.clone()
                value += inputs[1]
                return value
            case "product":
                return x * inputs[1]
            case "mask":
                return x.masked_fill(detail, 0.0)
            case "where":
                return torch.where(detail, x, inputs[1])
            case "view":
                return x.view(-1, 2, detail // 2).transpose(1, 2).reshape(-1, detail)
            case "stack":
                return torch.stack(inputs, 2).sum(2)
            case "unbind":
                return torch.stack(x.unbind(1)[::-1], 1)
            case "softmax":
                return functions.softmax(x)
            case "layer_norm":
                return functions.layer_norm(
                    x, self.weights[f"{detail}w"], self.weights[f"{detail}b"]
                )
            case "rms_norm":
                return functions.rms_norm(x, self.weights[f"{detail}w"])
            case _:
                raise ValueError(step.kind)

    # how it is drawn

    def _extend(self) -> None:
        i = self._pick()
        width = self.widths[i]
        same = [j for j, w in enumerate(self.widths) if w == width and j != i and j > 0]
        kinds = ["linear", "elementwise", "elementwise", "elementwise", "in place", "columns"]
        kinds += ["mask", "softmax", "unbind"] + self.norms * ["layer_norm", "rms_norm"]
        kinds += ["piece", "view"] * (width % 2 == 0)
        kinds += ["add", "add in place", "product", "where", "stack", "cat"] * bool(same)
        kind = str(self.draw.choice(kinds))
        pair = (i, int(self.draw.choice(same))) if same else (i,)
        match kind:
            case "linear":
                self._linear(i, int(self.draw.choice([4, 6, 8])))
            case "elementwise":
                detail = (str(self.draw.choice(self.names)), int(self.draw.integers(8)))
                self._add(kind, (i,), width, detail)
            case "in place":
                name = str(self.draw.choice(self.in_place))
                self._add(kind, (i,), width, (name, width // 2))
            case "piece":  # both, so that somebody reads the other
                self._add(kind, (i,), width // 2, 0)
                self._add(kind, (i,), width // 2, 1)
            case "columns":
                kept = slice(None, width - 1) if width > 2 else slice(None)
                self._add(kind, (i,), width - (width > 2), kept)
            case "cat":
                self._add(kind, pair, 2 * width)
            case "add" | "add in place" | "product" | "stack":
                self._add(kind, pair, width)
            case "mask":
                self._add(kind, (i,), width, self._mask(width))
            case "where":
                self._add(kind, pair, width, self._mask(width))
            case "view":
                self._add(kind, (i,), width, width)
            case "layer_norm" | "rms_norm":
                self._add(kind, (i,), width, self._weights((width,), 1.0))
            case _:
                self._add(kind, (i,), width)

    def _pick(self) -> int:
        """Mostly a value that nobody has read yet, and narrow enough."""
        fit = [j for j, w in enumerate(self.widths) if 2 <= w <= 16 and j > 0]
        fresh = [j for j in fit if j in self.unread]
        return int(self.draw.choice(fresh if fresh and self.draw.random() < 0.7 else fit))

    def _linear(self, i: int, width: int) -> None:
        """A new layer, or one that is there already."""
        shape = (width, self.widths[i])
        known = [
            step.detail
            for step in self.steps
            if step.kind == "linear" and self.weights[f"{step.detail}w"].shape == shape
        ]
        shared = known and self.draw.random() < 0.4
        name = known[0] if shared else self._weights(shape, 0.0)
        self._add("linear", (i,), width, name)

    def _weights(self, shape: tuple[int, ...], centre: float) -> str:
        name = f"p{len(self.weights)}"
        scale = 1.2 / math.sqrt(shape[-1])
        for part, size, middle in (("w", shape, centre), ("b", shape[:1], 0.0)):
            drawn = self.draw.normal(middle, scale, size)
            self.weights[f"{name}{part}"] = nn.Parameter(torch.from_numpy(drawn))
        return name

    def _mask(self, width: int) -> Tensor:
        return torch.from_numpy(self.draw.random(width) < 0.3)

    def _add(self, kind: str, inputs: tuple[int, ...], width: int, detail: Any = None) -> None:
        self.steps.append(Step(kind, inputs, detail))
        self.unread -= {*inputs}
        self.unread.add(len(self.widths))
        self.widths.append(width)


def data(seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    draw = np.random.default_rng([seed, 1])
    return torch.from_numpy(draw.normal(size=(ROWS, 6))), torch.from_numpy(
        draw.normal(size=(ROWS, 3))
    )
