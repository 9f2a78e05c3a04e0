"""How a run is trained: what was asked for, and what the size of the data asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

from lpom import methods
from lpom.checks import as_device, check_number
from lpom.estimators import MLPClassifier, MLPRegressor
from lpom.estimators.base import BaseMLP
from lpom.exceptions import unknown_name
from lpom.methods import Method
from lpom.settings import Settings as SettingsOf
from lpom.tables import Target

_PATIENCE = 10  # epochs without a lower held-out loss, at least, before training stops
_ENOUGH_TO_WATCH = 40  # rows; of fewer a tenth tells nothing
_ENOUGH_TO_STOP = 500  # rows; of fewer a tenth is too few to choose an epoch by
_OF_SMALL_TABLES = 1.0  # the penalty of these

Estimator: TypeAlias = MLPClassifier | MLPRegressor


@final
@dataclass(frozen=True)
class Settings:
    """How to train; None leaves a choice to the size of the data.

    ``method_settings`` are those of the method by name, ``{"mu": 5.0}``; ``class_weight`` is
    "balanced" or a weight per name of a class.
    """

    hidden: tuple[int, ...] | None = None
    activation: str = "relu"
    output_activation: str = "identity"
    method: str | Method[Any] = "lpom"
    method_settings: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float | None = None
    loss: str = "auto"
    alpha: float | None = None
    class_weight: str | Mapping[str, float] | None = None
    epochs: int | None = None
    batch_size: int | None = None
    early_stopping: bool | None = None
    seed: int = 0
    device: str = "auto"
    precision: str | None = None
    compile: bool = False

    def planned(self, n: int) -> tuple[int | None, int]:
        """Batch size (None: all rows) and most epochs for ``n`` rows to train on.

        Small tables get small batches, and epochs enough for about 4000 steps.
        """
        for name in ("epochs", "batch_size"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), whole=True)
        if methods.get(self.method).full_batch:
            if self.batch_size is not None:
                name = methods.get(self.method).name
                raise ValueError(
                    f"method {name!r} takes all rows in every step; leave the batch size out."
                )
            return None, 100 if self.epochs is None else self.epochs
        small = 32 if n < 10_000 else 100
        batch = min(n, small) if self.batch_size is None else self.batch_size
        enough = min(max(round(4000 * batch / n), 10), 300)
        return batch, enough if self.epochs is None else self.epochs

    def widths(self, n: int) -> tuple[int, ...]:
        """Hidden layers for ``n`` rows to train on."""
        if self.hidden is not None:
            return self.hidden
        return (50,) if n < 500 else (100,) if n < 5000 else (300, 100)

    def stops_early(self, n: int) -> bool:
        """Whether training ends where the loss on held-out rows does."""
        if self.early_stopping is None:
            return n >= _ENOUGH_TO_STOP
        return self.early_stopping and n >= _ENOUGH_TO_WATCH

    def penalty(self, n: int) -> float:
        """Of the weights: stronger where a small table is trained to the end."""
        if self.alpha is not None:
            return self.alpha
        method = methods.get(self.method).with_params(**self.method_settings)
        gradients = any(name.endswith("learning_rate") for name in method.get_params())
        to_the_end = self.early_stopping is None and not self.stops_early(n)
        return _OF_SMALL_TABLES if to_the_end and gradients else float(BaseMLP.alpha)

    def estimator(self, target: Target, n: int) -> Estimator:
        """The estimator that a user of Python would make for ``n`` rows to train on."""
        batch, epochs = self.planned(n)
        estimator: Estimator
        estimator = MLPRegressor() if target.task == "regression" else MLPClassifier()
        estimator.set_params(
            hidden_layer_sizes=self.widths(n),
            activation=self.activation,
            output_activation=self.output_activation,
            method=self.method,
            loss=self.loss,
            alpha=self.penalty(n),
            batch_size="auto" if batch is None else batch,
            learning_rate_init=self.learning_rate,
            max_iter=epochs,
            early_stopping=self.stops_early(n),
            n_iter_no_change=max(_PATIENCE, epochs // 10) if self.stops_early(n) else epochs,
            random_state=self.seed,
            device=as_device(self.device),
            precision=self.precision,
            compile=self.compile,
        )
        if self.class_weight is not None:
            estimator.set_params(class_weight=_class_weight(self.class_weight, target))
        if self.method_settings:
            estimator.set_params(
                **{f"method__{name}": value for name, value in self.method_settings.items()}
            )
        return estimator

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Settings:
        """Settings from what JSON made of ``asdict``."""
        hidden = plain["hidden"]
        return cls(**{**plain, "hidden": None if hidden is None else tuple(hidden)})


def method_settings(method: Method[Any]) -> dict[str, Any]:
    """Settings of a method, those of settings by names with a dot."""
    params = method.get_params(deep=True)
    plain = {name: value for name, value in params.items() if not isinstance(value, SettingsOf)}
    return {name.replace("__", "."): value for name, value in plain.items()}


def _class_weight(given: str | Mapping[str, float], target: Target) -> Any:
    if target.task == "regression" or len(target.names) > 1:
        raise ValueError(
            f"class weights are for one column of classes; {target.name!r} is none. Leave it out."
        )
    if isinstance(given, str):
        return given
    classes = {str(label): label for label in target.classes[0]}
    for name in given:
        if name not in classes:
            raise ValueError(unknown_name(f"class of {target.name!r}", name, classes))
    return {label: given.get(name, 1.0) for name, label in classes.items()}
