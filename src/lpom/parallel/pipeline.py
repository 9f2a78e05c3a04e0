"""The steps of one rank: its piece of the model, its share of the rows, what goes to others.

Each rank holds consecutive modules. It feeds a batch forward through them, with the rule of the
method, and sends the last state up. When the pull on that state arrives from above, autograd
carries it down through the piece, what reaches the first state is sent on, and the weights move.
Pipelined, a rank goes on with the next batches until then, so none waits; autograd then reads
weights that have moved since, on purpose. Ranks that share rows add their gradients up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn

from lpom.methods import Batch, Method, Problem, State
from lpom.methods.optimizers import OptimizerState, advance
from lpom.modes import evaluating
from lpom.parallel.pieces import pieces
from lpom.parallel.ranks import Ranks
from lpom.rule import row_weights
from lpom.weights.factored import Factored

T = TypeVar("T")


class Team:
    """The processes of a run, here one; the ``first`` writes, draws and calls back for all."""

    size, first = 1, True

    def ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches, for a process that wants to know what follows."""
        return batches

    def drain(self) -> None:
        """End what is under way: every process has all weights then."""
        return None

    def gather(self, value: T) -> list[T]:
        """The value that each process has."""
        return [value]

    def of_first(self, value: T) -> T:
        """The value that the first process has."""
        return value

    def memory(self, state: dict[str, Any]) -> dict[str, Any]:
        """The whole state of the method, of which every process has what its weights need."""
        return state


@dataclass
class _UnderWay:
    """A batch that was fed forward: its first and last states, and who waits for the pull."""

    batch: Batch
    inputs: Any
    outputs: Tensor
    pull: Callable[[], Tensor] | None


