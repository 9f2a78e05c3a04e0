r"""Lifting: LPOM's rule at every function of a model that bends, whoever wrote the model.

The default step of LPOM is this. The model itself runs, and torch reports each call to a mode. What
is affine in each of its tensors (layers, sums, products, views, choices) is an edge and stays
torch's own. What bends is answered by the rule (`lpom.rule`) in place of a derivative.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, final

import torch
from torch import Tensor, nn

from lpom.audit import audit
from lpom.checks import check_choice, check_number
from lpom.exceptions import UntrainableError
from lpom.mode import Lifting
from lpom.rule import Displacement, Rule, Weight

#: The displacement of "auto", from benchmarks/zoo.py: at 0.01 the kinks of ReLU networks with batch
#: norm take up to 0.02 off the cosine to the gradient, at 0.003 float32 still has five digits.
AUTO = 0.003


def lift(
    model: nn.Module,
    mu: float | None = None,
    *,
    displacement: str | float | Mapping[str, float] = "auto",
    sides: int | Mapping[str, int] = 2,
    window: float = 2.0,
    reduction: str = "mean",
    batch_dims: int = 1,
    strict: bool = False,
) -> Lifted:
    r"""The same module, with LPOM's rule in place of the derivative of every function that bends.

    Any loop then trains it by LPOM. The weights stay those of ``model``.

    Parameters
    ----------
    model : any torch module; it stays as it is, and `unlift` gives it back
    mu : float, optional
        Hold the weight of every gap, as the paper does, in place of the displacement.
    displacement : "auto", a number, or a mapping
        How far states move, in units of their spread (elements) or of their size (rows of a norm),
        see `lpom.rule.Displacement`. A mapping goes from patterns to numbers, the first that fits:
        names of functions (``"gelu"``), kinds (``"elementwise"``, ``"norm"``, ``"softmax"``,
        ``"jump"``) or names of modules (``"encoder.*"``).
    sides : 1, 2, or such a mapping
        From how many sides functions are read.
    window : float
        Where a function jumps, it is read half a window from either side; the smaller of this and
        one spread.
    reduction : {"mean", "sum"}
        Read only with ``mu``: whether the loss is averaged over the samples or added up.
    batch_dims : int
        Read only with ``mu``: how many dimensions of the first tensor are averaged over.
    strict : bool
        Refuse what can't be lifted, when the model first runs into it. Else it keeps its own
        derivative, and `Lifted.report` names it.

    Notes
    -----
    With ``mu``, whatever the loss is multiplied by before ``backward()`` goes into the attribute
    ``scale``: 1 / k with gradients accumulated over k batches, ``scaler.get_scale()`` with mixed
    precision. A displacement needs nothing of the kind.

    Examples
    --------
    >>> lifted = lift(nn.Sequential(nn.Linear(2, 8), nn.GELU(), nn.Linear(8, 1)))
    >>> x = torch.randn(4, 2)
    >>> ((lifted(x) - x[:, :1]) ** 2).mean().backward()
    >>> print(lifted.report())
    lifted: gelu (1)
    """
    return Lifted(
        unlift(model),
        mu,
        displacement=displacement,
        sides=sides,
        window=window,
        reduction=reduction,
        batch_dims=batch_dims,
        strict=strict,
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
    scale : with ``mu``, what the loss is multiplied by before ``backward()``
    """

    def __init__(
        self,
        module: nn.Module,
        mu: float | None = None,
        *,
        displacement: str | float | Mapping[str, float] = "auto",
        sides: int | Mapping[str, int] = 2,
        window: float = 2.0,
        reduction: str = "mean",
        batch_dims: int = 1,
        strict: bool = False,
    ) -> None:
        super().__init__()
        if mu is not None:
            check_number("mu", mu)
        check_number("window", window)
        check_number("batch_dims", batch_dims, whole=True)
        check_choice("reduction", reduction, ("mean", "sum"))
        self.module = module
        self.mu, self.reduction, self.batch_dims = mu, reduction, batch_dims
        self.displacement, self.sides, self.window = displacement, sides, window
        self.strict, self.scale = strict, 1.0
        self._plan = None if mu is not None else _Plan(displacement, sides, window)
        self._lifted: dict[str, int] = {}
        self._kept: dict[str, str] = {}
        self._audited = False
        self.register_state_dict_post_hook(_without_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_with_prefix)  # type: ignore[no-untyped-call]

    @property
    def _orig_mod(self) -> nn.Module:
        """The module by the name that torch.compile's wrapper gives it."""
        return self.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_exporting():
            return self.module(*args, **kwargs)
        if self._plan is None:
            mode = Lifting(Weight(self._strength(args, kwargs), self.window), None)
        else:
            mode = Lifting(self._plan.rule, self._plan if self._plan.varies else None)
        if torch.compiler.is_compiling():
            with mode:
                return self.module(*args, **kwargs)
        with mode, mode.sparing(), _following(self.module, mode):
            outputs = self.module(*args, **kwargs)
        self._lifted = mode.lifted
        if not self._audited:  # the graph of autograd is looked at once
            self._kept, self._audited = audit(outputs), True
            if self.strict and self._kept:
                name, reason = next(iter(self._kept.items()))
                self._audited = False
                raise UntrainableError(
                    f"{name} can't be lifted: {reason}. With strict=False it keeps its own "
                    "derivative."
                )
        return outputs

    def report(self) -> str:
        """What the last pass with gradients lifted, and what kept its own derivative and why.

        The latter is read off autograd's graph of the first pass. A pass that torch.compile has
        made its own leaves no report.
        """
        if not self._audited:
            return "nothing lifted yet: call the model on a batch first"
        done = [f"{name} ({count})" for name, count in self._lifted.items()]
        lines = [f"lifted: {', '.join(done) or 'nothing'}"]
        lines += [f"kept its own derivative: {name}: {why}" for name, why in self._kept.items()]
        return "\n".join(lines)

    def extra_repr(self) -> str:
        if self.mu is None:
            return f"displacement={self.displacement!r}, sides={self.sides!r}"
        return f"mu={self.mu:g}, reduction={self.reduction!r}, scale={self.scale:g}"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # before it is there, as when a copy is made
                raise
            return getattr(self.module, name)

    def _strength(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
        """The weight of a gap in the units of the gradient as it comes down."""
        assert self.mu is not None
        if self.reduction == "sum":
            return self.mu * self.scale
        for given in (*args, *kwargs.values()):
            if isinstance(given, nn.utils.rnn.PackedSequence):
                given = given.batch_sizes[0] if self.batch_dims == 1 else given.data
                return self.mu * self.scale / (int(given) if given.ndim == 0 else len(given))
            if isinstance(given, Tensor) and given.ndim >= self.batch_dims:
                return self.mu * self.scale / math.prod(given.shape[: self.batch_dims])
        raise TypeError(
            "with mu= a lifted model takes the size of the batch from its first tensor, but it was "
            "called without any; give it one, or lift with reduction='sum'."
        )


class _Plan:
    """Which displacement a function has, by its name, its kind or the module it stands in."""

    def __init__(self, size: Any, sides: Any, window: float) -> None:
        self.sizes = dict(size) if isinstance(size, Mapping) else {"*": size}
        self.sides = dict(sides) if isinstance(sides, Mapping) else {"*": sides}
        self.window = window
        self.varies = isinstance(size, Mapping) or isinstance(sides, Mapping)
        for value in self.sizes.values():
            for number in self.sides.values():  # says what is wrong with them
                Displacement(_size(value), number, window)
        self.rule = Displacement(_size(self.sizes.get("*", "auto")), self.sides.get("*", 2), window)

    def rule_of(self, *names: str) -> Rule:
        """The first pattern that fits one of the names."""
        size = next((v for p, v in self.sizes.items() if _fits(p, names)), "auto")
        sides = next((v for p, v in self.sides.items() if _fits(p, names)), 2)
        return Displacement(_size(size), sides, self.window)


def _fits(pattern: str, names: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _size(value: Any) -> float:
    if isinstance(value, str) and value != "auto":
        raise ValueError(
            f"displacement must be 'auto', a number, or a mapping to numbers, got {value!r}."
        )
    return AUTO if value == "auto" else value


@contextmanager
def _following(model: nn.Module, mode: Lifting) -> Iterator[None]:
    """Let the mode know which module is running, where its rule depends on that."""
    if mode.plan is None:
        yield
        return
    handles = []
    for name, module in model.named_modules():

        def enter(module: nn.Module, args: Any, name: str = name) -> None:
            mode.modules.append(name)

        def leave(module: nn.Module, args: Any, outputs: Any) -> None:
            mode.modules.pop()

        handles += [
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(leave, always_call=True),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _without_prefix(module: nn.Module, state: dict[str, Any], prefix: str, local: Any) -> None:
    """Names as in the plain module, on the way out."""
    for key in [key for key in state if key.startswith(f"{prefix}module.")]:
        state[prefix + key.removeprefix(f"{prefix}module.")] = state.pop(key)


def _with_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Names as in the plain module, on the way in."""
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}module." + key.removeprefix(prefix)] = state.pop(key)
