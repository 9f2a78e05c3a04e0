"""What a model takes and gives, by a forward pass on two rows; and checks of what it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lpom.activations import Activation, Identity, from_call
from lpom.activations.base import apply
from lpom.checks import as_array, as_tensor, check_finite, plain_tensor
from lpom.exceptions import DataError, warn
from lpom.methods.base import Inputs, call, main_output
from lpom.modes import evaluating

_LARGE = 1e6  # numbers in X beyond this are said to be unscaled
#: Names under which a dictionary holds its targets.
TARGETS = ("labels", "label", "targets", "target", "y")
_FAILURES = (RuntimeError, IndexError, TypeError, ValueError, KeyError)


@dataclass(frozen=True, eq=False)
class Interface:
    """What a model takes and gives.

    Attributes
    ----------
    example : inputs of two rows, as the model takes them
    outputs : what it gives for them; of a model with a loss of its own that loss
    like : a weight of the model, whose dtype and device data is brought to
    indices : whether its one input is looked up in a table, so that whole numbers stay so
    channels_last : whether it takes pictures in the layout in which convolutions are fast: not
        those that ask for ``view`` where ``reshape`` would do
    output_activation : the last function of a forward pass if that is an activation
    own_loss : whether the loss is the model's, ``outputs.loss``
    """

    model: nn.Module
    example: Inputs
    outputs: Tensor
    like: Tensor
    indices: bool = False
    channels_last: bool = False
    output_activation: Activation = Identity()
    own_loss: bool = False

    @classmethod
    def of(cls, model: nn.Module, X: Inputs, loss: Any = "auto", batch: Any = None) -> Interface:
        """Try a model on two rows of X, or of a ``batch`` that has targets among its entries."""
        like = next(model.parameters()).detach()
        whole = batch if isinstance(batch, Mapping) else X
        if loss == "model" or (loss == "auto" and target_of(whole) is not None):
            own = _own_loss(model, whole, like)
            if own is not None:
                return own
            if loss == "model":
                raise ValueError(
                    "loss='model' is for models whose outputs have a loss, as those of "
                    "transformers do when they are given labels; this one's have none. Give a "
                    "loss by name or as a function."
                )
        example, indices = _first_rows(X, like), False
        if isinstance(example, Tensor) and _has(model, nn.Embedding, nn.EmbeddingBag):
            indices = not _goes_through(model, example) and _goes_through(model, example.long())
            example = example.long() if indices else example
        last = LastCall()
        try:
            outputs = main_output(_outputs(model, example, last))
        except _FAILURES as error:
            raise _explained(error, model, example) from error
        fast = False
        if isinstance(example, Tensor) and example.ndim == 4:
            layout = example.contiguous(memory_format=torch.channels_last)
            convolves = _has(model, nn.Conv2d, nn.ConvTranspose2d)
            fast = convolves and _goes_through(model, layout)
        return cls(model, example, outputs, like, indices, fast, last.activation(outputs))

    @property
    def n_outputs(self) -> int:
        """Numbers that it predicts for a sample, or at each step of one."""
        return int(self.outputs.shape[-1])

    @property
    def n_steps(self) -> int:
        """Steps of a sample at each of which it predicts; 0 if there are none."""
        return int(self.outputs.shape[1]) if self.outputs.ndim == 3 else 0

    @property
    def numbers(self) -> int:
        """Numbers in a row."""
        parts = [part for part in _values(self.example) if isinstance(part, Tensor)]
        return max(1, sum(part[0].numel() for part in parts if part.ndim))

    def keeps_numbers(self, X: Any) -> bool:
        """Whether whole numbers among the inputs stay whole numbers."""
        if isinstance(self.example, Tensor):
            return self.indices
        return not (X.is_floating_point() if isinstance(X, Tensor) else X.dtype.kind == "f")

    def check_shape(self, X: Any) -> None:
        """Raise if rows of a table have another width, or X other dimensions, than the example."""
        if not isinstance(self.example, Tensor):
            return
        shape = tuple(self.example.shape[1:])
        if X.ndim != self.example.ndim or (X.ndim == 2 and tuple(X.shape[1:]) != shape):
            wanted = ", ".join(["n_samples", *map(str, shape)])
            raise ValueError(
                f"X needs shape ({wanted}), as the model takes it; got {tuple(X.shape)}."
            )

    def stored(self, X: Tensor) -> Tensor:
        """All rows, row after row, in the model's dtype and on its device: itself, or one copy."""
        dtype = self._dtype(X)
        if (X.dtype, X.device) == (dtype, self.like.device) and X.is_contiguous():
            return X
        return torch.empty(X.shape, dtype=dtype, device=self.like.device).copy_(X)

    def inputs(self, rows: Inputs) -> Inputs:
        """Rows as the model takes them: dtype, device, and pictures in the layout that is fast."""
        return map_inputs(self._placed, rows)

    def _placed(self, rows: Tensor) -> Tensor:
        rows = rows.to(self.like.device, self._dtype(rows))
        if self.channels_last:
            return rows.contiguous(memory_format=torch.channels_last)
        return rows.contiguous()

    def _dtype(self, X: Tensor) -> torch.dtype:
        if self.indices:
            if X.is_floating_point() and not bool((X == X.floor()).all()):
                raise DataError(
                    "the model looks rows up in an embedding, so X must hold whole numbers; got "
                    f"{float(X[X != X.floor()][0]):g}."
                )
            return torch.long
        return X.dtype if self.keeps_numbers(X) else self.like.dtype


