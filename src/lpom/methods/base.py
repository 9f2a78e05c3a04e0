"""What every training method is: hyperparameters, a state, and one step on one batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, Generic, TypeVar

from sklearn.base import BaseEstimator
from torch import Tensor, nn

from lpom.data import Batch
from lpom.losses import Loss
from lpom.network import Lifted
from lpom.objective import Objective


@dataclass(frozen=True)
class Problem:
    """What is trained, fixed for the whole run."""

    network: Lifted
    loss: Loss


@dataclass
class State:
    """All that a method carries from step to step beside the weights, which the module keeps.

    :func:`lpom.fit` keeps ``progress``, the share of the planned steps already done, which
    schedules follow; ``parameters``, the weights that this state belongs to; and ``setup``, the
    method and its settings. ``remarks`` are sentences it passes on as warnings, once each.
    """

    progress: float = 0.0
    remarks: dict[str, str] = field(default_factory=dict)
    parameters: list[nn.Parameter] = field(default_factory=list, repr=False)
    setup: str = ""
    said: set[str] = field(default_factory=set, repr=False)  # topics passed on already

    #: What belongs to the data and not to the run: copies and pickles go without it.
    transient: ClassVar[tuple[str, ...]] = ()

    def __getstate__(self) -> dict[str, Any]:
        lost = {f.name: _default(f) for f in fields(self) if f.name in self.transient}
        return self.__dict__ | lost

    def share_data(self, other: State) -> None:
        """Take from the state that this is a copy of what copies go without; no tensor is copied.

        Steps replace such tensors and do not write to them, so lists of their own are enough.
        """
        for name in self.transient:
            setattr(self, name, copy(getattr(other, name)))

    def remark(self, topic: str, sentence: str) -> None:
        """Say something to the user, once per topic."""
        self.remarks.setdefault(topic, sentence)

    def tensors(self) -> dict[str, Tensor] | None:
        """All that a later run needs to go on from here; None if that can't be written down."""
        return None

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take up what :meth:`tensors` gave, in a state that ``init`` has just made."""
        raise NotImplementedError(f"{type(self).__name__} can't be resumed from tensors.")

    def serves(self, problem: Problem) -> bool:
        """Whether this state belongs to this very network."""
        return list(map(id, self.parameters)) == list(map(id, problem.network.parameters))

    def new_remarks(self) -> list[str]:
        """The remarks not passed on yet."""
        fresh = [self.remarks[topic] for topic in self.remarks if topic not in self.said]
        self.said.update(self.remarks)
        return fresh


def _default(of: Field[Any]) -> Any:
    return of.default if of.default_factory is MISSING else of.default_factory()


S = TypeVar("S", bound=State)


class Method(BaseEstimator, ABC, Generic[S]):  # type: ignore[misc]
    """A training method; its fields are its hyperparameters (scikit-learn's ``get_params``).

    No loop over batches, no clock, no printing here: :func:`lpom.fit` owns those.
    """

    name: ClassVar[str]
    equation: ClassVar[str]  # the objective, in words a table can hold
    costs: ClassVar[str]  # what the blocks of one step cost
    full_batch: ClassVar[bool] = False  # needs all data at once

    @abstractmethod
    def init(self, problem: Problem) -> S:
        """Check the hyperparameters against the problem, say what is wrong, build the state."""

    @abstractmethod
    def step(self, problem: Problem, batch: Batch, state: S) -> Tensor | None:
        """Change weights and state in place by one step on ``batch``.

        Returns the network's outputs on the batch before the step if they were computed anyway.
        """

    @abstractmethod
    def objective(self, problem: Problem, batch: Batch, state: S) -> Objective:
        """The method's own objective on the batch of the last step, after it."""

    def rates(self, problem: Problem, state: S) -> list[float]:
        """Contraction factors of the state updates, one per layer; none by default."""
        return []

    def end_epoch(self, problem: Problem, batch: Batch, state: S) -> None:
        """Called after each epoch with its last batch: for what follows epochs, and for remarks."""
        return None
