"""What every activation provides."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import fields
from typing import ClassVar, TypeAlias, TypeVar, final

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import handle_torch_function, has_torch_function_unary

A = TypeVar("A", bound="Activation")
#: What a parameter of an activation is, so that it can be saved as data.
Parameter: TypeAlias = float | int | None | list[float] | list[int]


class Activation(ABC):
    r"""The gradient of a convex function: in one dimension, a function that never decreases.

    With :math:`\phi = \nabla \Phi`, :math:`\Phi` convex, the gap

    .. math:: D(x, z) = \Phi^*(x) + \Phi(z) - \langle x, z \rangle \;\ge\; 0

    is zero exactly when :math:`x = \phi(z)`: LPOM adds it in place of the constraint.
    :math:`\phi` keeps shape, dtype and device. So do primitive, conjugate and gap of a function of
    single elements; those of a function of whole slices have one value per slice, the dimensions
    within a slice being 1, and dimension 0 stays that of the samples. In either case the sum over
    all values is the total. Concrete classes are frozen dataclasses whose fields are the
    parameters, so two activations compare as values.

    Attributes
    ----------
    name : str
        The name that `get` knows it by.
    formula : str
        :math:`\phi(z)` in plain text, for lists.
    elementwise : bool
        Whether each element is mapped by itself, and not together with others of its slice.
    lipschitz : float
        Smallest :math:`\gamma` with :math:`\|\phi(a) - \phi(b)\| \le \gamma \|a - b\|`;
        step sizes and contraction rates are computed from it. Infinite where :math:`\phi` jumps.
    lower, upper : float
        Bounds of every component of :math:`\phi`, possibly infinite. Those of an elementwise
        function are the ends of its closed range.
    subtracts : bool
        Whether `response` takes the difference of :math:`\phi` at two points, as it does here,
        so that it is glad of :math:`\phi(z)`.
    """

    name: str
    formula: str = ""
    elementwise: bool = True
    subtracts: ClassVar[bool] = True
    _plain: ClassVar[bool] = True  # whether `response` is the one below

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._plain = cls.response is Activation.response
        if "subtracts" not in cls.__dict__:
            cls.subtracts = cls._plain

    @property
    @abstractmethod
    def lipschitz(self) -> float: ...

    @property
    @abstractmethod
    def lower(self) -> float: ...

    @property
    @abstractmethod
    def upper(self) -> float: ...

    @abstractmethod
    def phi(self, z: Tensor) -> Tensor:
        """The activation itself."""

    @abstractmethod
    def primitive(self, z: Tensor) -> Tensor:
        """A convex function whose gradient is phi."""

    @abstractmethod
    def conjugate(self, x: Tensor) -> Tensor:
        """Convex conjugate of the primitive; infinite outside the closed range of phi."""

    def gap(self, x: Tensor, z: Tensor) -> Tensor:
        """Fenchel-Young gap: never negative, zero exactly where ``x == phi(z)``."""
        total = self.conjugate(x) + self.primitive(z)
        return torch.where(torch.isinf(total), total, total - x * z)

    @property
    def kinks(self) -> tuple[float, ...] | None:
        """Points between which an elementwise phi is affine, in order; None if it is curved."""
        return None

    @property
    def jumps(self) -> bool:
        """Whether phi is discontinuous."""
        return math.isinf(self.lipschitz)

    def response(
        self,
        z: Tensor,
        pull: Tensor,
        out: Tensor | None = None,
        said: Tensor | None = None,
        spare: Tensor | None = None,
    ) -> Tensor:
        """``phi(z) - phi(z - pull)``: how a state answers; ``out`` may be ``z`` or ``pull``.

        ``said`` is ``phi(z)`` where that is at hand, ``spare`` has memory as large that nobody
        needs: that of ``pull``, say. Where there is a form without the difference of two nearly
        equal numbers it stands here.
        """
        return torch.sub(self.phi(z) if said is None else said, self.phi(z - pull), out=out)

    def answer(self, z: Tensor, g: Tensor, strength: float, said: Tensor | None = None) -> Tensor:
        """``strength * response(z, g / strength)``: what stands where others have ``phi'(z) g``."""
        if self._plain and said is not None:  # in a pass less
            moved = self.phi(torch.sub(z, g, alpha=1 / strength))
            return torch.sub(said, moved).mul_(strength)
        pull = g / strength
        return self.response(z, pull, out=pull, said=said).mul_(strength)

    def smoothed(self: A, width: float) -> A:
        """A Lipschitz version: each jump becomes a ramp of this width; self if there is none."""
        return self

    def params(self) -> dict[str, Parameter]:
        """The parameters as plain data, such that ``get(a.name, **a.params()) == a``."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}

    def to_module(self) -> nn.Module:
        """The ordinary torch module of this function, or an `Elementwise` where there is none."""
        return Elementwise(self)

    def _within(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` moved into the closed range, and where it was outside."""
        outside = (x < self.lower) | (x > self.upper)
        return x.clamp(self.lower, self.upper), outside


@final
class Elementwise(nn.Module):
    """An activation as a torch module, elementwise or not."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, z: Tensor) -> Tensor:
        return apply(self.activation, z)

    def extra_repr(self) -> str:
        return repr(self.activation)


def apply(activation: Activation, z: Tensor) -> Tensor:
    """``activation.phi(z)``, which torch's function modes see as one call, as they see F.relu."""
    if has_torch_function_unary(z):
        applied: Tensor = handle_torch_function(apply, (z,), activation, z)
        return applied
    return activation.phi(z)


def positive(value: float, what: str) -> None:
    """Raise unless ``value`` is a finite number above zero."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{what} must be a finite number above 0, got {value!r}.")


def at_hand(x: Tensor) -> bool:
    """Whether its numbers can be decided by: an accelerator would be waited for, and a trace has
    none.
    """
    return x.is_cpu and get_proxy_mode() is None


def infinite(where: Tensor, value: Tensor) -> Tensor:
    """``value``, replaced by plus infinity where asked."""
    return value.masked_fill(where, torch.inf)


def check_width(width: float, name: str, most: float = math.inf) -> None:
    """Raise unless ``width`` is a ramp's: finite, not negative, not above ``most``."""
    if not (0 <= width < math.inf and width <= most):
        limit = f", at most {most!r}" if most < math.inf else ""
        raise ValueError(f"width of {name} must be a finite number >= 0{limit}, got {width!r}.")
