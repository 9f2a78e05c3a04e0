r"""Penalties and constraints on weights: functions :math:`h(W)` that are added to the objective.

.. math:: \frac{1}{m} F(W, X) + \sum_W s\, h(W)

with a strength :math:`s` beside the mean over the m samples, as in scikit-learn's Lasso. All that
training asks of h is its proximal operator with a step size per weight,

.. math:: \mathrm{prox}(W, t) = \arg\min_V h(V) + \sum_j (V_j - W_j)^2 / (2 t_j) .

>>> from lpom import LPOM
>>> LPOM(penalties={"0.weight": L1(1e-4), "*.weight": Box(-1, 1)}).penalties["0.weight"].strength
0.0001
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from lpom.checks import check_choice, check_number, check_pair
from lpom.settings import Settings, chosen, geometric

#: A size of steps for all weights, or one for each.
Step: TypeAlias = float | Tensor


class Penalty(Settings, ABC):
    """A function of one weight tensor, at strength one, and its proximal operator.

    Kernels of convolutions have the shape (outputs, inputs, height, width); each output is a
    channel, as each row of a matrix is.
    """

    every: int = 1  #: steps of an optimiser that one proximal step follows, and makes up for
    least_dimensions: int = 2  #: of the weights it acts on
    convex: bool = True
    lazy: bool = False  #: whether an optimiser moves weights behind those of the network
    bound: float | None = None  #: how far from zero those may be

    @abstractmethod
    def value(self, W: Tensor) -> Tensor:
        """``h(W)``, infinite where a constraint is broken."""

    @abstractmethod
    def prox(self, W: Tensor, step: Step) -> Tensor:
        """The minimiser of ``h(V) + sum((V - W)**2 / (2 * step))``.

        Where it has no closed form with a step per weight, one step is taken for all weights that
        hang together: the harmonic mean of theirs.
        """

    @abstractmethod
    def strength_at(self, progress: float) -> float:
        """What h is multiplied by at this share of the run."""


@final
@dataclass(frozen=True)
class Box(Penalty):
    """Every weight between ``low`` and ``high``."""

    low: float = -1.0
    high: float = 1.0

    least_dimensions = 1

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"Box needs low <= high, got low={self.low!r}, high={self.high!r}.")

    def value(self, W: Tensor) -> Tensor:
        inside = ((W >= self.low) & (W <= self.high)).all()
        return torch.where(inside, 0.0, torch.inf)

    def prox(self, W: Tensor, step: Step) -> Tensor:
        return W.clamp(self.low, self.high)

    def strength_at(self, progress: float) -> float:
        return 1.0


# sparse: weights, units, singular values


@dataclass(frozen=True)
class Sparse(Penalty):
    """A penalty that makes some parts of a weight vanish.

    Parameters
    ----------
    strength : float or (float, float)
        Beside the mean loss of a sample; of a pair it goes geometrically from the first to the
        second over the run.
    keep : float, optional
        Share of the parts that are to be left, of all weights that this penalty acts on taken
        together. Then h passes over the largest parts, a share that falls geometrically from all
        to this one, while its strength grows from the one given to a thousand times as much; when
        three quarters of the run are done all but the largest parts vanish, and stay so.
    """

    strength: float | tuple[float, float] = 1e-4
    keep: float | None = None

    def __post_init__(self) -> None:
        self.strength_at(0.0)
        if self.keep is not None and not 0 < self.keep < 1:
            raise ValueError(f"keep must be a share between 0 and 1, got {self.keep!r}.")
        if self.lazy and self.keep is None:
            raise ValueError(
                f"{type(self).__name__}(lazy=True) leaves the largest parts of the weights behind "
                "the network: say how many, e.g. keep=0.02."
            )

    def strength_at(self, progress: float) -> float:
        if isinstance(self.strength, Sequence):
            return geometric(check_pair("strength", self.strength), progress)
        check_number("strength", self.strength, strict=False)
        return self.strength

    @abstractmethod
    def sizes(self, W: Tensor) -> Tensor:
        """How large each part of ``W`` is, in units of a single weight; zero if it vanished."""

    def restrict(self, W: Tensor, kept: Tensor) -> Tensor:
        """``W`` without the parts that are False in ``kept``, which is shaped as `sizes`."""
        return W * kept

    def prox_but(self, W: Tensor, step: Step, free: Tensor) -> Tensor:
        """The proximal operator of h without the parts that are True in ``free``: these stay."""
        return torch.where(free, W, self.prox(W, step))


@final
@dataclass(frozen=True)
class L1(Sparse):
    """The sum of absolute values: single weights vanish. Steps may differ from weight to weight.

    ``lazy`` is for a target: the network has the largest weights of a dense tensor, which the
    optimiser goes on to move with gradients taken at the sparse one (Lin et al., 2020), so that
    what was left out too early comes back. Its share falls as that of ``keep``.
    """

    lazy: bool = False

    least_dimensions = 1

    def value(self, W: Tensor) -> Tensor:
        return W.abs().sum()

    def prox(self, W: Tensor, step: Step) -> Tensor:
        return W - W.clamp(-torch.as_tensor(step), torch.as_tensor(step))

    def sizes(self, W: Tensor) -> Tensor:
        return W.abs()


@final
@dataclass(frozen=True)
class GroupL1(Sparse):
    r"""Whole units or channels vanish: :math:`\sum_g \sqrt{n_g} \|W_g\|`, groups of n weights.

    ``groups`` are the weights into each output of a layer (rows, the default) or out of each of its
    inputs (columns). One step is taken for each group. ``lazy`` as in `L1`.
    """

    groups: str = "outputs"
    lazy: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("groups", self.groups, ("outputs", "inputs"))

    def value(self, W: Tensor) -> Tensor:
        return self._root(W) * self._norms(W).sum()

    def prox(self, W: Tensor, step: Step) -> Tensor:
        if isinstance(step, Tensor) and step.ndim:
            step = harmonic_mean(step, self._dims(W))
        norms = self._norms(W)
        left = 1 - step * self._root(W) / norms
        return W * torch.where(norms > 0, left, 0).clamp(min=0)

    def sizes(self, W: Tensor) -> Tensor:
        return self._norms(W) / self._root(W)

    @property
    def _axis(self) -> int:
        return 0 if self.groups == "outputs" else 1

    def _dims(self, W: Tensor) -> list[int]:
        """All dimensions within a group."""
        return [d for d in range(W.ndim) if d != self._axis]

    def _norms(self, W: Tensor) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(W, dim=self._dims(W), keepdim=True)
        return norms

    def _root(self, W: Tensor) -> float:
        """Of the number of weights in a group."""
        return math.sqrt(W.numel() / W.shape[self._axis])


@final
@dataclass(frozen=True)
class NuclearNorm(Sparse):
    """The sum of singular values: the rank falls. A kernel counts as a matrix (outputs, rest).

    Every proximal step is a singular value decomposition with one step for all weights, so in
    training it is taken only after every ``every`` steps of the optimiser, and then for them all.
    """

    every: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("every", self.every, whole=True)

    def value(self, W: Tensor) -> Tensor:
        nuclear: Tensor = torch.linalg.svdvals(W.flatten(1)).sum()
        return nuclear

    def prox(self, W: Tensor, step: Step) -> Tensor:
        return self.prox_but(W, step, torch.zeros((), dtype=torch.bool, device=W.device))

    def prox_but(self, W: Tensor, step: Step, free: Tensor) -> Tensor:
        if isinstance(step, Tensor):
            step = harmonic_mean(step.flatten(), [0])
        U, S, V = _svd(W)
        return ((U * torch.where(free, S, (S - step).clamp(min=0))) @ V).reshape(W.shape)

    def sizes(self, W: Tensor) -> Tensor:
        S = torch.linalg.svdvals(W.flatten(1))
        rounding = 10 * max(W.flatten(1).shape) * torch.finfo(W.dtype).eps * S[:1]
        return torch.where(rounding < S, S, 0)

    def restrict(self, W: Tensor, kept: Tensor) -> Tensor:
        U, S, V = _svd(W)
        return ((U * (S * kept)) @ V).reshape(W.shape)


def _svd(W: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    U, S, V = torch.linalg.svd(W.flatten(1), full_matrices=False)
    return U, S, V


# few bits


@dataclass(frozen=True)
class Grid(Penalty):
    r"""Weights on few levels: :math:`\sum_j |W_j - Q(W)_j|`, Q the nearest of the levels.

    The levels are integers times a scale, one for each output of a layer (channel) or one for all.
    Scales are taken from the weights, and the proximal operator is exact for the scales as they
    are: each weight goes to its nearest level by at most its step. The strength grows over the
    run; after the share ``settled`` of it every step ends on the levels themselves.

    ``lazy``: the network has Q(V) all along, and the optimiser moves the weights V behind it with
    the gradient taken at Q(V) (BinaryConnect; Dockhorn et al., 2021, show it to be this proximal
    method with the steps summed up before the projection). They stay within plus and minus
    ``bound``: a weight that has run away from zero could not change its sign any more.
    """

    strength: tuple[float, float] = (1e-6, 1e-2)
    settled: float = 0.8
    scales: str = "channel"
    lazy: bool = False
    bound: float | None = None

    convex = False

    def __post_init__(self) -> None:
        check_pair("strength", self.strength)
        check_number("settled", self.settled, strict=False)
        check_choice("scales", self.scales, ("channel", "layer"))
        if self.bound is not None:
            check_number("bound", self.bound)

    def value(self, W: Tensor) -> Tensor:
        return (W - self.nearest(W)).abs().sum()

    def prox(self, W: Tensor, step: Step) -> Tensor:
        level = self.nearest(W)
        if isinstance(step, float) and math.isinf(step):
            return level
        away = W - level
        return level + (away - away.clamp(-torch.as_tensor(step), torch.as_tensor(step)))

    def strength_at(self, progress: float) -> float:
        if self.lazy or progress >= self.settled:
            return torch.inf
        return geometric(self.strength, progress / self.settled)

    def nearest(self, W: Tensor) -> Tensor:
        """Each weight's nearest level; a fixed point of itself."""
        scale = self.scale(W)
        return self.integers(W, scale) * scale

    def _mean(self, values: Tensor) -> Tensor:
        dims = list(range(0 if self.scales == "layer" else 1, values.ndim))
        return values.mean(dim=dims, keepdim=True)

    @abstractmethod
    def scale(self, W: Tensor) -> Tensor:
        """The distance of the levels, one for each channel or one for all."""

    @abstractmethod
    def integers(self, W: Tensor, scale: Tensor) -> Tensor:
        """The nearest levels of ``W`` in units of the scale."""


