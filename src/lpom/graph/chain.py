"""Chains of Linear layers: the networks that several methods are defined on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from lpom.activations import Activation
from lpom.exceptions import UntrainableError
from lpom.graph.network import Graph, Node
from lpom.graph.operations import call_name


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
    if node.edge.linear is not None or node.index != 1:
        return node.edge.linear
    plain = len(node.edge.steps) == 2 and node.edge.flattens
    return node.edge.first_linear if plain else None


@final
class Dense:
    """A fully connected layer: ``Z = X @ W.T + b``, a view of a :class:`torch.nn.Linear`."""

    def __init__(self, module: nn.Linear) -> None:
        self.module = module

    @property
    def n_inputs(self) -> int:
        return self.module.in_features

    @property
    def n_outputs(self) -> int:
        return self.module.out_features

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

    def as_rows(self, Z: Tensor) -> Tensor:
        return Z

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

    def start_vector(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.module.in_features)
        vector = torch.randn(self.module.in_features, generator=generator, dtype=torch.float64)
        unit: Tensor = (vector / torch.linalg.vector_norm(vector)).to(self.weight)
        return unit

    def input_like(self, vector: Tensor) -> Tensor:
        return vector[None]

    def norm(self, vector: Tensor, iterations: int = 1) -> tuple[Tensor, Tensor]:
        r"""Spectral norm of the linear part by power iteration, and the vector to go on from.

        The estimate comes from below and gets closer as the vector is kept between calls.
        """
        norm = vector.new_zeros(())
        for _ in range(iterations):
            image = self.linear(self.input_like(vector))
            norm = torch.linalg.vector_norm(image)
            back = self.adjoint(image)
            size = torch.linalg.vector_norm(back)
            # a zero map, or a vector in its null space, keeps the vector it has
            vector = torch.where(size > 0, back.reshape(vector.shape) / size, vector)
        return norm, vector
