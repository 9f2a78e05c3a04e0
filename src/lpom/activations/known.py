"""Every activation by name, and as torch calls it: the lists to join."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from torch import nn

from lpom.activations.base import Activation, Elementwise
from lpom.activations.jumps import Hardshrink, Sign, Staircase, Step, Threshold
from lpom.activations.numerical import GELU, Absolute, Cosine, Gaussian, Hardswish, Mish, SiLU, Sine
from lpom.activations.scalar import (
    CELU,
    ELU,
    SELU,
    Clamp,
    Hardsigmoid,
    Hardtanh,
    Identity,
    LeakyReLU,
    LogSigmoid,
    ReLU,
    ReLU6,
    Sigmoid,
    Softplus,
    Softshrink,
    Softsign,
    Tanh,
)
from lpom.activations.table import Table
from lpom.activations.vector import (
    GroupNorm,
    L2Normalize,
    LayerNorm,
    OneHot,
    RMSNorm,
    Softmax,
    Sparsemax,
    TopK,
)
from lpom.registry import build


def _leaky_relu(negative_slope: float = 0.01, inplace: bool = False) -> Activation:
    return ReLU() if negative_slope == 0 else LeakyReLU(negative_slope)


def _softplus(beta: float = 1.0, threshold: float = 20.0) -> Activation:
    if math.log1p(math.exp(-threshold)) / beta > 1e-8:
        raise ValueError(
            f"nn.Softplus with threshold={threshold:g} jumps there by more than 1e-8; "
            "leave the threshold at 20."
        )
    return Softplus(beta)


def _clamp(min: Any = None, max: Any = None) -> Activation | None:
    if not all(bound is None or isinstance(bound, int | float) for bound in (min, max)):
        return None  # bounds that are computed
    low = -math.inf if min is None else float(min)
    high = math.inf if max is None else float(max)
    if math.isfinite(low) and math.isfinite(high):
        return Hardtanh(low, high)
    if (low, high) == (0, math.inf):
        return ReLU()
    return Clamp(low if math.isfinite(low) else None, high if math.isfinite(high) else None)


def _threshold(threshold: float, value: float, inplace: bool = False) -> Activation | None:
    if value > threshold:
        raise ValueError(_refusal("threshold", f"it jumps down from {value:g} to {threshold:g}"))
    return _clamp(min=threshold) if value == threshold else Threshold(threshold, value)


def _softmax(dim: int | None = None, *_: Any, **__: Any) -> Activation:
    # what may follow, a dtype for the sum, changes the rounding alone
    if dim is None:
        raise ValueError("softmax needs its dimension, got none; write softmax(dim=-1).")
    return Softmax(dim)


def _normalize(p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None) -> Activation:
    if p != 2:
        reason = f"with p={p:g} its derivative is not symmetric; use p=2"
        raise ValueError(_refusal("normalize", reason))
    return L2Normalize(dim, eps)


def _rms_norm(shape: Any, weight: Any = None, eps: float | None = None) -> Activation:
    return RMSNorm(_unweighted("rms_norm", shape, weight), eps)


def _layer_norm(
    shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Activation:
    return LayerNorm(_unweighted("layer_norm", shape, weight, bias), eps)


def _group_norm(
    groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Activation:
    return GroupNorm(_unweighted("group_norm", groups, weight, bias), eps)


def _unweighted(name: str, parameter: Any, *weights: Any) -> Any:
    if any(weight is not None for weight in weights):
        raise ValueError(
            f"{name} with weight or bias is no activation: they belong to the edge above it. Use "
            "it without them and put them into the layer that follows."
        )
    return parameter


Call = Callable[..., Activation | None]


def _plain(kind: Callable[..., Activation]) -> Call:
    """A call whose arguments are the parameters, and whether it is in place."""
    parameters = [field.name for field in fields(kind)]  # type: ignore[arg-type]

    def call(*args: Any, inplace: bool = False, **kwargs: Any) -> Activation:
        if len(args) == len(parameters) + 1 and isinstance(args[-1], bool):
            args = args[:-1]
        return kind(*args, **kwargs)

    return call


#: One of each kind: tests and ``lpom activations`` go through these.
_EXAMPLES: list[Activation] = [
    *(Sigmoid(), Tanh(), ReLU(), LeakyReLU(), ELU(), SELU(), CELU(), Softplus(), LogSigmoid()),
    *(Softsign(), Identity(), Hardtanh(), Hardsigmoid(), ReLU6(), Clamp(), Softshrink()),
    *(Hardshrink(), Threshold(1.0, 0.0), GELU(), SiLU(), Mish(), Hardswish(), Sine(), Cosine()),
    *(Gaussian(), Absolute(), Step(), Sign(), Staircase()),
    Table((-2.0, -0.5, 0.5, 3.0), (-1.0, -0.8, 0.7, 1.0)),
    *(Softmax(), Sparsemax(), TopK(3), OneHot(), L2Normalize()),
    *(RMSNorm((8,)), LayerNorm((8,)), GroupNorm(2)),
]
_CLASSES = {example.name: type(example) for example in _EXAMPLES}
#: Torch functions, each with what makes an activation of the arguments after the input.
_CALLS: dict[str, Call] = {
    **{
        name: _plain(_CLASSES[name])
        for name in (
            "sigmoid tanh relu elu selu celu softsign identity hardsigmoid relu6 hardtanh gelu "
            "silu mish hardswish logsigmoid"
        ).split()
    },
    **{"log_sigmoid": _plain(LogSigmoid), "special_expit": _plain(Sigmoid)},
    **{"sin": _plain(Sine), "cos": _plain(Cosine), "abs": _plain(Absolute)},
    **{"leaky_relu": _leaky_relu, "softplus": _softplus, "threshold": _threshold},
    **{"clamp": _clamp, "clip": _clamp},
    **{"clamp_min": lambda min: _clamp(min=min), "clamp_max": lambda max: _clamp(max=max)},
    "softshrink": lambda lambd=0.5: Softshrink(lambd) if lambd else Identity(),
    "hardshrink": lambda lambd=0.5: Hardshrink(lambd) if lambd else Identity(),
    **{"softmax": _softmax, "_softmax": _softmax, "normalize": _normalize},
    **{"rms_norm": _rms_norm, "layer_norm": _layer_norm, "group_norm": _group_norm},
}
#: Torch modules, each with the call that it makes and the attributes that it calls it with.
_MODULES: dict[type[nn.Module], tuple[str, tuple[str, ...]]] = {
    **{
        kind.module: (name, tuple(field.name for field in fields(kind)))  # type: ignore[arg-type]
        for name, kind in _CLASSES.items()
        if kind.module is not None
    },
    nn.Softplus: ("softplus", ("beta", "threshold")),
    nn.Hardshrink: ("hardshrink", ("lambd",)),
    nn.Threshold: ("threshold", ("threshold", "value")),
    nn.RMSNorm: ("rms_norm", ("normalized_shape", "weight", "eps")),
    nn.LayerNorm: ("layer_norm", ("normalized_shape", "weight", "bias", "eps")),
    nn.GroupNorm: ("group_norm", ("num_groups", "weight", "bias", "eps")),
}
_ALIASES = {  # scikit-learn's and torch's
    **{"logistic": "sigmoid", "log_sigmoid": "logsigmoid", "swish": "silu"},
    **{"sin": "sine", "cos": "cosine", "abs": "absolute"},
}
#: Functions of torch that bend and are no activation here, and why.
UNSUPPORTED = {
    "square": "it has no bound on its slope",
    "softmin": "it falls where softmax rises; use softmax of -z",
    "log_softmax": "its derivative is not symmetric; train on logits with cross-entropy",
}
#: Functions of torch that are flat between jumps, and ours that are trained through them.
JUMPING = {
    "sign": "sign",
    "sgn": "sign",
    "heaviside": "step",
    **dict.fromkeys("round floor ceil trunc fix".split(), "staircase"),
}
_UNSUPPORTED_MODULES = {nn.Softmin: "softmin", nn.LogSoftmax: "log_softmax"}


def names() -> list[str]:
    """Names of elementwise activations that `get` makes without further arguments."""
    return [
        name
        for name, kind in _CLASSES.items()
        if kind.elementwise and not any(field.default is MISSING for field in fields(kind))  # type: ignore[arg-type]
    ]


def vector_names() -> list[str]:
    """Names of activations of whole slices; some need an argument, such as the shape of a norm."""
    return [name for name, kind in _CLASSES.items() if not kind.elementwise]


def examples() -> list[Activation]:
    """One of each kind that has a name: with default parameters, or with some where it has none.

    They all take an input of shape ``(m, 4, 8)``.
    """
    return list(_EXAMPLES)


def get(activation: str | Activation | nn.Module, **params: Any) -> Activation:
    """The activation of this name, with parameters; one that is made already is returned.

    That may be a torch module too, see `from_module`.
    """
    if isinstance(activation, nn.Module):
        activation = from_module(activation)
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


def from_call(
    name: str, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> Activation | None:
    """The activation that a call of a torch function or method computes.

    Parameters
    ----------
    name : str
        Its bare name, such as ``"relu"``, ``"relu_"`` or ``"layer_norm"``.
    args, kwargs
        What it is given after the input tensor, in the order of ``torch.nn.functional``.

    Returns
    -------
    Activation or None
        None if the function is no activation.

    Raises
    ------
    ValueError
        If it is one that has no place in a graph of states, or has arguments that LPOM cannot
        train with.

    Examples
    --------
    >>> from_call("leaky_relu_", (0.2,))
    LeakyReLU(negative_slope=0.2)
    >>> from_call("clamp_min", (0,))
    ReLU()
    """
    name = name.rstrip("_")
    if name in UNSUPPORTED:
        raise ValueError(_refusal(name, UNSUPPORTED[name]))
    if name in JUMPING:
        raise ValueError(
            f"torch's {name} has the derivative 0, so nothing below it would learn. Use "
            f"lpom.activations.Elementwise(lpom.activations.get({JUMPING[name]!r})) instead, which "
            "is trained through its jumps."
        )
    if name not in _CALLS:
        return None
    named = dict(kwargs or {})
    try:
        return _CALLS[name](*args, **named)
    except TypeError as error:
        raise ValueError(
            f"{name} was called with arguments {args} and {named}, which are not those of "
            f"torch.nn.functional ({error}); write it in that form."
        ) from error


def is_activation(module: nn.Module) -> bool:
    """Whether `from_module` has an answer: an activation, or the reason why this is none.

    What has weights of its own is not one: the scale and shift of a norm belong to the edge above.
    """
    kinds = {*_MODULES, *_UNSUPPORTED_MODULES, nn.Softmax2d, Elementwise}
    return type(module) in kinds and next(module.parameters(), None) is None


def from_module(module: nn.Module) -> Activation:
    """The activation that a torch module computes."""
    kind = type(module)
    if isinstance(module, Elementwise):
        return module.activation
    if kind in _UNSUPPORTED_MODULES:
        name = _UNSUPPORTED_MODULES[kind]
        raise ValueError(_refusal(f"nn.{kind.__name__}", UNSUPPORTED[name]))
    if kind is nn.Softmax2d:
        return Softmax(-3)
    if kind not in _MODULES:
        raise TypeError(
            f"no activation is known for the module {kind.__name__}; supported are "
            f"{', '.join(known.__name__ for known in [*_MODULES, Elementwise])}. For another "
            "function use lpom.activations.Elementwise(lpom.activations.from_function(phi))."
        )
    name, attributes = _MODULES[kind]
    activation = from_call(name, tuple(getattr(module, key) for key in attributes))
    assert activation is not None  # every module has a call
    return activation


def _refusal(name: str, reason: str) -> str:
    return f"{name} is not supported where states move on a graph: {reason}."
