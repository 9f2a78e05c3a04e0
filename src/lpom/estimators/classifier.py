"""A classifier: two classes, several, or several labels at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.utils import compute_class_weight, compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets, type_of_target, unique_labels
from sklearn.utils.validation import column_or_1d

from lpom import activations, losses
from lpom.estimators.base import BaseMLP, Targets
from lpom.estimators.fitted import Array


@final
@dataclass(repr=False, eq=False)
class MLPClassifier(ClassifierMixin, BaseMLP):  # type: ignore[misc]
    """A fully connected network for classes, trained by LPOM or another method of the library.

    With the parameters and attributes of scikit-learn's class of this name where they apply; in
    place of its ``solver`` and the like there is ``method``. Labels may be of any kind
    that scikit-learn takes; a 0/1 matrix is several labels at once. Scale data first; it may be
    sparse, and float32 stays float32.

    Parameters
    ----------
    hidden_layer_sizes : widths of the hidden layers
    activation : name or :class:`~lpom.activations.Activation` of the hidden layers
    method : name or :class:`~lpom.methods.Method`
        Its hyperparameters are ``method__mu`` and the like, in ``set_params`` and grid searches,
        also where it is a name.
    loss : name or :class:`~lpom.losses.Loss`
        "auto" is cross-entropy, binary for two classes (with one output) and for labels; squared
        where ``output_activation`` is bounded and can't give logits.
    output_activation : name or Activation of the last layer
    alpha : float or "auto", default 0.1
        Strength of the L2 penalty on the weights, as in scikit-learn: ``alpha / 2`` times their
        squared norm, divided by the rows of a batch, is added to the mean loss. Methods that solve
        for their weights (bcd, admm, ``LPOM(weights="exact")``) have a ridge instead and take no
        other alpha.
        With "auto", 0.1, 1 or 5, whichever has the lowest loss on a quarter of the rows held out:
        three times up to 1,500 rows, else once. It takes about five times as long and pays on
        small tables; ``alpha_`` is what was chosen
    batch_size : rows per step, "auto": 100, or all if there are fewer
    learning_rate_init : the method's ``learning_rate``, if it is not to be its own default
    max_iter : most epochs, which is also what the learning-rate schedule spans
    early_stopping : hold out ``validation_fraction``, keep the weights with the lowest loss on it
    n_iter_no_change, tol : stop after so many epochs in which nothing got better by ``tol``: the
        held-out loss with early stopping, else the training loss; where ``max_iter`` comes first,
        scikit-learn's ``ConvergenceWarning`` says so
    warm_start : let ``fit`` go on from the weights of the last one, with a new optimiser
    scaling : "auto" or None
        "auto" (default) divides columns whose largest number is far from 1 by that number during
        training: all by one common number, which keeps pictures as they look, and those that
        stand out a hundredfold by their own. The weights carry the division, so the network takes
        the columns as they are. Tables like those of scikit-learn's scalers stay untouched
    monotonic_cst : array of -1, 0 and 1 per feature, or dict of feature name to these
        Where the output is to fall or to rise with a feature: as in scikit-learn's
        HistGradientBoosting. Weights keep their signs (`lpom.estimators.monotone`)
    device : where torch computes, e.g. "cuda"
    precision : "bf16" for steps whose products round their factors to bfloat16, see
        :func:`lpom.fit`; X must be float32
    compile : whether the steps of ``fit`` go through torch's compiler, see :func:`lpom.fit`
    diagnostics : whether ``history_`` has the objective, gaps and contraction rates of each epoch
    random_state : fixes initial weights, the order of batches and what is held out
    verbose : print a line per epoch
    checkpoint : a folder, or a :class:`lpom.Checkpoint`, where a call of ``fit`` is kept; the same
        call goes on from there after whatever ended it, see :func:`lpom.fit`
    class_weight : "balanced", or a weight per class

    Attributes
    ----------
    classes_ : class labels, in the order of ``predict_proba``'s columns
    coefs_, intercepts_ : weights (inputs, outputs) and biases of each layer, read-only
    history_ : :class:`~lpom.History` of all epochs; ``loss_curve_``, ``validation_scores_``,
        ``loss_``, ``best_loss_``, ``best_validation_score_`` and ``n_iter_`` are read off it
    result_ : :class:`~lpom.Result` of the last call
    t_ : rows seen in training
    n_features_in_, feature_names_in_, n_layers_, n_outputs_, out_activation_ : as in scikit-learn

    >>> from sklearn.datasets import load_digits
    >>> X, y = load_digits(return_X_y=True)
    >>> clf = MLPClassifier(max_iter=40, random_state=0).fit(X[:1400] / 16, y[:1400])
    >>> clf.score(X[1400:] / 16, y[1400:]) > 0.85
    True
    """

    class_weight: str | Mapping[Any, float] | None = None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None, **options: Any) -> MLPClassifier:
        """Train on ``X`` (n_samples, n_features) and ``y``, labels or a 0/1 matrix of them.

        ``options`` are further arguments of :func:`lpom.fit`: ``callbacks``, ``progress``, ...
        """
        return self._fit(X, y, sample_weight, options)

    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None
    ) -> MLPClassifier:
        """Go over this data once, from where the last call ended, at the full learning rate.

        The first call needs all ``classes`` that will ever come, except for a 0/1 matrix.
        """
        if isinstance(self.class_weight, str):
            raise ValueError(
                f"class_weight={self.class_weight!r} needs all data at once, which partial_fit "
                "does not see; give a weight per class, or sample_weight."
            )
        if classes is None:
            return self._partial_fit(X, y, sample_weight)
        classes = unique_labels(classes)
        if self._is_fitted() and not np.array_equal(classes, self.classes_):
            raise ValueError(
                f"classes cannot change between calls: they were {_listed(self.classes_)}, now "
                f"{_listed(classes)}. Leave the argument out after the first call."
            )
        return self._partial_fit(X, y, sample_weight, classes_=classes)

    def predict(self, X: Any) -> Array:
        """The likeliest class of each row, or its labels as 0 and 1."""
        outputs = self._outputs(X)
        decided: Array = self.result_.task.decide(outputs).numpy()
        return decided if self._multilabel else self.classes_[decided]

    def decision_function(self, X: Any) -> Array:
        """The network's outputs; for two classes one number, positive for ``classes_[1]``.

        One output, or one per label, is counted from where the loss draws the line: 0 for the
        entropies, whose outputs are handed out as they are.
        """
        outputs: Array = self._outputs(X).numpy()
        if self._multilabel:
            return outputs - self.result_.task.loss.threshold
        if self.n_outputs_ == 1:
            return outputs[:, 0] - self.result_.task.loss.threshold
        return outputs[:, 1] - outputs[:, 0] if self.n_outputs_ == 2 else outputs

    def predict_proba(self, X: Any) -> Array:
        """Probabilities of the classes, summing to one, or of each label by itself.

        They are the model's own for the entropies; for other losses outputs squeezed into [0, 1]
        and divided by their sum, which is not calibrated.
        """
        outputs = self._outputs(X)
        p: Array = self.result_.task.loss.probabilities(outputs).numpy()
        if self._multilabel:
            return p
        if self.n_outputs_ == 1:
            return np.hstack([1 - p, p])
        nothing = p.sum(1) == 0  # every output squeezed to zero: the largest takes it all
        p[nothing, outputs.numpy()[nothing].argmax(1)] = 1
        p /= p.sum(1, keepdims=True)
        return p

    def predict_log_proba(self, X: Any) -> Array:
        """Logarithms of :meth:`predict_proba`."""
        with np.errstate(divide="ignore"):
            logarithms: Array = np.log(self.predict_proba(X))
        return logarithms

    @property
    def _multilabel(self) -> bool:
        return self.result_.task.kind == "labels"

    def _targets(self, y: Any, weight: Array | None, known: bool) -> Targets:
        if y.ndim == 2 and y.shape[1] == 1:
            y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        kind = type_of_target(y)
        if kind == "multiclass-multioutput":
            raise ValueError(
                "y must be one class label per row, or a matrix of 0 and 1 with a column per "
                f"label; got a matrix of shape {y.shape} with other values. "
                "Use scikit-learn's MultiOutputClassifier for several classes at once."
            )
        if self._is_fitted() and known and self._multilabel != (kind == "multilabel-indicator"):
            raise ValueError(
                "cannot continue: the fitted estimator has "
                + ("a 0/1 matrix of labels" if self._multilabel else "one class label per row")
                + f" as y, but got {kind}."
            )
        if kind == "multilabel-indicator":
            return self._labels(y, weight)
        return self._classes(y, weight, known)

    def _labels(self, y: Array, weight: Array | None) -> Targets:
        self.classes_ = np.arange(y.shape[1])
        if self.class_weight is not None:
            weight = _product(weight, compute_sample_weight(self.class_weight, y))
        return Targets(y.astype(np.int64), y.shape[1], weight)

    def _classes(self, y: Array, weight: Array | None, known: bool) -> Targets:
        if not known:
            self.classes_ = unique_labels(y)
        elif "classes_" not in vars(self):
            raise ValueError("classes must be passed on the first call to partial_fit.")
        elif unseen := sorted(set(y.tolist()) - set(self.classes_.tolist())):
            raise ValueError(
                f"y holds classes that are not among those of the first call: {_listed(unseen)}; "
                f"those were {_listed(self.classes_)}."
            )
        counted = self.classes_ if known else unique_labels(y if weight is None else y[weight > 0])
        if len(counted) < 2:
            raise ValueError(
                f"a classifier needs at least two classes to tell apart, but y holds one class "
                f"only, {_listed(counted)}" + ("." if weight is None else ", of weight above zero.")
            )
        codes = np.searchsorted(self.classes_, y)
        if self.class_weight is not None:
            counts = np.isin(self.classes_, counted)  # a class of weight zero has none to balance
            rows = counts[codes]
            each = np.zeros(len(self.classes_))
            each[counts] = compute_class_weight(
                self.class_weight,
                classes=self.classes_[counts],
                y=y[rows],
                sample_weight=None if weight is None else weight[rows],
            )
            weight = _product(weight, each[codes])
        two_outputs = self.loss != "auto" and losses.get(self.loss).exclusive
        two_outputs |= not activations.get(self.output_activation).elementwise
        n_outputs = len(self.classes_)
        if self.monotonic_cst is not None and n_outputs > 2 - two_outputs:
            raise ValueError(
                "monotonic_cst is for two classes with one output, the probability of the second "
                f"of which is to rise or fall; got {n_outputs} classes and loss={self.loss!r}."
            )
        if n_outputs == 2 and not two_outputs:
            n_outputs = 1
        return Targets(codes, n_outputs, weight, strata=codes)


def _product(weight: Array | None, other: Array) -> Array:
    return other if weight is None else weight * other


def _listed(classes: Any) -> str:
    return ", ".join(repr(label) for label in np.asarray(classes).tolist())