class LastCall(TorchFunctionMode):
    """Remembers the last function of torch that was called, and its result."""

    def __init__(self) -> None:
        super().__init__()
        self.call: tuple[Any, tuple[Any, ...], dict[str, Any], Any] | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.call = (func, args, kwargs or {}, result)
        return result

    def activation(self, outputs: Tensor) -> Activation:
        """The activation that made the outputs; the identity if it was none that is known."""
        if self.call is None or self.call[3] is not outputs:
            return Identity()
        func, args, kwargs, _ = self.call
        if func is apply:
            return args[0]  # type: ignore[no-any-return]
        options = {
            name: value for name, value in kwargs.items() if name not in ("input", "_stacklevel")
        }
        try:
            return from_call(getattr(func, "__name__", ""), args[1:], options) or Identity()
        except (ValueError, TypeError):
            return Identity()


def map_inputs(function: Callable[[Any], Any], inputs: Inputs) -> Inputs:
    """A function applied to the one input of a model, or to each array among several."""
    if isinstance(inputs, Mapping):
        return {name: _mapped(function, part) for name, part in inputs.items()}
    if type(inputs) is tuple:
        return tuple(_mapped(function, part) for part in inputs)
    return function(inputs)


def _mapped(function: Callable[[Any], Any], part: Any) -> Any:
    is_array = isinstance(part, Tensor | np.ndarray) or hasattr(part, "tocsr")
    return function(part) if is_array else part


def _values(inputs: Inputs) -> list[Any]:
    if isinstance(inputs, Mapping):
        return list(inputs.values())
    return list(inputs) if type(inputs) is tuple else [inputs]


def target_of(inputs: Inputs) -> str | None:
    """The name of the targets among the entries of a dictionary."""
    if not isinstance(inputs, Mapping):
        return None
    return next((name for name in TARGETS if name in inputs), None)


def _first_rows(X: Inputs, like: Tensor) -> Inputs:
    def first(part: Any) -> Tensor:
        if not np.ndim(part):
            raise ValueError(f"X must be an array of rows, got {type(part).__name__}.")
        if hasattr(part, "tocsr"):
            rows = as_tensor(part.tocsr()[:2].toarray())
        elif isinstance(part, Tensor):
            rows = plain_tensor(part, "X")[:2]
        else:
            rows = as_tensor(as_array(part[:2], "X"))
        if not len(rows):
            raise ValueError("X has no rows; at least one sample is needed.")
        rows = rows if len(rows) == 2 else torch.cat([rows, rows])
        floats = not several or rows.is_floating_point()
        return rows.to(like) if floats else rows.to(like.device)

    several = isinstance(X, Mapping) or type(X) is tuple
    return map_inputs(first, X)


