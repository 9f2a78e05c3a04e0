"""Edges: everything torch does between the states, as one function of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

#: What the feed-forward pass of a batch chose, by the name of the step: masks, statistics, places.
Switches = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One torch operation: ``out = call(*args, **kwargs)``, where fx nodes stand for values.

    ``switch`` says that it is affine only once what it chose is given.
    """

    out: fx.Node
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    switch: str = ""

    def run(self, values: dict[fx.Node, Any], switches: Switches | None) -> Any:
        args = fx.node.map_arg(self.args, values.__getitem__)
        kwargs = fx.node.map_arg(self.kwargs, values.__getitem__) if self.kwargs else {}
        if getattr(self.call, "inplace", False):  # states are not written over
            args = (args[0].clone(), *args[1:])
        if self.switch and switches is not None:
            return _REPLAYS[self.switch](self, switches, *args, **kwargs)
        return self.call(*args, **kwargs)


def out_of_place(name: str) -> str:
    """The method that does the same to a copy; some, ``normal_`` say, have none."""
    plain = name.removesuffix("_")
    return name if name.endswith("__") or not hasattr(Tensor, plain) else plain


@dataclass(frozen=True)
class Attribute:
    """Reads a parameter or buffer of the model when it is needed."""

    root: nn.Module
    path: str

    def __call__(self) -> Any:
        return operator.attrgetter(self.path)(self.root)


@dataclass(frozen=True)
class Method:
    """Calls a method of a tensor by its name."""

    name: str

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(x, self.name)(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class Edge:
    r"""``Z = A(X[s] for s in sources; W)``, affine in each source and in each weight.

    Attributes
    ----------
    sources : indices of the states it reads, 0 for the data
    parameters : the weights it uses; the module keeps them
    names : their names in the module
    layer : the layer that is the whole edge, where one is: a Linear, a Conv2d
    obstacle : why it is not affine in each of its weights, empty if it is
    multiplies : whether it multiplies sources with each other: its norm depends on the batch
    """

    sources: tuple[int, ...]
    parameters: tuple[nn.Parameter, ...]
    steps: tuple[Step, ...] = field(repr=False)
    inputs: tuple[fx.Node, ...] = field(repr=False)
    result: fx.Node = field(repr=False)
    names: tuple[str, ...] = ()
    layer: nn.Module | None = field(default=None, repr=False)
    obstacle: str = ""
    multiplies: bool = False

    @cached_property
    def linear(self) -> nn.Linear | None:
        """The Linear layer that is the whole edge: a plain product, which needs no autograd."""
        return self.layer if isinstance(self.layer, nn.Linear) else None

    @property
    def affine(self) -> bool:
        return not self.obstacle

    @cached_property
    def switches(self) -> bool:
        """Whether something in it is chosen anew by every feed-forward pass."""
        return any(step.switch for step in self.steps)

    @property
    def alone(self) -> bool:
        """Whether it acts on each sample alike, so that one sample tells its norm."""
        return not (self.multiplies or self.switches)

    def __call__(self, X: Sequence[Tensor], switches: Switches | None = None) -> Tensor:
        """Its value at the states ``X`` of its sources, in their order.

        With ``switches`` what the feed-forward pass chooses is written there in the first call and
        kept in all others, so that the edge is one affine map.
        """
        if self.linear is not None:
            return F.linear(X[0], self.linear.weight, self.linear.bias)
        values: dict[fx.Node, Any] = dict(zip(self.inputs, X, strict=True))
        for step in self.steps:
            values[step.out] = step.run(values, switches)
        Z: Tensor = values[self.result]
        return Z


def _choose(switches: Switches, step: Step, choice: Callable[[], Any]) -> Any:
    if step.out.name not in switches:
        with torch.no_grad():
            switches[step.out.name] = choice()
    return switches[step.out.name]


def _dropout(step: Step, switches: Switches, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Every kind of dropout is ``x * factor + shift``: two calls with one seed find both."""

    def choose() -> tuple[Tensor, Tensor]:
        state = torch.get_rng_state()
        shift = step.call(torch.zeros_like(x), *args, **kwargs)
        torch.set_rng_state(state)
        return step.call(torch.ones_like(x), *args, **kwargs) - shift, shift

    factor, shift = _choose(switches, step, choose)
    masked: Tensor = x * factor + shift
    return masked


def _max_pool(step: Step, switches: Switches, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The places of the maxima, found as the maxima of the places themselves would be."""

    def choose() -> Tensor:
        name = step.switch
        if isinstance(step.call, nn.Module):
            module = step.call
            if name.startswith("adaptive"):
                options: tuple[Any, ...] = (module.output_size,)
            else:
                options = (
                    module.kernel_size,
                    module.stride,
                    module.padding,
                    module.dilation,
                    module.ceil_mode,
                )
            places = getattr(F, name)(x, *options, return_indices=True)[1]
        else:
            places = getattr(F, name)(x, *args, **{**kwargs, "return_indices": True})[1]
        found: Tensor = places
        return found

    places = _choose(switches, step, choose)
    chosen: Tensor = x.flatten(2).gather(2, places.flatten(2)).reshape(places.shape)
    return chosen


def _amax(step: Step, switches: Switches, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    def choose() -> Tensor:
        largest = step.call(x, *args, **{**kwargs, "keepdim": True})
        chosen = (x == largest).to(x.dtype)
        dims = [d for d in range(x.ndim) if largest.shape[d] != x.shape[d]]
        share: Tensor = chosen / chosen.sum(dims, keepdim=True)
        return share

    weight = _choose(switches, step, choose)
    like = step.call(x.detach(), *args, **kwargs)
    dims = kwargs.get("dim", args[0] if args else None)
    largest: Tensor = (x * weight).sum(dims).reshape(like.shape)
    return largest


def _batch_norm(step: Step, switches: Switches, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """With the batch's own statistics, which are constants; running ones move once."""
    module = step.call
    weight: Tensor | None
    bias: Tensor | None
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        weight, bias, eps = module.weight, module.bias, module.eps
        own = module.training or module.running_mean is None
    else:
        names = ("running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
        given = dict(zip(names, args, strict=False)) | kwargs
        weight, bias, eps = given.get("weight"), given.get("bias"), given.get("eps", 1e-5)
        own = given.get("training", False)
    if not own:
        return step.call(x, *args, **kwargs)  # type: ignore[no-any-return]

    def choose() -> tuple[Tensor, Tensor]:
        step.call(x, *args, **kwargs)  # moves the running statistics, as torch's training does
        var, mean = torch.var_mean(x, [d for d in range(x.ndim) if d != 1], correction=0)
        return mean, var

    mean, var = _choose(switches, step, choose)
    return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)


_REPLAYS: dict[str, Callable[..., Tensor]] = {
    **dict.fromkeys(
        "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout "
        "feature_dropout".split(),
        _dropout,
    ),
    **dict.fromkeys(
        (f"{kind}max_pool{d}d" for kind in ("", "adaptive_") for d in (1, 2, 3)), _max_pool
    ),
    "amax": _amax,
    "batch_norm": _batch_norm,
}
