"""What a model takes and gives: the shape of a sample, the outputs, the kind of numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lpom.activations import Activation
from lpom.exceptions import DataError, UntrainableError
from lpom.graph import Graph, trace
from lpom.graph.lengths import Ragged, join, ragged
from lpom.graph.tracing import unwrapped
from lpom.modes import evaluating
from lpom.training.tasks import as_array, as_tensor, plain_tensor


@dataclass(frozen=True, eq=False)
class Signature:
    """A traced model together with the shape of the samples it was traced for.

    ``model`` takes one tensor: it is the one that was given, or, for sequences with lengths, a
    `Ragged` one with the same weights, whose inputs `joined` makes. ``n_outputs`` are the numbers
    it predicts for a sample, or at each of ``n_steps`` steps of one (0 if there are none);
    ``flattens`` says that the first thing it does is to make one row of each; ``indices`` that it
    looks rows up, so that its inputs are whole numbers and stay so; ``channels_last`` that it takes
    pictures in the layout in which convolutions are fast: not those that ask for ``view`` where
    ``reshape`` would do.
    """

    model: nn.Module
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
        first: Tensor | None = None
        if has_lengths(X):
            x, lengths = _with_lengths(X)
            packed = isinstance(X, nn.utils.rnn.PackedSequence)
            model = ragged(unwrapped(model), tuple(x.shape[2:]), packed)
            X = first = join(x, lengths, x.shape[1])
        shape = tuple(int(size) for size in np.shape(X)[1:]) if not hasattr(X, "tocsr") else ()
        if hasattr(X, "tocsr"):
            shape = (int(X.shape[1]),) if X.ndim == 2 else ()
        parameter = next(model.parameters(), None)
        if parameter is None:
            raise DataError(
                "the model has no weights to train; expected a torch module with layers such as "
                f"Linear or Conv2d, got {type(model).__name__}."
            )
        example = torch.zeros(3, *shape, device=parameter.device)
        if first is not None:  # which steps are there is not to be made up
            example = torch.cat([first[:3]] * 3)[:3].to(parameter.device)
        indices = _looks_up(model, example.to(parameter))
        example = example.long() if indices else example.to(parameter)
        graph = trace(model, example)
        readers = graph.consumers[0]
        flattens = len(readers) == 1 and readers[0].edge.flattens
        if flattens:
            example = example.flatten(1)
        _check_width(graph, example, shape)
        *steps, outputs = _outputs(model, example)
        n_steps = steps[0] if steps else 0
        shape = tuple(example.shape[1:])
        if isinstance(model, Ragged):
            _check_padding(model, graph, example)
        else:
            _check_graph(model, graph, example)
        fast = example.ndim == 4 and _takes_channels_last(model, example)
        return cls(model, graph, shape, outputs, n_steps, flattens, indices, fast)

    def joined(self, X: Any) -> Any:
        """X; sequences with their lengths as one tensor, of as many steps as the first at least."""
        if has_lengths(X) != isinstance(self.model, Ragged):
            raise DataError(
                "all X must be alike: sequences with their lengths, (x, lengths), or without, as "
                "those that the run began with."
            )
        return join(*_with_lengths(X), self.shape[0]) if has_lengths(X) else X

    def there(self, X: Any) -> Tensor | None:
        """Which steps are there in what `joined` made, (n, steps); None where all are."""
        return X[..., -1] > 0 if isinstance(self.model, Ragged) else None

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
        self._check_whole(X)
        if (X.dtype, X.device) == (dtype, like.device) and X.is_contiguous():
            return X
        return torch.empty(X.shape, dtype=dtype, device=like.device).copy_(X)

    def _check_whole(self, X: Tensor) -> None:
        if self.indices and X.is_floating_point() and not bool((X == X.floor()).all()):
            raise DataError(
                "the model looks rows up in an embedding, so X must hold whole numbers; got "
                f"{float(X[X != X.floor()][0]):g}."
            )

    def inputs(self, rows: Tensor) -> Tensor:
        """Rows as the model takes them: dtype, device, and pictures in the layout that is fast."""
        self._check_whole(rows)
        rows = rows.to(self.like.device, torch.long) if self.indices else rows.to(self.like)
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return rows.contiguous(memory_format=layout)


def has_lengths(X: Any) -> bool:
    """Whether X is a pair (x, lengths), or a packed sequence: not two rows, which are alike."""
    if isinstance(X, nn.utils.rnn.PackedSequence):
        return True
    pair = isinstance(X, tuple | list) and len(X) == 2
    return pair and np.ndim(X[0]) >= 2 and np.ndim(X[1]) == 1


def _with_lengths(X: Any) -> tuple[Tensor, Tensor]:
    if isinstance(X, nn.utils.rnn.PackedSequence):
        X = nn.utils.rnn.pad_packed_sequence(X, batch_first=True)
    x, lengths = (
        plain_tensor(part, name) if isinstance(part, Tensor) else as_tensor(as_array(part, name))
        for part, name in zip(X, ("x", "lengths"), strict=True)
    )
    return x, lengths


@torch.no_grad()
def _check_padding(model: Ragged, graph: Graph, example: Tensor) -> None:
    """A graph has the steps that are given; packed sequences lose those that none of them has."""
    if example.shape[1] < 2:
        return
    rows = example.clone()
    rows[:, -1] = 0
    rows = rows[rows[:, 0, -1] > 0]
    with evaluating(model):
        _, X = graph.feed_forward(rows)
        outputs, wanted = X[graph.output], model(rows)
    if outputs.ndim == 3 and outputs.shape[1] == rows.shape[1]:
        there = rows[..., -1] > 0
        outputs, wanted = outputs[there], wanted[there]
    if not torch.allclose(outputs, wanted, rtol=1e-3, atol=1e-4):
        raise UntrainableError(
            "the model's predictions change with how many steps its sequences are padded to: in "
            "place of a mean or a last step of padded outputs take what is left at each end (h_n), "
            "divide a sum by the lengths, or pad to all steps, pad_packed_sequence(..., "
            "total_length=x.shape[1])."
        )


def _looks_up(model: nn.Module, example: Tensor) -> bool:
    """Whether the model takes whole numbers only, with which it looks rows up."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    if not any(isinstance(module, tables) for module in model.modules()):
        return False
    return not _goes_through(model, example) and _goes_through(model, example.long())


