"""What the processes of a run must agree on: one by itself, or several together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, TypeVar, final

from lpom.methods import Batch

T = TypeVar("T")


class Team(ABC):
    """The processes of a run; ``first`` says that this one writes, draws and calls back for all."""

    size: int
    first: bool

    @abstractmethod
    def ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches, for a process that wants to know what follows."""

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

    def ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        return batches

    def drain(self) -> None:
        return None

    def gather(self, value: T) -> list[T]:
        return [value]

    def of_first(self, value: T) -> T:
        return value

    def memory(self, state: dict[str, Any]) -> dict[str, Any]:
        return state
