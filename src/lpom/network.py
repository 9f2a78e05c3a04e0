"""A torch module looked at as a list of layers: a linear map, then an activation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from lpom import activations
from lpom.activations import Activation, Identity
from lpom.maps import Dense, LinearMap


@dataclass(frozen=True)
class Layer:
    """``X[i + 1] = activation.phi(map.apply(X[i]))``."""

    map: LinearMap
    activation: Activation


class Lifted:
    """The layers of a ``torch.nn.Sequential``; the module keeps the weights.

    Rows are samples, ``X[0]`` is the data, ``Z[i] = map_i(X[i])`` and ``X[i + 1] = phi_i(Z[i])``.
    """

    def __init__(self, layers: Sequence[Layer], *, flattens: bool = False) -> None:
        self.layers = tuple(layers)
        self.flattens = flattens  # samples may come in any shape

    @classmethod
    def from_module(cls, model: nn.Module) -> Lifted:
        """See ``Linear`` layers, each followed by at most one activation (none: identity)."""
        modules = list(_flat(model))
        first = modules[0] if modules else None
        flattens = isinstance(first, nn.Flatten)
        if isinstance(first, nn.Flatten) and (first.start_dim, first.end_dim) != (1, -1):
            raise ValueError(
                f"the model begins with {first}, but each sample must become one row: use "
                "Flatten() as it comes."
            )
        return cls(_layers(model, modules[flattens:]), flattens=flattens)

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __getitem__(self, i: int) -> Layer:
        return self.layers[i]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for layer in self for parameter in layer.map.parameters()]

    @property
    def n_inputs(self) -> int:
        return self[0].map.n_inputs

    @property
    def n_outputs(self) -> int:
        return self[-1].map.n_outputs

    @property
    def jumps(self) -> bool:
        """Whether an activation is discontinuous."""
        return any(layer.activation.jumps for layer in self)

    def smoothed(self, width: float) -> Lifted:
        """The same maps; every jump of an activation replaced by a ramp of this width."""
        layers = [Layer(layer.map, layer.activation.smoothed(width)) for layer in self]
        return Lifted(layers, flattens=self.flattens)

    def feed_forward(self, inputs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Pre-activations ``Z`` (one per layer) and states ``X`` (one more: the inputs)."""
        Z: list[Tensor] = []
        X = [inputs]
        for layer in self:
            Z.append(layer.map.apply(X[-1]))
            X.append(layer.activation.phi(Z[-1]))
        return Z, X


def mlp(
    sizes: Sequence[int],
    activation: str | Activation = "relu",
    output: str | Activation = "identity",
    *,
    bias: bool = True,
    seed: int | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Sequential:
    """A fully connected network with Glorot-uniform weights and zero biases.

    The weights are scaled by one over the Lipschitz constant of the activation above them (four
    for a sigmoid), so that a signal neither fades nor grows from layer to layer.

    Parameters
    ----------
    sizes : widths of all layers, inputs and outputs included, e.g. ``[784, 300, 10]``
    activation, output : activation of the hidden layers and of the last one
    bias : whether layers have biases
    seed : makes the weights the same every time

    >>> mlp([4, 8, 3], "tanh", seed=0)
    Sequential(
      (0): Linear(in_features=4, out_features=8, bias=True)
      (1): Tanh()
      (2): Linear(in_features=8, out_features=3, bias=True)
    )
    """
    if len(sizes) < 2 or any(int(size) != size or size < 1 for size in sizes):
        raise ValueError(
            "sizes needs the widths of at least inputs and outputs, each an integer of at "
            f"least 1, e.g. [784, 300, 10]; got {list(sizes)}."
        )
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    hidden, last = activations.get(activation), activations.get(output)
    modules: list[nn.Module] = []
    for i, (n_in, n_out) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
        # without torch's own start, which would draw from the global generator
        linear = nn.utils.skip_init(  # type: ignore[no-untyped-call]
            nn.Linear, int(n_in), int(n_out), bias=bias, dtype=dtype
        )
        act = last if i == len(sizes) - 2 else hidden
        gain = 1.0 if act.jumps else 1.0 / act.lipschitz
        nn.init.xavier_uniform_(linear.weight, gain=gain, generator=generator)
        if bias:
            nn.init.zeros_(linear.bias)
        modules += [linear] if act == Identity() else [linear, act.to_module()]
    return nn.Sequential(*modules)


def _layers(model: nn.Module, modules: Sequence[nn.Module]) -> list[Layer]:
    maps: list[LinearMap] = []
    acts: list[Activation | None] = []
    seen: set[nn.Module] = set()
    for module in modules:
        if isinstance(module, nn.Linear):
            if module in seen:
                raise ValueError(
                    "the same Linear layer appears twice in the model; LPOM updates each layer "
                    "on its own, so shared weights are not supported. Use two layers."
                )
            _check_linear(module)
            seen.add(module)
            maps.append(Dense(module))
            acts.append(None)
        elif module is model:
            raise ValueError(
                "expected a torch.nn.Sequential of Linear layers and activations, got "
                f"{type(model).__name__}; pass the Sequential inside it, or build one."
            )
        elif not maps:
            raise ValueError(
                f"the model must begin with a Linear layer, got {module}. "
                "Apply earlier steps to the data instead."
            )
        elif isinstance(module, nn.Softmax | nn.LogSoftmax):
            raise ValueError(
                f"{module} is not elementwise and cannot be used as an activation; leave it out "
                "and train on the logits with loss='cross-entropy'."
            )
        else:
            activation = activations.from_module(module)
            if acts[-1] is not None:
                raise ValueError(
                    f"two activations in a row: {acts[-1].name} and then {module}. "
                    "Put a Linear layer between them or drop one."
                )
            acts[-1] = activation
    for below, above in itertools.pairwise(maps):
        if below.n_outputs != above.n_inputs:
            raise ValueError(
                f"a Linear layer takes {above.n_inputs} inputs, but the one before it has "
                f"{below.n_outputs} outputs."
            )
    if not maps:
        raise ValueError(
            "the model has no Linear layer to train; expected a torch.nn.Sequential of Linear "
            f"layers each followed by an activation, got {type(model).__name__}."
        )
    return [
        Layer(map_, Identity() if act is None else act)
        for map_, act in zip(maps, acts, strict=True)
    ]


def _check_linear(module: nn.Linear) -> None:
    """Raise if a layer is not what its class says: ``X @ weight.T + bias``."""
    if isinstance(module.weight, UninitializedParameter):
        raise ValueError(
            "a LazyLinear layer has no weights yet; call the model once on a batch of data first."
        )
    if type(module).forward is not nn.Linear.forward:
        raise ValueError(
            f"{type(module).__name__} has a forward method of its own, which LPOM cannot see "
            "through; use a plain torch.nn.Linear."
        )
    if not isinstance(module._parameters.get("weight"), nn.Parameter):
        raise ValueError(
            f"the weight of Linear({module.in_features}, {module.out_features}) is computed from "
            "other parameters (by weight_norm, pruning or the like) and cannot be set directly. "
            "Undo that first, e.g. with torch.nn.utils.parametrize.remove_parametrizations."
        )


def _flat(model: nn.Module) -> Iterator[nn.Module]:
    if isinstance(model, nn.Sequential):
        for child in model:
            yield from _flat(child)
    else:
        yield model
