r"""The states of one batch: feed forward, move, pull back.

With :math:`c` running over the nodes that read the state :math:`X_v`, and the residuals
:math:`R_c = \phi_c(Z_c) - X_c`, the block of :math:`X_v` has the optimality condition (eq. 17)

.. math:: 0 \in \phi_v^{-1}(X_v) - Z_v + G_v, \qquad G_v = \sum_c \frac{\mu_c}{\mu_v} A_c^T R_c

(at the output :math:`G` holds the gradient of the loss divided by :math:`\mu`). The plain iteration
(eqs. 25, 28) solves it as if the rest stood still, :math:`X_v \leftarrow \phi_v(Z_v - G_v)`. The
safe step keeps the pre-activation :math:`P`, :math:`X = \phi(P)`, as variable and goes only the
share :math:`\alpha_v` of the way there: mirror descent with mirror map :math:`\Phi^*`, which never
raises the block's objective when
:math:`\alpha_v \le 2 / (1 + \gamma_v \sum_c (\mu_c / \mu_v) \gamma_c \|A_c\|^2)`. Half of that is
taken, so a norm that power iteration has seen from below does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpom.activations import Identity
from lpom.graph import Graph, Node, Switches
from lpom.graph.programs import Program
from lpom.graph.scans import Layer, Memory
from lpom.weights.blocks import Use
from lpom.weights.gradients import Apart, Gradients

#: Numbers of a tensor that are worked on at once where several operations follow each other.
CACHED = 1 << 18
#: Numbers of a state that is kept: its memory is worth less than the time to compute it again.
SMALL = 1 << 15


class Learner(Protocol):
    """What moves weights within a sweep."""

    large: set[nn.Parameter]

    def descend(self, weight: nn.Parameter, R: Tensor, X: Tensor, share: float | Tensor) -> None:
        """Move one of them against ``share * R.T @ X``."""


class States:
    """States ``X``, pre-activations ``P`` and the edges' values ``Z`` of one batch.

    It works where autograd is off, and turns it on for the edges that need it.

    Lists by the index of the node, the data first. ``X[v] = phi_v(P[v])`` always; ``P[v]`` is None
    while the state is feed-forward, where it would be ``Z[v]``. Moving a state makes the values of
    the edges above it stale: they are evaluated again when they are asked for.

    Parameters
    ----------
    graph, inputs : the network and the data ``X[0]``
    mu : weight of each node's gap, by index (the first is not read)
    soft : the graph whose activations move the states, where those of ``graph`` jump
    learner : moves large matrices as soon as their residuals are there; others get gradients
    once : every edge is evaluated and carried back but once, so what is no longer needed is
        written over, and the choices of the pass (dropout, batch norm, max-pooling) need not be
        kept in ``switches``. States are let go of as well: `state` has them again
    apart : gradients stay here by themselves, in place of where optimisers look for them, and
        nothing is written over what is there
    """

    def __init__(
        self,
        graph: Graph,
        inputs: Tensor,
        mu: Sequence[float],
        *,
        soft: Graph | None = None,
        learner: Learner | None = None,
        once: bool = False,
        apart: bool = False,
    ) -> None:
        self.graph, self.mu, self.once, self.apart = graph, mu, once, apart
        self.soft, self.learner = soft or graph, learner
        self.switches: Switches | None = None if once else {}
        self.X: list[Tensor] = [inputs] * (len(graph.nodes) + 1)
        self.P: list[Tensor | None] = [None] * (len(graph.nodes) + 1)
        self.pulls: list[Tensor | None] = [None] * (len(graph.nodes) + 1)
        self._own = [False] * (len(graph.nodes) + 1)
        self._Z: list[Tensor | None] = [None] * (len(graph.nodes) + 1)
        self._ends: dict[int, Any] = {}  # where autograd ends: at the states that an edge reads
        self._known: dict[int, Any] = {}  # what an edge's own adjoint needs, by its node
        self._dropped: set[int] = set()  # states to be computed again from their Z
        self.gradients: Gradients | Apart = Apart() if apart else Gradients(graph.parameters)
        self._passes: dict[int, Memory] = {}  # what recurrent layers know, by their node
        for node in graph.nodes:
            if node.layer is None:
                self._set(node, node.activation.phi(self.Z(node)))
            else:
                there = None if node.there is None else node.there([inputs])
                X, self._passes[node.index] = node.layer.forward(self.Z(node), there)
                self._set(node, X)

    @property
    def outputs(self) -> Tensor:
        return _plain(self.X[self.graph.output])

    def Z(self, node: Node) -> Tensor:
        """What the edge of a node gives at the present states and weights."""
        return _plain(self._value(node))

    def residual(self, node: Node) -> Tensor | None:
        """``phi(Z) - X``: what the edge does not yet say of the state; None where that is zero."""
        if self.P[node.index] is None:
            return None
        return self._phi(node, self.Z(node)) - self.X[node.index].detach()

    def pull(self, node: Node, pull: Tensor, *, own: bool = False) -> None:
        """Add to what a state is to be moved against, in units of its pre-activation.

        ``own``: nobody else looks at the memory of ``pull``.
        """
        old = self.pulls[node.index]
        if old is None:
            self.pulls[node.index] = pull
            self._own[node.index] = own
        elif self._own[node.index]:
            old.add_(pull)
        elif own:
            self.pulls[node.index] = pull.add_(old)
            self._own[node.index] = True
        else:
            self.pulls[node.index] = old + pull
            self._own[node.index] = True

    def move(self, node: Node, alpha: float | Tensor | None = None) -> Tensor | None:
        """Move a state against its pulls (eqs. 25 and 28); its residual, None where that is zero.

        Where the state was feed-forward the residual is ``phi(Z) - phi(Z - pull)``.
        """
        pull, self.pulls[node.index] = self.pulls[node.index], None
        P = self.P[node.index]
        if pull is None and P is None:
            return None
        if self.once:
            assert pull is not None
            if node.layer is not None:
                down = any(node.sources) or bool(node.edge.parameters)
                return node.layer.backward(self._passes[node.index], pull, down=down)
            return pull if isinstance(node.activation, Identity) else self._response(node, pull)
        Z = self.Z(node)
        if P is None:
            P, step, said = Z, pull, self.X[node.index].detach()
        else:
            step, said = P - Z if pull is None else P - Z + pull, self._phi(node, Z)
        assert step is not None
        self.P[node.index] = P = P - (step if alpha is None else alpha * step)
        moved = self._phi(node, P)
        self.put(node, moved)
        return said - moved

    def _response(self, node: Node, pull: Tensor) -> Tensor:
        """``phi(Z) - phi(Z - pull)``, written over Z or the pull, a part of the batch at a time.

        A part is small enough to stay in the processor's cache from one operation to the next.
        """
        soft, Z = self.soft.nodes[node.index - 1].activation, self.Z(node)
        known = soft is node.activation and node.index not in self._dropped
        said = self.X[node.index].detach() if known and soft.subtracts else None
        self.X[node.index] = self.X[0]  # all who read it have been here
        own, samples = self._own[node.index] and not self.apart, Z.shape[0]
        out = Z if self._owned(node) else pull if own and pull.shape == Z.shape else None
        if out is None:
            return soft.response(Z, pull, said=said)
        rows = max(1, CACHED * samples // max(Z.numel(), 1))
        if rows >= samples:
            return soft.response(Z, pull, out=out, said=said, spare=pull if own else None)
        parts = torch.split(Z, rows), torch.split(pull, rows), torch.split(out, rows)
        sayings = [None] * len(parts[0]) if said is None else torch.split(said, rows)
        for z, g, R, x in zip(*parts, sayings, strict=True):
            soft.response(z, g, out=z if out is Z else R, said=x, spare=g if own else None)
        return out

    def pull_back(self, node: Node, residual: Tensor | None) -> None:
        r"""Hand a node's residual to all its sources, :math:`A^T R` to each."""
        if residual is None:
            return
        if self._program(node) is not None:  # all at once
            self._run_back(node, residual, 0.0, weights=False)
        else:
            self._pull_sources(node, residual, [s for s in node.sources if s])

    def gather(self, node: Node) -> None:
        """Pulls on a state from every node that reads it, by their residuals as they are now."""
        for above in self.graph.consumers[node.index]:
            residual = self.residual(above)
            if residual is not None:
                self._pull_sources(above, residual, [node.index])

    def _pull_sources(self, node: Node, residual: Tensor, sources: list[int]) -> None:
        if self._program(node) is not None:
            for s in sources:
                self._run_back(node, residual, 0.0, weights=False, place=node.sources.index(s))
        else:
            for s, pull in zip(
                sources,
                self._adjoint(node, residual, [self._ends.get(s) for s in sources]),
                strict=True,
            ):
                self._hand(node, s, pull)

    def carry_back(
        self,
        node: Node,
        residual: Tensor | None,
        weight: Tensor | None,
        total: float | Tensor,
        *,
        down: bool = True,
    ) -> None:
        r"""Hand a node's residual to its sources (``down``) and, averaged, to its weights at once.

        :math:`\mu R^T X / m` is the gradient of the weights' convex problem: it goes where
        optimisers look for it. ``weight`` and ``total`` are those of the samples.
        """
        share = self.mu[node.index] / total
        if node.layer is not None:
            self._grade(node, node.layer, weight, share)
        if residual is None:
            return
        if self._program(node) is not None:
            if weight is None:
                self._run_back(node, residual, share, down=down)
            else:
                self._run_back(node, residual, share, down=down, weights=False)
                self._run_back(node, _weighted(residual, weight), share, down=False)
        else:
            sources = [s for s in node.sources if s and down]
            weights = [p for p in node.edge.parameters if p.requires_grad]
            states = [self._ends[s] for s in sources]
            if weight is None:
                found = self._adjoint(node, residual, [*states, *weights])
            else:
                found = self._adjoint(node, residual, states, again=True)
                found += self._adjoint(node, _weighted(residual, weight), weights)
            memory = [pull.data_ptr() for pull in found[: len(sources)] if pull is not None]
            for source, pull in zip(sources, found, strict=False):
                self._hand(node, source, pull, own=len(set(memory)) == len(memory))
            for parameter, gradient in zip(weights, found[len(states) :], strict=True):
                if gradient is not None:
                    self.gradients.add(parameter, gradient, share)
        if self.once:
            self._Z[node.index] = None
            self._known.pop(node.index, None)
            self.X[node.index] = self.X[0]

    def _grade(
        self, node: Node, layer: Layer, weight: Tensor | None, share: float | Tensor
    ) -> None:
        """Gradients of the weights of a recurrent layer that has been swept."""
        for parameter, gradient in layer.gradients(self._passes.pop(node.index), weight):
            self.gradients.add(parameter, gradient, share)

    def _run_back(
        self,
        node: Node,
        residual: Tensor,
        share: float | Tensor,
        *,
        down: bool = True,
        weights: bool = True,
        place: int = -1,
    ) -> None:
        """Carry a residual back by the edge's own adjoints: to its sources, or one, and weights."""
        linear, program = node.edge.linear, self._program(node)
        if linear is not None:  # most edges of most networks: its adjoint stands here
            source, weight, bias = node.sources[0], linear.weight, linear.bias
            if down and source:
                self._hand_product(node, source, residual, weight)
            if weights:
                X, R = self.state(source), residual
                if R.ndim > 2:
                    X, R = X.reshape(-1, X.shape[-1]), R.reshape(-1, R.shape[-1])
                if self.learner is not None and weight in self.learner.large:
                    self.learner.descend(weight, R, X, share)  # type: ignore[arg-type]
                else:
                    self.gradients.add_product(weight, R, X, share)  # type: ignore[arg-type]
                if bias is not None:
                    self.gradients.add_sum(bias, R, share)
            return
        assert program is not None
        if not self.once:
            self._value(node)  # so that what is known of it is of the present states
        wanted = program.leading(down, weights, place)
        known, last = self._known[node.index], self.once and weights
        back = _Back(self, node, share)
        value = _plain(self._value(node)) if program.by_value else None
        program.backward(self.state, known, residual, back, wanted, value, last=last)

    def use(self, node: Node, weight: Tensor | None, share: float, *, fresh: bool) -> Use:
        """What the exact weight step needs to know of a node: states as they are now.

        ``share`` is the node's mu beside that of the other uses; ``fresh``: Z is the weights' own.
        """
        if share != 1:
            weight = (self.X[0].new_ones(len(self.X[0])) if weight is None else weight) * share
        sources = tuple(self.X[s] for s in node.sources)
        known = self.Z(node) if fresh else None
        return Use(node, sources, self.X[node.index].detach(), self.switches, weight, known)

    def weights_moved(self) -> None:
        """Every edge is to be evaluated again, and gradients begin anew."""
        for node in self.graph.nodes:
            self._forget(node)
        assert isinstance(self.gradients, Gradients)  # those that stay apart have one sweep
        self.gradients.begin()

    def _program(self, node: Node) -> Program | None:
        return node.edge.program_once if self.once else node.edge.program

    def _phi(self, node: Node, z: Tensor) -> Tensor:
        return self.soft.nodes[node.index - 1].activation.phi(z)

    def _value(self, node: Node) -> Tensor:
        """``Z`` with autograd's graph of this edge alone; a plain product without."""
        value = self._Z[node.index]
        if value is None:
            sources = [self.X[s] for s in node.sources]
            linear, program = node.edge.linear, self._program(node)
            if program is not None:
                if linear is not None:
                    value = F.linear(sources[0], linear.weight, linear.bias)
                else:
                    value, self._known[node.index] = program.forward(sources)
                if self.once:
                    self._drop(node)
            elif self.once:
                value = self._light(node, sources)
            else:
                with torch.enable_grad():
                    value = node.edge(sources, self.switches)
            self._Z[node.index] = value
        return value

    def _light(self, node: Node, sources: list[Tensor]) -> Tensor:
        """The edge's value, with a graph that remembers states by their number alone.

        A state that all have read is dropped, and computed again from its Z when the graph is
        carried back: so a state takes the memory of one tensor, as in back-propagation, not of
        two.
        """
        pairs = zip(node.sources, sources, strict=True)
        places = {x.data_ptr(): (s, x.shape, x.stride()) for s, x in pairs}

        def pack(saved: Tensor) -> Tensor | int:
            s, shape, stride = places.get(saved.data_ptr(), (0, None, None))
            return s if s and (shape, stride) == (saved.shape, saved.stride()) else saved

        def unpack(kept: Tensor | int) -> Tensor:
            return self.state(kept).detach() if isinstance(kept, int) else kept

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            value = node.edge(sources, None)
        self._drop(node)
        return value

    def _drop(self, node: Node) -> None:
        """Let go of the states that this node was the last to read.

        Not of those that are more work than memory: of functions of whole slices, of layers, and
        small ones.
        """
        for s in node.sources:
            if s in (0, self.graph.output) or self.X[s].numel() < SMALL:
                continue
            below = self.graph.nodes[s - 1]
            plain = below.activation.elementwise and below.layer is None
            if plain and self.graph.consumers[s][-1] is node:
                self.X[s] = self.X[0]
                self._dropped.add(s)

    def state(self, index: int) -> Tensor:
        """``X[index]``, computed again if it was dropped."""
        if index in self._dropped:
            self._dropped.remove(index)
            node = self.graph.nodes[index - 1]
            self.X[index] = node.activation.phi(self.Z(node))
        return self.X[index]

    def _no_pull(self, index: int) -> Tensor:
        """Zeros as large as a state; in its own memory where nobody will look at it again."""
        node, Z = self.graph[index], self._Z[index]
        if node.layer is not None:
            return torch.zeros_like(self.X[index])
        over = self.once and isinstance(node.activation, Identity) and index != self.graph.output
        if over and Z is not None and self._owned(node) and not self.graph.remembered[index]:
            return Z.zero_()
        return torch.zeros_like(self.Z(node))

    def _owned(self, node: Node) -> bool:
        """Whether the memory of the node's Z may be written over: nobody else looks at it."""
        if self.apart:
            return False
        program = self._program(node)
        if program is not None:
            return program.owns
        value = self._value(node)
        return not (value.is_leaf or value._is_view())

    def put(self, node: Node, X: Tensor) -> None:
        """Give a state; what its readers said of the old one is stale."""
        self._set(node, X)
        for reader in self.graph.consumers[node.index]:
            self._forget(reader)

    def _set(self, node: Node, X: Tensor) -> None:
        X = X.detach()
        if not self.once:
            self._ends[node.index] = X.requires_grad_()
        elif self.graph.ends[node.index]:
            with torch.enable_grad():
                token = torch.zeros((), requires_grad=True)
                X = _Start.apply(token, X)  # type: ignore[no-untyped-call]
            self._ends[node.index] = torch.autograd.graph.get_gradient_edge(X)
        self.X[node.index] = X

    def _forget(self, node: Node) -> None:
        """The edge will say something else: a state that was feed-forward is so no longer."""
        value = self._Z[node.index]
        if value is not None and self.P[node.index] is None:
            self.P[node.index] = value.detach()
        self._Z[node.index] = None

    def _adjoint(
        self, node: Node, residual: Tensor, wanted: Sequence[Any], *, again: bool = False
    ) -> list[Tensor | None]:
        """``A^T residual`` for states or weights; None for those that the edge does not feel."""
        value = self._value(node)
        if not wanted or not value.requires_grad:
            return [None] * len(wanted)
        keep = again or not self.once
        return list(
            torch.autograd.grad(value, wanted, residual, retain_graph=keep, allow_unused=True)
        )

    def _hand(self, node: Node, source: int, pull: Tensor | None, *, own: bool = False) -> None:
        if pull is not None:
            ratio = self.mu[node.index] / self.mu[source]
            if ratio != 1:
                pull, own = pull * ratio, True
            self.pull(self.graph.nodes[source - 1], pull, own=own and self.once)

    def _hand_product(self, node: Node, source: int, R: Tensor, W: Tensor) -> None:
        """Hand ``R @ W``: added up within the product where there is a pull already."""
        old = self.pulls[source]
        if old is not None and self._own[source] and old.is_contiguous():
            rows = old.view(-1, old.shape[-1])
            rows.addmm_(R.reshape(-1, R.shape[-1]), W, alpha=self.mu[node.index] / self.mu[source])
        else:
            self._hand(node, source, R @ W, own=True)


