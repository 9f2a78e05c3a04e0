"""Who makes the steps of a run: this process by itself, or several together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeVar, final

from torch import Tensor

from lpom.methods import Batch, Method, Problem, State

T = TypeVar("T")


class Team(ABC):
    """Makes steps, and knows what the processes of a run must agree on.

    ``first`` says that this is the process that writes, draws and calls back for all.
    """

    size: int
    first: bool

    @abstractmethod
    def step(self, batch: Batch) -> Tensor | None:
        """A step; the network's outputs on the batch before it, where they are known."""

    @abstractmethod
    def drain(self) -> None:
        """End what is under way: every process has all weights then."""

    @abstractmethod
    def gather(self, value: T) -> list[T]:
        """The value that each process has."""

    @abstractmethod
    def of_first(self, value: T) -> T:
        """The value that the first process has."""

    @abstractmethod
    def memory(self, state: dict[str, Any]) -> dict[str, Any]:
        """The whole state of the method, of which every process has what its weights need."""


@final
class Alone(Team):
    """One process."""

    size, first = 1, True

    def __init__(self, method: Method[Any], problem: Problem, state: State) -> None:
        self.method, self.problem, self.state = method, problem, state

    def step(self, batch: Batch) -> Tensor | None:
        return self.method.step(self.problem, batch, self.state)

    def drain(self) -> None:
        return None

    def gather(self, value: T) -> list[T]:
        return [value]

    def of_first(self, value: T) -> T:
        return value

    def memory(self, state: dict[str, Any]) -> dict[str, Any]:
        return state