def _outputs(model: nn.Module, example: Inputs, last: LastCall | None = None) -> Any:
    """All that the model gives, as nobody has asked."""
    with torch.no_grad(), evaluating(model), torch.random.fork_rng(devices=[]):
        with last or nullcontext():
            return call(model, example)


def _goes_through(model: nn.Module, example: Tensor) -> bool:
    try:
        main_output(_outputs(model, example))
    except _FAILURES:
        return False
    return True


def _own_loss(model: nn.Module, batch: Inputs, like: Tensor) -> Interface | None:
    """The interface of a model whose outputs have a loss; None if they have none."""
    example = _first_rows(batch, like)
    try:
        loss = getattr(_outputs(model, example), "loss", None)
    except _FAILURES:
        return None
    if not isinstance(loss, Tensor):
        return None
    return Interface(model, example, loss.reshape(1, 1), like, own_loss=True)


def own_loss(outputs: Any) -> Tensor:
    """The loss that a model has computed, as a matrix of one number."""
    loss: Tensor = outputs.loss.reshape(1, 1)
    return loss


def _has(model: nn.Module, *kinds: type[nn.Module]) -> bool:
    return any(isinstance(module, kinds) for module in model.modules())


def _explained(error: Exception, model: nn.Module, example: Inputs) -> Exception:
    """The usual mistake in plain words: rows that the first Linear layer can't take."""
    first = next((m for m in model.modules() if [*m.parameters(recurse=False)]), None)
    if not isinstance(example, Tensor):
        return ValueError(f"the model can't take these inputs: {error}")
    shape = tuple(example.shape[1:])
    if isinstance(first, nn.Linear) and (not shape or shape[-1] != first.in_features):
        shown = f"(n_samples, {', '.join(map(str, shape))})" if shape else "one dimension"
        return ValueError(
            f"X needs shape (n_samples, {first.in_features}) to match the first Linear layer; got "
            f"{shown}. ({error})"
        )
    return ValueError(f"the model can't take samples of shape {shape}: {error}")


def check_inputs(X: Any, interface: Interface) -> Any:
    """A tensor, a memory-mapped array or a CSR matrix of samples that the model can take.

    Numbers must be finite, also in the model's dtype. Nothing is copied but what torch can't read.
    """
    mapped = isinstance(X, np.memmap)
    sparse = hasattr(X, "tocsr")
    if sparse:
        X = X.tocsr()
    else:
        X = plain_tensor(X, "X") if isinstance(X, Tensor) else as_array(X, "X")
    interface.check_shape(X)
    if X.shape[0] == 0:
        raise ValueError("X has no rows; at least one sample is needed.")
    dtype = None if interface.keeps_numbers(X) else interface.like.dtype
    advice = "Remove or impute such values first"
    largest = check_finite(X.data if sparse else X, "X", advice, dtype, not sparse)
    if dtype is not None and largest > _LARGE:
        warn(
            f"X holds values up to {largest:.3g}, and networks learn from numbers near 1: such "
            "columns drown all others. Standardise X, for example by scikit-learn's "
            "StandardScaler.",
            UserWarning,
        )
    return X if sparse or mapped or isinstance(X, Tensor) else as_tensor(X)


def n_rows(X: Inputs) -> int:
    """Rows of an array, or of the first of several that are a model's arguments."""
    if isinstance(X, Mapping | tuple):
        X = next(part for part in _values(X) if hasattr(part, "shape"))
    return int(X.shape[0]) if hasattr(X, "shape") else len(X)