@final
@dataclass(frozen=True)
class Binary(Grid):
    """Every weight plus or minus the mean absolute value, the best scale in least squares."""

    def scale(self, W: Tensor) -> Tensor:
        return self._mean(W.abs())

    def integers(self, W: Tensor, scale: Tensor) -> Tensor:
        return torch.copysign(torch.ones_like(scale), W)

    def nearest(self, W: Tensor) -> Tensor:
        return torch.copysign(self.scale(W), W)  # one pass, which a large layer's step feels


@final
@dataclass(frozen=True)
class Ternary(Grid):
    """Every weight zero, or plus or minus a scale.

    The scale is the mean of what is not rounded to zero, found by three rounds of Lloyd's algorithm
    that start with everything above 0.7 times the mean.
    """

    def scale(self, W: Tensor) -> Tensor:
        size = W.abs()
        least, scale = 0.7 * self._mean(size), size
        for _ in range(3):
            kept = (size > least).to(W)
            scale = self._mean(size * kept) / self._mean(kept).clamp_min(1e-30)
            least = scale / 2
        return scale

    def integers(self, W: Tensor, scale: Tensor) -> Tensor:
        return torch.where(W.abs() > scale / 2, W.sign(), 0)


@final
@dataclass(frozen=True)
class Levels(Grid):
    r"""Integers of some ``bits`` times a scale: :math:`-(2^{b-1} - 1) .. 2^{b-1} - 1`.

    The largest weight is the largest level.
    """

    bits: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("bits", self.bits, low=1, whole=True)

    def scale(self, W: Tensor) -> Tensor:
        dims = list(range(0 if self.scales == "layer" else 1, W.ndim))
        largest = W.abs().amax(dim=dims, keepdim=True)
        return torch.where(largest > 0, largest / (2 ** (self.bits - 1) - 1), 1)

    def integers(self, W: Tensor, scale: Tensor) -> Tensor:
        return torch.round(W / scale)


