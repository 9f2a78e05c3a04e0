"""What can be set of LPOM: how states move, how weights move, and how jumps are trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

from lpom.checks import check_choice, check_number, check_pair
from lpom.settings import Settings, geometric
from lpom.weights.adaptive import Factory, Schedule

ORDERS = ("interleaved", "top-down", "paper", "parallel")


@final
@dataclass(frozen=True)
class Sweeps(Settings):
    """How the states of a batch are moved.

    Parameters
    ----------
    order : {"interleaved", "top-down", "paper", "parallel"}
        Interleaved shares one residual between a node's weights and the states below it, and costs
        what back-propagation costs. Top-down moves all states, then all weights. Paper: states
        from the bottom up, the output last (a feed-forward start then sends no signal below the
        last layer in the first sweep). Parallel: every state from the same old ones.
    most : int
        Most sweeps over the states of a batch.
    rule : {"auto", "plain", "safe"}
        The paper's iteration, or the damped one that cannot raise the objective. Auto is plain
        for a single interleaved sweep, else safe.
    tolerance : float
        Stop sweeping when no node's pre-activations change by more than this, relative to their
        norm.
    """

    order: str = "interleaved"
    most: int = 1
    rule: str = "auto"
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        check_choice("order", self.order, ORDERS)
        check_choice("rule", self.rule, ("auto", "plain", "safe"))
        check_number("most", self.most, whole=True)
        check_number("tolerance", self.tolerance, strict=False)

    @cached_property
    def safe(self) -> bool:
        """Whether states move by the safe step."""
        if self.rule == "auto":
            return self.order != "interleaved" or self.most > 1
        return self.rule == "safe"


@final
@dataclass(frozen=True)
class Adaptive(Settings):
    """Give the gradient of each weight's convex problem to an optimiser.

    Parameters
    ----------
    optimizer : a name ("adam", "factored", "muon", "sgd", ...), a class of ``torch.optim``, or a
        function of the parameters that returns an optimiser with a learning rate of its own
    learning_rate : float
    schedule : "linear", "cosine" or "constant" over the run; or a function of the optimiser that
        returns one of torch's schedulers, which then takes a step after every epoch
    """

    optimizer: str | Factory = "adam"
    learning_rate: float = 2e-3
    schedule: Schedule = "linear"


@final
@dataclass(frozen=True)
class Exact(Settings):
    """Solve each weight problem by Algorithm 2.

    Parameters
    ----------
    iterations : int
        Iterations of Algorithm 2 in a step.
    ridge : float or (float, float)
        Relative to the size of the states. Of a pair the ridge grows over the run, geometrically
        from the first to the second number: it holds the weights to the old ones, so the last
        steps average over many batches.
    """

    iterations: int = 1
    ridge: float | tuple[float, float] = 0.1

    def __post_init__(self) -> None:
        check_number("iterations", self.iterations, whole=True)
        self.ridge_at(0.0)

    def ridge_at(self, progress: float) -> float:
        """The ridge at this share of the run."""
        if isinstance(self.ridge, Sequence):
            return geometric(check_pair("ridge", self.ridge), progress)
        check_number("ridge", self.ridge, strict=False)
        return self.ridge


@final
@dataclass(frozen=True)
class Straight(Settings):
    """Jumps stay jumps in the network; states move as if they were ramps.

    Parameters
    ----------
    width : float
        Of the ramps, in running standard deviations of each node's pre-activations.
    relative : bool
        False: the width is in units of the pre-activations themselves.
    """

    width: float = 1.0
    relative: bool = True

    def __post_init__(self) -> None:
        check_number("width", self.width)


@final
@dataclass(frozen=True)
class Continuation(Settings):
    """The network is trained with ramps whose width shrinks geometrically over the run."""

    first: float = 1.0
    last: float = 0.1

    def __post_init__(self) -> None:
        check_pair("width", (self.first, self.last))
