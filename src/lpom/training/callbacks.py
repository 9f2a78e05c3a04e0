"""What may end a run before its last epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lpom.checks import check_number
from lpom.training.history import Epoch

#: Called after each epoch. It stops the run by returning ``True`` itself, and by nothing else.
Callback = Callable[[Epoch], Any]


@dataclass(frozen=True)
class EarlyStopping:
    """Stop when nothing got better by ``min_delta`` for ``patience`` epochs.

    Watches the validation score if there is validation data, else the training loss. The weights
    of the epoch with the best validation score are put back.
    """

    patience: int = 10
    min_delta: float = 1e-4

    def __post_init__(self) -> None:
        check_number("patience", self.patience, whole=True)
        check_number("min_delta", self.min_delta, strict=False)


@dataclass
class Watch:
    """What early stopping has seen of a run.

    ``best`` is the highest value so far, ``reached`` the one that must be beaten by
    ``min_delta``, ``waited`` the epochs since.
    """

    rule: EarlyStopping
    best: float | None = None
    reached: float | None = None
    waited: int = 0

    def see(self, epoch: Epoch) -> bool:
        """Take note of an epoch, and say whether it is the best one so far."""
        value = -epoch.loss if epoch.validation_score is None else epoch.validation_score
        if self.reached is None or value > self.reached + self.rule.min_delta:
            self.reached, self.waited = value, 0
        else:
            self.waited += 1
        better = self.best is None or value > self.best
        if better:
            self.best = value
        return better

    @property
    def stops(self) -> bool:
        return self.waited >= self.rule.patience

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "reached": self.reached, "waited": self.waited}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.best, self.reached, self.waited = saved["best"], saved["reached"], saved["waited"]