def harmonic_mean(step: Tensor, dims: list[int]) -> Tensor:
    """One step for many: the mean of the curvatures ``1 / step``, turned round."""
    return 1 / (1 / step).mean(dim=dims, keepdim=True)


KINDS: dict[str, type[Penalty]] = {
    kind.__name__.lower(): kind for kind in (L1, GroupL1, NuclearNorm, Box, Binary, Ternary, Levels)
}


def get(penalty: Any) -> Penalty:
    """A penalty itself, by name, or as ``{name: {setting: value}}``."""
    return chosen("a penalty", penalty, KINDS)


def by_pattern(penalties: Any) -> Penalty | Mapping[str, Penalty] | None:
    """What a method was given: nothing, one penalty, or one for each pattern of names."""
    if penalties is None or isinstance(penalties, Penalty):
        return penalties
    if isinstance(penalties, Mapping) and not penalties.keys() <= KINDS.keys():
        if all(isinstance(penalty, Penalty) for penalty in penalties.values()):
            return penalties  # the same one, as clones of estimators are compared
        return {str(pattern): get(penalty) for pattern, penalty in penalties.items()}
    return get(penalties)


def any_lazy(penalties: Penalty | Mapping[str, Penalty] | None) -> bool:
    """Whether one of these is lazy."""
    found = penalties.values() if isinstance(penalties, Mapping) else [penalties]
    return any(penalty is not None and penalty.lazy for penalty in found)
