r"""LPOM's steps on the nodes of one rank.

Upwards go the states that other ranks read, downwards the pulls on them,
:math:`\sum_c (\mu_c / \mu_v) A_c^T R_c`: nothing else of a layer is known elsewhere. Since a state
is a variable, it can be moved when its pull arrives, by weights that have moved since it was fed
forward; no copy of the old ones is kept.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn

from lpom.graph import Node
from lpom.graph.edges import BatchNormOverRanks
from lpom.methods import LPOM, Batch, Method, Problem, State
from lpom.methods import _old_lpom
from lpom.methods._old_choices import Straight, Sweeps
from lpom.parallel import memory
from lpom.parallel.dividing import divide
from lpom.parallel.lending import lend
from lpom.parallel.ranks import Parallel, Ranks
from lpom.parallel.stages import Stage, plan, with_batch_norm_over_ranks
from lpom.parallel.team import Team
from lpom._old_states import States
from lpom.weights.adam import Adam, large_matrices
from lpom.weights.adaptive import Adaptive, moves_each_number
from lpom.weights.blocks import Block, Use, blocks
from lpom.weights.factored import Factored

T = TypeVar("T")
#: States, or pulls on them, on their way: their indices, and what waits for them.
_Arriving = list[tuple[list[int], Callable[[], list[Tensor]]]]
_Waiting = Callable[[], list[Tensor]]
_UnderWay = tuple[States, Batch, _Arriving, _Waiting | None]


@final
class Pipeline(Team):
    """The steps of one rank: feed a batch forward; move states and weights by an earlier one.

    Parameters
    ----------
    method, problem, state : those of the whole network. The optimiser in ``state`` is given the
        gradients of this rank's weights only, so its memory is of these
    ranks : the processes of the run
    example, rows : a few samples, and how many there are in a batch, to see what the nodes cost
    weighted : whether rows have weights of their own, or several predictions each
    """

    def __init__(
        self,
        method: Method[Any],
        problem: Problem,
        state: State,
        ranks: Ranks,
        example: Tensor,
        rows: int,
        weighted: bool = False,
    ) -> None:
        self.method, self.ranks = check(method, problem, ranks.parallel), ranks
        self.whole = state
        state = _old_lpom.old_state(self.method, problem.graph, state)
        self.size, self.first = ranks.size, ranks.first
        graph, parallel = problem.graph, ranks.parallel
        self._interleaved = self.method.states == Sweeps()
        # an optimiser that looks at a whole weight needs it whole
        divides = self._interleaved and moves_each_number(state.optimizer)
        exact = bool(state.blocks)
        lends = self._interleaved and not exact and not weighted and parallel.data == 1
        chosen = plan(graph, example, rows, parallel.layers, divides=divides, lends=lends)
        chosen = ranks.of_first(chosen)
        self.divided = divide(graph, chosen.places)
        self.lent = lend(self.divided.graph, self.divided.ends, chosen.lent)
        with torch.random.fork_rng(devices=[]):
            _, X = self.divided.graph.feed_forward(example)
        self._shapes = [(len(x) / len(example), tuple(x.shape[1:])) for x in X]
        graph, last = self.lent.graph, self.lent.ends
        if parallel.data > 1:
            graph = with_batch_norm_over_ranks(graph, ranks.add)
        self.stage = Stage.of(graph, last, ranks.layer)
        self.problem = Problem.on(self.stage.graph, problem.loss, problem.model)
        mu = [state.mu[self.divided.origins[origin]] for origin in self.lent.origins]
        self.state = replace(
            state,
            mu=self.stage.mu(mu),
            vectors={},
            blocks=blocks(self.stage.graph) if exact else [],
            # gradients of lent weights are added up, for which they are needed as a whole
            large=large_matrices(self.stage.graph) - set(self.lent.parameters)
            if state.large and type(state.optimizer) is Adam
            else set(),
            # they wait for the pulls, for which another rank waits
            late=[] if self.stage.received else None,
        )
        optimizer = state.optimizer
        groups = [] if optimizer is None else optimizer.param_groups
        self._whole = [list(p.shape) for group in groups for p in group["params"]]
        kept = [_tensors(Stage.of(graph, last, layer)) for layer in range(parallel.layers)]
        self._kept = [_but(tensors, kept[0] if k else []) for k, tensors in enumerate(kept)]
        self._last = ranks.layer == parallel.layers - 1
        pipelined = self._interleaved and parallel.delay == "pipelined"
        self.lag = parallel.layers - 1 - ranks.layer if pipelined else 0
        self._lender_lag = parallel.layers - 1 if pipelined else 0
        # what was sent this many messages ago has arrived: no rank is behind by so many batches
        per_batch = len(self.stage.received) + len(self.stage.sent) + bool(chosen.lent)
        self._messages = 2 * parallel.layers * per_batch
        self._lender = bool(chosen.lent) and ranks.layer == 0
        self._helper = bool(chosen.lent) and ranks.layer == 1
        self._ahead_of_weights = 0  # batches begun since the lent weights were last heard of
        self._weights: deque[_Waiting] = deque()
        self._under_way: deque[_UnderWay] = deque()
        self._arriving: _Arriving | None = None  # states for the next batch
        self._following: int | None = None  # the rows of that
        self._like = example.new_empty((), dtype=graph.parameters[0].dtype)
        if example.device.type == "cpu":
            ranks.share_memory(self._sizes(rows), self._messages)

    def ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches. Who knows that another one follows can let its states arrive early."""
        batch = next(batches, None)
        while batch is not None:
            following = next(batches, None)
            self._following = None if following is None else len(following)
            yield batch
            batch = following

    @torch.no_grad()
    def step(self, batch: Batch) -> Tensor | None:
        """Begin with a batch, and end the one before it by as many as may be under way.

        Returns the network's outputs on the batch where they are known: on the last layer.
        """
        whole = self.whole
        self.state.progress, self.state.remarks = whole.progress, whole.remarks
        self.state.steps = whole.steps
        if self._interleaved:
            outputs = self._feed_forward(batch)
            while len(self._under_way) > self.lag:
                self._move(*self._under_way.popleft())
            self.ranks.wait_for_sent(but=self._messages)
        elif self.ranks.parallel.layers == 1:
            outputs = self.method.step(self.problem, batch, self.state)
        else:
            outputs = self._settle(batch)
            self.ranks.wait_for_sent()
        whole.steps += 1
        return outputs

    @torch.no_grad()
    def end_batches(self) -> None:
        """End all that are under way."""
        while self._under_way:
            self._move(*self._under_way.popleft())
        self._hear_of_weights(0)
        self._take_weights()
        self.ranks.wait_for_sent()

    def drain(self) -> None:
        """End all batches that are under way, and let all ranks have all weights."""
        self.end_batches()
        if len(self._kept) > 1:
            for layer, tensors in enumerate(self._kept):
                for tensor in tensors:
                    self.ranks.from_layer(tensor, layer)

    def gather(self, value: T) -> list[T]:
        return self.ranks.gather(value)

    def of_first(self, value: T) -> T:
        return self.ranks.of_first(value)

    def take_own(self) -> None:
        """Of all weights let the optimiser move and remember this rank's."""
        if self.state.optimizer is not None:
            own = set(self.stage.graph.parameters)
            own -= set(self.lent.parameters if self._helper else [])
            memory.take_own(self.state.optimizer, own, self.divided.rows)

    def give_back(self) -> None:
        """Let the optimiser have the module's own weights again, and remember all rows of them."""
        if self.state.optimizer is not None and self.divided.rows:
            known = self.memory(self.whole.state_dict())["optimizer"]["memory"]
            memory.give_back(self.state.optimizer, self.divided.rows, known)

    def memory(self, state: dict[str, Any]) -> dict[str, Any]:
        """The optimiser's memory of a weight is on the ranks that move it."""
        if state["optimizer"] is None:
            return state
        found = self.ranks.gather(state["optimizer"]["memory"])
        known = memory.joined(found[: self.ranks.parallel.layers])  # other rows have the same
        return state | {"optimizer": state["optimizer"] | {"memory": known, "shapes": self._whole}}

    def _feed_forward(self, batch: Batch) -> Tensor | None:
        self._take_weights()
        states = self._start(batch)
        pulls = self._receive_pulls(len(batch))
        self._under_way.append((states, batch, pulls, self._receive_gradients()))
        self._ahead_of_weights += 1
        self._hear_of_weights(self._lender_lag)
        self._arriving = None if self._following is None else self._receive(self._following)
        self._following = None
        return self._outputs(states)

    def _start(self, batch: Batch) -> States:
        """The states of a batch, fed forward by those that arrive, and sent on."""
        self.stage.inbox.update(_arrived(self._arriving or self._receive(len(batch))))
        states = self.method.feed_forward(self.problem, batch, self.state)
        self._send_states(states)
        return states

    def _outputs(self, states: States) -> Tensor | None:
        known = self._last and states.graph is self.problem.graph
        return states.outputs if known else None

    def _settle(self, batch: Batch) -> Tensor | None:
        """Every state of every rank from the same old ones, several times; then all weights."""
        states, method, stage, rows = self._start(batch), self.method, self.stage, len(batch)
        outputs, graph = self._outputs(states), states.graph
        own = [graph[index] for index in stage.own]
        for _ in range(method.states.most):
            pulls = self._receive_pulls(rows)
            for indices in stage.received.values():
                for index in indices:
                    states.gather(graph[stage.numbers[index]])
            self._send_pulls(states, rows)
            above = self._steepness_elsewhere(states) if method.states.safe else {}
            for node in own:
                states.gather(node)
            if self._last:
                pull = method.loss_pull(states, self.problem, batch)
                states.pull(graph[graph.output], pull)
            for index, pull in _arrived(pulls):
                states.pull(graph[stage.numbers[index]], pull)
            shares = [self._share(states, node, above.get(node.index, 0.0)) for node in own]
            moves = list(zip(own, shares, strict=True))
            for node, share in reversed(moves):  # so that what a state is moved from is old too
                states.move(node, share)
            self._send_states(states)
            for index, X in _arrived(self._receive(rows)):
                states.put(graph[stage.numbers[index]], X)
        waiting: dict[Block, list[Use]] = {}
        for node in own:
            residual = states.residual(node)
            method.visit(states, node, residual, batch, self.state, waiting, down=False)
        method.update(states, batch, self.state)
        return outputs

    def _steepness_elsewhere(self, states: States) -> dict[int, float]:
        """By node, that of the readers of its state on other ranks; they are told of theirs."""
        stage, ranks = self.stage, self.ranks
        for layer, indices in stage.received.items():
            nodes = [states.graph[stage.numbers[index]] for index in indices]
            steepness = [self.method.steepness(states, node, self.state) for node in nodes]
            ranks.send([torch.as_tensor(v, dtype=self._like.dtype) for v in steepness], layer)
        found: dict[int, float] = {}
        for layer, indices in stage.sent.items():
            told = ranks.receive([()] * len(indices), self._like, layer)()
            for index, value in zip(indices, told, strict=True):
                number = stage.numbers[index]
                found[number] = found.get(number, 0.0) + float(value)
        return found

    def _share(self, states: States, node: Node, above: float) -> Tensor | float | None:
        """The share of the way that a state goes, by its readers here and on other ranks."""
        if not self.method.states.safe:
            return None
        steepness = self.method.steepness(states, node, self.state) + above
        if self._last and node.index == states.graph.output:
            steepness = steepness + self.problem.loss.lipschitz
        return self.method.share(states, node, steepness)

    def _move(
        self, states: States, batch: Batch, pulls: _Arriving, gradients: _Waiting | None
    ) -> None:
        stage, graph = self.stage, states.graph
        if self._last:
            pull = self.method.loss_pull(states, self.problem, batch)
            states.pull(graph[graph.output], pull)
        for index, pull in _arrived(pulls):
            states.pull(graph[stage.numbers[index]], pull, own=True)
        if self.lag and self.state.blocks:  # they are solved for as they are now
            states.weights_moved()
        own = [graph[index] for index in stage.own]
        lent = own[: self.lent.own] if self._helper else []
        self.method.sweep_down(states, own[len(lent) :], self.problem, batch, self.state)
        self._send_pulls(states, len(batch))
        if self._helper:
            self.method.sweep_down(states, lent, self.problem, batch, self.state)
            self._send_gradients()
        if gradients is not None:
            for parameter, gradient in zip(self.lent.parameters, gradients(), strict=True):
                assert parameter.grad is not None
                parameter.grad.add_(gradient)
        self.method.update(states, batch, self.state)
        if self._lender:
            self.ranks.send([p.clone() for p in self.lent.parameters], 1)  # they will move on

    def _receive_gradients(self) -> _Waiting | None:
        """Begin to receive what lent rows say of this rank's weights."""
        if not self._lender:
            return None
        return self.ranks.receive([p.shape for p in self.lent.parameters], self._like, 1)

    def _send_gradients(self) -> None:
        """Give those of weights that another rank moves."""
        found = []
        for parameter in self.lent.parameters:
            assert parameter.grad is not None
            found.append(parameter.grad)
            parameter.grad = None
        self.ranks.send(found, 0)

    def _hear_of_weights(self, lag: int) -> None:
        """Begin to receive the lent weights of all batches but the last so many."""
        while self._helper and self._ahead_of_weights > lag:
            shapes = [p.shape for p in self.lent.parameters]
            self._weights.append(self.ranks.receive(shapes, self._like, 0))
            self._ahead_of_weights -= 1

    def _take_weights(self) -> None:
        """Put the lent weights that have been sent into the module."""
        while self._weights:
            for parameter, value in zip(
                self.lent.parameters, self._weights.popleft()(), strict=True
            ):
                parameter.copy_(value)

    def _send_states(self, states: States) -> None:
        for layer, indices in self.stage.sent.items():
            self.ranks.send([states.state(self.stage.numbers[i]) for i in indices], layer)

    def _send_pulls(self, states: States, rows: int) -> None:
        for layer, indices in self.stage.received.items():
            found = []
            for index in indices:
                number = self.stage.numbers[index]
                pull, states.pulls[number] = states.pulls[number], None
                if pull is None:
                    pull = self._like.new_zeros(self._shape(index, rows))
                found.append(pull)
            self.ranks.send(found, layer)

    def _receive(self, rows: int) -> _Arriving:
        """Begin to receive the states of a batch."""
        return self._begin(self.stage.received, rows)

    def _receive_pulls(self, rows: int) -> _Arriving:
        """Begin to receive what others pull this rank's states by."""
        return self._begin(self.stage.sent, rows)

    def _begin(self, indices_by_layer: dict[int, list[int]], rows: int) -> _Arriving:
        found: _Arriving = []
        for layer, indices in indices_by_layer.items():
            shapes = [self._shape(index, rows) for index in indices]
            found.append((indices, self.ranks.receive(shapes, self._like, layer)))
        return found

    def _sizes(self, rows: int) -> dict[int, int]:
        """Bytes of the largest message to each layer."""
        found = {
            layer: sum(math.prod(self._shape(index, rows)) for index in indices)
            for layer, indices in (self.stage.received | self.stage.sent).items()
        }
        if self._lender or self._helper:
            lent, other = sum(p.numel() for p in self.lent.parameters), int(self._lender)
            found[other] = max(found[other], lent)
        return {layer: self._like.element_size() * numbers for layer, numbers in found.items()}

    def _shape(self, index: int, rows: int) -> tuple[int, ...]:
        """Of a state of the whole graph, for a batch of so many rows."""
        per_row, rest = self._shapes[self.lent.origins[index]]
        return (round(per_row * self.lent.rows(index, rows)), *rest)


