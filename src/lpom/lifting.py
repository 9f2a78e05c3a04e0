r"""LPOM's step as a backward rule: for other people's loops, and models too dynamic to trace.

One interleaved sweep is back-propagation in which every activation answers what comes down to it,

.. math:: g \;\mapsto\; \mu' (\phi(z) - \phi(z - g / \mu')) \quad\text{in place of}\quad \phi'(z) g

with :math:`\mu' = \mu` for the gradient of one sample. A loss that is a mean over m samples sends
down one m-th of that, so :math:`\mu' = \mu / m`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from types import FrameType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from lpom import activations
from lpom.activations import Activation, Identity
from lpom.activations.base import apply
from lpom.checks import check_choice, check_number
from lpom.exceptions import UntrainableError
from lpom.graph.operations import AFFINE, CONSTANTS, SHAPES, call_name
from lpom.graph.scans import MODES, Call, Scan, called
from lpom.graph.written import FUNCTIONS, written_function

#: Every function and method of torch that is an activation, or looks like one, by its name.
_ACTIVATIONS: dict[Any, str] = {
    getattr(owner, form): name
    for name in activations.call_names()
    for owner in (torch, torch.special, torch.nn.functional, Tensor)
    for form in (name, f"{name}_", f"__{name}__")
    if callable(getattr(owner, form, None))
}
#: Those that write over their input whatever they are given.
_IN_PLACE = frozenset(f for f in _ACTIVATIONS if f.__name__.rstrip("_") + "_" == f.__name__)
#: What is neither an activation nor in the tracer's table, but needs no remark.
_PLAIN = frozenset(
    "set requires_grad retain_grad backward cross_entropy nll_loss mse_loss data item tolist "
    "binary_cross_entropy_with_logits setitem format repr type cpu cuda".split()
)
_SIMPLE = AFFINE | SHAPES | CONSTANTS | _PLAIN


def lift(
    model: nn.Module,
    mu: float = 20.0,
    *,
    reduction: str = "mean",
    batch_dims: int = 1,
    width: float = 2.0,
    strict: bool = False,
) -> Lifted:
    r"""The same module, with LPOM's rule in place of the derivative of every activation.

    Any loop then trains it by LPOM. The weights stay those of ``model``; modules and functional
    calls are lifted alike, whoever wrote the class they stand in, while the model runs.

    Parameters
    ----------
    model : any torch module; it stays as it is, and `unlift` gives it back
    mu : weight of every gap
    reduction : {"mean", "sum"}
        Whether the loss is averaged over the samples or added up.
    batch_dims : int
        How many dimensions of the input are averaged over, from the first: 1 for a prediction per
        sample, 2 for one at every step of (m, steps, ...).
    width : float
        Where an activation jumps, the state moves as if the jump were a ramp of this width.
    strict : bool
        Refuse what can't be lifted (GELU, SiLU, ...), when the model first runs into it. Else it
        keeps its own derivative, and `Lifted.report` lists it.

    Notes
    -----
    Whatever the loss is multiplied by before ``backward()`` goes into the attribute ``scale``,
    so that mu keeps its meaning: 1 / k with gradients accumulated over k batches of a mean loss,
    ``scaler.get_scale()`` with mixed precision; with steps that a mask leaves out of the mean, the
    number of all steps over the number of those that count.

    Examples
    --------
    >>> lifted = lift(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)))
    >>> x = torch.randn(4, 2)
    >>> ((lifted(x) - x[:, :1]) ** 2).mean().backward()
    >>> print(lifted.report())
    lifted: tanh (1)
    """
    return Lifted(
        unlift(model), mu, reduction=reduction, batch_dims=batch_dims, width=width, strict=strict
    )


def unlift(model: nn.Module) -> nn.Module:
    """The plain module inside a lifted one, whose weights it has; another is returned as it is."""
    return model.module if isinstance(model, Lifted) else model


@final
class Lifted(nn.Module):
    """A module that runs as ``module`` does and is differentiated by LPOM's rule; see `lift`.

    Names of weights in ``state_dict`` and attributes are those of ``module``. Where no gradients
    are wanted, and in torch.export, it is the plain module.

    Attributes
    ----------
    module : the plain one
    scale : what the loss is multiplied by before ``backward()``
    """

    def __init__(
        self,
        module: nn.Module,
        mu: float = 20.0,
        *,
        reduction: str = "mean",
        batch_dims: int = 1,
        width: float = 2.0,
        strict: bool = False,
    ) -> None:
        super().__init__()
        check_number("mu", mu)
        check_number("width", width)
        check_number("batch_dims", batch_dims, whole=True)
        check_choice("reduction", reduction, ("mean", "sum"))
        self.module = module
        self.mu, self.reduction, self.batch_dims = mu, reduction, batch_dims
        self.width, self.strict, self.scale = width, strict, 1.0
        self._lifted: dict[str, int] = {}
        self._kept: dict[str, str] = {}
        self.register_state_dict_post_hook(_without_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_with_prefix)  # type: ignore[no-untyped-call]

    @property
    def _orig_mod(self) -> nn.Module:
        """The module by the name that torch.compile's wrapper gives it."""
        return self.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_exporting():
            return self.module(*args, **kwargs)
        self._lifted, self._kept = {}, {}
        rule = _Lifting(self._strength(args, kwargs), self.width, self._lifted, self._kept)
        with rule:
            outputs = self.module(*args, **kwargs)
        if self.strict and self._kept:
            name, reason = next(iter(self._kept.items()))
            raise UntrainableError(
                f"{name} can't be lifted: {reason} With strict=False it keeps its own derivative."
            )
        return outputs

    def report(self) -> str:
        """What the last pass with gradients lifted, and what kept its own derivative and why.

        A pass that torch.compile has made its own leaves no report.
        """
        if not self._lifted and not self._kept:
            return "nothing lifted yet: call the model on a batch first"
        done = [f"{name} ({count})" for name, count in self._lifted.items()]
        lines = [f"lifted: {', '.join(done) or 'nothing'}"]
        lines += [f"kept its own derivative: {name}: {why}" for name, why in self._kept.items()]
        return "\n".join(lines)

    def extra_repr(self) -> str:
        return f"mu={self.mu:g}, reduction={self.reduction!r}, scale={self.scale:g}"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # before it is there, as when a copy is made
                raise
            return getattr(self.module, name)

    def _strength(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
        """mu', which weighs the gap of a gradient as it comes down."""
        if self.reduction == "sum":
            return self.mu * self.scale
        for given in (*args, *kwargs.values()):
            if isinstance(given, nn.utils.rnn.PackedSequence):
                given = given.batch_sizes[0] if self.batch_dims == 1 else given.data
                return self.mu * self.scale / (int(given) if given.ndim == 0 else len(given))
            if isinstance(given, Tensor) and given.ndim >= self.batch_dims:
                count = 1
                for size in given.shape[: self.batch_dims]:
                    count *= size
                return self.mu * self.scale / count
        raise TypeError(
            "a lifted model takes the size of the batch from its first tensor, but it was called "
            "without any; give it one, or lift with reduction='sum'."
        )


class _Lifting(TorchFunctionMode):
    """While it is on, activations are lifted, and what has activations inside is written out."""

    def __init__(
        self, strength: float, width: float, lifted: dict[str, int], kept: dict[str, str]
    ) -> None:
        super().__init__()
        self.strength, self.width = strength, width
        self.lifted, self.kept = lifted, kept

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not torch.compiler.is_compiling() and _is_simple(func):
            return func(*args, **(kwargs or {}))
        named = dict(kwargs or {})
        if not torch.compiler.is_compiling():
            _check_recomputing()
        if func is apply:
            return self._answer(args[1], args[0])
        scanned = None if named else called(func, args)
        if scanned is not None:
            return self._scan(scanned)
        written = written_function(func, args, named)
        if written is not None:
            with self:
                return written(*args, **named)
        z = args[0] if args else named.get("input")
        if not isinstance(z, Tensor) or not z.requires_grad:
            return func(*args, **named)
        name = _ACTIVATIONS.get(func)
        if name is None:
            outputs = func(*args, **named)
            if not torch.compiler.is_compiling():
                self._remark(call_name(func), outputs)
            return outputs
        activation = _activation(name, args[1:], named)
        if not isinstance(activation, Activation):
            self.kept.setdefault(name, activation)
            return func(*args, **named)
        for option in (*args[1:], *named.values()):
            if isinstance(option, torch.dtype):
                z = z.to(option)
        if func in _IN_PLACE or named.get("inplace"):
            return z.copy_(self._answer(z.clone(), activation))
        return self._answer(z, activation)

    def _remark(self, name: str, outputs: Any) -> None:
        """Note what bends the network and is not lifted."""
        if name not in _SIMPLE and isinstance(outputs, Tensor) and outputs.requires_grad:
            self.kept.setdefault(name, _UNKNOWN)

    def _answer(self, z: Tensor, activation: Activation) -> Tensor:
        if not z.requires_grad or isinstance(activation, Identity):
            return activation.phi(z)
        if not torch.compiler.is_compiling():
            self.lifted[activation.name] = self.lifted.get(activation.name, 0) + 1
        answered = _Answer.apply(z, activation, self.strength, self.width)  # type: ignore[no-untyped-call]
        return answered  # type: ignore[no-any-return]

    def _scan(self, call: Call) -> tuple[Tensor, ...]:
        for name, count in call.scan.cell.calls.items():
            self.lifted[name] = self.lifted.get(name, 0) + count * call.n_steps
        x = call.x.transpose(0, 1) if call.batch_first else call.x
        n_start = len(call.start)
        outputs, *ends = _Scanned.apply(  # type: ignore[no-untyped-call]
            call.scan, self.strength, n_start, x, *call.start, *call.weights
        )
        return outputs.transpose(0, 1) if call.batch_first else outputs, *ends


def _check_recomputing() -> None:
    """Raise where the model has a part of itself run again on the way back: unlifted, there."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not Lifted.forward.__code__:
        if frame.f_code.co_filename == checkpoint.__file__:
            raise UntrainableError(
                "the lifted model calls torch.utils.checkpoint, which runs a part of it again in "
                "backward(), where nothing is lifted: its gradients would be wrong. Turn "
                "activation checkpointing off, or lift the part inside, "
                "checkpoint(lpom.lift(part), x)."
            )
        frame = frame.f_back


@lru_cache(maxsize=256)
def _is_simple(func: Any) -> bool:
    """Whether any call of it is neither an activation nor made of some, nor needs a remark."""
    known = func is apply or func in _ACTIVATIONS or func in MODES or func in FUNCTIONS
    return not known and call_name(func) in _SIMPLE


_UNKNOWN = "lpom knows it neither as affine nor as an activation."


def _activation(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Activation | str:
    """What a call computes, or why that is not to be lifted."""
    options = {k: _fixed(v) for k, v in kwargs.items() if k not in ("input", "dtype")}
    rest = tuple(_fixed(a) for a in args if not isinstance(a, torch.dtype))
    if any(isinstance(a, Tensor) for a in (*rest, *options.values())):
        return _UNKNOWN
    if torch.compiler.is_compiling():  # it looks into functions, not into caches
        return _found(name, rest, tuple(options.items()))
    return _cached(name, rest, tuple(options.items()))


def _found(
    name: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
) -> Activation | str:
    try:
        return activations.from_call(name, args, dict(kwargs)) or _UNKNOWN
    except ValueError as error:
        return str(error)


_cached = lru_cache(maxsize=256)(_found)


def _fixed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class _Answer(torch.autograd.Function):
    r""":math:`\phi(z)`; backwards :math:`\mu' (\phi(z) - \phi(z - g / \mu'))`.

    In half precision the difference of two near numbers would be lost, so it is taken in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, activation: Activation, strength: float, width: float
    ) -> Tensor:
        x = activation.phi(z)
        half = z.dtype in (torch.float16, torch.bfloat16)
        # others know the difference without its terms, or can't take this one
        known = not (half or activation.jumps) and activation.subtracts
        ctx.save_for_backward(z, x if known else None)
        ctx.activation, ctx.strength, ctx.width = activation, strength, width
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        z, x = ctx.saved_tensors
        wide = z.float() if z.dtype in (torch.float16, torch.bfloat16) else z
        soft = ctx.activation.smoothed(ctx.width)
        answer = soft.answer(wide, g.to(wide.dtype), ctx.strength, said=x)
        return answer.to(z.dtype), None, None, None


