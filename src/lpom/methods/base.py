"""What every training method is: hyperparameters, a state, and one step on one batch."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from lpom.exceptions import UntrainableError
from lpom.graph import Graph, trace
from lpom.losses import Loss
from lpom.objectives import Objective
from lpom.settings import Settings

if TYPE_CHECKING:
    from lpom.methods.chains import Chain

#: What runs a model: itself, or what torch's compiler has made of it.
Runner: TypeAlias = Callable[..., Any]
#: Inputs of a model: one tensor, a tuple of its arguments, or a dictionary of them by name.
Inputs: TypeAlias = Any


def call(model: Callable[..., Any], inputs: Inputs) -> Any:
    """What a model gives for one tensor, a tuple of arguments, or a dictionary of them."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if type(inputs) is tuple:
        return model(*inputs)
    return model(inputs)


def main_output(outputs: Any) -> Tensor:
    """The tensor that a loss is taken of: the only one, ``logits``, or the first one."""
    if isinstance(outputs, Tensor):
        return outputs
    logits = getattr(outputs, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    for value in values if isinstance(values, Iterable) else ():
        if isinstance(value, Tensor):
            return value
    raise UntrainableError(
        f"the model must return a tensor, or a tuple or dictionary with one; got "
        f"{type(outputs).__name__}. Return the outputs that the loss is taken of."
    )


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """All tensors among the inputs of a model, in order."""
    if isinstance(inputs, Mapping):
        inputs = tuple(inputs.values())
    parts = inputs if isinstance(inputs, tuple | list) else (inputs,)
    return [part for part in parts if isinstance(part, Tensor)]


@dataclass(frozen=True, eq=False)
class Problem:
    """What is trained, fixed for the whole run: a model, and the loss of its outputs.

    Parameters
    ----------
    example : inputs of a few rows
        With which the model is traced when its graph is asked for.
    read : callable
        Makes one tensor of what the model returns.
    compiled : callable, optional
        Makes of a model that which runs it in a step, as `torch.compile` does; None for itself.
    """

    model: nn.Module
    loss: Loss
    example: Inputs = None
    read: Callable[[Any], Tensor] = main_output
    compiled: Callable[[nn.Module], Runner] | None = None

    @classmethod
    def on(cls, graph: Graph, loss: Loss, model: nn.Module) -> Problem:
        """The problem of a model whose graph is at hand."""
        problem = cls(model, loss)
        problem.__dict__["graph"] = graph
        return problem

    @cached_property
    def graph(self) -> Graph:
        """The states of the network, traced when they are asked for the first time.

        Raises
        ------
        UntrainableError
            If torch.fx cannot follow the model.
        """
        if isinstance(self.example, Mapping | tuple):
            raise UntrainableError(
                f"{type(self.model).__name__} takes several inputs, and a graph is of models that "
                "take one tensor. The objective, its gaps, other orders than the default and exact "
                "weights need a graph; the default step does not."
            )
        return trace(self.model, self.example)

    @property
    def is_traced(self) -> bool:
        """Whether anything has asked for the graph."""
        return "graph" in self.__dict__

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The weights, each once."""
        return list(self.model.parameters())

    @cached_property
    def parameter_names(self) -> dict[nn.Parameter, str]:
        """The name of each weight in the model, the first where it has several."""
        return {p: name for name, p in self.model.named_parameters()}

    @cached_property
    def has_graph(self) -> bool:
        """Whether the model can be traced; that is tried now if it was not before."""
        try:
            return self.graph is not None
        except UntrainableError:
            return False

    @cached_property
    def plain(self) -> Runner:
        """What runs the model itself in a step."""
        return self.runner(self.model)

    def runner(self, model: nn.Module) -> Runner:
        """What runs a model in a step."""
        return model if self.compiled is None else self.compiled(model)

    def outputs(self, inputs: Inputs, model: Callable[..., Any] | None = None) -> Tensor:
        """The network's outputs as one tensor, by another model with the same weights if given."""
        return self.read(call(self.model if model is None else model, inputs))

    @cached_property
    def is_chain(self) -> bool:
        """Whether the network is a chain of Linear layers."""
        try:
            return len(self.chain) > 0
        except UntrainableError:
            return False

    @cached_property
    def chain(self) -> Chain:
        """The network as a chain of Linear layers, for methods that need one."""
        from lpom.methods.chains import chain  # which has states of samples, made of those here

        return chain(self.graph)


@dataclass(frozen=True)
class Share:
    """The rows of a batch that this rank has, where others have the rest of all ``rows``.

    ``total`` is what means over all of them are divided by.
    """

    rows: int
    total: float | Tensor


@dataclass(frozen=True)
class Batch:
    """Rows of data: inputs (m, ...), coded targets (m, n_outputs), and a weight per row or none.

    ``inputs`` are one tensor, a tuple of the model's arguments, or a dictionary of them.
    Targets of shape (m, steps, n_outputs) have ``counts``, the number of predictions of each row
    that count; else there is one.

    ``whole`` says that these are all the rows there are. ``cache`` is for what a method computes
    of the rows alone, to find it there again as long as the batch lives. With a ``share`` other
    ranks have more rows of the batch, and totals are those of all of them.
    """

    inputs: Inputs
    target: Tensor
    weight: Tensor | None = None
    counts: Tensor | None = None
    whole: bool = False
    share: Share | None = None
    cache: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        first = self.inputs if isinstance(self.inputs, Tensor) else tensors_of(self.inputs)[0]
        return len(first)

    @property
    def total(self) -> Tensor | float:
        """What means over the predictions are divided by: a number where it is just their count."""
        if self.share is not None:
            return self.share.total
        return len(self) if self.weight is None and self.counts is None else self.total_weight

    @property
    def total_weight(self) -> Tensor:
        if self.share is not None:
            return torch.as_tensor(self.share.total, dtype=self.target.dtype).to(self.target.device)
        if self.weight is None and self.counts is None:
            return self.target.new_tensor(float(len(self)))
        given = [part for part in (self.weight, self.counts) if part is not None]
        total = given[0].sum() if len(given) == 1 else given[0] @ given[1]
        return torch.where(total > 0, total, 1)  # a batch that counts for nothing has no mean

    @cached_property
    def fingerprint(self) -> str:
        """The same for the same rows, targets and weights, in any process and on any device."""
        return fingerprint(
            *tensors_of(self.inputs), self.target, *([] if self.weight is None else [self.weight])
        )


def fingerprint(*tensors: Tensor) -> str:
    """The same for the same numbers, in any process and on any device."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(repr((tensor.dtype, tensor.shape)).encode())
        rows = tensor.detach().reshape(1) if tensor.ndim == 0 else tensor.detach()
        for start in range(0, len(rows), 8192):
            part = rows[start : start + 8192].cpu().contiguous()
            digest.update(part.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def from_settings(default_factory: Any) -> Any:
    """A field of a :class:`State` that ``init`` makes of the settings: it is not written down."""
    return field(default_factory=default_factory, metadata={"from_settings": True})


@dataclass
class State:
    """All that a method carries from step to step beside the weights, which the module keeps.

    :func:`lpom.fit` keeps ``progress``, the share of the planned steps already done, which
    schedules follow, and ``method``, whose state this is. ``remarks`` are sentences it passes on
    as warnings, once each.

    Fields hold tensors, plain values, or lists and dictionaries of them. Copies and pickles of a
    state are whole.
    """

    progress: float = 0.0
    remarks: dict[str, str] = field(default_factory=dict)
    said: list[str] = field(default_factory=list, repr=False)  # topics passed on already
    method: str = ""

    @property
    def settles(self) -> float:
        """The share of the run before which its weights are not what they are to become."""
        return 0.0

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on from here, in tensors and plain values; nothing is copied.

        What ``init`` makes of the settings is left out, and so are the rows of data.
        """
        return {f.name: getattr(self, f.name) for f in fields(self) if _kept(f)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take up what :meth:`state_dict` gave, in a state that ``init`` has just made.

        Tensors are not copied; they take the dtype and device of those they replace, if any.
        """
        known = {f.name for f in fields(self) if _kept(f)}
        if known != saved.keys():
            raise ValueError(
                f"a {type(self).__name__} is made of {', '.join(sorted(known))}; got "
                f"{', '.join(sorted(saved))}. It was written by another version, or for another "
                "method: start again."
            )
        for name, value in saved.items():
            setattr(self, name, _like(value, getattr(self, name)))

    def without_samples(self) -> State:
        """This state, or a copy that has nothing of single samples: the next step begins them."""
        return self

    def release(self) -> None:
        """Let go of the rows of data, at the end of a run."""
        return None

    def remark(self, topic: str, sentence: str) -> None:
        """Say something to the user, once per topic."""
        self.remarks.setdefault(topic, sentence)

    def new_remarks(self) -> list[str]:
        """The remarks not passed on yet."""
        topics = [topic for topic in self.remarks if topic not in self.said]
        self.said += topics
        return [self.remarks[topic] for topic in topics]


def _kept(of: Any) -> bool:
    return "from_settings" not in of.metadata


def _like(new: Any, old: Any) -> Any:
    if isinstance(new, Tensor) and isinstance(old, Tensor) and new.shape == old.shape:
        return new.to(old)
    if isinstance(new, list) and isinstance(old, list) and len(new) == len(old):
        return [_like(a, b) for a, b in zip(new, old, strict=True)]
    return new


S = TypeVar("S", bound=State)
M = TypeVar("M", bound="Method[Any]")


class Method(Settings, ABC, Generic[S]):
    """A training method: a frozen dataclass whose fields are its hyperparameters.

    No loop over batches, no clock, no printing here: :func:`lpom.fit` owns those.
    """

    name: ClassVar[str]
    equation: ClassVar[str]  # the objective, in words a table can hold
    costs: ClassVar[str]  # what the blocks of one step cost
    full_batch: ClassVar[bool] = False  # needs all data at once

    @property
    def runs_model(self) -> bool:
        """Whether a step is autograd on the model, with whatever rule, and asks for no graph."""
        return False

    def lifted(self, problem: Problem) -> nn.Module:
        """The model that a step runs where it `runs_model`: itself, or with another rule."""
        return problem.model

    @property
    def steadier(self) -> tuple[str, ...]:
        """What keeps the weights from growing without bound, of the settings that are read."""
        return ()

    @abstractmethod
    def init(self, problem: Problem) -> S:
        """Check the hyperparameters against the problem, say what is wrong, build the state."""

    @abstractmethod
    def step(self, problem: Problem, batch: Batch, state: S) -> Tensor | None:
        """Change weights and state in place by one step on ``batch``.

        Returns the network's outputs on the batch before the step if they were computed anyway.
        """

    @abstractmethod
    def objective(self, problem: Problem, batch: Batch, state: S) -> Objective:
        """The method's own objective on ``batch``, with the weights as they are.

        Variables of the samples are those that the state keeps of these very rows, or else those
        that a step would find for them. The weights stay as they are.
        """

    def with_learning_rate(self: M, rate: float) -> M:
        """The same with this learning rate; raises where there is none."""
        if "learning_rate" not in self.get_params(deep=False):
            raise ValueError(
                f"method {self.name!r} has no learning rate; leave learning_rate_init=None."
            )
        return self.with_params(learning_rate=rate)

    def rates(self, problem: Problem, batch: Batch, state: S) -> list[float]:
        """Contraction factors of the state updates, one per layer; none by default."""
        return []

    def end_epoch(self, problem: Problem, batch: Batch, state: S) -> None:
        """Called after each epoch with the probe batch: for what follows epochs, and remarks."""
        return None
