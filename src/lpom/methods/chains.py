"""Chains of Linear layers: what the methods have in common that are defined on them alone.

Layers, least squares of their weights, and variables that belong to the samples of a full batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from lpom.activations import Activation
from lpom.exceptions import UntrainableError
from lpom.graph import Graph, Node
from lpom.graph.operations import call_name
from lpom.methods.base import Batch, State
from lpom.weights.gram import gram, inverse


@dataclass(frozen=True)
class Layer:
    """``X[i + 1] = activation.phi(map.apply(X[i]))``."""

    map: Dense
    activation: Activation


@final
class Chain:
    """Layers one after the other: ``Z[i] = map_i(X[i])`` and ``X[i + 1] = phi_i(Z[i])``.

    Rows are samples and ``X[0]`` is the data, each sample one row.
    """

    def __init__(self, layers: tuple[Layer, ...]) -> None:
        self.layers = layers

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __getitem__(self, i: int) -> Layer:
        return self.layers[i]

    def feed_forward(self, inputs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Pre-activations ``Z`` (one per layer) and states ``X`` (one more: the inputs)."""
        Z: list[Tensor] = []
        X = [inputs]
        for layer in self:
            Z.append(layer.map.apply(X[-1]))
            X.append(layer.activation.phi(Z[-1]))
        return Z, X


def chain(graph: Graph) -> Chain:
    """The layers of a graph that is a chain; for others an error that names what is not."""
    layers: list[Layer] = []
    for node in graph:
        linear = _linear(node)
        if linear is None or node.sources != (node.index - 1,) or not node.activation.elementwise:
            what = ", ".join(call_name(step.out.target) for step in node.edge.steps) or "nothing"
            raise UntrainableError(
                "this method trains chains of Linear layers, each followed by an elementwise "
                f"activation, but the state {node.name!r} of this network comes from the states "
                f"{node.sources} by {what}. Use 'lpom', 'mac' or back-propagation, which train any "
                "network."
            )
        shared = [p for p in linear.parameters() if len(graph.uses[p]) > 1]
        if shared:
            name = node.edge.names[node.edge.parameters.index(shared[0])]
            raise UntrainableError(
                f"this method solves for each layer on its own, but {name} is used "
                "twice. Use 'lpom' or back-propagation, which add up over the uses."
            )
        layers.append(Layer(Dense(linear), node.activation))
    return Chain(tuple(layers))


def _linear(node: Node) -> nn.Linear | None:
    """The layer that makes up the edge, flattening of the data aside."""
    if node.edge.linear is not None or node.index != 1 or len(node.edge.steps) != 2:
        return node.edge.linear
    flatten, linear = (step.call for step in node.edge.steps)
    flattens = isinstance(flatten, nn.Flatten) and flatten.start_dim == 1
    return linear if flattens and isinstance(linear, nn.Linear) else None


@final
class Dense:
    """A fully connected layer: ``Z = X @ W.T + b``, a view of a :class:`torch.nn.Linear`."""

    def __init__(self, module: nn.Linear) -> None:
        self.module = module

    @property
    def weight(self) -> Tensor:
        return self.module.weight.detach()

    @property
    def bias(self) -> Tensor | None:
        return None if self.module.bias is None else self.module.bias.detach()

    def parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())

    def apply(self, X: Tensor) -> Tensor:
        return nn.functional.linear(X, self.weight, self.bias)

    def linear(self, X: Tensor) -> Tensor:
        return X @ self.weight.T

    def adjoint(self, R: Tensor) -> Tensor:
        return R @ self.weight

    @property
    def free(self) -> bool:
        """Whether a solver of the whole map may move it: not if it is frozen.

        Raises
        ------
        ValueError
            If only some of its parameters are frozen.
        """
        free = [parameter.requires_grad for parameter in self.module.parameters()]
        if any(free) and not all(free):
            raise ValueError(
                "a layer has its weight frozen and its bias not, or the other way round, but this "
                "method solves for both at once. Freeze both or neither."
            )
        return all(free)

    def design(self, X: Tensor) -> Tensor:
        return X if self.bias is None else torch.cat([X, X.new_ones(len(X), 1)], dim=1)

    def matrix(self) -> Tensor:
        if self.bias is None:
            return self.weight.clone()
        return torch.cat([self.weight, self.bias[:, None]], dim=1)

    def set_matrix(self, matrix: Tensor) -> None:
        width = self.module.in_features
        self.weight.copy_(matrix[:, :width])
        if self.bias is not None:
            self.bias.copy_(matrix[:, width])

    def add_matrix(self, change: Tensor) -> None:
        width = self.module.in_features
        self.weight.add_(change[:, :width])
        if self.bias is not None:
            self.bias.add_(change[:, width])


