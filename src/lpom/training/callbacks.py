"""What may end a run before its last epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lpom.checks import check_choice, check_number
from lpom.training.history import Epoch

#: Called after each epoch. It stops the run by returning ``True`` itself, and by nothing else.
Callback = Callable[[Epoch], Any]


@dataclass(frozen=True)
class EarlyStopping:
    """Stop when nothing got better by ``min_delta`` for ``patience`` epochs.

    Watches the validation data if there is any, else the training loss; the weights of the epoch
    that did best on the validation data are put back. ``watch``: its "score", or its "loss", which
    also hears of answers that are right and hardly sure.
    """

    patience: int = 10
    min_delta: float = 1e-4
    watch: str = "score"

    def __post_init__(self) -> None:
        check_choice("watch", self.watch, ("score", "loss"))
        check_number("patience", self.patience, whole=True)
        check_number("min_delta", self.min_delta, strict=False)

    def gain(self, epoch: Epoch) -> float:
        """What should rise: the validation score, or a loss with its sign turned."""
        if epoch.validation_loss is None or epoch.validation_score is None:
            return -epoch.loss
        return epoch.validation_score if self.watch == "score" else -epoch.validation_loss


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
        value = self.rule.gain(epoch)
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
