"""What both estimators share: parameters, the one way into :func:`lpom.fit`, fitted attributes."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import KW_ONLY, dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from scipy.sparse import issparse
from sklearn.exceptions import ConvergenceWarning as SklearnConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import (
    _check_monotonic_cst,
    _check_sample_weight,
    check_is_fitted,
    validate_data,
)

from lpom import activations, methods
from lpom.activations import Activation
from lpom.checks import check_choice, check_number
from lpom.estimators.data import divided, scale_inputs, split_rows, units
from lpom.estimators.fitted import Array, Design, FittedMLP, as_numpy
from lpom.estimators.monotone import constrained, restore
from lpom.exceptions import ConvergenceWarning, DivergenceError, warn
from lpom.losses import Loss
from lpom.methods import Method, State
from lpom.networks import mlp
from lpom.training import Checkpoint, EarlyStopping, evaluate, fit
from lpom.training.history import Epoch, History

E = TypeVar("E", bound="BaseMLP")

_ROWS = 100  # of a batch, unless batch_size says otherwise
ALPHAS = (0.1, 1.0, 5.0)  # that "auto" chooses from
_LEAST, _FEW, _MOST = 12, 1500, 4000  # rows: for a choice, for three trials, that it looks at
_EPOCHS = 100  # of a trial


class MaxIterReached(ConvergenceWarning, SklearnConvergenceWarning):  # type: ignore[misc]
    """``max_iter`` ended a run that was still learning."""


class Targets(NamedTuple):
    """Targets as :func:`lpom.fit` takes them, and how many outputs they need."""

    values: Array
    n_outputs: int
    weight: Array | None = None
    strata: Array | None = None  # what a held-out part must have in the same shares


@dataclass(repr=False, eq=False)
class BaseMLP(FittedMLP, ABC):
    """A fully connected network behind scikit-learn's interface.

    Fitting happens on a copy that takes the estimator's place when all went well, so a failed
    call leaves a fitted estimator as it was.
    """

    hidden_layer_sizes: int | Sequence[int] = (100,)
    activation: str | Activation = "relu"
    _: KW_ONLY
    method: str | Method[Any] = "lpom"
    loss: str | Loss = "auto"
    output_activation: str | Activation = "identity"
    alpha: float | str = 0.1
    batch_size: int | str = "auto"
    learning_rate_init: float | None = None
    max_iter: int = 200
    early_stopping: bool = False
    validation_fraction: float = 0.1
    n_iter_no_change: int = 10
    tol: float = 1e-4
    warm_start: bool = False
    scaling: str | None = "auto"
    monotonic_cst: Sequence[int] | Mapping[str, int] | None = None
    device: str | torch.device | None = None
    precision: str | None = None
    compile: bool = False
    diagnostics: bool = False
    random_state: int | np.random.RandomState | None = None
    verbose: bool = False
    checkpoint: str | Path | Checkpoint | None = None

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Parameters by name; deep: ``method__mu`` and the like too, also of a method's name."""
        params: dict[str, Any] = super().get_params(deep=False)
        if deep:
            with suppress(ValueError, TypeError):  # an unknown name, which fit will say
                inner = methods.get(self.method).get_params()
                params |= {f"method__{name}": value for name, value in inner.items()}
        return params

    def set_params(self: E, **params: Any) -> E:
        """Set parameters; ``method__mu=...`` makes a Method of a method's name first."""
        inner = {name: params.pop(name) for name in list(params) if name.startswith("method__")}
        if inner:
            method = methods.get(params.get("method", self.method))
            values = {name.removeprefix("method__"): value for name, value in inner.items()}
            params["method"] = method.with_params(**values)
        super().set_params(**params)
        return self

    def evaluate(self, X: Any, y: Any) -> tuple[float, float]:
        """Mean loss, and accuracy or R2, as ``history_`` has them."""
        check_is_fitted(self)
        X, y = self._checked(X, y, reset=False)
        values = copy(self)._targets(y, None, known=True).values
        return evaluate(self._model, X, values, loss=self.result_.task.loss)

    @abstractmethod
    def _targets(self, y: Any, weight: Array | None, known: bool) -> Targets:
        """Code ``y``; ``known``: an earlier call settled what it may hold."""

    def _is_fitted(self) -> bool:
        return "result_" in vars(self)

    def _fit(self: E, X: Any, y: Any, sample_weight: Any, options: Mapping[str, Any]) -> E:
        trained = copy(self)
        goes_on = self.warm_start and self._is_fitted()
        trained._learn(X, y, sample_weight, goes_on, partial=False, options=options)
        self.__dict__ = trained.__dict__
        self._warn_of_the_end()
        return self

    def _partial_fit(self: E, X: Any, y: Any, sample_weight: Any, **settled: Any) -> E:
        if self.early_stopping:
            raise ValueError(
                "partial_fit goes over the data once and cannot stop early; "
                "set early_stopping=False."
            )
        trained = copy(self)
        trained.__dict__.update(settled)
        trained._learn(X, y, sample_weight, self._is_fitted(), partial=True, options={})
        self.__dict__ = trained.__dict__
        return self

    def _learn(
        self,
        X: Any,
        y: Any,
        sample_weight: Any,
        goes_on: bool,
        *,
        partial: bool,
        options: Mapping[str, Any],
    ) -> None:
        """Check everything, then train a new network, or a copy of the one that is there."""
        method = self._checked_method()
        X, y = self._checked(X, y, reset=not goes_on)
        if sample_weight is not None:
            sample_weight = as_numpy(sample_weight, "sample_weight")
            sample_weight = _check_sample_weight(
                sample_weight, X, dtype=X.dtype, ensure_non_negative=True
            )
        targets = self._targets(y, sample_weight, goes_on or partial)
        design = self._plan(X.shape[1], targets.n_outputs)
        if not (goes_on and partial):
            self._random = check_random_state(self.random_state)
        else:
            self._random = deepcopy(self._random)
        if not goes_on:
            alpha = self._chosen_alpha(X, y, sample_weight)
        elif design != self._design:
            raise ValueError(
                f"cannot continue: the fitted network is {self._design}, but parameters and data "
                f"now require {design}. Set them back, or fit again with warm_start=False."
            )
        else:
            alpha = self.alpha_ if isinstance(self.alpha, str) else self.alpha
        self._begin(X, design, goes_on, penalised=getattr(method, "penalties", None) is not None)
        state: State | None = None
        if goes_on and partial and method == self._trained_by:
            state = self.result_.state
        monotonic = _check_monotonic_cst(self, self.monotonic_cst)
        used = method
        if monotonic.any():
            used = constrained(method, self._model, monotonic, design.activation)
        X = divided(X, self._column_units)
        train, held_out = self._hold_out(X, targets)
        rows = self._rows_per_step(train[0].shape[0], method)
        counted = rows if train[2] is None else rows * float(np.mean(train[2]))
        callbacks = [*([_say] if self.verbose else []), *options.get("callbacks", ())]
        diverged: DivergenceError | None = None
        try:
            self.result_ = fit(
                self._model,
                *train[:2],
                sample_weight=train[2],
                validation_data=held_out,
                method=used,
                loss=self.loss,
                weight_decay=alpha / counted,
                epochs=1 if partial else int(self.max_iter),
                batch_size=rows,
                seed=self._seed(),
                device=self.device,
                early_stopping=EarlyStopping(int(self.n_iter_no_change), self.tol, watch="loss"),
                state=state,
                endless=partial,  # a stream has no end to plan for
                checkpoint=None if partial else self.checkpoint,
                precision=self.precision,
                compile=self.compile and not partial,
                diagnostics=self.diagnostics,
                **{"progress": False, **options, "callbacks": callbacks},
            )
        except DivergenceError as error:
            if error.result is None:
                raise
            self.result_, error.estimator, diverged = error.result, self, error
        restore(self._model, used)
        scale_inputs(self._model, self._column_units, into=False)
        self._design, self._trained_by, self.alpha_ = design, method, alpha
        self._add_to_history(goes_on, train[0].shape[0])
        if diverged is not None:
            raise diverged

    def _begin(self, X: Any, design: Design, goes_on: bool, *, penalised: bool) -> None:
        """A new network, or the one that is there, for columns in units near 1."""
        if goes_on:
            self._model = deepcopy(self._model)
            scale_inputs(self._model, self._column_units, into=True)
            return
        dtype = torch.float32 if X.dtype == np.float32 else torch.float64
        self._model = mlp(*design, seed=self._seed(), dtype=dtype)
        # what penalties ask of the weights is to hold of those for the columns as they are
        self._column_units = None if penalised or self.scaling is None else units(X)

    def _checked(self, X: Any, y: Any, *, reset: bool) -> tuple[Any, Any]:
        X, y = validate_data(
            self,
            as_numpy(X, "X"),
            as_numpy(y, "y"),
            accept_sparse="csr",
            dtype=(np.float64, np.float32),
            multi_output=True,
            reset=reset,
        )
        return X, y.toarray() if issparse(y) else y

    def _checked_method(self) -> Method[Any]:
        check_number("max_iter", self.max_iter, whole=True)
        check_number("n_iter_no_change", self.n_iter_no_change, whole=True)
        check_number("tol", self.tol, strict=False)
        if self.alpha != "auto":
            check_number("alpha, unless 'auto',", self.alpha, strict=False)
        if self.batch_size != "auto":
            check_number("batch_size, unless 'auto',", self.batch_size, whole=True)
        if self.scaling is not None:
            check_choice("scaling", self.scaling, ("auto",))
        method = methods.get(self.method)
        if self.alpha not in (0, BaseMLP.alpha) and not _takes_gradient_steps(method):
            raise ValueError(
                f"method {method.name!r} with these settings solves for its weights and takes no "
                f"gradient that alpha={self.alpha!r} could be added to. Leave alpha out."
            )
        if self.early_stopping and not 0 < self.validation_fraction < 1:
            raise ValueError(
                "validation_fraction must be a number between 0 and 1, "
                f"got {self.validation_fraction!r}."
            )
        if self.checkpoint is not None and not isinstance(self.random_state, Integral):
            raise ValueError(
                "checkpoint needs an integer as random_state, so that a run goes on with the rows "
                f"and batches it was begun with; got random_state={self.random_state!r}."
            )
        if self.learning_rate_init is None:
            return method
        return method.with_learning_rate(self.learning_rate_init)

    def _chosen_alpha(self, X: Any, y: Array, weight: Array | None) -> float:
        """``alpha``; of several that with the lowest loss on held-out rows at the end of trials."""
        n = X.shape[0]
        if self.alpha != "auto" or n < _LEAST:
            return ALPHAS[0] if isinstance(self.alpha, str) else float(self.alpha)
        rows = self._random.permutation(n)[:_MOST]
        part = [None if each is None else each[rows] for each in (X, y, weight)]
        epochs = min(int(self.max_iter), _EPOCHS)
        params = self.get_params(deep=False) | {
            "early_stopping": True, "validation_fraction": 0.25, "checkpoint": None,
            "max_iter": epochs, "n_iter_no_change": epochs, "verbose": False, "warm_start": False,
            "diagnostics": False,
        }  # fmt: skip
        losses = dict.fromkeys(ALPHAS, 0.0)
        for seed in [self._seed() for _ in range(3 if n <= _FEW else 1)]:
            for alpha in ALPHAS:
                trial = type(self)(**{**params, "alpha": alpha, "random_state": seed})
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    try:
                        history = trial.fit(*part).result_.history
                        last = [epoch.validation_loss for epoch in history][-5:]
                        losses[alpha] += float(np.mean(last))
                    except DivergenceError:
                        losses[alpha] = np.inf
        return min(ALPHAS, key=lambda alpha: losses[alpha])

    def _plan(self, n_features: int, n_outputs: int) -> Design:
        hidden = np.atleast_1d(np.asarray(self.hidden_layer_sizes))
        if hidden.size and (hidden.ndim != 1 or hidden.dtype.kind not in "iu" or hidden.min() < 1):
            raise ValueError(
                "hidden_layer_sizes must be integers above 0, e.g. (100, 50), "
                f"got {self.hidden_layer_sizes!r}."
            )
        return Design(
            (n_features, *hidden.tolist(), n_outputs),
            activations.get(self.activation),
            activations.get(self.output_activation),
        )

    def _rows_per_step(self, n: int, method: Method[Any]) -> int:
        if method.full_batch:
            return n
        return min(_ROWS if isinstance(self.batch_size, str) else int(self.batch_size), n)

    def _seed(self) -> int:
        return int(self._random.randint(2**31 - 1))

    def _hold_out(self, X: Any, targets: Targets) -> tuple[tuple[Any, ...], tuple[Any, ...] | None]:
        """(X, y, weight) to train on, and what to watch if training may stop early."""
        everything = (X, targets.values, targets.weight)
        if not self.early_stopping:
            return everything, None
        kept, held_out = split_rows(
            X.shape[0], self.validation_fraction, self._random, targets.strata
        )
        if not len(kept) or len(held_out) < 2:
            raise ValueError(
                "early stopping needs at least 2 samples held out and 1 to train on, but "
                f"validation_fraction={self.validation_fraction} of {X.shape[0]} gives "
                f"{len(held_out)} and {len(kept)}. Change it, or give more data."
            )

        def take(rows: Array) -> tuple[Any, ...]:
            return tuple(None if part is None else part[rows] for part in everything)

        return take(kept), take(held_out)

    def _add_to_history(self, goes_on: bool, n_samples: int) -> None:
        new = self.result_.history
        old = self.history_.epochs if goes_on else []
        epochs = [replace(epoch, epoch=len(old) + epoch.epoch) for epoch in new]
        self.history_ = History(new.metric, [*old, *epochs])
        self.t_ = (self.t_ if goes_on else 0) + len(new) * n_samples

    def _warn_of_the_end(self) -> None:
        """Say what about the end of training may be wrong."""
        if self.result_.status == "finished":
            warn(
                f"training ended after max_iter={self.max_iter} epochs, before the "
                f"{'held-out' if self.early_stopping else 'training'} loss stood still for "
                f"n_iter_no_change={self.n_iter_no_change} of them. Raise max_iter, or tol.",
                MaxIterReached,
            )
        held_out = [epoch.validation_loss for epoch in self.result_.history]
        losses = [loss for loss in held_out if loss is not None]
        if self.early_stopping and len(losses) > 1 and losses[0] == min(losses):
            warn(
                "the held-out loss was lowest after the first epoch, so the weights are hardly "
                "trained. The held-out rows may be too few or have an outlier: set "
                "early_stopping=False and alpha='auto', or clip your data.",
                ConvergenceWarning,
            )


def _say(epoch: Epoch) -> None:
    text = f"epoch {epoch.epoch}: loss {epoch.loss:.6f}, score {epoch.score:.4f}"
    if epoch.validation_score is not None:
        text += f", validation score {epoch.validation_score:.4f}"
    print(f"{text}, {epoch.samples_per_second:,.0f} samples/s")


def _takes_gradient_steps(method: Method[Any]) -> bool:
    """Which a method has a learning rate for."""
    return any(name.split("__")[-1] == "learning_rate" for name in method.get_params())
