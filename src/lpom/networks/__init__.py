"""Known networks by name: plain torch modules, their weights drawn from a seed.

>>> model = get("lenet5", (1, 28, 28), pool="avg")
>>> sum(parameter.numel() for parameter in model.parameters())
61706

`names` lists them, `describe` says what one is, and `from_file` takes a network from a Python file
of your own. To add one, write the function that makes it and put it into the list below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lpom.exceptions import unknown_name
from lpom.networks.making import call, from_file
from lpom.networks.plain import lenet5, mlp, vgg5
from lpom.networks.residual import residual20, resnet8, resnet20
from lpom.networks.sequences import char_transformer, lstm, rnn, transformer

__all__ = ["describe", "from_file", "get", "names", "takes_texts"]

_NETWORKS: tuple[Callable[..., nn.Module], ...] = (
    mlp,
    lenet5,
    vgg5,
    resnet8,
    resnet20,
    residual20,
    rnn,
    lstm,
    transformer,
    char_transformer,
)
#: How many numbers give the shape of what each takes, where it is not a picture.
_DIMENSIONS = {char_transformer: 1}


def names() -> tuple[str, ...]:
    """The names that `get` knows."""
    return tuple(make.__name__.replace("_", "-") for make in _NETWORKS)


def describe(name: str) -> str:
    """What the network of this name is, in one line."""
    return (_make(name).__doc__ or "").partition("\n")[0]


def takes_texts(name: str) -> bool:
    """Whether the network of this name predicts the next characters of texts."""
    return ":" not in name and _make(name) in _DIMENSIONS


def get(
    name: str,
    input_shape: Sequence[int],
    n_outputs: int = 10,
    seed: int = 0,
    **options: Any,
) -> nn.Module:
    """The network of this name, for samples of a shape.

    Parameters
    ----------
    name : one of `names`, or ``"path.py:function"`` for one of your own, see `from_file`
    input_shape : (channels, rows, columns) of a picture; `mlp` takes any shape, `char-transformer`
        the length of a piece of text
    n_outputs : how many numbers it predicts: one per class
    seed : makes the weights the same every time; torch's global generator is left alone
    options : of this network, e.g. ``width=0.25`` for vgg5
    """
    if ":" in name:
        return from_file(name, input_shape, n_outputs, seed, **options)
    make = _make(name)
    if make in _DIMENSIONS and len(input_shape) != _DIMENSIONS[make]:
        raise ValueError(
            f"network {name} takes texts: input_shape should be the length of a piece, e.g. "
            f"(128,), got {tuple(input_shape)}."
        )
    n_dimensions = 3 if make is not mlp and make not in _DIMENSIONS else len(input_shape)
    if len(input_shape) != n_dimensions or min(input_shape, default=0) < 1:
        raise ValueError(
            f"network {make.__name__} takes pictures: input_shape should be (channels, rows, "
            f"columns), e.g. (3, 32, 32), got {tuple(input_shape)}. A data set with pictures has "
            "them as .pictures(); for a table use mlp."
        )
    offered = {"input_shape": tuple(input_shape), "n_outputs": n_outputs, "seed": seed}
    model: nn.Module = call(make.__name__, make, offered, options)
    return model


def _make(name: str) -> Callable[..., nn.Module]:
    plain = name.lower().replace("-", "").replace("_", "")
    for make in _NETWORKS:
        if make.__name__.replace("_", "") == plain:
            return make
    raise ValueError(
        unknown_name("network", name, names()) + " One of your own is named 'path.py:function'."
    )