@final
class Pipeline(Team):
    """The steps of one rank.

    Parameters
    ----------
    whole : State
        Of the whole model, made by ``method.init``: it has the schedule, the optimiser's settings,
        and, outside of a run, its memory of all weights.
    """

    def __init__(self, method: Method[Any], problem: Problem, whole: State, ranks: Ranks) -> None:
        self.ranks, self.size, self.first = ranks, ranks.size, ranks.first
        self.layers, self.layer = ranks.parallel.layers, ranks.layer
        self.whole, self.model = check(method, whole, ranks), problem.model
        self.pieces: list[nn.Module] = [problem.model]
        if self.layers > 1:
            self.pieces = list(pieces(problem.model, problem.example, self.layers))
        piece = self.pieces[self.layer]
        self.piece = Problem(piece, problem.loss, read=problem.read)
        self.run, self.state = method.lifted(self.piece), self.whole
        if self.layers > 1:
            self.state = check(method, method.init(self.piece), ranks)
            self.state.weight_decay, self.state.remarks = self.whole.weight_decay, whole.remarks
        self.lag = 0 if ranks.parallel.delay == "none" else self.layers - 1 - self.layer
        self.like = next(piece.parameters()).detach()
        self._shape = self._shape_of_inputs(problem.example)
        self._under_way: deque[_UnderWay] = deque()
        self._next: Batch | None = None
        self._arriving: Callable[[], Tensor] | None = None

    @property
    def _last(self) -> bool:
        return self.layer == self.layers - 1

    def _shape_of_inputs(self, example: Any) -> tuple[int, ...]:
        """Of one row of the state that this rank's piece begins with."""
        with torch.no_grad():
            for piece in self.pieces[: self.layer]:
                with evaluating(piece):
                    example = piece(example)
        return tuple(example.shape[1:]) if self.layer else ()

    # Steps

    def ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; each is here while the one before it is worked on."""
        batch = next(batches, None)
        while batch is not None:
            self._next = next(batches, None)
            yield batch
            batch = self._next

    def step(self, problem: Problem, batch: Batch, state: State) -> Tensor | None:
        """Feed a batch forward, and carry back the one before it by as many as may be under way.

        Called as a method's step is; ``problem`` and ``state``, of the whole model, are known.
        Returns the network's outputs on the batch, on the ranks that have the last layer.
        """
        if self.state is not self.whole:
            advance(self.state, self.whole.progress)
        outputs = self._feed_forward(batch)
        while len(self._under_way) > self.lag:
            self._carry_back(self._under_way.popleft())
        self.ranks.wait_for_sent(but=2 * self.layers)
        return outputs

    def _feed_forward(self, batch: Batch) -> Tensor | None:
        inputs = batch.inputs
        if self.layer:
            inputs = (self._arriving or self._receive(len(batch)))().requires_grad_()
            self._arriving = None
        with torch.enable_grad(), row_weights(batch.weight), self._moving_weights():
            if self._last:
                outputs = self.piece.outputs(inputs, self.run)
            else:
                outputs = self.run(inputs)
        pull = None
        if not self._last:
            self.ranks.send(outputs, self.layer + 1)
            pull = self.ranks.receive(tuple(outputs.shape), self.like, self.layer + 1)
        self._under_way.append(_UnderWay(batch, inputs, outputs, pull))
        if self.layer and self._next is not None:
            self._arriving = self._receive(len(self._next))
        return outputs.detach() if self._last else None

    def _receive(self, rows: int) -> Callable[[], Tensor]:
        return self.ranks.receive((rows, *self._shape), self.like, self.layer - 1)

    def _moving_weights(self) -> Any:
        """Within, autograd does not mind that weights move before it has carried back."""
        if not self.lag:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(_itself, _itself)

    def _carry_back(self, step: _UnderWay) -> None:
        """Carry the pull on the last state down, send on what reaches the first, move weights."""
        state, batch = self.state, step.batch
        state.clear_gradients()
        pull = self._pull_of_loss(step) if step.pull is None else step.pull()
        if step.outputs.requires_grad:
            with row_weights(batch.weight):
                step.outputs.backward(pull)
        if self.layer:
            below = step.inputs.grad
            below = torch.zeros_like(step.inputs) if below is None else below
            self.ranks.send(below, self.layer - 1)
        self.ranks.add([p.grad for p in self.piece.parameters if p.grad is not None])
        state.move()

    def _pull_of_loss(self, step: _UnderWay) -> Tensor:
        batch, outputs = step.batch, step.outputs.detach()
        pull = self.piece.loss.gradient(outputs, batch.target) / batch.total
        if batch.weight is not None:
            pull = pull * batch.weight.view(-1, *[1] * (pull.ndim - 1))
        return pull

    def drain(self) -> None:
        while self._under_way:
            self._carry_back(self._under_way.popleft())
        self.ranks.wait_for_sent()
        for buffer in self.pieces[self.layer].buffers():
            self.ranks.from_first_row(buffer)
        for layer, piece in enumerate(self.pieces):
            for tensor in (*piece.parameters(), *piece.buffers()):
                self.ranks.from_layer(tensor, layer)

    # What the ranks know together

    def gather(self, value: T) -> list[T]:
        return self.ranks.gather(value)

    def of_first(self, value: T) -> T:
        return self.ranks.of_first(value)

    def take_own(self) -> None:
        """Of what the optimiser remembers of all weights take that of this rank's."""
        if self.state is self.whole:
            return
        memory, own = _optimizer(self.whole).state, _optimizer(self.state).state
        own.update({p: memory[p] for p in self.piece.parameters if p in memory})
        memory.clear()

    def give_back(self) -> None:
        """Let the optimiser of the whole model remember all of it again."""
        if self.state is not self.whole:
            memory = self._memory()
            own = _optimizer(self.whole).state
            own.update({p: memory[k] for k, p in self._places().items() if k in memory})

    def memory(self, state: dict[str, Any]) -> dict[str, Any]:
        if self.state is self.whole:
            return state
        return state | {"optimizer": state["optimizer"] | {"memory": self._memory()}}

    def _places(self) -> dict[str, nn.Parameter]:
        groups = _optimizer(self.whole).param_groups
        return {str(i): p for i, p in enumerate(p for group in groups for p in group["params"])}

    def _memory(self) -> dict[str, Any]:
        """What all layers remember, by the places of their weights in the whole model."""
        own = _optimizer(self.state).state
        parts = self.gather({k: own[p] for k, p in self._places().items() if p in own})
        joined = {k: memory for part in parts[: self.layers] for k, memory in part.items()}
        return {k: joined[k] for k in sorted(joined, key=int)}


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _optimizer(state: OptimizerState) -> torch.optim.Optimizer:
    assert state.optimizer is not None  # init made it
    return state.optimizer


def check(method: Method[Any], state: State, ranks: Ranks) -> OptimizerState:
    """The state, if the steps can be spread over ranks; else raise and say why not."""
    if not method.runs_model or not isinstance(state, OptimizerState):
        raise ValueError(
            "parallel= is for methods whose step runs the model: back-propagation, and 'lpom' "
            f"without mu, with one sweep and adaptive weights; got {method!r}."
        )
    if isinstance(state.optimizer, Factored):
        raise ValueError(
            "optimizer='factored' needs residuals and states of a whole batch, which are on "
            "several ranks here. Take 'adam' or 'muon'."
        )
    if getattr(method, "penalties", None) is not None:
        raise ValueError(
            "penalties compare the weights of all layers, which are on several ranks here. Leave "
            "parallel or penalties out."
        )
    if state.scheduler is not None and ranks.parallel.layers > 1:
        raise ValueError(
            "a scheduler of torch moves one optimiser, and each rank has one of its own here. "
            "Take schedule='linear', 'cosine' or 'constant', or layers=1."
        )
    return state
