"""Every activation by name, and as torch calls it: the one list to join.

A row of `_KNOWN` has an example, the torch functions that compute its kind, each with its arguments
after the input, and the torch modules, each with what makes it a call of the first function. Tests
and ``lpom activations`` go through the examples.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from torch import nn

from lpom.activations.base import Activation, Elementwise
from lpom.activations.exponential import CELU, ELU, SELU
from lpom.activations.norms import GroupNorm, L2Normalize, LayerNorm, RMSNorm
from lpom.activations.piecewise import Identity, LeakyReLU, ReLU
from lpom.activations.ramps import Hardsigmoid, Hardtanh, ReLU6, Sign, Staircase, Step
from lpom.activations.smooth import LogSigmoid, Sigmoid, Softplus, Softsign, Tanh
from lpom.activations.table import Table
from lpom.activations.thresholds import Clamp, Hardshrink, Softshrink, Threshold
from lpom.activations.vector import OneHot, Softmax, Sparsemax, TopK
from lpom.registry import build


def _leaky_relu(negative_slope: float = 0.01, inplace: bool = False) -> Activation:
    return ReLU() if negative_slope == 0 else LeakyReLU(negative_slope)


def _elu(
    alpha: float = 1.0, scale: float | bool = 1.0, input_scale: float = 1.0, inplace: bool = False
) -> Activation:
    # the functional form has ``inplace`` second, the operator below it two scales
    if isinstance(scale, bool) or (scale, input_scale) == (1, 1):
        return ELU(alpha)
    if (alpha, scale, input_scale) == (SELU.alpha, SELU.scale, 1):
        return SELU()
    if scale == 1 and math.isclose(alpha * input_scale, 1):
        return CELU(alpha)
    raise ValueError(
        f"elu with alpha={alpha:g}, scale={scale:g} and input_scale={input_scale:g} is none of "
        "ELU, CELU and SELU; use one of these."
    )


def _softplus(beta: float = 1.0, threshold: float = 20.0) -> Activation:
    if math.log1p(math.exp(-threshold)) / beta > 1e-8:
        raise ValueError(
            f"nn.Softplus with threshold={threshold:g} jumps there by more than 1e-8; "
            "leave the threshold at 20."
        )
    return Softplus(beta)


def _hardtanh(min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Activation:
    return Hardtanh(min_val, max_val)


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
        raise ValueError(_refusal("threshold", f"it falls from {value:g} to {threshold:g}"))
    return _clamp(min=threshold) if value == threshold else Threshold(threshold, value)


def _softshrink(lambd: float = 0.5) -> Activation:
    return Identity() if lambd == 0 else Softshrink(lambd)


def _hardshrink(lambd: float = 0.5) -> Activation:
    return Identity() if lambd == 0 else Hardshrink(lambd)


def _softmax(dim: int | None = None, *_: Any, **__: Any) -> Activation:
    # what may follow, a dtype for the sum, changes the rounding alone
    if dim is None:
        raise ValueError("softmax needs its dimension, got none; write softmax(dim=-1).")
    return Softmax(dim)


def _normalize(p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None) -> Activation:
    if p != 2:
        reason = f"with p={p:g} its derivative is not symmetric"
        raise ValueError(_refusal("normalize", reason, "Use p=2."))
    return L2Normalize(dim, eps)


def _rms_norm(shape: Any, weight: Any = None, eps: float | None = None) -> Activation:
    _without_weights("rms_norm", weight)
    return RMSNorm(shape, eps)


def _layer_norm(
    shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Activation:
    _without_weights("layer_norm", weight, bias)
    return LayerNorm(shape, eps)


def _group_norm(
    groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Activation:
    _without_weights("group_norm", weight, bias)
    return GroupNorm(groups, eps)


def _without_weights(name: str, *weights: Any) -> None:
    if any(weight is not None for weight in weights):
        raise ValueError(
            f"{name} with weight or bias is no activation: they belong to the edge above it. Use "
            "it without them and put them into the layer that follows."
        )


Call = Callable[..., Activation | None]
Arguments = Callable[[Any], tuple[Any, ...]]


@dataclass(frozen=True)
class _Known:
    example: Activation
    calls: Mapping[str, Call] = field(default_factory=dict)
    modules: Mapping[type[nn.Module], Arguments] = field(default_factory=dict)


def _plain(kind: Callable[[], Activation]) -> Call:
    """A call without parameters of its own."""
    return lambda inplace=False: kind()


def _nothing(module: nn.Module) -> tuple[Any, ...]:
    return ()


_KNOWN = [
    _Known(
        Sigmoid(),
        {"sigmoid": _plain(Sigmoid), "special_expit": _plain(Sigmoid)},
        {nn.Sigmoid: _nothing},
    ),
    _Known(Tanh(), {"tanh": _plain(Tanh)}, {nn.Tanh: _nothing}),
    _Known(ReLU(), {"relu": _plain(ReLU)}, {nn.ReLU: _nothing}),
    _Known(
        LeakyReLU(),
        {"leaky_relu": _leaky_relu},
        {nn.LeakyReLU: lambda made: (made.negative_slope,)},
    ),
    _Known(ELU(), {"elu": _elu}, {nn.ELU: lambda made: (made.alpha,)}),
    _Known(SELU(), {"selu": _plain(SELU)}, {nn.SELU: _nothing}),
    _Known(
        CELU(),
        {"celu": lambda alpha=1.0, inplace=False: CELU(alpha)},
        {nn.CELU: lambda made: (made.alpha,)},
    ),
    _Known(
        Softplus(),
        {"softplus": _softplus},
        {nn.Softplus: lambda made: (made.beta, made.threshold)},
    ),
    _Known(
        LogSigmoid(),
        {"logsigmoid": _plain(LogSigmoid), "log_sigmoid": _plain(LogSigmoid)},
        {nn.LogSigmoid: _nothing},
    ),
    _Known(Softsign(), {"softsign": _plain(Softsign)}, {nn.Softsign: _nothing}),
    _Known(Identity(), {"identity": _plain(Identity)}, {nn.Identity: _nothing}),
    _Known(
        Hardtanh(),
        {"hardtanh": _hardtanh},
        {nn.Hardtanh: lambda made: (made.min_val, made.max_val)},
    ),
    _Known(Hardsigmoid(), {"hardsigmoid": _plain(Hardsigmoid)}, {nn.Hardsigmoid: _nothing}),
    _Known(ReLU6(), {"relu6": _plain(ReLU6)}, {nn.ReLU6: _nothing}),
    _Known(
        Clamp(),
        {
            "clamp": _clamp,
            "clip": _clamp,
            "clamp_min": lambda min: _clamp(min=min),
            "clamp_max": lambda max: _clamp(max=max),
        },
    ),
    _Known(Softshrink(), {"softshrink": _softshrink}, {nn.Softshrink: lambda made: (made.lambd,)}),
    _Known(Hardshrink(), {"hardshrink": _hardshrink}, {nn.Hardshrink: lambda made: (made.lambd,)}),
    _Known(
        Threshold(1.0, 0.0),
        {"threshold": _threshold},
        {nn.Threshold: lambda made: (made.threshold, made.value)},
    ),
    _Known(Step()),
    _Known(Sign()),
    _Known(Staircase()),
    _Known(Table((-2.0, -0.5, 0.5, 3.0), (-1.0, -0.8, 0.7, 1.0))),
    _Known(
        Softmax(),
        {"softmax": _softmax, "_softmax": _softmax},
        {nn.Softmax: lambda made: (made.dim,), nn.Softmax2d: lambda made: (-3,)},
    ),
    _Known(Sparsemax()),
    _Known(TopK(3)),
    _Known(OneHot()),
    _Known(L2Normalize(), {"normalize": _normalize}),
    _Known(
        RMSNorm((8,)),
        {"rms_norm": _rms_norm},
        {nn.RMSNorm: lambda made: (made.normalized_shape, made.weight, made.eps)},
    ),
    _Known(
        LayerNorm((8,)),
        {"layer_norm": _layer_norm},
        {nn.LayerNorm: lambda made: (made.normalized_shape, made.weight, made.bias, made.eps)},
    ),
    _Known(
        GroupNorm(2),
        {"group_norm": _group_norm},
        {nn.GroupNorm: lambda made: (made.num_groups, made.weight, made.bias, made.eps)},
    ),
]
_CLASSES = {row.example.name: type(row.example) for row in _KNOWN}
_CALLS = {name: call for row in _KNOWN for name, call in row.calls.items()}
_MODULES = {
    module: (next(iter(row.calls)), arguments)
    for row in _KNOWN
    for module, arguments in row.modules.items()
}
_ALIASES = {"logistic": "sigmoid", "log_sigmoid": "logsigmoid"}  # scikit-learn's, torch's

_FALLS = "it falls before it rises"
_WAVES = "it rises and falls"
#: Functions of torch that are no gradient of a convex function, and why.
NOT_MONOTONE = {
    "gelu": _FALLS,
    "silu": _FALLS,
    "mish": _FALLS,
    "hardswish": _FALLS,
    "abs": _FALLS,
    "square": _FALLS,
    "sin": _WAVES,
    "cos": _WAVES,
    "softmin": "it falls where softmax rises",
    "log_softmax": "its derivative is not symmetric",
}
#: Functions of torch that are flat between jumps, and ours that are trained through them.
JUMPING = {
    "sign": "sign",
    "sgn": "sign",
    "heaviside": "step",
    **dict.fromkeys("round floor ceil trunc fix".split(), "staircase"),
}
_ADVICE = {"log_softmax": "Leave it out and train on logits with cross-entropy."}
_NOT_MONOTONE_MODULES: dict[type[nn.Module], str] = {
    nn.GELU: "gelu",
    nn.SiLU: "silu",
    nn.Mish: "mish",
    nn.Hardswish: "hardswish",
    nn.Softmin: "softmin",
    nn.LogSoftmax: "log_softmax",
}


def names() -> list[str]:
    """Names of elementwise activations that `get` makes without further arguments."""
    return [name for name, kind in _CLASSES.items() if kind.elementwise and not _required(kind)]


def vector_names() -> list[str]:
    """Names of activations of whole slices; some need an argument, such as the shape of a norm."""
    return [name for name, kind in _CLASSES.items() if not kind.elementwise]


def torch_calls() -> list[str]:
    """Bare names of the torch functions that `from_call` knows."""
    return list(_CALLS)


def torch_modules() -> list[type[nn.Module]]:
    """Classes of torch modules that `from_module` knows."""
    return list(_MODULES)


def examples() -> list[Activation]:
    """One of each kind that has a name: with default parameters, or with some where it has none.

    They all take an input of shape ``(m, 4, 8)``.
    """
    return [row.example for row in _KNOWN]


def get(activation: str | Activation | nn.Module, **params: Any) -> Activation:
    """The activation of this name, with parameters; one that is made already is returned.

    That may be a torch module too, see `from_module`.
    """
    if isinstance(activation, nn.Module):
        activation = from_module(activation)
    if str(activation).lower() in NOT_MONOTONE:
        raise ValueError(_not_monotone(str(activation).lower(), str(activation)))
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
        If it is one that is not the gradient of a convex function, or has arguments that LPOM
        cannot train with.

    Examples
    --------
    >>> from_call("leaky_relu_", (0.2,))
    LeakyReLU(negative_slope=0.2)
    >>> from_call("clamp_min", (0,))
    ReLU()
    """
    name = name.rstrip("_")
    if name in NOT_MONOTONE:
        raise ValueError(_not_monotone(name, name))
    if name in JUMPING:
        raise ValueError(
            f"torch's {name} has the derivative 0, so nothing below it would learn. Use "
            f"lpom.activations.Elementwise(lpom.activations.get({JUMPING[name]!r})) instead, which "
            "is trained through its jumps."
        )
    if name not in _CALLS:
        return None
    call, named = _CALLS[name], dict(kwargs or {})
    try:
        inspect.signature(call).bind(*args, **named)
    except TypeError as error:
        raise ValueError(
            f"{name} was called with arguments {args} and {named}, which are not those of "
            f"torch.nn.functional ({error}); write it in that form."
        ) from error
    return call(*args, **named)


