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

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpom.activations import Identity
from lpom.graph import Graph, Node, Switches
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
        self.X: list[Tensor] = [inputs] * (len(graph) + 1)
        self.P: list[Tensor | None] = [None] * (len(graph) + 1)
        self.pulls: list[Tensor | None] = [None] * (len(graph) + 1)
        self._Z: list[Tensor | None] = [None] * (len(graph) + 1)
        self._graded: set[nn.Parameter] = set()  # weights whose .grad is of this sweep
        for node in graph:
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

    def pull(self, node: Node, pull: Tensor) -> None:
        """Add to what a state is to be moved against, in units of its pre-activation."""
        old = self.pulls[node.index]
        self.pulls[node.index] = pull if old is None else old + pull

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
            return pull if isinstance(node.activation, Identity) else self._response(node, pull)
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
        phi, Z = self.soft[node.index].activation.phi, self.Z(node)
        R = Z if self._owned(node) else torch.empty_like(Z)
        rows = max(1, CACHED * len(Z) // max(Z.numel(), 1))
        for z, g, r in zip(Z.split(rows), pull.split(rows), R.split(rows), strict=True):
            said = phi(z)
            torch.sub(said, phi(z - g), out=r)
        return R

    def pull_back(self, node: Node, residual: Tensor | None) -> None:
        r"""Hand a node's residual to all its sources, :math:`A^T R` to each."""
        for source in node.sources:
            if source and residual is not None:
                self._hand(node, source, self._adjoint(node, residual, [self.X[source]])[0])

    def gather(self, node: Node) -> None:
        """Pulls on a state from every node that reads it, by their residuals as they are now."""
        for above in self.graph.consumers[node.index]:
            residual = self.residual(above)
            if residual is not None:
                pull = self._adjoint(above, residual, [self.X[node.index]])[0]
                self._hand(above, node.index, pull)

    def carry_back(
        self, node: Node, residual: Tensor | None, weight: Tensor | None, total: float | Tensor
    ) -> None:
        r"""Hand a node's residual to its sources and, averaged, to its weights at once.

        :math:`\mu R^T X / m` is the gradient of the weights' convex problem: it goes where
        optimisers look for it. ``weight`` and ``total`` are those of the samples.
        """
        if residual is None:
            return
        share = self.mu[node.index] / total
        linear, sources = node.edge.linear, [s for s in node.sources if s]
        if linear is not None:
            if sources:
                self._hand(node, sources[0], residual @ linear.weight.detach())
            self._linear_gradient(node, linear, _weighted(residual, weight), share)
        else:
            weights = [p for p in node.edge.parameters if p.requires_grad]
            states = [self.X[s] for s in sources]
            if weight is None:
                found = self._adjoint(node, residual, [*states, *weights])
            else:
                found = self._adjoint(node, residual, states, again=True)
                found += self._adjoint(node, _weighted(residual, weight), weights)
            for source, pull in zip(sources, found, strict=False):
                self._hand(node, source, pull)
            for parameter, gradient in zip(weights, found[len(sources) :], strict=True):
                if gradient is not None:
                    self._add_gradient(parameter, gradient * share)
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
        for node in self.graph:
            self._forget(node)
        self._graded.clear()

    def drop_old_gradients(self) -> None:
        """Weights that this sweep did not reach keep no gradient: the optimiser would move them."""
        for parameter in self.graph.parameters:
            if parameter not in self._graded:
                parameter.grad = None

    def _phi(self, node: Node, z: Tensor) -> Tensor:
        return self.soft[node.index].activation.phi(z)

    def _value(self, node: Node) -> Tensor:
        """``Z`` with autograd's graph of this edge alone; a plain product without."""
        value = self._Z[node.index]
        if value is None:
            sources = [self.X[s] for s in node.sources]
            linear = node.edge.linear
            if linear is not None:
                bias = None if linear.bias is None else linear.bias.detach()
                value = F.linear(sources[0].detach(), linear.weight.detach(), bias)
            else:
                with torch.enable_grad():
                    value = node.edge(sources, self.switches)
            self._Z[node.index] = value
        return value

    def _owned(self, node: Node) -> bool:
        """Whether nobody else looks at the memory of the node's Z."""
        value = self._value(node)
        return node.edge.linear is not None or not (value.is_leaf or value._is_view())

    def _set(self, node: Node, X: Tensor) -> None:
        self.X[node.index] = X.detach().requires_grad_()  # where autograd ends
        for above in self.graph.consumers[node.index]:
            self._forget(above)

    def _forget(self, node: Node) -> None:
        """The edge will say something else: a state that was feed-forward is so no longer."""
        value = self._Z[node.index]
        if value is not None and self.P[node.index] is None:
            self.P[node.index] = value.detach()
        self._Z[node.index] = None

    def _adjoint(
        self, node: Node, residual: Tensor, wanted: Sequence[Tensor], *, again: bool = False
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

    def _hand(self, node: Node, source: int, pull: Tensor | None) -> None:
        if pull is not None:
            ratio = self.mu[node.index] / self.mu[source]
            self.pull(self.graph[source], pull if ratio == 1 else pull * ratio)

    def _linear_gradient(
        self, node: Node, linear: nn.Linear, R: Tensor, share: float | Tensor
    ) -> None:
        X = self.X[node.sources[0]].detach()
        if X.ndim > 2:
            X, R = X.reshape(-1, X.shape[-1]), R.reshape(-1, R.shape[-1])
        if isinstance(share, Tensor):
            R, share = R * share, 1.0
        for parameter in (linear.weight, linear.bias):
            if parameter is None or not parameter.requires_grad:
                continue
            fresh = parameter not in self._graded
            out = parameter.grad if fresh else None  # new memory costs the time to get its pages
            if parameter is linear.weight:
                product = torch.addmm(
                    linear.weight.detach(), R.T, X, beta=0, alpha=share, out=out
                )
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


def _weighted(residual: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None:
        return residual
    return residual * weight.view(-1, *[1] * (residual.ndim - 1))
