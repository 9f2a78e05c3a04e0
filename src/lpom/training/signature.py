"""What a model takes and gives: the shape of a sample, the outputs, the kind of numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lpom.activations import Activation
from lpom.exceptions import DataError
from lpom.graph import Graph, trace


@dataclass(frozen=True, eq=False)
class Signature:
    """A traced model together with the shape of the samples it was traced for.

    ``n_outputs`` are the numbers it predicts for a sample, or at each of ``n_steps`` steps of one
    (0 if there are none); ``flattens`` says that the first thing it
    does is to make one row of each; ``indices`` that it looks rows up, so that its inputs are
    whole numbers and stay so; ``channels_last`` that it takes pictures in the layout in which
    convolutions are fast: not those that ask for ``view`` where ``reshape`` would do.
    """

    graph: Graph
    shape: tuple[int, ...]
    n_outputs: int
    n_steps: int
    flattens: bool
    indices: bool
    channels_last: bool = False

    @classmethod
    def of(cls, model: nn.Module, X: Any) -> Signature:
        """Trace a model for samples like those in ``X``, of which two rows are tried."""
        if isinstance(X, nn.utils.rnn.PackedSequence):
            raise DataError(
                "X is a PackedSequence; give sequences of one length, padded at their ends "
                "(torch.nn.utils.rnn.pad_sequence(..., batch_first=True)), and -100 as the class "
                "of steps that are not there. lpom.lift(model) takes packed ones, in a loop of "
                "your own."
            )
        shape = tuple(int(size) for size in np.shape(X)[1:]) if not hasattr(X, "tocsr") else ()
        if hasattr(X, "tocsr"):
            shape = (int(X.shape[1]),) if X.ndim == 2 else ()
        parameter = next(model.parameters(), None)
        if parameter is None:
            raise DataError(
                "the model has no weights to train; expected a torch module with layers such as "
                f"Linear or Conv2d, got {type(model).__name__}."
            )
        indices = _looks_up(model)
        example = torch.zeros(3, *shape, device=parameter.device)
        example = example.long() if indices else example.to(parameter)
        graph = trace(model, example)
        first = graph.consumers[0]
        flattens = len(first) == 1 and first[0].edge.flattens
        if flattens:
            example = example.flatten(1)
        _check_width(graph, example, shape)
        *steps, outputs = _outputs(model, example)
        n_steps = steps[0] if steps else 0
        shape = tuple(example.shape[1:])
        fast = example.ndim == 4 and _takes_channels_last(model, example)
        return cls(graph, shape, outputs, n_steps, flattens, indices, fast)

    @property
    def like(self) -> Tensor:
        """A weight of the model: what has its dtype is on its device."""
        return self.graph.parameters[0].detach()

    @property
    def output_activation(self) -> Activation:
        return self.graph.output_activation

    def stored(self, X: Tensor) -> Tensor:
        """All rows, row after row, in the model's dtype and on its device: itself, or one copy."""
        like = self.like
        dtype = torch.long if self.indices else like.dtype
        if (X.dtype, X.device) == (dtype, like.device) and X.is_contiguous():
            return X
        return torch.empty(X.shape, dtype=dtype, device=like.device).copy_(X)

    def inputs(self, rows: Tensor) -> Tensor:
        """Rows as the model takes them: dtype, device, and pictures in the layout that is fast."""
        rows = rows.to(self.like.device, torch.long) if self.indices else rows.to(self.like)
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return rows.contiguous(memory_format=layout)


def _looks_up(model: nn.Module) -> bool:
    """Whether the first layer with weights is an embedding."""
    for module in model.modules():
        layer = next(module.children(), None) is None
        if layer and any(True for _ in module.parameters()):
            return isinstance(module, nn.Embedding | nn.EmbeddingBag)
    return False


def _check_width(graph: Graph, example: Tensor, shape: tuple[int, ...]) -> None:
    """The usual mistake, in plain words: rows that the first Linear layer can't take."""
    for node in graph.consumers[0]:
        linear = node.edge.first_linear
        if linear is not None and (example.ndim < 2 or example.shape[-1] != linear.in_features):
            raise ValueError(
                f"X needs shape (n_samples, {linear.in_features}) to match the first Linear "
                f"layer; got (n_samples, {', '.join(map(str, shape))})."
                if shape
                else f"X needs shape (n_samples, {linear.in_features}) to match the first Linear "
                "layer; got one dimension."
            )


def _takes_channels_last(model: nn.Module, example: Tensor) -> bool:
    """Whether a forward pass goes through with pictures in that layout."""
    try:
        _outputs(model, example.contiguous(memory_format=torch.channels_last))
    except ValueError:
        return False
    return True


@torch.no_grad()
def _outputs(model: nn.Module, example: Tensor) -> tuple[int, ...]:
    """The shape of what it gives for a sample."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        outputs = model(example[:2])
    except (RuntimeError, IndexError, ValueError) as error:
        raise ValueError(
            f"the model can't take samples of shape {tuple(example.shape[1:])}: {error}"
        ) from error
    finally:
        for module, training in modes.items():
            module.training = training
    if outputs.ndim not in (2, 3) or len(outputs) != 2:
        raise ValueError(
            "the model must give one row of outputs per sample, (n_samples, n_outputs), or per "
            "step of one, (n_samples, n_steps, n_outputs); it gives shape "
            f"{tuple(outputs.shape)} for 2 samples."
        )
    return tuple(outputs.shape[1:])
