"""Lifted Proximal Operator Machines (Li, Fang, Lin, AAAI 2019): the method."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from lpom.graph import Graph, Node
from lpom.methods import jumps as widths
from lpom.methods.base import Batch, Method, Problem, from_settings
from lpom.methods._old_choices import Continuation, Straight, Sweeps
from lpom.weights.adaptive import Adaptive
from lpom.weights.exact import Exact
from lpom.methods.optimizers import PenalisedState
from lpom.objectives import Mu, Objective, contraction, edge_norm, evaluate, per_node
from lpom.penalties import Penalty, any_lazy, by_pattern
from lpom.settings import chosen, geometric
from lpom.stacks import Stack
from lpom._old_states import States
from lpom.weights.adam import Adam, large_matrices
from lpom.weights.blocks import Block, Share, Use, blocks
from lpom.weights.exact import exact_step, penalised_step
from lpom.weights.factored import Factored
from lpom.weights.gradients import Apart, Gradients
from lpom.weights.penalised import Penalised

#: Power iteration sees the norm from below; the safe step takes this much more than it saw.
NORM_MARGIN = 1.1
#: Samples on which the rates of products of states are measured.
RATED = 16
#: With mu="auto" pulls are this small beside the pre-activations, measured every so many steps.
RELATIVE_PULL, MEASURE_EVERY = 3e-3, 50


_ONE_SWEEP = Sweeps()


@dataclass
class LPOMState(PenalisedState):
    """Optimiser, weights of the gaps by node, norm vectors of the safe step by node and source."""

    mu: list[float] = from_settings(list)
    measured: list[float] = field(default_factory=list)  # the same, where it is chosen on the way
    vectors: dict[str, Tensor] = field(default_factory=dict)
    blocks: list[Block] = from_settings(list)
    large: set[nn.Parameter] = from_settings(set)  # matrices that are moved within the sweep
    stack: Stack | None = from_settings(lambda: None)  # the short way of one sweep
    #: what those are to be moved by, where they wait for the end of the sweep
    late: list[tuple[nn.Parameter, Tensor, Tensor, float | Tensor]] | None = from_settings(
        lambda: None
    )

    def descend(self, weight: nn.Parameter, R: Tensor, X: Tensor, share: float | Tensor) -> None:
        if self.late is not None:
            self.late.append((weight, R, X, share))
            return
        assert isinstance(self.optimizer, Adam)
        self.optimizer.descend(weight, R, X, share, self.weight_decay)

    def descend_late(self) -> None:
        """Move the matrices that have waited, the last one first: it was read a moment ago."""
        waiting, self.late = self.late, None
        for use in reversed(waiting or ()):
            self.descend(*use)
        self.late = None if waiting is None else []

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        super().load_state_dict(saved)
        self.mu = self.measured or self.mu


@final
@dataclass(frozen=True)
class LPOM(Method[LPOMState]):
    r"""Train by block coordinate descent on the lifted objective, without back-propagation.

    .. math:: \mathrm{loss}(X_{out}, T) + \sum_v \mu_v \sum D_v(X_v, A_v(X_{sources}; W)) + m\, h(W)

    Parameters
    ----------
    mu : float, one per node, a mapping from patterns of names, or "auto"
        Weight of each node's gap. Auto chooses it for every node from the size of the signal that
        comes down to it, so that pulls stay clear of rounding and of saturation.
    states : Sweeps
        How states move: ``Sweeps(order="top-down", most=3, rule="safe")``.
    weights : Adaptive or Exact
        How weights move: ``Adaptive(optimizer="adam", learning_rate=2e-3)``, or
        ``Exact(iterations=3, ridge=0.1)``.
    jumps : Straight or Continuation
        How activations without a derivative (step, sign, staircase, ...) are trained.
    penalties : one of `lpom.penalties` for all matrices and kernels, or a mapping from patterns of
        names, the first that fits: ``{"0.weight": L1(1e-4), "*.weight": Box(-1, 1)}``
    """

    mu: Mu | Literal["auto"] = 20.0
    states: Sweeps = Sweeps()
    weights: Adaptive | Exact = Adaptive()
    jumps: Straight | Continuation = Straight()
    penalties: Penalty | Mapping[str, Penalty] | None = None

    name: ClassVar[str] = "lpom"
    equation: ClassVar[str] = "loss(X_L, T) + sum_i mu_i D_i(X_i+1, Z_i)   (eq. 18)"
    costs: ClassVar[str] = "the products of back-propagation; each further sweep two per layer"

    def __post_init__(self) -> None:
        put = object.__setattr__  # names of settings stand for the settings
        put(self, "states", chosen("states", self.states, {"sweeps": Sweeps}))
        put(
            self, "weights", chosen("weights", self.weights, {"adaptive": Adaptive, "exact": Exact})
        )
        kinds = {"straight": Straight, "continuation": Continuation}
        put(self, "jumps", chosen("jumps", self.jumps, kinds))
        put(self, "penalties", by_pattern(self.penalties))
        if isinstance(self.weights, Exact) and any_lazy(self.penalties):
            raise ValueError(
                "a lazy penalty is about the steps of an optimiser, and exact weights have none: "
                "use weights='adaptive', or lazy=False."
            )

    @torch.no_grad()
    def step(self, problem: Problem, batch: Batch, state: LPOMState) -> Tensor | None:
        """Feed forward; then sweeps over the states, with the weights between or after them."""
        stack = state.stack
        if stack is not None and stack.takes(batch.inputs):
            outputs = stack.sweep(
                batch.inputs,
                batch.target,
                problem.loss,
                state.mu,
                state.weight_decay,
                state if state.large else None,
            )
            assert state.optimizer is not None  # init made it
            state.optimizer.step()
            state.steps += 1
            return outputs
        states = self.feed_forward(problem, batch, state)
        outputs = states.outputs
        if self.states.order == "interleaved":
            for _ in self._sweeps(states):
                states.pull(
                    states.graph.nodes[states.graph.output - 1],
                    self.loss_pull(states, problem, batch),
                )
                self.sweep_down(states, states.graph.nodes, problem, batch, state)
                self.update(states, batch, state)
        else:
            self._settle(states, problem, batch, state)
            waiting: dict[Block, list[Use]] = {}
            for node in states.graph:
                residual = states.residual(node)
                self.visit(states, node, residual, batch, state, waiting, down=False)
            self.update(states, batch, state)
        state.steps += 1
        graph = problem.graph
        return outputs if states.graph is graph or states.graph is graph.swept else None

    def sweep(
        self, problem: Problem, batch: Batch, state: LPOMState
    ) -> tuple[Tensor, dict[nn.Parameter, Tensor]]:
        """The outputs, and the gradients of one interleaved sweep, as a function of tensors.

        It is what `step` does before the optimiser, for a compiler: no weight moves, and nothing
        is written over.
        """
        states = self.feed_forward(problem, batch, state, apart=True)
        outputs, top = states.outputs, states.graph.nodes[states.graph.output - 1]
        states.pull(top, self.loss_pull(states, problem, batch))
        self.sweep_down(states, states.graph.nodes, problem, batch, state)
        assert isinstance(states.gradients, Apart)
        return outputs, states.gradients.found

    def descend(
        self, problem: Problem, state: LPOMState, gradients: Mapping[nn.Parameter, Tensor]
    ) -> None:
        """Let the optimiser move the weights by the gradients of `sweep`."""
        taken: set[int] = set()  # a compiler may give two equal gradients the same memory
        for parameter in problem.graph.parameters:
            found, old = gradients.get(parameter), parameter.grad
            if found is None:
                parameter.grad = None
            elif found.stride() == parameter.stride() and found.data_ptr() not in taken:
                parameter.grad = found
                taken.add(found.data_ptr())
            else:  # fused optimisers go through weight and gradient side by side
                old = torch.empty_like(parameter) if old is None else old
                parameter.grad = old.copy_(found)
        self._move(state)
        state.steps += 1

    def sweep_down(
        self,
        states: States,
        nodes: Sequence[Node],
        problem: Problem,
        batch: Batch,
        state: LPOMState,
    ) -> None:
        """From above, each state and then what the weights below it are to know of it."""
        waiting: dict[Block, list[Use]] = {}
        for node in reversed(nodes):
            residual = states.move(node, self._alpha(states, node, problem, state))
            self.visit(states, node, residual, batch, state, waiting, down=True)

    def _settle(self, states: States, problem: Problem, batch: Batch, state: LPOMState) -> None:
        """Move all states, the weights standing still, in the order that is set."""
        graph, order = states.graph, self.states.order
        nodes = graph.nodes if order == "paper" else graph.nodes[::-1]
        for _ in self._sweeps(states):
            if order == "parallel":  # from above, so that what a state is moved from is old too
                for node in nodes:
                    self._gather(states, node, problem, batch, state)
            for node in nodes:
                if order != "parallel":
                    self._gather(states, node, problem, batch, state)
                states.move(node, self._alpha(states, node, problem, state))

    def visit(
        self,
        states: States,
        node: Node,
        residual: Tensor | None,
        batch: Batch,
        state: LPOMState,
        waiting: dict[Block, list[Use]],
        *,
        down: bool,
    ) -> None:
        """Hand a residual down and to the weights: as gradients, or as a use of Algorithm 2.

        Weights with several uses wait until the last of them has been here.
        """
        if isinstance(self.weights, Adaptive):
            total = batch.inputs.shape[0] if _plain(batch) else batch.total
            states.carry_back(node, residual, batch.weight, total, down=down)
            if batch.share is not None:
                self._begin_to_add(states.graph, node, batch.share, down=down)
            return
        if down:
            states.pull_back(node, residual)
        for block in state.blocks:
            if node.index not in block.uses:
                continue
            uses = waiting.setdefault(block, [])
            share = state.mu[node.index] / max(state.mu[v] for v in block.uses)
            uses.append(states.use(node, batch.weight, share, fresh=block.alone))
            if len(uses) == len(block.uses):
                self._solve(block, uses, batch, state)

    def _begin_to_add(self, graph: Graph, node: Node, share: Share, *, down: bool) -> None:
        """Gradients that no further node changes go to other ranks while the sweep goes on."""
        for parameter in node.edge.parameters:
            last = graph.uses[parameter][0 if down else -1]
            if last is node and parameter.grad is not None:
                share.begin(parameter.grad)

    def _solve(self, block: Block, uses: list[Use], batch: Batch, state: LPOMState) -> None:
        assert isinstance(self.weights, Exact)
        iterations, ridge = self.weights.iterations, self.weights.ridge_at(state.progress)
        if any(parameter in state.penalised for parameter in block.parameters):
            largest = max(state.mu[v] for v in block.uses)
            penalised_step(
                block,
                uses,
                state.penalised,
                weight=float(batch.total_weight) / largest,
                iterations=iterations,
                ridge=ridge,
                share=batch.share,
            )
        elif exact_step(block, uses, iterations=iterations, ridge=ridge, share=batch.share):
            state.remark(
                "rank-deficient",
                f"the exact weight step of {block.names[0]} met states that are rank-"
                f"deficient (batch of {len(batch)}); their pseudo-inverse was taken. Set "
                "ridge above 0 (0.1 works for most networks).",
            )

    def update(self, states: States, batch: Batch, state: LPOMState) -> None:
        """Let the optimiser, if there is one, move the weights by what the sweep has found."""
        if state.optimizer is not None:
            if batch.share is not None:
                batch.share.finish()
            state.descend_late()
            assert isinstance(states.gradients, Gradients)
            states.gradients.drop_old()
            self._move(state)
        if not states.once:
            states.weights_moved()

    def _move(self, state: LPOMState) -> None:
        """Let the optimiser move the weights by their gradients, decay and penalties."""
        assert state.optimizer is not None  # init made it
        if state.weight_decay:
            state.add_decay()
        if self.penalties is None:
            state.optimizer.step()
        else:
            state.penalised.step(state.optimizer)

    def _sweeps(self, states: States) -> Iterator[int]:
        """As many sweeps as allowed, or until the states hardly change."""
        for sweep in range(self.states.most):
            before = list(states.P) if self.states.tolerance > 0 else None
            yield sweep
            if before is not None and _change(before, states) < self.states.tolerance:
                return

    def _gather(
        self, states: States, node: Node, problem: Problem, batch: Batch, state: LPOMState
    ) -> None:
        states.gather(node)
        if node.index == states.graph.output:
            states.pull(node, self.loss_pull(states, problem, batch))

    def loss_pull(self, states: States, problem: Problem, batch: Batch) -> Tensor:
        """The pull of the loss on the outputs, in units of their pre-activations (eq. 28)."""
        gradient = problem.loss.gradient(states.outputs, batch.target)
        return gradient / states.mu[states.graph.output]

    def _alpha(
        self, states: States, node: Node, problem: Problem, state: LPOMState
    ) -> Tensor | float | None:
        """The share of the way that a state goes; None for all of it."""
        if not self.states.safe:
            return None
        steepness = self.steepness(states, node, state)
        if node.index == states.graph.output:
            steepness = steepness + problem.loss.lipschitz
        return self.share(states, node, steepness)

    def steepness(self, states: States, node: Node, state: LPOMState) -> Tensor | float:
        r""":math:`\sum_c \mu_c \gamma_c \|A_c\|^2` over the readers of a state."""
        v = node.index
        steepness: Tensor | float = 0.0
        if not len(states.X[v]):  # other ranks have the rows of this batch
            return steepness
        for above in states.graph.consumers[v]:
            key = f"{above.index} {v}"
            norm, state.vectors[key] = edge_norm(
                above.edge,
                v,
                states.X,
                state.vectors.get(key),
                iterations=2 if key in state.vectors else 20,
                switches=states.switches,
            )
            gamma = states.soft[above.index].activation.lipschitz
            steepness = steepness + NORM_MARGIN * state.mu[above.index] * gamma * norm**2
        return steepness

    def share(self, states: States, node: Node, steepness: Tensor | float) -> Tensor | float:
        """The share of the way that cannot raise the block's objective (`lpom.states`)."""
        gamma = states.soft[node.index].activation.lipschitz
        return 1 / (1 + gamma / states.mu[node.index] * steepness)

    # what surrounds the steps

    @property
    def steadier(self) -> tuple[str, ...]:
        if isinstance(self.weights, Adaptive):
            return ("a smaller learning_rate", "a larger mu")
        return ("a larger ridge", "a larger mu")

    def with_learning_rate(self, rate: float) -> LPOM:
        if not isinstance(self.weights, Adaptive):
            raise ValueError(
                "exact weights have no learning rate; leave learning_rate_init=None, or use "
                "weights='adaptive'."
            )
        return self.with_params(weights__learning_rate=rate)

    def init(self, problem: Problem) -> LPOMState:
        graph, loss = problem.graph, problem.loss
        auto = self.mu == "auto"
        state = LPOMState(mu=per_node(20.0 if auto else self.mu, graph))  # type: ignore[arg-type]
        if self.states.safe and math.isinf(loss.lipschitz):
            raise ValueError(
                f"the safe step needs a loss with a Lipschitz gradient, which {loss!r} does not "
                "have: give it some smoothing, or use Sweeps(rule='plain')."
            )
        if isinstance(self.weights, Adaptive):
            by = self.weights
            state.make(problem, by.optimizer, by.learning_rate, by.schedule)
            if self.one_sweep and self.penalties is None and isinstance(state.optimizer, Adam):
                state.large = large_matrices(graph, state.optimizer.above)
            if isinstance(state.optimizer, Factored) and not state.large:
                state.remark(
                    "factored",
                    "optimizer='factored' is for matrices of Linear layers with nothing else "
                    "between two states, moved in one interleaved sweep without penalties: here "
                    "all weights move as Adam moves them.",
                )
            matrices = {p for p in graph.parameters if p.ndim > 1}
            alike = not state.large or state.large == matrices  # all move in the same way
            if self.one_sweep and self.penalties is None and self.mu != "auto" and alike:
                state.stack = Stack.of(graph)
        else:
            state.blocks = blocks(graph)
        state.penalised = Penalised(self.penalties, graph.parameter_names)
        if self.states.order in ("paper", "parallel") and self.states.most == 1 and len(graph) > 1:
            state.remark(
                "one sweep",
                f"order={self.states.order!r} with one sweep moves no state but the output, so "
                "only the last weights learn. Use Sweeps(most=2) or more, about as many as there "
                "are layers; or order='top-down'.",
            )
        return state

    @cached_property
    def one_sweep(self) -> bool:
        """Whether every edge is evaluated but once in a step, and weights move by gradients."""
        return self.states == _ONE_SWEEP and isinstance(self.weights, Adaptive)

    def feed_forward(
        self, problem: Problem, batch: Batch, state: LPOMState, *, apart: bool = False
    ) -> States:
        """The states of a batch, with which a step begins."""
        if self.penalties is not None:
            state.penalised.advance(state.progress)
        once = self.one_sweep
        straight = once and isinstance(self.jumps, Straight)
        # what goes beyond one sweep wants one function throughout
        graph = problem.graph if straight else self.as_measured(problem, batch, state)
        if self.mu == "auto" and state.steps % MEASURE_EVERY == 0:
            soft = self.as_measured(problem, batch, state)
            self._measure(States(graph, batch.inputs, state.mu, soft=soft), problem, batch, state)
        # gradients that are added up over ranks are needed as a whole
        learner = state if state.large and batch.share is None and not apart else None
        one_mu = once and len(set(state.mu[1:])) == 1
        if graph.swept is not None and one_mu and not graph.jumps and batch.share is None:
            mu = state.mu[1:2] * (len(graph.swept) + 1)
            return States(graph.swept, batch.inputs, mu, learner=learner, once=True, apart=apart)
        states = States(graph, batch.inputs, state.mu, learner=learner, once=once, apart=apart)
        if self._follows_spreads(problem) and state.steps % widths.MEASURE_EVERY == 0:
            state.spreads.measure(problem.graph, states.Z)
        if straight:
            states.soft = self.as_measured(problem, batch, state)
        return states

    def _follows_spreads(self, problem: Problem) -> bool:
        return problem.graph.jumps and isinstance(self.jumps, Straight) and self.jumps.relative

    def as_measured(self, problem: Problem, batch: Batch, state: LPOMState) -> Graph:
        """The network whose gaps are finite, with ramps as wide as they are now for jumps."""
        graph = problem.graph
        if not graph.jumps:
            return graph
        if isinstance(self.jumps, Continuation):
            return graph.smoothed(geometric((self.jumps.first, self.jumps.last), state.progress))
        if not self.jumps.relative:
            return graph.smoothed(self.jumps.width)
        if not state.spreads.values:
            Z, _ = graph.feed_forward(batch.inputs)
            state.spreads.measure(graph, lambda node: Z[node.index])
        return state.spreads.ramps(graph, self.jumps.width)

    def _measure(self, states: States, problem: Problem, batch: Batch, state: LPOMState) -> None:
        r"""Set every mu such that the pull on a state is `RELATIVE_PULL` of its pre-activations.

        :math:`\mu_v G_v` hardly depends on the mu above it: it is about the gradient of the loss.
        """
        graph = states.graph
        states.pull(graph[graph.output], self.loss_pull(states, problem, batch))
        wanted = list(state.mu)
        for node in reversed(graph.nodes):
            pull = states.pulls[node.index]
            if pull is not None:
                size = states.Z(node).square().mean().sqrt()
                ratio = float(pull.square().mean().sqrt() / size) if float(size) > 0 else 0.0
                if 0 < ratio < math.inf:
                    wanted[node.index] = state.mu[node.index] * ratio / RELATIVE_PULL
            states.pull_back(node, states.move(node))
        limited = [min(max(mu, 1e-4), 1e6) for mu in wanted]
        old = state.mu if state.steps else limited
        state.mu = state.measured = [math.sqrt(a * b) for a, b in zip(old, limited, strict=True)]

    @torch.no_grad()
    def settle(self, problem: Problem, batch: Batch, state: LPOMState) -> tuple[States, Graph]:
        """The states of a batch after the sweeps, the weights untouched; and their graph."""
        graph = self.as_measured(problem, batch, state)
        states = States(graph, batch.inputs, state.mu)
        if self.states.safe:  # whose vectors stay as they are
            state = replace(state, vectors=dict(state.vectors))
        if self.states.order != "interleaved":
            self._settle(states, problem, batch, state)
            return states, graph
        for _ in self._sweeps(states):
            states.pull(graph[graph.output], self.loss_pull(states, problem, batch))
            for node in reversed(graph.nodes):
                states.pull_back(node, states.move(node, self._alpha(states, node, problem, state)))
        return states, graph

    @torch.no_grad()
    def objective(self, problem: Problem, batch: Batch, state: LPOMState) -> Objective:
        states, graph = self.settle(problem, batch, state)
        return evaluate(
            graph,
            problem.loss,
            states.X,
            batch.target,
            state.mu,
            batch.weight,
            penalty=state.penalised.value(),
            values=states.Z,
        )

    def rates(self, problem: Problem, batch: Batch, state: LPOMState) -> list[float]:
        graph = self.as_measured(problem, batch, state)
        X: list[Tensor] = []
        if any(node.edge.linear is None for node in graph):
            _, X = graph.feed_forward(batch.inputs[:RATED])
        return contraction(graph, problem.loss, state.mu, X)

    @torch.no_grad()
    def end_epoch(self, problem: Problem, batch: Batch, state: LPOMState) -> None:
        """Sweep a batch once more with the weights standing still, and see whether F falls."""
        state.end_epoch()
        if self.states.most == 1:
            return
        graph = self.as_measured(problem, batch, state)
        start = States(graph, batch.inputs, state.mu)
        before = evaluate(
            graph, problem.loss, start.X, batch.target, state.mu, batch.weight, start.switches
        ).total
        states, _ = self.settle(problem, batch, state)
        after = evaluate(
            graph, problem.loss, states.X, batch.target, state.mu, batch.weight, states.switches
        ).total
        # each gap is known to a few units in the last place; NaN counts as a rise
        size = sum(
            mu * (X.numel() + float(X.detach().square().sum()))
            for mu, X in zip(state.mu[1:], states.X[1:], strict=True)
        )
        if not after <= before + 10 * torch.finfo(batch.inputs.dtype).eps * size:
            state.remark(
                "diverging sweep",
                f"the sweeps over the states diverge: they raise the objective of a batch from "
                f"{before:.3g} to {after:.3g}. Use Sweeps(rule='safe'), or a mu that falls towards "
                "the output.",
            )