@final
class Regression:
    r"""Least squares of a layer's weights on the states ``X`` below it, chunk by chunk.

    .. math:: \min_W \|U - A(X; W)\|_F^2 + \lambda \|W - W_{old}\|_F^2

    With more samples than columns only the sums :math:`X^T X` and :math:`X^T (U - Z)` over chunks
    of rows are formed (transpose reduction), so results do not depend on the chunk; otherwise
    the Gram matrix is that of the rows. The ridge is relative as in
    :func:`lpom.weights.gram.gram`, and
    pulls towards the old weights: it moves no fixed point and the objective cannot rise.
    """

    def __init__(
        self,
        map_: Dense,
        X: Tensor,
        *,
        ridge: float,
        weight: Tensor | None = None,
        chunk: int = 8192,
    ) -> None:
        self.map, self.X, self.ridge, self.chunk = map_, X, ridge, chunk
        self.scale = None if weight is None else weight.sqrt()[:, None]
        first = map_.design(X[:1])
        columns, rows = first.shape[1], len(first) * len(X)
        self.rows = None if rows > columns else gram(map_.design(X), ridge, weight)
        if self.rows is None:
            total = first.new_zeros(columns, columns)
            for part in self._parts():
                A = self._design(part)
                total.addmm_(A.T, A)
            strength = ridge * total.diagonal().sum() / columns
            self.inverse, _ = inverse(total, strength)

    def step(self, map_: Dense, R: Tensor) -> None:
        """Move the weights by the solution for ``R = U - A(X; W_old)``, unless they are frozen."""
        if map_.free:
            map_.add_matrix(self.solve(R).T)

    def solve(self, R: Tensor) -> Tensor:
        """The change of the weights that the residual asks for, one column per output."""
        if self.rows is not None:
            R = R if self.scale is None else self.scale * R
            return self.rows.weights(self.rows.solve(R)).T
        total: Tensor | None = None
        for part in self._parts():
            rows = R[part] if self.scale is None else self.scale[part] * R[part]
            product = self._design(part).T @ rows
            total = product if total is None else total.add_(product)
        assert total is not None  # there is at least one row
        return self.inverse(total)

    def apply(self, change: Tensor) -> Tensor:
        """What a change of the weights, as :meth:`solve` gives it, does to the outputs."""
        return torch.cat([self.map.design(self.X[part]) @ change for part in self._parts()])

    def _parts(self) -> Iterator[slice]:
        for start in range(0, len(self.X), self.chunk):
            yield slice(start, start + self.chunk)

    def _design(self, part: slice) -> Tensor:
        A = self.map.design(self.X[part])
        return A if self.scale is None else self.scale[part] * A


def of_samples(default_factory: Any) -> Any:
    """A field of a :class:`SampleState` that has a row for every sample."""
    return field(default_factory=default_factory, metadata={"of_samples": default_factory})


@dataclass
class SampleState(State):
    """A state with variables of all samples: ``X[i]`` are states, the inputs first.

    ``samples`` tells to which rows they belong, by the fingerprint of their batch. The inputs
    are there from the first step of a run to its end; neither copies made afterwards nor what is
    written down have them.
    """

    X: list[Tensor] = of_samples(list)
    samples: str = ""

    def belongs_to(self, batch: Batch) -> bool:
        """Whether the variables are those of these rows, whose inputs are then put in place."""
        if self.samples != batch.fingerprint:
            return False
        if self.X[0] is not batch.inputs:
            self.X[0] = batch.inputs
        return True

    def start(self, batch: Batch, X: Sequence[Tensor]) -> None:
        """Begin anew, with these states for the rows of ``batch``."""
        self.X, self.samples = list(X), batch.fingerprint

    def without_samples(self) -> State:
        own = [f for f in fields(self) if "of_samples" in f.metadata]
        return replace(self, samples="", **{f.name: f.metadata["of_samples"]() for f in own})

    def release(self) -> None:
        if self.X:
            self.X[0] = self.X[0].new_empty(0)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"X": self.X[1:]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        inputs = [torch.empty(0)] if saved.get("X") else []
        super().load_state_dict(saved | {"X": inputs + list(saved.get("X", []))})


def least_squares(map_: Dense, X: Tensor, batch: Batch, *, ridge: float) -> Regression:
    """The regression of a layer's weights on the states X; the one on the inputs is made once."""
    kept: Regression | None = batch.cache.get("regression") if X is batch.inputs else None
    if kept is not None and kept.map is map_ and kept.ridge == ridge:
        return kept
    made = Regression(map_, X, ridge=ridge, weight=batch.weight)
    if X is batch.inputs:
        batch.cache["regression"] = made
    return made
