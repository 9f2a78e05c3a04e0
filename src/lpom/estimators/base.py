"""What both estimators share: parameters, one way into :func:`lpom.fit`, fitted attributes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, clone
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state, gen_batches
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from lpom import activations, methods
from lpom.activations import Activation
from lpom.data import as_input, rows_of
from lpom.history import Epoch, History
from lpom.losses import Loss
from lpom.methods import Method, State
from lpom.methods.base import check_number
from lpom.network import Lifted, mlp
from lpom.training import EarlyStopping, Result, fit

_PREDICT_ROWS = 4096  # rows of one forward pass; sparse rows become dense this many at a time
_SEEDS = 2**31 - 1

E = TypeVar("E", bound="BaseMLP")


class Targets(NamedTuple):
    """Targets as :func:`lpom.fit` takes them, the outputs they need, a weight per row or none."""

    values: NDArray[Any]
    n_outputs: int
    weight: NDArray[Any] | None
    strata: NDArray[Any] | None  # what a held-out part has to have in the same shares


@dataclass(repr=False, eq=False)
class BaseMLP(BaseEstimator):  # type: ignore[misc]
    """A fully connected network behind scikit-learn's interface.

    Fitting happens on a copy that takes the place of the estimator when all went well, so a
    failed call leaves a fitted estimator as it was.
    """

    hidden_layer_sizes: int | Sequence[int] = (100,)
    activation: str | Activation = "relu"
    _: KW_ONLY
    method: str | Method[Any] = "lpom"
    loss: str | Loss = "auto"
    output_activation: str | Activation = "identity"
    batch_size: int | str = "auto"
    learning_rate_init: float | None = None
    max_iter: int = 100
    early_stopping: bool = False
    validation_fraction: float = 0.1
    n_iter_no_change: int = 10
    tol: float = 1e-4
    warm_start: bool = False
    device: str | torch.device | None = None
    random_state: int | np.random.RandomState | None = None
    verbose: bool = False

    # -- parameters ---------------------------------------------------------------------------

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Parameters by name; deep: also ``method__mu`` and the like, for a method's name too."""
        params: dict[str, Any] = super().get_params(deep)
        if deep and isinstance(self.method, str) and self.method in methods.names():
            inner = methods.get(self.method).get_params()
            params |= {f"method__{name}": value for name, value in inner.items()}
        return params

    def set_params(self: E, **params: Any) -> E:
        """Set parameters; ``method__mu=...`` turns a method's name into a Method that has it."""
        inner = {name for name in params if name.startswith("method__")}
        if inner:
            method = methods.get(params.get("method", self.method))
            method = clone(method).set_params(**{k.split("__", 1)[1]: params[k] for k in inner})
            params = {name: params[name] for name in params.keys() - inner} | {"method": method}
        super().set_params(**params)
        return self

    # -- fitting ------------------------------------------------------------------------------

    @abstractmethod
    def _targets(
        self, y: Any, weight: NDArray[Any] | None, known: bool, dtype: np.dtype[Any]
    ) -> Targets:
        """Code ``y``; ``known`` says that what it may hold was settled by an earlier call."""

    def _fitted(self) -> bool:
        return "result_" in vars(self)

    def _fit(self: E, X: Any, y: Any, sample_weight: Any) -> E:
        trained = copy(self)
        trained._learn(X, y, sample_weight, self.warm_start and self._fitted(), partial=False)
        self.__dict__ = trained.__dict__
        return self

    def _partial_fit(self: E, X: Any, y: Any, sample_weight: Any, **settled: Any) -> E:
        if self.early_stopping:
            raise ValueError(
                "partial_fit goes over the data once and cannot stop early; "
                "set early_stopping=False."
            )
        trained = copy(self)
        vars(trained).update(settled)
        trained._learn(X, y, sample_weight, self._fitted(), partial=True)
        self.__dict__ = trained.__dict__
        return self

    def _learn(self, X: Any, y: Any, sample_weight: Any, goes_on: bool, *, partial: bool) -> None:
        """Check everything, then train a new network, or a copy of the one that is there."""
        self._check_numbers()
        method = self._method()
        X, y = validate_data(
            self,
            X,
            y,
            accept_sparse="csr",
            dtype=(np.float64, np.float32),
            multi_output=True,
            reset=not goes_on,
        )
        if sample_weight is not None:
            sample_weight = _check_sample_weight(
                sample_weight, X, dtype=X.dtype, ensure_non_negative=True
            )
        known = goes_on or (partial and "classes_" in vars(self))
        targets = self._targets(y, sample_weight, known, X.dtype)
        hidden = np.atleast_1d(np.asarray(self.hidden_layer_sizes, dtype=object)).tolist()
        design = _Design(
            (X.shape[1], *hidden, targets.n_outputs),
            activations.get(self.activation),
            activations.get(self.output_activation),
        )
        if not (goes_on and partial):
            self._random = check_random_state(self.random_state)
        state: State | None = None
        if goes_on:
            self._check_same(design)
            self._model, state = deepcopy((self._model, self.result_.state))
            if not partial or not _same_method(method, self._trained_by):
                state = None
        else:
            dtype = torch.float32 if X.dtype == np.float32 else torch.float64
            seed = int(self._random.randint(_SEEDS))
            self._model = mlp(*design, seed=seed, dtype=dtype)
        train, held_out = self._hold_out(X, targets)
        result = fit(
            self._model,
            *train[:2],
            method=method,
            loss=self.loss,
            epochs=1 if partial else int(self.max_iter),
            batch_size=self._rows_per_step(X, partial),
            validation_data=held_out,
            sample_weight=train[2],
            seed=int(self._random.randint(_SEEDS)),
            device=self.device,
            callbacks=[self._say] if self.verbose else [],
            early_stopping=EarlyStopping(int(self.n_iter_no_change), self.tol),
            progress=False,
            state=state,
            span=(0.0, 0.0) if partial else (0.0, 1.0),
        )
        self._design, self._trained_by = design, clone(method)
        self._remember(result, goes_on, train[0].shape[0])

    def _check_numbers(self) -> None:
        check_number("max_iter", self.max_iter, whole=True)
        check_number("n_iter_no_change", self.n_iter_no_change, whole=True)
        check_number("tol", self.tol, strict=False)
        if not (isinstance(self.batch_size, str) and self.batch_size == "auto"):
            check_number("batch_size, if it is not 'auto',", self.batch_size, whole=True)  # type: ignore[arg-type]

    def _method(self) -> Method[Any]:
        method = methods.get(self.method)
        if self.learning_rate_init is None:
            return method
        return clone(method).set_params(learning_rate=self.learning_rate_init)  # type: ignore[no-any-return]

    def _rows_per_step(self, X: Any, partial: bool) -> int | None:
        if isinstance(self.batch_size, str):
            return None  # fit's own default
        size = int(self.batch_size)
        return min(size, X.shape[0]) if partial else size

    def _check_same(self, design: _Design) -> None:
        if design != self._design:
            raise ValueError(
                f"this goes on with a network of {self._design}, but the parameters and data now "
                f"ask for {design}. Set them back, or fit anew with warm_start=False."
            )

    def _hold_out(self, X: Any, targets: Targets) -> tuple[tuple[Any, ...], tuple[Any, ...] | None]:
        """(X, y, weight) to train on, and those to validate on if training may stop early."""
        everything = (X, targets.values, targets.weight)
        if not self.early_stopping:
            return everything, None
        parts = train_test_split(
            np.arange(X.shape[0]),
            test_size=self.validation_fraction,
            stratify=targets.strata,
            random_state=self._random,
        )
        if len(parts[1]) < 2:
            raise ValueError(
                f"early stopping needs at least 2 samples held out, but validation_fraction="
                f"{self.validation_fraction!r} of {X.shape[0]} gives {len(parts[1])}. "
                "Raise it, or give more data."
            )
        train, held_out = (
            tuple(None if part is None else part[rows] for part in everything) for rows in parts
        )
        return train, held_out if targets.weight is not None else held_out[:2]

    def _say(self, epoch: Epoch) -> None:
        text = f"epoch {epoch.epoch}: loss {epoch.loss:.6f}, score {epoch.score:.4f}"
        if epoch.validation_score is not None:
            text += f", validation score {epoch.validation_score:.4f}"
        print(f"{text}, {epoch.samples_per_second:,.0f} samples/s")

    def _remember(self, result: Result, goes_on: bool, n_samples: int) -> None:
        old = self.history_.epochs if goes_on else []
        new = [replace(epoch, epoch=len(old) + epoch.epoch) for epoch in result.history]
        self.result_ = result
        self.history_ = History(result.history.metric, [*old, *new])
        self.n_iter_ = len(self.history_)
        self.t_ = (self.t_ if goes_on else 0) + len(new) * n_samples
        self.n_layers_ = len(self._design.sizes)
        self.n_outputs_ = self._design.sizes[-1]
        self.out_activation_ = _LINKS.get(result.task.loss.name, self._design.output.name)
        self.loss_curve_ = self.history_.column("loss")
        self.loss_ = self.loss_curve_[-1] if self.loss_curve_ else np.nan
        scores = self.history_.column("validation_score")
        self.validation_scores_ = scores if self.early_stopping else None
        self.best_loss_ = None if self.early_stopping else min(self.loss_curve_, default=np.nan)
        scores = [score for score in scores if score is not None]
        self.best_validation_score_ = max(scores, default=None) if self.early_stopping else None

    # -- the fitted network -------------------------------------------------------------------

    @property
    def coefs_(self) -> list[NDArray[Any]]:
        """Weights of each layer, (in, out); not to be written to."""
        return [_read_only(layer.map.matrix().T) for layer in self._layers()]