def call_names() -> list[str]:
    """Bare names of torch's functions for which `from_call` has an answer, or a reason why not."""
    return [*_CALLS, *NOT_MONOTONE, *JUMPING]


def is_activation(module: nn.Module) -> bool:
    """Whether `from_module` has an answer: an activation, or the reason why this is none.

    What has weights of its own is not one: the scale and shift of a norm belong to the edge above.
    """
    kind = type(module)
    known = kind in _MODULES or kind in _NOT_MONOTONE_MODULES or kind is Elementwise
    return known and next(module.parameters(), None) is None


def from_module(module: nn.Module) -> Activation:
    """The activation that a torch module computes."""
    kind = type(module)
    if isinstance(module, Elementwise):
        return module.activation
    if kind in _NOT_MONOTONE_MODULES:
        raise ValueError(_not_monotone(_NOT_MONOTONE_MODULES[kind], f"nn.{kind.__name__}"))
    if kind in _MODULES:
        name, arguments = _MODULES[kind]
        made = from_call(name, arguments(module))
        assert made is not None  # every module has a call in its own row
        return made
    if any(word in kind.__name__ for word in ("Dropout", "Norm")):
        raise TypeError(
            f"{kind.__name__} is not an elementwise function that never decreases, so LPOM cannot "
            "train through it; leave it out."
        )
    raise TypeError(
        f"no activation is known for the module {kind.__name__}; supported are "
        f"{', '.join(known.__name__ for known in [*_MODULES, Elementwise])}. For another "
        "non-decreasing function use lpom.activations.Elementwise(from_function(phi, "
        "lipschitz=...))."
    )


def _required(kind: type[Activation]) -> bool:
    """Whether it has a parameter without default."""
    parameters = fields(kind)  # type: ignore[arg-type]
    return any(parameter.default is MISSING for parameter in parameters)


def _not_monotone(name: str, shown: str) -> str:
    return _refusal(shown, NOT_MONOTONE[name], _ADVICE.get(name))


def _refusal(shown: str, reason: str, advice: str | None = None) -> str:
    return (
        f"{shown} is not monotone: {reason}. LPOM needs an activation that never decreases, "
        "because its primitive must be convex. "
        + (advice or "Use softplus, ELU, leaky ReLU or ReLU instead.")
    )
