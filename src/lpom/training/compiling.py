"""Steps through torch's compiler: what stands between the products becomes a few loops.

Of back-propagation the forward pass is compiled, and autograd's way back with it. A sweep of LPOM
has its way back written down, without autograd, so it is compiled as a whole: traced once with the
operations that it makes, of which all tensors that are not made on the way are inputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from lpom.exceptions import warn
from lpom.graph.kernels import GRANTED
from lpom.methods import LPOM, Batch, Method, Problem, State
from lpom.methods.backprop import Backprop
from lpom.methods.lpom import LPOMState
from lpom.methods.optimizers import OptimizerState
from lpom.weights.factored import Factored

Step = Callable[[Batch], Tensor | None]

#: Numbers drawn in a step (dropout) come from torch's generator, as without the compiler.
_OPTIONS: dict[str, Any] = {"fallback_random": True}


def compiled(
    step: Step, method: Method[Any], problem: Problem, state: State, shape: torch.Size
) -> Step:
    """The step on batches of inputs of this shape, compiled at the first of them.

    Others, as the last of an epoch may be, are taken as they were. Where the compiler can't be
    had that is said, and all are.
    """
    obstacle = f"method='lpom' and back-propagation, and this is {method.name!r}"
    if isinstance(method, Backprop) and isinstance(state, OptimizerState):
        return _Compiled(step, partial(_forward, method, problem, state), problem.model, shape)
    if isinstance(method, LPOM) and isinstance(state, LPOMState):
        obstacle = _obstacle(method, problem, state)
        if not obstacle:
            return _Compiled(
                step, partial(_sweep, step, method, problem, state), problem.model, shape
            )
    warn(f"compile=True is for {obstacle}. Steps are made without.", UserWarning)
    return step


def _obstacle(method: LPOM, problem: Problem, state: LPOMState) -> str:
    """What this step would have to be and is not; empty where it can be compiled."""
    if not hasattr(method, "sweep"):
        return "back-propagation for now"
    if not method.one_sweep or method.penalties is not None or method.mu == "auto":
        return (
            "one interleaved sweep with adaptive weights, numbers for mu and no penalties, and "
            f"this is {method!r}"
        )
    if isinstance(state.optimizer, Factored):
        return "optimisers that are given gradients, which 'factored' is not"
    graph = problem.graph.swept or problem.graph
    if any(node.layer is not None for node in graph):
        return "networks without recurrent layers, whose steps it makes slower"
    if problem.graph.jumps:
        return "activations without jumps, whose ramps follow the data"
    return ""


class _Compiled:
    """Compiles at the first batch of the shape; goes back to the plain step where that fails."""

    def __init__(
        self, step: Step, make: Callable[[Batch], Step], model: nn.Module, shape: torch.Size
    ) -> None:
        self.plain, self.make, self.model, self.shape = step, make, model, shape
        self.run: Step | None = None

    def __call__(self, batch: Batch) -> Tensor | None:
        if batch.inputs.shape != self.shape:
            return self.plain(batch)
        if self.run is None:
            try:
                with warnings.catch_warnings(), _untouched(self.model):
                    warnings.simplefilter("ignore")
                    self.run = self.make(batch)
            except Exception as error:  # the compiler's own, and whatever it could not follow
                reason = str(error).strip().split("\n")[0] or type(error).__name__
                warn(
                    f"the step could not be compiled ({reason[:300]}), and is made without. "
                    "torch.compile needs a compiler for C++, and a model whose Python does not ask "
                    "for numbers; leave compile out.",
                    UserWarning,
                )
                self.run = self.plain
        return self.run(batch)


def _forward(method: Backprop, problem: Problem, state: OptimizerState, batch: Batch) -> Step:
    """Back-propagation through a forward pass that is compiled."""
    model = torch.compile(problem.model, dynamic=False, options=_OPTIONS)
    with torch.enable_grad():
        model(batch.inputs).sum().backward()  # so that what fails does so now
    fast = replace(problem, model=cast(nn.Module, model))
    return lambda batch: method.step(fast, batch, state)


def _sweep(plain: Step, method: LPOM, problem: Problem, state: LPOMState, batch: Batch) -> Step:
    """A sweep of LPOM as one compiled function of the batch, the weights and the buffers.

    The plain step is made while the model or the batch is not as it was for the trace.
    """
    from torch import _inductor  # takes a second

    order: list[nn.Parameter] = []
    first = _parts(batch)
    names = list(first)

    def sweep(*given: Tensor) -> list[Tensor]:
        parts: dict[str, Any] = dict(zip(names, given, strict=True))
        outputs, gradients = method.sweep(problem, Batch(**parts), state)
        order[:] = gradients
        return [outputs, *gradients.values()]

    granted: list[Callable[[], bool]] = []
    standing = _Standing(problem.model)
    with torch.no_grad():
        token = GRANTED.set(granted)
        try:
            traced = make_fx(sweep, _allow_non_fake_inputs=True)(*first.values())
        finally:
            GRANTED.reset(token)
        held = _made_inputs(traced)
        example: list[Any] = [*first.values(), *[tensor.detach() for tensor in held]]
        run = _inductor.compile(traced, example, options=_OPTIONS)

    def step(batch: Batch) -> Tensor | None:
        parts = _parts(batch)
        alike = list(parts) == names and standing.holds()
        if not alike or not all(ask() for ask in granted):
            return plain(batch)
        with torch.no_grad():
            found: list[Tensor] = run(*parts.values(), *[tensor.detach() for tensor in held])
            method.descend(problem, state, dict(zip(order, found[1:], strict=True)))
        return found[0]

    return step


def _parts(batch: Batch) -> dict[str, Tensor]:
    """The tensors that a batch has, by the names of its fields."""
    found = {name: getattr(batch, name) for name in ("inputs", "target", "weight", "counts")}
    return {name: part for name, part in found.items() if part is not None}


def _made_inputs(traced: fx.GraphModule) -> list[Tensor]:
    """The tensors that a traced function holds, each made an input of it behind those it has.

    They are the weights and what is moved beside them, as running means.
    """
    graph = traced.graph
    held: dict[int, tuple[fx.Node, Tensor]] = {}
    start = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        tensor = getattr(traced, str(node.target))
        if id(tensor) not in held:
            with graph.inserting_before(start):
                held[id(tensor)] = graph.placeholder(f"held_{len(held)}"), tensor
        node.replace_all_uses_with(held[id(tensor)][0])
        graph.erase_node(node)
    graph.lint()
    traced.recompile()
    return [tensor for _, tensor in held.values()]


class _Standing:
    """What a trace takes for granted of a model, which anybody may change between two steps.

    That is modes and numbers of its layers, which tensors it has, how they lie, and which move.
    """

    def __init__(self, model: nn.Module) -> None:
        self.numbers: list[tuple[dict[str, Any], str, float]] = []
        self.tensors: list[tuple[dict[str, Any], str, Tensor, tuple[Any, ...]]] = []
        for module in model.modules():
            of = vars(module)
            self.numbers += [(of, k, v) for k, v in of.items() if isinstance(v, bool | int | float)]
            for has in (module._parameters, module._buffers):
                there = [(k, tensor) for k, tensor in has.items() if tensor is not None]
                self.tensors += [(has, k, tensor, _how(tensor)) for k, tensor in there]

    def holds(self) -> bool:
        return all(of.get(name) == value for of, name, value in self.numbers) and all(
            of.get(name) is tensor and _how(tensor) == how for of, name, tensor, how in self.tensors
        )


def _how(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.requires_grad, tensor.shape, tensor.stride()


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Buffers, gradients and random numbers are afterwards what they were."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
