"""Monotone activations, each with its primitive, conjugate and Fenchel-Young gap.

>>> get("leaky_relu", negative_slope=0.1)
LeakyReLU(negative_slope=0.1)

`Activation` is what a training method sees, `get` finds one by name, `from_module` recognises
torch's own, and `from_function` takes any non-decreasing Lipschitz function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn

from lpom.activations.base import Activation, Elementwise
from lpom.activations.custom import Custom, from_function
from lpom.activations.piecewise import Identity, LeakyReLU, ReLU
from lpom.activations.ramps import Hardsigmoid, Hardtanh, ReLU6, Sign, Staircase, Step
from lpom.activations.smooth import ELU, Sigmoid, Softplus, Tanh
from lpom.registry import build

__all__ = [
    "ELU",
    "Activation",
    "Custom",
    "Elementwise",
    "Hardsigmoid",
    "Hardtanh",
    "Identity",
    "LeakyReLU",
    "ReLU",
    "ReLU6",
    "Sigmoid",
    "Sign",
    "Softplus",
    "Staircase",
    "Step",
    "Tanh",
    "from_function",
    "from_module",
    "get",
    "names",
]

_CLASSES: dict[str, type[Activation]] = {
    "sigmoid": Sigmoid,
    "tanh": Tanh,
    "relu": ReLU,
    "leaky_relu": LeakyReLU,
    "elu": ELU,
    "softplus": Softplus,
    "identity": Identity,
    "hardtanh": Hardtanh,
    "hardsigmoid": Hardsigmoid,
    "relu6": ReLU6,
    "step": Step,
    "sign": Sign,
    "staircase": Staircase,
}
_ALIASES = {"logistic": "sigmoid"}  # scikit-learn's


def names() -> list[str]:
    """Names that `get` knows."""
    return list(_CLASSES)


def get(activation: str | Activation | nn.Module, **params: Any) -> Activation:
    """The activation of this name, with parameters; one that is made already is returned.

    That may be a torch module too, see `from_module`.
    """
    if isinstance(activation, nn.Module):
        activation = from_module(activation)
    if str(activation).lower() in {kind.__name__.lower() for kind in _NOT_MONOTONE}:
        raise ValueError(_not_monotone(str(activation)))
    return build(
        "activation",
        Activation,
        _CLASSES,
        activation,
        params,
        aliases=_ALIASES,
        separator="_",
        hint=" For a function of your own see lpom.activations.from_function.",
    )


def _softplus(module: nn.Softplus) -> Activation:
    beta, threshold = float(module.beta), float(module.threshold)
    if math.log1p(math.exp(-threshold)) / beta > 1e-8:
        raise ValueError(
            f"nn.Softplus with threshold={threshold:g} jumps there by more than 1e-8; "
            "leave the threshold at 20."
        )
    return Softplus(beta)


_FROM_MODULE: dict[type[nn.Module], Callable[[Any], Activation]] = {
    nn.ReLU: lambda module: ReLU(),
    nn.LeakyReLU: lambda module: LeakyReLU(module.negative_slope),
    nn.Sigmoid: lambda module: Sigmoid(),
    nn.Tanh: lambda module: Tanh(),
    nn.ELU: lambda module: ELU(module.alpha),
    nn.Softplus: _softplus,
    nn.Identity: lambda module: Identity(),
    nn.Hardtanh: lambda module: Hardtanh(module.min_val, module.max_val),
    nn.Hardsigmoid: lambda module: Hardsigmoid(),
    nn.ReLU6: lambda module: ReLU6(),
    Elementwise: lambda module: module.activation,
}
_NOT_MONOTONE = (nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish)


def from_module(module: nn.Module) -> Activation:
    """The activation that a torch module computes."""
    kind = type(module)
    if kind in _FROM_MODULE:
        return _FROM_MODULE[kind](module)
    if kind in _NOT_MONOTONE:
        raise ValueError(_not_monotone(f"nn.{kind.__name__}"))
    if any(word in kind.__name__ for word in ("Dropout", "Norm")):
        raise TypeError(
            f"{kind.__name__} is not an elementwise function that never decreases, so LPOM cannot "
            "train through it; leave it out."
        )
    raise TypeError(
        f"no activation is known for the module {kind.__name__}; supported are "
        f"{', '.join(made.__name__ for made in _FROM_MODULE)}. For another non-decreasing "
        "function use lpom.activations.Elementwise(from_function(phi, lipschitz=...))."
    )


def _not_monotone(name: str) -> str:
    return (
        f"{name} is not monotone: it falls before it rises. LPOM needs an activation that never "
        "decreases, because its primitive must be convex. Use softplus, ELU, leaky ReLU or ReLU "
        "instead."
    )
