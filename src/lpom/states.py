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

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpom.activations import Identity
from lpom.graph import Graph, Node, Switches
from lpom.graph.edges import Part
from lpom.weights.adaptive import as_gradient
from lpom.weights.blocks import Use

#: Numbers of a tensor that are worked on at once where several operations follow each other.
CACHED = 1 << 16


class States:
    """States ``X``, pre-activations ``P`` and the edges' values ``Z`` of one batch.

    Lists by the index of the node, the data first. ``X[v] = phi_v(P[v])`` always; ``P[v]`` is None
    while the state is feed-forward, where it would be ``Z[v]``. Moving a state makes the values of
    the edges above it stale: they are evaluated again when they are asked for.

    Parameters
    ----------
    graph, inputs : the network and the data ``X[0]``
    mu : weight of each node's gap, by index (the first is not read)
    soft : the graph whose activations move the states, where those of ``graph`` jump
    once : every edge is evaluated and carried back but once, so what is no longer needed is
        written over, and the choices of the pass (dropout, batch norm, max-pooling) need not be
        kept in ``switches``
    """

    def __init__(
        self,
        graph: Graph,
        inputs: Tensor,
        mu: Sequence[float],
        *,
        soft: Graph | None = None,
        once: bool = False,
    ) -> None:
        self.graph, self.mu, self.once = graph, mu, once
        self.soft = soft or graph
        self.switches: Switches | None = None if once else {}
        self.X: list[Tensor] = [inputs] * (len(graph.nodes) + 1)
        self._token = torch.zeros((), requires_grad=True)
        self.P: list[Tensor | None] = [None] * (len(graph.nodes) + 1)
        self.pulls: list[Tensor | None] = [None] * (len(graph.nodes) + 1)
        self._own = [False] * (len(graph.nodes) + 1)
        self._Z: list[Tensor | None] = [None] * (len(graph.nodes) + 1)
        self._ends: dict[int, Any] = {}  # where autograd ends: at the states that an edge reads
        self._part_ends: dict[int, list[Any]] = {}  # and, by the edge's node, at parts of them
        self._dropped: set[int] = set()  # states to be computed again from their Z
        self._graded: set[nn.Parameter] = set()  # weights whose .grad is of this sweep
        for node in graph.nodes:
            self._set(node, node.activation.phi(self.Z(node)))

    @property
    def outputs(self) -> Tensor:
        return self.X[self.graph.output].detach()

    def Z(self, node: Node) -> Tensor:
        """What the edge of a node gives at the present states and weights."""
        return self._value(node).detach()

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
            return pull if node.activation == Identity() else self._response(node, pull)
        Z = self.Z(node)
        if P is None:
            P, step, said = Z, pull, self.X[node.index].detach()
        else:
            step, said = P - Z if pull is None else P - Z + pull, self._phi(node, Z)
        assert step is not None
        self.P[node.index] = P = P - (step if alpha is None else alpha * step)
        moved = self._phi(node, P)
        self._set(node, moved)
        return said - moved

    def _response(self, node: Node, pull: Tensor) -> Tensor:
        """``phi(Z) - phi(Z - pull)``, written over Z, a part of the batch at a time.

        A part is small enough to stay in the processor's cache from one operation to the next.
        """
        response, Z = self.soft.nodes[node.index - 1].activation.response, self.Z(node)
        rows = max(1, CACHED * len(Z) // max(Z.numel(), 1))
        if not self._owned(node):
            return response(Z, pull)
        for z, g in zip(torch.split(Z, rows), torch.split(pull, rows), strict=True):
            response(z, g, out=z)
        return Z

    def pull_back(self, node: Node, residual: Tensor | None) -> None:
        r"""Hand a node's residual to all its sources, :math:`A^T R` to each."""
        for source in node.sources:
            if source and residual is not None:
                self._hand(node, source, self._adjoint(node, residual, [self._ends.get(source)])[0])

    def gather(self, node: Node) -> None:
        """Pulls on a state from every node that reads it, by their residuals as they are now."""
        for above in self.graph.consumers[node.index]:
            residual = self.residual(above)
            if residual is not None:
                pull = self._adjoint(above, residual, [self._ends[node.index]])[0]
                self._hand(above, node.index, pull)

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
        if residual is None:
            return
        share = self.mu[node.index] / total
        linear, sources = node.edge.linear, [s for s in node.sources if s and down]
        if linear is not None:
            if sources:
                self._hand(node, sources[0], residual @ linear.weight.detach())
            self._linear_gradient(node, linear, _weighted(residual, weight), share)
        else:
            weights = [p for p in node.edge.parameters if p.requires_grad]
            parts = node.edge.parts if self.once else ()
            in_parts = {part.source for part in parts}
            sources = [s for s in sources if s not in in_parts]
            states = [*(self._ends[s] for s in sources), *self._part_ends.pop(node.index, ())]
            if weight is None:
                found = self._adjoint(node, residual, [*states, *weights])
            else:
                found = self._adjoint(node, residual, states, again=True)
                found += self._adjoint(node, _weighted(residual, weight), weights)
            memory = [pull.data_ptr() for pull in found[: len(sources)] if pull is not None]
            for source, pull in zip(sources, found, strict=False):
                self._hand(node, source, pull, own=len(set(memory)) == len(memory))
            for part, pull in zip(parts, found[len(sources) :], strict=False):
                self._hand_part(node, part, pull)
            for parameter, gradient in zip(weights, found[len(states) :], strict=True):
                if gradient is not None:
                    self._add_gradient(parameter, as_gradient(parameter, gradient, share))
        if self.once:  # all who read it have been here
            self._Z[node.index] = None
            self.X[node.index] = self.X[0]

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
        self._graded.clear()

    def drop_old_gradients(self) -> None:
        """Weights that this sweep did not reach keep no gradient: the optimiser would move them."""
        for parameter in self.graph.parameters:
            if parameter not in self._graded:
                parameter.grad = None

    def _phi(self, node: Node, z: Tensor) -> Tensor:
        return self.soft.nodes[node.index - 1].activation.phi(z)

    def _value(self, node: Node) -> Tensor:
        """``Z`` with autograd's graph of this edge alone; a plain product without."""
        value = self._Z[node.index]
        if value is None:
            sources = [self.X[s] for s in node.sources]
            linear = node.edge.linear
            if linear is not None:
                bias = None if linear.bias is None else linear.bias.detach()
                value = F.linear(sources[0].detach(), linear.weight.detach(), bias)
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
            pieces = node.edge.take_apart(sources)
            value = node.edge.of_parts(sources, pieces, None)
        if pieces:
            ends = [torch.autograd.graph.get_gradient_edge(piece) for piece in pieces]
            self._part_ends[node.index] = ends
        for s in node.sources:
            if s not in (0, self.graph.output) and self.graph.consumers[s][-1] is node:
                self.X[s] = self.X[0]
                self._dropped.add(s)
        return value

    def state(self, index: int) -> Tensor:
        """``X[index]``, computed again if it was dropped."""
        if index in self._dropped:
            self._dropped.remove(index)
            self.X[index] = self.graph[index].activation.phi(self.Z(self.graph[index]))
        return self.X[index]

    def _owned(self, node: Node) -> bool:
        """Whether nobody else looks at the memory of the node's Z."""
        value = self._value(node)
        return node.edge.linear is not None or not (value.is_leaf or value._is_view())

    def _set(self, node: Node, X: Tensor) -> None:
        X = X.detach()
        above = self.graph.consumers[node.index]
        if self.once and any(reader.edge.linear is None for reader in above):
            with torch.enable_grad():
                X = _Start.apply(self._token, X)  # type: ignore[no-untyped-call]
            self._ends[node.index] = torch.autograd.graph.get_gradient_edge(X)
        elif not self.once:
            self._ends[node.index] = X.requires_grad_()
        self.X[node.index] = X
        for reader in above:
            self._forget(reader)

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
        if node.edge.linear is not None:
            return [residual @ node.edge.linear.weight.detach()]
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

    def _hand_part(self, node: Node, part: Part, pull: Tensor | None) -> None:
        """Pull a part of a source, the rest of which stays as it is."""
        if pull is None:
            return
        ratio, s = self.mu[node.index] / self.mu[part.source], part.source
        old = self.pulls[s]
        if old is None or not self._own[s]:
            old = torch.zeros_like(self.Z(self.graph[s])) if old is None else old.clone()
            self.pulls[s], self._own[s] = old, True
        part.of(old).add_(pull, alpha=ratio)

    def _linear_gradient(
        self, node: Node, linear: nn.Linear, R: Tensor, share: float | Tensor
    ) -> None:
        X = self.state(node.sources[0]).detach()
        if X.ndim > 2:
            X, R = X.reshape(-1, X.shape[-1]), R.reshape(-1, R.shape[-1])
        if isinstance(share, Tensor):
            R, share = R * share, 1.0
        for parameter in linear.parameters():
            if not parameter.requires_grad:
                continue
            fresh = parameter not in self._graded
            out = parameter.grad if fresh else None  # new memory costs the time to get its pages
            if parameter is linear.weight:
                product = torch.addmm(linear.weight.detach(), R.T, X, beta=0, alpha=share, out=out)
            else:
                product = torch.sum(R, 0, out=out).mul_(share)
            self._add_gradient(parameter, product)

    def _add_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Gradients of one weight add up over its uses."""
        if parameter in self._graded:
            assert parameter.grad is not None
            gradient = parameter.grad + gradient
        parameter.grad = gradient
        self._graded.add(parameter)


class _Start(torch.autograd.Function):
    """A state where autograd begins, without autograd holding on to its memory."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, X: Tensor) -> Tensor:
        return X.view_as(X)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


def _weighted(residual: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None:
        return residual
    return residual * weight.view(-1, *[1] * (residual.ndim - 1))