@torch.no_grad()
def _goes_through(model: nn.Module, example: Tensor) -> bool:
    try:
        with evaluating(model):
            model(example)
    except (RuntimeError, IndexError, TypeError, ValueError):
        return False
    return True


@torch.no_grad()
def _check_graph(model: nn.Module, graph: Graph, example: Tensor) -> None:
    """What torch.fx saw of the model says the same as the model, if that always says the same.

    Of layers one after the other everything is seen; where units jump, rounding may tip one over.
    """
    layers = type(model) is nn.Sequential and not any(any(m.children()) for m in model)
    if layers or graph.jumps:
        return
    generator = torch.Generator(example.device).manual_seed(0)
    rows = example
    if example.is_floating_point():
        rows = torch.rand(example.shape, generator=generator, device=example.device).to(example)
    with evaluating(model), torch.random.fork_rng(devices=[]):
        try:
            wanted, again = model(rows), model(rows)
        except (RuntimeError, IndexError, ValueError):  # of values that mean something
            return
        _, X = graph.feed_forward(rows)
    size = float(wanted.abs().max())
    if torch.equal(wanted, again) and not torch.allclose(
        X[graph.output].reshape(wanted.shape), wanted, rtol=0.0, atol=0.01 * size + 1e-6
    ):
        raise UntrainableError(
            f"what torch.fx has seen of {type(model).__name__} gives other outputs than the model "
            "itself: it does something that can't be seen (tensors changed through another name, "
            "numbers read out of tensors). lpom.lift(model) trains such models in a loop of your "
            "own."
        )


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
    try:
        with evaluating(model):
            outputs = model(example[:2])
    except (RuntimeError, IndexError, ValueError) as error:
        raise ValueError(
            f"the model can't take samples of shape {tuple(example.shape[1:])}: {error}"
        ) from error
    if outputs.ndim not in (2, 3) or len(outputs) != 2:
        raise ValueError(
            "the model must give one row of outputs per sample, (n_samples, n_outputs), or per "
            "step of one, (n_samples, n_steps, n_outputs); it gives shape "
            f"{tuple(outputs.shape)} for 2 samples."
        )
    return tuple(outputs.shape[1:])
