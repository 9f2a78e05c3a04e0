"""Every function of torch that bends, by its name, and how the rule answers for it.

Functions of single elements are read at displaced points as they are; `lpom.written` has those that
are rows or made of others.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lpom import activations, attention, recurrent, written
from lpom.rows import Rows
from lpom.rule import Device, Jump, Pointwise

if TYPE_CHECKING:
    from lpom.mode import Lifting


def ours(mode: Lifting, activation: Any, z: Tensor) -> Any:
    """An activation of ours."""
    if not z.requires_grad or isinstance(activation, activations.Identity):
        return activation.phi(z)
    name, call = activation.name, (z,)
    if activation.measured:
        return written.by(Device, z, activation, mode.rule_for(name, "elementwise"))
    if activation.jumps:
        return written.by(Jump, z, activation, mode.rule_for(name, "jump"))
    if isinstance(activation, activations.ReLU):
        return mode.rectify(z, mode.rule_for(name, "elementwise"))
    if activation.elementwise:
        return written.by(Pointwise, activation.phi, mode.rule_for(name, "elementwise"), None, z)
    if isinstance(activation, activations.Softmax):
        return written.softmax(mode, None, name, call, {"dim": activation.dim})
    if isinstance(activation, activations.LayerNorm):
        return written.layer_norm(mode, None, name, (z, activation.shape), {"eps": activation.eps})
    if isinstance(activation, activations.RMSNorm):
        return written.rms_norm(mode, None, name, (z, activation.shape), {"eps": activation.eps})
    if isinstance(activation, activations.GroupNorm):
        return written.group_norm(mode, None, name, (z, activation.groups), {"eps": activation.eps})
    dim, rule = activation.dim, mode.rule_for(name, "rows")

    def phi(z: Tensor) -> Tensor:
        moved: Tensor = activation.phi(z.movedim(-1, dim)).movedim(dim, -1)
        return moved

    return written.along(z, dim, lambda z: written.by(Rows, z, phi, rule))


# What is done with each function that bends, by its name. A handler has the mode, the function, its
# bare name, with a "_" where it writes over its input, and what it is called with.


def _plainly(call: Any) -> Any:
    """Run what is no real, dense tensor's as torch does."""

    def handled(mode: Lifting, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and (
                value.is_complex()
                or value.layout != torch.strided
                or value.is_nested
                or _batched(value)
            ):
                return func(*args, **kwargs)
        return call(mode, func, name, args, kwargs)

    return handled


def _batched(value: Tensor) -> bool:
    """Whether torch.func.vmap or grad runs over it, which know nothing of the rule."""
    if torch.compiler.is_compiling():
        return False
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


class Kind(NamedTuple):
    """An elementwise function: how far its argument may move, relative to the displacement."""

    room: Callable[[Tensor], Tensor] | None = None
    jumps: bool = False


def _inside(z: Tensor) -> Tensor:
    return (1 - z.abs()).clamp_min(0)


#: Powers that are products.
WHOLE = (1, 2, 3, 4)

_ELEMENTWISE: dict[str, Kind] = {
    **dict.fromkeys(
        "sigmoid expit tanh relu relu6 leaky_relu elu selu celu gelu silu mish hardswish "
        "hardsigmoid hardtanh softplus logsigmoid log_sigmoid softsign tanhshrink softshrink "
        "threshold _threshold abs absolute sin cos tan sinh cosh atan arctan asinh arcsinh exp "
        "exp2 expm1 erf erfc clamp clip clamp_min clamp_max maximum minimum fmax fmin sinc i0 i0e "
        "i1 i1e log_ndtr ndtr logaddexp logaddexp2 atan2 arctan2 hypot nan_to_num rpow bessel_j0 "
        "bessel_j1".split(),
        Kind(),
    ),
    **dict.fromkeys(
        "log log2 log10 sqrt rsqrt reciprocal pow float_power lgamma digamma polygamma gammaln "
        "xlogy xlog1py".split(),
        Kind(torch.abs),
    ),
    "log1p": Kind(lambda z: (1 + z).abs()),
    "acosh": Kind(lambda z: (z - 1).abs()),
    "arccosh": Kind(lambda z: (z - 1).abs()),
    **dict.fromkeys("asin arcsin acos arccos atanh arctanh erfinv".split(), Kind(_inside)),
    "logit": Kind(lambda z: torch.minimum(z, 1 - z).clamp_min(0)),
    "ndtri": Kind(lambda z: torch.minimum(z, 1 - z).clamp_min(0)),
    **dict.fromkeys(
        "sign sgn round floor ceil trunc fix frac heaviside hardshrink".split(), Kind(jumps=True)
    ),
}


def _elementwise(mode: Lifting, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    if isinstance(func, FunctionType) and any(a is True for a in args):
        args, kwargs = _bound(func, args, kwargs)
    in_place = name in _IN_PLACE or bool(kwargs.get("inplace"))
    bare = _IN_PLACE.get(name, name)
    kwargs = {k: v for k, v in kwargs.items() if k not in ("inplace", "out")}
    target = args[0]
    if in_place:
        mode.spare(target)
        func = _FUNCTIONS.get(bare, func)
        args = (target.clone(), *args[1:])
    elif bare == "rpow":
        func, args = torch.pow, (args[1], args[0])
    if bare == "pow" and _is_product(args, kwargs):
        product = func(*args, **kwargs)
        return target.copy_(product) if in_place else product
    if bare == "pow" and not isinstance(args[0], Tensor):
        bare = "rpow"
    kind = _ELEMENTWISE[bare]
    names = [k for k, v in kwargs.items() if isinstance(v, Tensor) and v.requires_grad]
    places = [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.requires_grad]
    tensors = [*(args[i] for i in places), *(kwargs[k] for k in names)]
    if bare == "relu":
        x = mode.rectify(tensors[0], mode.rule_for(bare, "elementwise"))
        return target.copy_(x) if in_place else x

    def phi(*moved: Tensor) -> Any:
        given, named = list(args), dict(kwargs)
        for place, tensor in zip(places, moved, strict=False):
            given[place] = tensor
        for key, tensor in zip(names, moved[len(places) :], strict=True):
            named[key] = tensor
        return func(*given, **named)

    room = kind.room
    if (
        room is not None
        and bare in ("pow", "float_power", "xlogy", "xlog1py")
        and places[:1] != [0]
    ):
        room = None  # the exponent alone moves
    if kind.jumps:
        x = written.by(Jump, tensors[0], _Jumping(phi), mode.rule_for(bare, "jump"))
    else:
        x = written.by(Pointwise, phi, mode.rule_for(bare, "elementwise"), room, *tensors)
    return target.copy_(x) if in_place else x


class _Jumping(NamedTuple):
    """A jump of torch's, as the rule reads those of ours."""

    phi: Callable[..., Tensor]
    elementwise: bool = True

    def smoothed(self, width: float) -> _Jumping:
        """The mean of phi at both ends of a window: what can be known of it by its values."""
        phi = self.phi
        return _Jumping(lambda z: (phi(z + width / 2) + phi(z - width / 2)) / 2)


def _is_product(args: Any, kwargs: Any) -> bool:
    """A whole power is a product of a state with itself, which is an edge."""
    exponent = args[1] if len(args) > 1 else kwargs.get("exponent")
    return isinstance(exponent, int | float) and exponent in WHOLE


def _bound(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments by name but the first, so that ``inplace`` is found."""
    code = func.__code__
    names = code.co_varnames[: code.co_argcount]
    return args[:1], dict(zip(names[1:], args[1:], strict=False)) | kwargs


def _divide(mode: Lifting, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """A product with the reciprocal, which alone bends."""
    a, b = args[0], args[1] if len(args) > 1 else kwargs["other"]
    if name in ("rdiv", "rtruediv"):
        a, b = b, a
    if not isinstance(b, Tensor) or not b.requires_grad or kwargs.get("rounding_mode"):
        return func(*args, **kwargs)
    rule = mode.rule_for("reciprocal", "elementwise")
    inverse = written.by(Pointwise, torch.reciprocal, rule, torch.abs, b)
    return a.mul_(inverse) if name in _IN_PLACE else a * inverse


def _attention(mode: Lifting, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    return attention.attention(mode.rule_for("softmax", "softmax"), *args, **kwargs)


def _recurrent(mode: Lifting, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    return recurrent.run(mode, func, name, args, kwargs)


def _two_tensors(mode: Lifting, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """max and min of two tensors are elementwise; of one they choose, which is an edge."""
    if len(args) > 1 and isinstance(args[1], Tensor) or "other" in kwargs:
        pair = torch.maximum if name == "max" else torch.minimum
        return _elementwise(mode, pair, pair.__name__, args, kwargs)
    return func(*args, **kwargs)


Handler = Callable[..., Any]
_BY_NAME: dict[str, Handler] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(("div", "divide", "true_divide", "truediv", "rdiv", "rtruediv"), _divide),
    **dict.fromkeys(("softmax", "softmin"), written.softmax),
    "log_softmax": written.log_softmax,
    "logsumexp": written.logsumexp,
    "layer_norm": written.layer_norm,
    "rms_norm": written.rms_norm,
    "group_norm": written.group_norm,
    "instance_norm": written.instance_norm,
    "norm": written.vector_norm,
    "linalg_vector_norm": written.vector_norm,
    "linalg_norm": written.matrix_norm,
    "std": written.std,
    "std_mean": written.std,
    "cosine_similarity": written.cosine,
    "cdist": written.distance,
    "pairwise_distance": written.distance,
    "glu": written.glu,
    "prelu": written.prelu,
    "max": _two_tensors,
    "min": _two_tensors,
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(recurrent.NAMES, _recurrent),
}
#: By every name that torch has for the call: what handles it, and its bare name.
KNOWN: dict[str, tuple[Handler, str]] = {
    form: (_plainly(handler), f"{name}_" if form in (f"{name}_", f"__i{name}__") else name)
    for name, handler in _BY_NAME.items()
    for form in (name, f"{name}_", f"__{name}__", f"__i{name}__", f"special_{name}")
}
_IN_PLACE = {f"{name}_": name for name in _BY_NAME}
#: The function that gives a new tensor, for those that write over theirs.
_FUNCTIONS: dict[str, Any] = {
    name: getattr(owner, name)
    for name in _ELEMENTWISE
    for owner in (F, Tensor, torch)
    if callable(getattr(owner, name, None))
}


def _opened(function: FunctionType) -> FunctionType:
    """A function of torch written in Python, such that its calls are seen one by one.

    torch hands a whole call over to a mode by what it asks first; the copy is told that there is
    none.
    """
    none = dict.fromkeys(
        ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"),
        lambda *tensors: False,
    )
    spaces = {**function.__globals__, **none}
    copy = FunctionType(
        function.__code__, spaces, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


#: Losses are no part of the network, and keep their derivative.
OPENED = {
    function: _opened(function)
    for name in (
        "multi_head_attention_forward",
        "normalize",
        "gumbel_softmax",
        "local_response_norm",
        "lp_pool1d",
        "lp_pool2d",
        "lp_pool3d",
        "tanhshrink",
    )
    for function in [getattr(F, name)]
}
