"""What every activation provides."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import fields, replace
from typing import Any, ClassVar, TypeAlias, TypeVar, final

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

A = TypeVar("A", bound="Activation")
R = TypeVar("R", bound="Ramped")
#: What a parameter of an activation is, so that it can be saved as data.
Parameter: TypeAlias = float | int | str | None | list[Any]


class Activation(ABC):
    r"""A Lipschitz function :math:`\phi`; where it is monotone, the gradient of a convex function.

    With :math:`\phi = \nabla \Phi`, :math:`\Phi` convex, the gap

    .. math:: D(x, z) = \Phi^*(x) + \Phi(z) - \langle x, z \rangle \;\ge\; 0

    is zero exactly when :math:`x = \phi(z)`: LPOM adds it in place of the constraint. In one
    dimension such a function is one that never decreases. Any other with
    :math:`\phi' \ge -c` is split into two that are, see `split`; it has no conjugate itself.

    :math:`\phi` keeps shape, dtype and device. So do primitive, conjugate and gap of an elementwise
    function; those of a function of whole slices have one value per slice, the dimensions within
    a slice being 1, so the sum over all values is the total. Concrete classes are frozen
    dataclasses whose fields are the parameters, so two activations compare as values.

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
    slope_bound : float
        Smallest :math:`c \ge 0` such that :math:`\phi(z) + c z` is monotone: 0 if
        :math:`\phi` itself is.
    measured : bool
        Whether the rule asks it how far from z it is to be read, see `displacement`, and from how
        many ``sides``; the value on the way forward is then read once.
    module : type or None
        Torch's class of it, which takes the same parameters.
    lower, upper : float
        Bounds of every component of :math:`\phi`, possibly infinite. Those of an elementwise
        function are the ends of its closed range.
    """

    name: str
    formula: str = ""
    elementwise: bool = True
    slope_bound: float = 0.0
    measured: bool = False
    sides: int = 2
    module: ClassVar[type[nn.Module] | None] = None

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            _check(self.name, field.name, getattr(self, field.name))

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
    def conjugate(self, x: Tensor) -> Tensor:
        """Convex conjugate of the primitive; infinite outside the closed range of phi."""

    def primitive(self, z: Tensor) -> Tensor:
        """A function whose gradient is phi: here by Fenchel's equality, from the conjugate."""
        wide = double(z)
        x = self.phi(wide)
        return (x * wide - self.conjugate(x)).to(z.dtype)

    def gap(self, x: Tensor, z: Tensor) -> Tensor:
        r"""Fenchel-Young gap, computed in float64: zero exactly where ``x == phi(z)``.

        Of a function that is not monotone that of its monotone part, at :math:`x + c z`.
        """
        if self.slope_bound > 0:
            from lpom.activations.numerical import split

            c, part = split(self)
            return part.gap(x + c * z, z)
        inside, outside = self._within(x)
        inside, wide = self._within(double(inside))[0], double(z)
        total = self.conjugate(inside) + self.primitive(wide) - inside * wide
        return infinite(outside, total.to(x.dtype))

    @property
    def kinks(self) -> tuple[float, ...] | None:
        """Points between which an elementwise phi is affine, in order; None if it is curved."""
        return None

    @property
    def jumps(self) -> bool:
        """Whether phi is discontinuous."""
        return math.isinf(self.lipschitz)

    def response(self, z: Tensor, pull: Tensor) -> Tensor:
        """``phi(z) - phi(z - pull)``: how a state answers a pull.

        Exact where there is a form in which no two nearly equal numbers are subtracted.
        """
        return self.phi(z) - self.phi(z - pull)

    def difference(self, z: Tensor, d: Tensor | float) -> Tensor:
        """``phi(z + d) - phi(z - d)``."""
        return self.response(z + d, torch.as_tensor(2 * d, dtype=z.dtype, device=z.device))

    def displacement(self, z: Tensor, x: Tensor) -> Tensor:
        """How far from ``z`` the rule is to read phi, where ``x = phi(z)`` was read."""
        raise NotImplementedError(f"{self.name} leaves that to the rule.")

    def smoothed(self: A, width: float) -> A:
        """A Lipschitz version: each jump becomes a ramp of this width; self if there is none."""
        return self

    def params(self) -> dict[str, Parameter]:
        """The parameters as plain data, such that ``get(a.name, **a.params()) == a``."""
        return {
            field.name: _listed(getattr(self, field.name))
            for field in fields(self)  # type: ignore[arg-type]
        }

    def to_module(self) -> nn.Module:
        """The ordinary torch module of this function, or an `Elementwise` where there is none."""
        if self.module is None:
            return Elementwise(self)
        return self.module(*(getattr(self, field.name) for field in fields(self)))  # type: ignore[arg-type]

    def _within(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` moved into the closed range, and where it was outside."""
        outside = (x < self.lower) | (x > self.upper)
        return x.clamp(self.lower, self.upper), outside


class Ramped(Activation):
    """One that jumps unless it has a width; then each jump is a ramp of that width."""

    width: float
    widest: float = math.inf

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.width <= self.widest or math.isinf(self.width):
            limit = f", at most {self.widest!r}" if self.widest < math.inf else ""
            raise ValueError(
                f"width of {self.name} must be a finite number >= 0{limit}, got {self.width!r}."
            )

    def smoothed(self: R, width: float) -> R:
        """Ramps of this width, cut to the widest."""
        return replace(self, width=min(width, self.widest))  # type: ignore[type-var]


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


def double(x: Tensor) -> Tensor:
    """``x`` in float64, where the device has that."""
    return x.float() if x.device.type == "mps" else x.double()


def infinite(where: Tensor, value: Tensor) -> Tensor:
    """``value``, replaced by plus infinity where asked."""
    return value.masked_fill(where, torch.inf)


def _check(name: str, key: str, value: Any) -> None:
    """Raise unless a parameter is what all of its name are: positive, or a count."""
    if key in ("alpha", "beta", "lambd", "eps", "step") and value is not None:
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{key} of {name} must be a finite number above 0, got {value!r}.")
    if key in ("k", "levels", "groups") and (value != int(value) or value < 1):
        raise ValueError(f"{key} of {name} must be an integer >= 1, got {value!r}.")


def _listed(value: Any) -> Any:
    return [_listed(each) for each in value] if isinstance(value, tuple) else value
