"""The network inside a fitted estimator: its shape, its weights, its outputs."""

from __future__ import annotations

import copyreg
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import issparse
from sklearn.base import BaseEstimator
from sklearn.utils import gen_batches
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from lpom.activations import Activation
from lpom.checks import check_finite, check_unmasked, plain_tensor
from lpom.methods import Method, State
from lpom.saving import dumps, loads
from lpom.training.data import ROWS, dense_rows
from lpom.training.history import History, Result

Array: TypeAlias = NDArray[Any]


class Design(NamedTuple):
    """What :func:`lpom.mlp` builds a network from."""

    sizes: tuple[int, ...]
    activation: Activation
    output: Activation

    def __str__(self) -> str:
        sizes = "-".join(map(str, self.sizes))
        return f"{sizes} with {self.activation} (output {self.output})"


class FittedMLP(BaseEstimator):  # type: ignore[misc]
    """The part of an estimator that only looks at what fitting left."""

    result_: Result
    history_: History
    t_: int
    alpha_: float  # what alpha was, or was chosen to be
    _model: nn.Sequential
    _design: Design
    _column_units: Array | None  # what columns were divided by in training
    _trained_by: Method[Any] | None  # None: read from a file
    _random: np.random.RandomState  # goes on from one partial_fit to the next

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """For pickle and copies: the method's memory too, but for variables of single samples.

        So a pickle is no copy of the training data; ``partial_fit`` begins such variables anew.
        """
        kept: dict[str, Any] = super().__getstate__()
        if "result_" in kept:
            result = kept["result_"]
            kept = kept | {"result_": replace(result, state=result.state.without_samples())}
        return copyreg.__newobj__, (type(self),), kept  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        """For skops, which takes no tensors: what `lpom.save` writes."""
        return {"_saved": dumps(self._to_saved())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(loads(state["_saved"]) if "_saved" in state else state)

    def _to_saved(self) -> dict[str, Any]:
        """All but the method's own memory: what goes on from a file begins it anew."""
        saved = {**vars(self), "checkpoint": None, "_trained_by": None}
        if "result_" in saved:
            saved["result_"] = replace(self.result_, state=State())
        return saved

    def __copy__(self) -> FittedMLP:
        copied = object.__new__(type(self))
        copied.__dict__ = dict(self.__dict__)
        return copied

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    @property
    def coefs_(self) -> list[Array]:
        """Weights of each layer, of shape (inputs, outputs); read-only."""
        return [_read_only(linear.weight.T) for linear in self._linears()]

    @property
    def intercepts_(self) -> list[Array]:
        """Biases of each layer; read-only."""
        return [_read_only(linear.bias) for linear in self._linears()]

    @property
    def n_iter_(self) -> int:
        """Epochs so far, those of earlier calls that this one went on from included."""
        return len(self.history_)

    @property
    def n_layers_(self) -> int:
        """Layers, that of the inputs included."""
        return len(self._design.sizes)

    @property
    def n_outputs_(self) -> int:
        return self._design.sizes[-1]

    @property
    def out_activation_(self) -> str:
        """What makes predictions of the outputs: softmax, logistic, or the output's activation."""
        return self.result_.task.loss.link or self._design.output.name

    @property
    def loss_curve_(self) -> list[float]:
        """Mean loss on the training data in each epoch."""
        return self.history_.column("loss")

    @property
    def loss_(self) -> float:
        """Mean loss on the training data in the last epoch."""
        return self.loss_curve_[-1] if self.loss_curve_ else np.nan

    @property
    def best_loss_(self) -> float | None:
        """The lowest training loss; None with early stopping."""
        return None if self.validation_scores_ else min(self.loss_curve_, default=np.nan)

    @property
    def validation_scores_(self) -> list[float] | None:
        """Accuracy or R2 on the held-out part in each epoch of early stopping, else None."""
        scores = self.history_.column("validation_score")
        return [score for score in scores if score is not None] or None

    @property
    def best_validation_score_(self) -> float | None:
        """Accuracy or R2 on the held-out part of the weights that were kept."""
        if not self.validation_scores_:
            return None
        held_out = [epoch for epoch in self.result_.history if epoch.validation_loss is not None]
        return min(held_out, key=lambda epoch: epoch.validation_loss or 0.0).validation_score

    def to_torch(self) -> nn.Sequential:
        """The network as a torch module: a copy, yours to change.

        It maps a tensor of inputs to outputs: logits for the entropies, numbers for a regressor.
        """
        check_is_fitted(self)
        return self._answering()

    def _answering(self) -> nn.Sequential:
        """A copy of the network whose outputs are in the units of the target."""
        return deepcopy(self._model)

    @torch.inference_mode()
    def _outputs(self, X: Any) -> Tensor:
        """Outputs of the network on checked inputs, on the CPU."""
        check_is_fitted(self)
        X = as_numpy(X, "X")
        X = validate_data(self, X, accept_sparse="csr", dtype=(np.float64, np.float32), reset=False)
        like = next(self._model.parameters())
        sparse = issparse(X)
        advice = "Remove or impute such values first"
        check_finite(X.data if sparse else X, "X", advice, like.dtype, rows=not sparse)
        parts = [
            self._model(dense_rows(X, rows).to(like)).cpu()
            for rows in gen_batches(X.shape[0], ROWS)
        ]
        return torch.cat(parts)

    def _linears(self) -> list[nn.Linear]:
        return [module for module in self._answering() if isinstance(module, nn.Linear)]


def _read_only(values: Tensor) -> Array:
    array: Array = values.detach().cpu().numpy()
    array.flags.writeable = False
    return array


def as_numpy(values: Any, name: str) -> Any:
    """A tensor as NumPy knows it, for scikit-learn's checks; all else as it is.

    Those checks do not look at masks.
    """
    if not isinstance(values, Tensor):
        check_unmasked(values, name)
        return values
    plain = plain_tensor(values, name).cpu()
    return (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()