class _Scanned(torch.autograd.Function):
    """Recurrent layers over all steps, each of their activations answering as in `_Answer`."""

    @staticmethod
    def forward(
        ctx: Any, scan: Scan, strength: float, n_start: int, x: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        outputs, ends, ctx.memory = scan.forward(x, tensors[:n_start], tensors[n_start:])
        ctx.scan, ctx.strength, ctx.n_start = scan, strength, n_start
        ctx.save_for_backward(x, outputs, *tensors)  # the outputs, so that nobody writes over them
        ctx.set_materialize_grads(False)
        return outputs, *ends

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        scan, strength, (x, outputs, *tensors) = ctx.scan, ctx.strength, ctx.saved_tensors
        start, weights = tensors[: ctx.n_start], tensors[ctx.n_start :]
        memory, ctx.memory = ctx.memory, None
        if memory is None:  # carried back once more: what was known is written over
            memory = scan.forward(x, start, weights)[2]
        g, *ends = gradients
        if g is None:  # the ends alone were used
            g = x.new_zeros(()).expand(outputs.shape)
        ends = [None if end is None else end / strength for end in ends]
        down = ctx.needs_input_grad[3]
        below, starts = scan.backward(memory, g, ends, down=down, share=1 / strength)
        found: list[Tensor | None] = [None] * len(weights)
        wanted = ctx.needs_input_grad[4 + ctx.n_start :]
        for k, part in scan.gradients(memory, wanted, share=strength):
            found[k] = part.clone(memory_format=torch.contiguous_format)  # nobody else's memory
        answers = (below, *(starts or [None] * len(start)))
        return None, None, None, *(None if a is None else a * strength for a in answers), *found


def _without_prefix(module: nn.Module, state: dict[str, Any], prefix: str, local: Any) -> None:
    """Names as in the plain module, on the way out."""
    for key in [key for key in state if key.startswith(f"{prefix}module.")]:
        state[prefix + key.removeprefix(f"{prefix}module.")] = state.pop(key)


def _with_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Names as in the plain module, on the way in."""
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}module." + key.removeprefix(prefix)] = state.pop(key)