def _arrived(arriving: _Arriving) -> Iterator[tuple[int, Tensor]]:
    for indices, wait in arriving:
        yield from zip(indices, wait(), strict=True)


def check(method: Method[Any], problem: Problem, parallel: Parallel) -> Any:
    """The method, if its steps can be spread over ranks; else raise and say why not."""
    if not isinstance(method, LPOM):
        raise ValueError(
            f"parallel= spreads the steps of method 'lpom', got {method.name!r}. For "
            "back-propagation use torch's DistributedDataParallel."
        )
    method = _old_lpom.old_method(method)
    sweeps = method.states
    if sweeps.tolerance > 0:
        raise ValueError(
            f"tolerance={sweeps.tolerance:g} would be met sooner on one rank than on another. "
            "Give a number of sweeps, Sweeps(max_sweeps=...)."
        )
    if parallel.layers > 1 and sweeps != Sweeps() and sweeps.order != "parallel":
        raise ValueError(
            "layers on several ranks move their states by one plain interleaved sweep per batch, "
            f"Sweeps(), or all at once, Sweeps(order='parallel', max_sweeps=...); got {sweeps!r}."
        )
    if isinstance(method.weights, Adaptive) and method.weights.optimizer in ("factored", Factored):
        raise ValueError(
            "optimizer='factored' turns the residuals and states of a whole batch before they are "
            "multiplied, which are on several ranks here. Take 'adam' or 'muon'."
        )
    if method.mu == "auto":
        raise ValueError(
            "mu='auto' looks at all layers and rows at once, which are on several ranks here. Give "
            "a number, such as the default mu=20."
        )
    if parallel.layers == 1:
        return method
    jumps = method.jumps
    if problem.graph.jumps and isinstance(jumps, Straight) and jumps.relative:
        raise ValueError(
            "the network has activations that jump, and the widths of their ramps are measured in "
            "all layers, which are on several ranks here. Give a width by itself, "
            "LPOM(jumps=Straight(width=1.0, relative=False)), or take layers=1."
        )
    if method.penalties is not None:
        raise ValueError(
            "penalties compare the weights of all layers, which are on several ranks here. Take "
            "layers=1 and data= as many ranks as you like."
        )
    return method


def _but(tensors: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    known = {id(tensor) for tensor in others}
    return [tensor for tensor in tensors if id(tensor) not in known]


def _tensors(stage: Stage) -> list[Tensor]:
    """All that the steps of a part change in the module: weights, and buffers of its layers."""
    found: dict[int, Tensor] = {id(p): p for p in stage.graph.parameters}
    for node in stage.graph:
        for step in node.edge.steps:
            call = step.call.layer if isinstance(step.call, BatchNormOverRanks) else step.call
            if isinstance(call, nn.Module):
                found |= {id(buffer): buffer for buffer in call.buffers()}
    return list(found.values())
