"""A torch module looked at as a list of layers: a linear map, then an activation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lpom import activations
from lpom.activations import Activation
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

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = tuple(layers)

    @classmethod
    def from_module(cls, model: nn.Module) -> Lifted:
        """See ``Linear`` layers, each followed by at most one activation (none: identity)."""
        return cls(_layers(model))

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
        return len(self[0].map.start_vector())

    @property
    def n_outputs(self) -> int:
        return len(self[-1].map.matrix())

    @property
    def jumps(self) -> bool:
        """Whether an activation is discontinuous."""
        return any(layer.activation.jumps for layer in self)

    def smoothed(self, width: float) -> Lifted:
        """The same maps; every jump of an activation replaced by a ramp of this width."""
        return Lifted([Layer(layer.map, layer.activation.smoothed(width)) for layer in self])

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
            "sizes needs the widths of at least inputs and outputs, each a whole number of at "
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
        modules += [linear] if act.name == "identity" else [linear, act.to_module()]
    return nn.Sequential(*modules)


def _layers(model: nn.Module) -> list[Layer]:
    maps: list[LinearMap] = []
    acts: list[Activation | None] = []
    seen: set[nn.Module] = set()
    for module in _flat(model):
        if isinstance(module, nn.Linear):
            if module in seen:
                raise ValueError(
                    "the same Linear layer appears twice in the model; LPOM updates each layer "
                    "on its own, so shared weights are not supported. Use two layers."
                )
            if not isinstance(module._parameters.get("weight"), nn.Parameter):
                raise ValueError(
                    f"the weight of Linear({module.in_features}, {module.out_features}) is made of "
                    "other parameters (by weight_norm, pruning or the like) and can't be moved "
                    "itself. Take these off, e.g. with "
                    "torch.nn.utils.parametrize.remove_parametrizations."
                )
            seen.add(module)
            maps.append(Dense(module))
            acts.append(None)
        elif isinstance(module, nn.Flatten) and not maps:
            continue  # data come in as rows
        elif not maps:
            raise ValueError(
                f"the model must begin with a Linear layer, got {module}. "
                "Do what comes before it to the data instead."
            )
        elif isinstance(module, nn.Softmax | nn.LogSoftmax):
            raise ValueError(
                f"{module} mixes outputs and has no place in the layers; leave it out and train "
                "on the logits with loss='cross-entropy'."
            )
        elif acts[-1] is not None:
            raise ValueError(
                f"two activations in a row: {acts[-1].name} and then {module}. "
                "Put a Linear layer between them or drop one."
            )
        else:
            acts[-1] = activations.from_module(module)
    if not maps:
        raise ValueError(
            "the model has no Linear layer to train; expected a torch.nn.Sequential of Linear "
            f"layers each followed by an activation, got {type(model).__name__}."
        )
    return [
        Layer(map_, activations.get("identity") if act is None else act)
        for map_, act in zip(maps, acts, strict=True)
    ]


def _flat(model: nn.Module) -> Iterator[nn.Module]:
    if isinstance(model, nn.Sequential):
        for child in model:
            yield from _flat(child)
    else:
        yield model
