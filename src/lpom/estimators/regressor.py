"""A regressor: one output per column of the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from sklearn.base import MultiOutputMixin, RegressorMixin
from sklearn.utils.validation import column_or_1d
from torch import nn

from lpom import activations, losses
from lpom.activations import Identity
from lpom.estimators.base import BaseMLP, Targets
from lpom.estimators.fitted import Array


@final
@dataclass(repr=False, eq=False)
class MLPRegressor(MultiOutputMixin, RegressorMixin, BaseMLP):  # type: ignore[misc]
    """A fully connected network for numbers, trained by LPOM or another method of the library.

    Parameters and fitted attributes are those of :class:`MLPClassifier` without ``class_weight``
    and ``classes_``; ``loss="auto"`` is the squared loss.

    The target is standardised inside, so losses (and the ``delta`` of huber) are in its standard
    deviations; predictions, ``coefs_``, ``intercepts_`` and ``to_torch`` are in its own units.
    An ``output_activation`` other than identity says itself what range the target has, and then
    it is taken as it is.

    >>> from sklearn.datasets import make_regression
    >>> X, y = make_regression(n_samples=500, n_features=5, random_state=0)
    >>> y = 1e4 + y
    >>> MLPRegressor(tol=1e-3, random_state=0).fit(X, y).score(X, y) > 0.98
    True
    """

    # of each output: target = _offset + _scale * output; no fields, so no type here
    _offset = np.zeros(1)
    _scale = np.ones(1)

    def fit(self, X: Any, y: Any, sample_weight: Any = None, **options: Any) -> MLPRegressor:
        """Train on ``X`` (n_samples, n_features) and ``y``, one or several columns of numbers.

        ``options`` are further arguments of :func:`lpom.fit`: ``callbacks``, ``progress``, ...
        """
        return self._fit(X, y, sample_weight, options)

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> MLPRegressor:
        """Go over this data once, from where the last call ended, at the full learning rate."""
        return self._partial_fit(X, y, sample_weight)

    def predict(self, X: Any) -> Array:
        """Numbers in the units of the target, (n_samples,) or (n_samples, n_outputs)."""
        outputs: Array = self._outputs(X).numpy()
        numbers: Array = self._offset + self._scale * outputs
        if self._keeps_digits(outputs.dtype):
            numbers = numbers.astype(outputs.dtype)
        return numbers[:, 0] if self.n_outputs_ == 1 else numbers

    def _keeps_digits(self, dtype: np.dtype[Any]) -> bool:
        """Whether numbers in the units of the target may be rounded to the network's digits."""
        limits = np.finfo(dtype)
        size = np.abs(self._offset) + 100 * self._scale
        return bool((limits.eps * size < 1e-3 * self._scale).all() and size.max() < limits.max)

    @torch.no_grad()
    def _answering(self) -> nn.Sequential:
        network = super()._answering()
        if self._design.output == Identity():  # else nothing was scaled
            last = network[-1]
            assert isinstance(last, nn.Linear)
            scale, offset = (torch.from_numpy(x).to(last.bias) for x in (self._scale, self._offset))
            last.weight.mul_(scale[:, None])
            last.bias.mul_(scale).add_(offset)
        return network

    def _targets(self, y: Any, weight: Array | None, known: bool) -> Targets:
        if self.loss != "auto" and losses.get(self.loss).classifies:
            raise ValueError(
                f"loss={self.loss!r} is for classes; a regressor takes 'squared' or 'huber'."
            )
        if y.ndim == 2 and y.shape[1] == 1:
            y = column_or_1d(y, warn=True)
        numbers = y.astype(np.float64).reshape(len(y), -1)
        if numbers.shape[1] == 1 and not activations.get(self.output_activation).elementwise:
            raise ValueError(
                f"output_activation={self.output_activation!r} compares outputs with each other, "
                "and one target has one; take 'identity'."
            )
        if not (known and self._is_fitted()):
            self._offset, self._scale = self._units(numbers, weight)
        return Targets((numbers - self._offset) / self._scale, numbers.shape[1], weight)

    def _units(self, numbers: Array, weight: Array | None) -> tuple[Array, Array]:
        """Mean and standard deviation of each column, 1 where it is constant."""
        n = numbers.shape[1]
        if activations.get(self.output_activation) != Identity():
            return np.zeros(n), np.ones(n)
        with np.errstate(over="ignore", invalid="ignore"):
            offset = np.average(numbers, axis=0, weights=weight)
            scale = np.sqrt(np.average((numbers - offset) ** 2, axis=0, weights=weight))
        if not np.isfinite(scale).all():
            raise ValueError(
                f"y goes up to {np.abs(numbers).max():g}, and the squares of such numbers can't be "
                "computed with. Give it in another unit."
            )
        return offset, np.where(scale > 0, scale, 1.0)