class _Back:
    """Takes what an edge's adjoints hand down and across: pulls, and gradients of weights."""

    def __init__(self, states: States, node: Node, share: float | Tensor) -> None:
        self.states, self.node, self.share = states, node, share

    def hand(self, source: int, pull: Tensor, *, own: bool) -> None:
        self.states._hand(self.node, source, pull, own=own)

    def hand_product(self, source: int, R: Tensor, W: Tensor) -> None:
        self.states._hand_product(self.node, source, R, W)

    def hand_part(self, source: int, view: Callable[[Tensor], Tensor], pull: Tensor) -> None:
        """Pull a part of a source, the rest of which stays as it is."""
        states = self.states
        old = states.pulls[source]
        if old is None or not states._own[source]:
            old = states._no_pull(source) if old is None else old.clone()
            states.pulls[source], states._own[source] = old, True
        view(old).add_(pull, alpha=states.mu[self.node.index] / states.mu[source])

    def add_product(self, parameter: nn.Parameter, R: Tensor, X: Tensor) -> None:
        self.states.gradients.add_product(parameter, R, X, self.share)

    def add_sum(self, parameter: nn.Parameter, R: Tensor) -> None:
        self.states.gradients.add_sum(parameter, R, self.share)

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        self.states.gradients.add(parameter, gradient, self.share)


class _Start(torch.autograd.Function):
    """A state where autograd begins, without autograd holding on to its memory."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, X: Tensor) -> Tensor:
        return X.view_as(X)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


def _plain(value: Tensor) -> Tensor:
    return value.detach() if value.requires_grad else value


def _weighted(residual: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None:
        return residual
    if len(residual) != len(weight):
        raise ValueError(
            f"weights of {len(weight)} samples can't be given to a state of shape "
            f"{tuple(residual.shape)}: keep the samples first, (m, steps, features), between the "
            "model's activations, or leave the weights out."
        )
    return residual * weight.view(-1, *[1] * (residual.ndim - 1))
