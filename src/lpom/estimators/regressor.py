"""A regressor: one output per column of the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from sklearn.base import MultiOutputMixin, RegressorMixin
from sklearn.utils.validation import column_or_1d

from lpom import losses
from lpom.estimators.base import BaseMLP, Targets


@final
@dataclass(repr=False, eq=False)
class MLPRegressor(MultiOutputMixin, RegressorMixin, BaseMLP):  # type: ignore[misc]
    """A fully connected network for numbers, trained by LPOM or another method of the library.

    Parameters and fitted attributes are those of :class:`MLPClassifier` without ``class_weight``
    and ``classes_``; ``loss="auto"`` is the squared loss. The target is taken as it is: one far
    from zero or of large scale trains slowly, so standardise it first, e.g. with scikit-learn's
    ``TransformedTargetRegressor``.

    >>> from sklearn.datasets import make_regression
    >>> X, y = make_regression(n_samples=500, n_features=5, random_state=0)
    >>> y = y / y.std()
    >>> MLPRegressor(random_state=0).fit(X, y).score(X, y) > 0.98
    True
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> MLPRegressor:
        """Train on ``X`` (n_samples, n_features) and ``y``, one or several columns of numbers."""
        return self._fit(X, y, sample_weight)

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> MLPRegressor:
        """Go over this data once, from where the last call ended, at the full learning rate."""
        return self._partial_fit(X, y, sample_weight)

    def predict(self, X: Any) -> NDArray[Any]:
        """The network's outputs, (n_samples,) or (n_samples, n_outputs)."""
        outputs: NDArray[Any] = self._outputs(X).numpy()
        return outputs[:, 0] if self.n_outputs_ == 1 else outputs

    def _targets(self, y: Any, weight: NDArray[Any] | None, known: bool) -> Targets:
        if self.loss != "auto" and losses.get(self.loss).classifies:
            raise ValueError(
                f"loss={self.loss!r} is for classes; a regressor takes 'squared' or 'huber'."
            )
        if y.ndim == 2 and y.shape[1] == 1:
            y = column_or_1d(y, warn=True)
        return Targets(y.astype(np.float64), 1 if y.ndim == 1 else y.shape[1], weight)