def _plain(batch: Batch) -> bool:
    """Whether every row counts once, and all of them are here."""
    return batch.weight is None and batch.counts is None and batch.share is None


def _change(before: Sequence[Tensor | None], states: States) -> float:
    """The largest relative change of any node's pre-activations.

    Not of its states: where phi is flat these stand still while the former are on their way.
    """
    largest = 0.0
    for node in states.graph:
        new, old = states.P[node.index], before[node.index]
        if new is None:
            continue
        old = states.Z(node) if old is None else old
        size = torch.linalg.vector_norm(old).clamp_min(torch.finfo(old.dtype).tiny)
        change = float(torch.linalg.vector_norm(new - old) / size)
        largest = max(largest, change if change == change else math.inf)
    return largest


def old_method(method: Any) -> LPOM:
    """The same settings for the engine that steps over ranks still use."""
    own, jumps = method.states, method.jumps
    kind = Straight if hasattr(jumps, "relative") else Continuation
    return LPOM(
        mu=20.0 if method.mu is None else method.mu,
        states=Sweeps(own.order, own.max_sweeps, own.rule, own.tolerance),
        weights=method.weights,
        jumps=kind(**jumps.get_params()),
        penalties=method.penalties,
    )


def old_state(method: LPOM, graph: Graph, state: Any) -> LPOMState:
    """The state of such steps, with the same optimiser."""
    kept = {name: getattr(state, name) for name in _SHARED}
    made = LPOMState(**kept, mu=per_node(method.mu, graph))  # type: ignore[arg-type]
    if isinstance(method.weights, Adaptive):
        if method.one_sweep and method.penalties is None and isinstance(made.optimizer, Adam):
            made.large = large_matrices(graph, made.optimizer.above)
    else:
        made.blocks = blocks(graph)
    return made


_SHARED = (
    "progress remarks said method optimizer schedule scheduler weight_decay penalised spreads steps"
).split()
