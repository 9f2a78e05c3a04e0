"""Lifted Proximal Operator Machines (Li, Fang, Lin, AAAI 2019): the method."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from lpom.graph import Graph, Node
from lpom.lifting import AUTO, lift
from lpom.methods.base import Batch, Method, Problem, from_settings
from lpom.methods.jumps import MEASURE_EVERY, Continuation, Spreads, StraightThrough
from lpom.methods.optimizers import PenalisedState, add_gradient, descend
from lpom.objectives import Mu, Objective, contraction, per_node, total
from lpom.penalties import Penalty, any_lazy, by_pattern
from lpom.rule import Displacement, Rule, Weight, row_weights
from lpom.settings import chosen, geometric
from lpom.stack import Stack
from lpom.states import States, Sweeps
from lpom.weights.adaptive import Adaptive
from lpom.weights.blocks import Block, Use, blocks
from lpom.weights.exact import Exact, exact_step, penalised_step
from lpom.weights.factored import Factored
from lpom.weights.penalised import Penalised

#: What the gaps are weighed by where states stay and no mu is given: the paper's value.
PAPER_MU = 20.0
#: What the parts of the method may be, by name.
KINDS: dict[str, dict[str, type[Any]]] = {
    "states": {"sweeps": Sweeps},
    "weights": {"adaptive": Adaptive, "exact": Exact},
    "jumps": {"straight-through": StraightThrough, "continuation": Continuation},
}
#: Samples on which the rates of products of states are measured.
RATED = 16


@dataclass
class LPOMState(PenalisedState):
    """Optimiser, weights of the gaps by node, norm vectors of the safe step by node and source."""

    mu: list[float] = from_settings(list)
    vectors: dict[str, Tensor] = field(default_factory=dict)
    blocks: list[Block] = from_settings(list)
    run: Callable[..., Any] | None = from_settings(lambda: None)  # the lifted model
    stack: Stack | None = from_settings(lambda: None)  # the short way of one sweep
    rules: list[Rule] = from_settings(list)  # of its layers

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"run": None}


@final
@dataclass(frozen=True)
class LPOM(Method[LPOMState]):
    r"""Train by block coordinate descent on the lifted objective.

    .. math:: \mathrm{loss}(X_{out}, T) + \sum_v \mu_v \sum D_v(X_v, A_v(X_{sources}; W)) + m\, h(W)

    By default a step is one interleaved sweep: autograd on the model itself, with another backward
    rule at every function that bends (`lpom.lift`). With ``mu``, more sweeps, another order or
    exact weights, states that stay are moved on the graph of the model (`lpom.states`).

    Parameters
    ----------
    mu : float, one per node, or a mapping from patterns of names; None by default
        Weight of each node's gap. None holds the displacement of the states instead, in one
        interleaved sweep, and is 20 wherever states stay.
    displacement : "auto", float, or a mapping by kind of function or by module
        How far the rule moves a state, in spreads of its pre-activations (`lpom.lift`).
    sides : 1, 2, or such a mapping
        Whether the rule looks to one side of a pre-activation or to both.
    states : Sweeps
        How states move: ``Sweeps(order="top-down", max_sweeps=3, rule="safe")``.
    weights : Adaptive or Exact
        How weights move: ``Adaptive(optimizer="adam", learning_rate=2e-3)``, or
        ``Exact(iterations=3, ridge=0.1)``.
    jumps : StraightThrough or Continuation
        How activations without a derivative (step, sign, staircase, ...) are trained.
    penalties : one of `lpom.penalties` for all matrices and kernels, or a mapping from patterns of
        names, the first that fits: ``{"0.weight": L1(1e-4), "*.weight": Box(-1, 1)}``
    """

    mu: Mu | None = None
    displacement: str | float | Mapping[str, float] = "auto"
    sides: int | Mapping[str, int] = 2
    states: Sweeps = Sweeps()
    weights: Adaptive | Exact = Adaptive()
    jumps: StraightThrough | Continuation = StraightThrough()
    penalties: Penalty | Mapping[str, Penalty] | None = None

    name: ClassVar[str] = "lpom"
    equation: ClassVar[str] = "loss(X_L, T) + sum_i mu_i D_i(X_i+1, Z_i)   (eq. 18)"
    costs: ClassVar[str] = "the products of back-propagation; each further sweep two per layer"

    def __post_init__(self) -> None:
        put = object.__setattr__  # names of settings stand for the settings
        for name, kinds in KINDS.items():
            put(self, name, chosen(name, getattr(self, name), kinds))
        put(self, "penalties", by_pattern(self.penalties))
        if isinstance(self.displacement, str) and self.displacement != "auto":
            raise ValueError(
                "displacement must be 'auto', a number, or a mapping to numbers, got "
                f"{self.displacement!r}."
            )
        if isinstance(self.weights, Exact) and any_lazy(self.penalties):
            raise ValueError(
                "a lazy penalty is about the steps of an optimiser, and exact weights have none: "
                "use weights='adaptive', or lazy=False."
            )

    @classmethod
    def paper(
        cls, mu: Mu = PAPER_MU, *, sweeps: int = 5, iterations: int = 1, rtol: float = 0.03
    ) -> LPOM:
        """Algorithm 1 to the letter: the paper's order, plain iterations, pseudo-inverses.

        ``sweeps`` and ``iterations`` are K1 and K2; singular values below ``rtol`` of the largest
        count as zero, which the paper leaves open.
        """
        return cls(
            mu=mu,
            states=Sweeps(order="paper", max_sweeps=sweeps, rule="plain"),
            weights=Exact(iterations=iterations, ridge=0.0, rtol=rtol),
        )

    @cached_property
    def one_sweep(self) -> bool:
        """Whether a step is one interleaved sweep whose weights move by gradients."""
        return self.states == Sweeps() and isinstance(self.weights, Adaptive)

    @cached_property
    def runs_model(self) -> bool:
        """Whether a step is autograd on the lifted model, and no state stays."""
        jumps = self.jumps
        held = isinstance(jumps, StraightThrough) and jumps.relative
        return self.mu is None and self.one_sweep and held

    def step(self, problem: Problem, batch: Batch, state: LPOMState) -> Tensor | None:
        """One interleaved sweep on the model itself; all else moves states that stay."""
        if self.penalties is not None:
            state.penalised.advance(state.progress)
        state.steps += 1
        plain = batch.weight is None and batch.counts is None  # every row counts once
        if state.stack is not None and plain and state.stack.takes(batch.inputs):
            optimizer, decay = state.optimizer, state.weight_decay
            assert optimizer is not None  # a stack has adaptive weights
            outputs = state.stack.sweep(
                batch.inputs, batch.target, problem.loss, state.rules, optimizer, decay
            )
            optimizer.step()
            return outputs
        if self.runs_model:
            state.run = state.run or problem.runner(self.lifted(problem))
            with row_weights(batch.weight):
                with torch.enable_grad():
                    outputs = problem.outputs(batch.inputs, state.run)
                return descend(state, outputs, problem.loss, batch)
        return self._step_by_states(problem, batch, state)

    @torch.no_grad()
    def _step_by_states(self, problem: Problem, batch: Batch, state: LPOMState) -> Tensor | None:
        """Feed forward; then sweeps over the states, with the weights between or after them."""
        states = self._feed_forward(problem, batch, state)
        outputs, graph = states.outputs, states.graph
        if self.states.order == "interleaved":
            for _ in states.sweeps(self.states):
                states.pull_output()
                weights = self._weights(batch, state)
                for node in reversed(graph.nodes):
                    alpha = states.damping(node) if self.states.safe else None
                    residual = states.move(node, alpha)
                    states.pull_sources(node, residual)
                    weights.learn(states, node, residual)
                weights.finish(states)
        else:
            states.settle(self.states)
            weights = self._weights(batch, state)
            for node in graph:
                weights.learn(states, node, states.residual(node))
            weights.finish(states)
        return outputs if graph is problem.graph else None

    def _feed_forward(self, problem: Problem, batch: Batch, state: LPOMState) -> States:
        """The states with which a step begins.

        One sweep leaves jumps in the network; what goes beyond wants one function throughout.
        """
        straight = self.one_sweep and isinstance(self.jumps, StraightThrough)
        graph = problem.graph if straight else self.as_measured(problem, batch, state)
        states = States(
            graph,
            batch.inputs,
            batch.target,
            problem.loss,
            state.mu,
            hold=not self.one_sweep,
            vectors=state.vectors,
        )
        if problem.graph.jumps and state.steps % MEASURE_EVERY == 1:
            state.spreads.measure(problem.graph, states.Z)
        if straight:
            states.soft = self.as_measured(problem, batch, state)
        return states

    def as_measured(self, problem: Problem, batch: Batch, state: LPOMState) -> Graph:
        """The network whose gaps are finite, with ramps as wide as they are now for jumps."""
        graph, jumps = problem.graph, self.jumps
        if not graph.jumps:
            return graph
        if isinstance(jumps, Continuation):
            return graph.smoothed(geometric((jumps.first, jumps.last), state.progress))
        if not jumps.relative:
            return graph.smoothed(jumps.width)
        spreads = state.spreads
        if not spreads.values or self.runs_model:  # which are measured as a step goes on
            spreads, (Z, _) = Spreads(), graph.feed_forward(batch.inputs)
            spreads.measure(graph, lambda node: Z[node.index])
        return spreads.ramps(graph, 1.0, jumps.width)

    def _weights(self, batch: Batch, state: LPOMState) -> _Gradients | _Solutions:
        """What the weights learn from a sweep over the states."""
        how = self.weights
        return _Solutions(how, batch, state) if isinstance(how, Exact) else _Gradients(batch, state)

    # what surrounds the steps

    @property
    def steadier(self) -> tuple[str, ...]:
        if isinstance(self.weights, Adaptive):
            return ("a smaller learning_rate",) + (("a larger mu",) if self.mu else ())
        return ("a larger ridge", "a larger mu")

    def with_learning_rate(self, rate: float) -> LPOM:
        if not isinstance(self.weights, Adaptive):
            raise ValueError(
                "exact weights have no learning rate; leave learning_rate_init=None, or use "
                "weights='adaptive'."
            )
        return self.with_params(weights__learning_rate=rate)

    def lifted(self, problem: Problem) -> torch.nn.Module:
        """The model with the rule at every function that bends."""
        assert isinstance(self.jumps, StraightThrough)  # else no model is run
        return lift(
            problem.model,
            displacement=self.displacement,
            sides=self.sides,
            window=self.jumps.width,
        )

    def init(self, problem: Problem) -> LPOMState:
        state = LPOMState()
        if self.states.safe and math.isinf(problem.loss.lipschitz):
            raise ValueError(
                f"the safe step needs a loss with a Lipschitz gradient, which {problem.loss!r} "
                "does not have: give it some smoothing, or use Sweeps(rule='plain')."
            )
        if not self.runs_model:
            state.mu = self._mu(problem.graph)
        if isinstance(self.weights, Adaptive):
            by = self.weights
            state.make(problem, by.optimizer, by.learning_rate, by.schedule)
            varies = isinstance(self.displacement, Mapping) or isinstance(self.sides, Mapping)
            plain = problem.compiled is None and self.penalties is None
            if self.one_sweep and plain and not varies:
                state.stack = Stack.of(problem.model)
                state.rules = self._rules(state)
            if isinstance(state.optimizer, Factored) and state.stack is None:
                state.remark(
                    "factored",
                    "optimizer='factored' is for stacks of Linear layers, moved in one interleaved "
                    "sweep without penalties: here all weights move as Adam moves them.",
                )
        else:
            state.blocks = blocks(problem.graph)
        state.penalised = Penalised(self.penalties, problem.parameter_names)
        order, n_nodes = self.states.order, len(state.mu) - 1
        if order in ("paper", "parallel") and self.states.max_sweeps == 1 and n_nodes > 1:
            state.remark(
                "one sweep",
                f"order={order!r} with one sweep moves no state but the output, so only the last "
                "weights learn. Use Sweeps(max_sweeps=2) or more, about as many as there are "
                "layers; or order='top-down'.",
            )
        return state

    def _rules(self, state: LPOMState) -> list[Rule]:
        """One for each layer of a stack."""
        if state.stack is None:
            return []
        if self.mu is None:
            size, sides = self.displacement, self.sides
            assert not isinstance(size, Mapping) and isinstance(sides, int)  # else no stack
            rule = Displacement(AUTO if isinstance(size, str) else size, sides)
            return [rule] * len(state.stack.layers)
        return [Weight(mu) for mu in state.mu[1:]]

    def _mu(self, graph: Graph) -> list[float]:
        return per_node(PAPER_MU if self.mu is None else self.mu, graph)

    @torch.no_grad()
    def settle(self, problem: Problem, batch: Batch, state: LPOMState) -> States:
        """The states of a batch after the sweeps, the weights and the state untouched."""
        states = States(
            self.as_measured(problem, batch, state),
            batch.inputs,
            batch.target,
            problem.loss,
            state.mu or self._mu(problem.graph),
            vectors=dict(state.vectors),
        )
        states.settle(self.states)
        return states

    @torch.no_grad()
    def objective(self, problem: Problem, batch: Batch, state: LPOMState) -> Objective:
        """F after the sweeps; the loss alone for a model that has no graph.

        Where a step holds the displacement, the gaps are those that mu = 20 leaves.
        """
        penalty = state.penalised.value()
        if self.runs_model and not problem.has_graph:
            outputs = problem.outputs(batch.inputs)
            value = total(problem.loss.value(outputs, batch.target), batch.weight)
            return Objective(value, (), (), float(batch.total_weight) * penalty)
        return self.settle(problem, batch, state).objective(batch.weight, penalty)

    def rates(self, problem: Problem, batch: Batch, state: LPOMState) -> list[float]:
        """Contraction factors; none for a model that has no graph."""
        if self.runs_model and not problem.has_graph:
            return []
        graph = self.as_measured(problem, batch, state)
        X: list[Tensor] = []
        if any(node.edge.linear is None for node in graph):
            _, X = graph.feed_forward(batch.inputs[:RATED])
        return contraction(graph, problem.loss, state.mu or self._mu(graph), X)

    @torch.no_grad()
    def end_epoch(self, problem: Problem, batch: Batch, state: LPOMState) -> None:
        """Sweep a batch once more with the weights standing still, and see whether F falls."""
        state.end_epoch()
        if self.states.max_sweeps == 1:
            return
        states = self.settle(problem, batch, state)
        start = States(states.graph, batch.inputs, batch.target, problem.loss, state.mu)
        before, after = (s.objective(batch.weight).total for s in (start, states))
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


class _Gradients:
    """Adaptive weights: residuals become gradients, averaged over the batch, for the optimiser."""

    def __init__(self, batch: Batch, state: LPOMState) -> None:
        self.batch, self.state = batch, state
        state.clear_gradients()

    def learn(self, states: States, node: Node, residual: Tensor | None) -> None:
        gradients = states.weight_gradients(node, residual, self.batch.weight)
        for parameter, gradient in gradients.items():
            add_gradient(parameter, gradient / self.batch.total)

    def finish(self, states: States) -> None:
        self.state.move()
        states.weights_moved()


class _Solutions:
    """Exact weights: each block is solved for by Algorithm 2 once all its uses have been met."""

    def __init__(self, how: Exact, batch: Batch, state: LPOMState) -> None:
        self.how, self.batch, self.state = how, batch, state
        self.waiting: dict[Block, list[Use]] = {}

    def learn(self, states: States, node: Node, residual: Tensor | None) -> None:
        for block in self.state.blocks:
            if node.index not in block.uses:
                continue
            uses = self.waiting.setdefault(block, [])
            share = states.mu[node.index] / max(states.mu[v] for v in block.uses)
            uses.append(states.use(node, self.batch.weight, share, fresh=block.alone))
            if len(uses) == len(block.uses):
                self._solve(block, uses)

    def _solve(self, block: Block, uses: list[Use]) -> None:
        how, state = self.how, self.state
        ridge = how.ridge_at(state.progress)
        if any(parameter in state.penalised for parameter in block.parameters):
            largest = max(state.mu[v] for v in block.uses)
            weight = float(self.batch.total_weight) / largest
            penalised_step(
                block, uses, state.penalised, weight=weight, iterations=how.iterations, ridge=ridge
            )
        elif exact_step(block, uses, iterations=how.iterations, ridge=ridge, rtol=how.rtol):
            state.remark(
                "rank-deficient",
                f"the exact weight step of {block.names[0]} met states that are rank-"
                f"deficient (batch of {len(self.batch)}); their pseudo-inverse was taken. Set "
                "ridge above 0 (0.1 works for most networks).",
            )

    def finish(self, states: States) -> None:
        states.weights_moved()
