r"""States that stay: the activations of one batch, moved block by block on the graph.

With :math:`c` running over the nodes that read the state :math:`X_v`, and the residuals
:math:`R_c = \phi_c(Z_c) - X_c`, the block of :math:`X_v` has the optimality condition (eq. 17)

.. math:: 0 \in \phi_v^{-1}(X_v) - Z_v + G_v, \qquad G_v = \sum_c \frac{\mu_c}{\mu_v} A_c^T R_c

and at the output the gradient of the loss divided by :math:`\mu` is added to :math:`G`. The plain
iteration (eqs. 25 and 28) solves it as if the rest stood still, :math:`X_v \leftarrow
\phi_v(Z_v - G_v)`. The safe step keeps the pre-activation :math:`P`, :math:`X = \phi(P)`, as the
variable and goes only a part :math:`\alpha_v` of the way:

.. math:: P_v \leftarrow P_v - \alpha_v (P_v - Z_v + G_v), \qquad
    \alpha_v = 1 \big/ \big(1 + \gamma_v \sum_c \tfrac{\mu_c}{\mu_v} \gamma_c \|A_c\|^2\big)

It is mirror descent with mirror map :math:`\Phi^*` and never raises the block's objective. Twice
that :math:`\alpha` would do, so a norm that power iteration has seen from below does no harm.

:math:`A^T R` is autograd on one edge at a time: no activation is evaluated with gradients enabled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor, nn

from lpom.checks import check_choice, check_number
from lpom.graph import Graph, Node, Switches
from lpom.losses import Loss
from lpom.objectives import Objective, edge_norm, evaluate
from lpom.settings import Settings
from lpom.weights.blocks import Use

ORDERS = ("interleaved", "top-down", "paper", "parallel")
#: Power iteration sees the norm from below; the safe step takes this much more than it saw.
NORM_MARGIN = 1.1


@final
@dataclass(frozen=True)
class Sweeps(Settings):
    """How the states of a batch are moved.

    Parameters
    ----------
    order : {"interleaved", "top-down", "paper", "parallel"}
        Interleaved: from the output down, each state and then the weights below it; one residual
        serves both, at the cost of back-propagation. Top-down: all states, then all weights.
        Paper: states from the bottom up, the output last (from a feed-forward start the first
        sweep then sends no signal below the last layer), then all weights. Parallel: every state
        from the same old ones.
    max_sweeps : int
        At most so many sweeps over the states of a batch.
    rule : {"auto", "plain", "safe"}
        The paper's iteration, or the damped one that cannot raise the objective. Auto is plain
        for a single interleaved sweep, else safe.
    tolerance : float
        Stop sweeping when no node's pre-activations change by more than this, relative to their
        norm.
    """

    order: str = "interleaved"
    max_sweeps: int = 1
    rule: str = "auto"
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        check_choice("order", self.order, ORDERS)
        check_choice("rule", self.rule, ("auto", "plain", "safe"))
        check_number("max_sweeps", self.max_sweeps, whole=True)
        check_number("tolerance", self.tolerance, strict=False)

    @cached_property
    def safe(self) -> bool:
        """Whether states move by the safe step."""
        if self.rule == "auto":
            return self.order != "interleaved" or self.max_sweeps > 1
        return self.rule == "safe"


class States:
    """States ``X``, pre-activations ``P`` and values ``Z`` of the edges, of one batch.

    Lists by the index of the node, the data first. ``X[v] = phi_v(P[v])`` always; ``P[v]`` is None
    while the state is feed-forward, where it would be ``Z[v]``. After a state has moved, the
    values of the edges that read it are evaluated again when they are needed.

    Parameters
    ----------
    graph, inputs : the network and the data ``X[0]``
    target, loss : what pulls on the outputs
    mu : weight of each node's gap, by index (the first is not read)
    soft : the graph whose activations move the states, where those of ``graph`` jump
    hold : keep what the feed-forward pass chose (masks, statistics, places of maxima), so that
        every edge is one affine map; False evaluates each edge once, as one sweep needs it, and
        carries residuals through the batch's own statistics
    switches : what an earlier pass chose, to be kept
    vectors : of the power iteration behind the safe step, kept from batch to batch
    """

    def __init__(
        self,
        graph: Graph,
        inputs: Tensor,
        target: Tensor,
        loss: Loss,
        mu: Sequence[float],
        *,
        soft: Graph | None = None,
        hold: bool = True,
        switches: Switches | None = None,
        vectors: dict[str, Tensor] | None = None,
    ) -> None:
        self.graph, self.target, self.loss, self.mu = graph, target, loss, mu
        self.soft = soft or graph
        self.switches = ({} if switches is None else switches) if hold else None
        self.vectors = {} if vectors is None else vectors
        size = len(graph) + 1
        self.X: list[Tensor] = [inputs] * size
        self.P: list[Tensor | None] = [None] * size
        self.pulls: list[Tensor | None] = [None] * size
        self._values: list[Tensor | None] = [None] * size  # Z, with autograd's graph of the edge
        for node in graph:
            self._set(node, node.activation.phi(self.Z(node)))

    @property
    def outputs(self) -> Tensor:
        return self.X[self.graph.output].detach()

    def Z(self, node: Node) -> Tensor:
        """The value of the edge below a node, at the present states and weights."""
        return self._value(node).detach()

    def residual(self, node: Node) -> Tensor | None:
        """``phi(Z) - X``; None where that is zero, at a feed-forward state."""
        if self.P[node.index] is None:
            return None
        return self._phi(node, self.Z(node)) - self.X[node.index].detach()

    # pulls

    def pull_output(self) -> None:
        """Let the loss pull on the outputs (eq. 28)."""
        output = self.graph.output
        gradient = self.loss.gradient(self.outputs, self.target)
        self._add_pull(output, gradient / self.mu[output])

    def gather(self, node: Node) -> None:
        """All pulls on a state: of the loss, and of the nodes that read it as they are now."""
        for reader in self.graph.consumers[node.index]:
            residual = self.residual(reader)
            if residual is not None:
                self.pull_sources(reader, residual, [node.index])
        if node.index == self.graph.output:
            self.pull_output()

    def pull_sources(
        self, node: Node, residual: Tensor | None, sources: Sequence[int] | None = None
    ) -> None:
        r"""Hand a node's residual down: :math:`A^T R` to its sources, or to some of them."""
        if residual is None:
            return
        sources = [s for s in (node.sources if sources is None else sources) if s]
        pulls = self._adjoint(node, residual, [self.X[s] for s in sources])
        for source, pull in zip(sources, pulls, strict=True):
            if pull is not None:
                self._add_pull(source, pull * (self.mu[node.index] / self.mu[source]))

    def weight_gradients(
        self, node: Node, residual: Tensor | None, weight: Tensor | None
    ) -> dict[nn.Parameter, Tensor]:
        r"""``mu * R.T @ X``: the gradient of the weights' convex problem, summed over samples.

        ``weight`` is what each sample counts for.
        """
        parameters = [p for p in node.edge.parameters if p.requires_grad]
        if residual is None or not parameters:
            return {}
        if weight is not None:
            residual = _weighted(residual, weight)
        gradients = self._adjoint(node, residual, parameters)
        pairs = zip(parameters, gradients, strict=True)
        return {p: self.mu[node.index] * g for p, g in pairs if g is not None}

    def _adjoint(
        self, node: Node, residual: Tensor, wanted: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """``A^T residual`` for states or weights; None for those that the edge does not feel."""
        value = self._value(node)
        if not wanted or not value.requires_grad:
            return [None] * len(wanted)
        return torch.autograd.grad(value, wanted, residual, retain_graph=True, allow_unused=True)

    def _add_pull(self, index: int, pull: Tensor) -> None:
        old = self.pulls[index]
        self.pulls[index] = pull if old is None else old + pull

    # moves

    def move(self, node: Node, alpha: Tensor | float | None = None) -> Tensor | None:
        """Move a state against its pulls (eqs. 25 and 28); its residual, None where that is zero.

        Where the state was feed-forward the residual is ``phi(Z) - phi(Z - pull)``. ``alpha`` is
        the part of the way to go, all of it by default.
        """
        v = node.index
        pull, self.pulls[v] = self.pulls[v], None
        P, Z = self.P[v], self.Z(node)
        if P is None and pull is None:
            return None
        if P is None and alpha is None:
            assert pull is not None
            residual = self.soft[v].activation.response(Z, pull)
            self.put(node, Z - pull)
            return residual
        P = Z if P is None else P
        step = P - Z if pull is None else P - Z + pull
        self.put(node, P - (step if alpha is None else alpha * step))
        return self._phi(node, Z) - self.X[v].detach()

    def damping(self, node: Node) -> Tensor | float:
        """The part of the way that cannot raise the block's objective."""
        v, steepness = node.index, self._steepness(node)
        if v == self.graph.output:
            steepness = steepness + self.loss.lipschitz
        return 1 / (1 + self.soft[v].activation.lipschitz / self.mu[v] * steepness)

    def _steepness(self, node: Node) -> Tensor | float:
        r""":math:`\sum_c \mu_c \gamma_c \|A_c\|^2` over the readers of a state."""
        steepness: Tensor | float = 0.0
        for reader in self.graph.consumers[node.index]:
            key = f"{reader.index} {node.index}"
            norm, self.vectors[key] = edge_norm(
                reader.edge,
                node.index,
                self.X,
                self.vectors.get(key),
                iterations=2 if key in self.vectors else 20,
                switches=self.switches,
            )
            slope = NORM_MARGIN * self.soft[reader.index].activation.lipschitz
            steepness = steepness + self.mu[reader.index] * slope * norm**2
        return steepness

    # sweeps

    def sweeps(self, how: Sweeps) -> Iterator[int]:
        """As many sweeps as allowed, or until no pre-activations change."""
        for sweep in range(how.max_sweeps):
            before = list(self.P) if how.tolerance > 0 else None
            yield sweep
            if before is not None and self._change(before) < how.tolerance:
                return

    def settle(self, how: Sweeps) -> None:
        """Move all states in one of the orders, the weights standing still."""

        def move(node: Node) -> Tensor | None:
            return self.move(node, self.damping(node) if how.safe else None)

        nodes = self.graph.nodes if how.order == "paper" else self.graph.nodes[::-1]
        for _ in self.sweeps(how):
            if how.order == "interleaved":
                self.pull_output()
                for node in nodes:
                    self.pull_sources(node, move(node))
            elif how.order == "parallel":  # every pull is of old states: all first, then all moves
                for node in nodes:
                    self.gather(node)
                for node in nodes:
                    move(node)
            else:
                for node in nodes:
                    self.gather(node)
                    move(node)

    def objective(self, weight: Tensor | None = None, penalty: float = 0.0) -> Objective:
        """F at the states as they are; ``weight`` is what each sample counts for."""
        given = (self.graph, self.loss, self.X, self.target, self.mu, weight)
        return evaluate(*given, penalty=penalty, values=self.Z)

    def use(self, node: Node, weight: Tensor | None, share: float, *, fresh: bool) -> Use:
        """What the exact weight step needs to know of a node: states as they are now.

        ``share`` is the node's mu beside that of the other uses; ``fresh``: no weight that the
        edge reads has moved since its value was computed.
        """
        if share != 1:
            weight = (self.X[0].new_ones(len(self.X[0])) if weight is None else weight) * share
        sources = tuple(self.X[s] for s in node.sources)
        known = self.Z(node) if fresh else None
        return Use(node, sources, self.X[node.index].detach(), self.switches, weight, known)

    def weights_moved(self) -> None:
        """Every edge is evaluated again when it is needed."""
        for node in self.graph:
            self._forget(node)

    def _change(self, before: Sequence[Tensor | None]) -> float:
        """The largest relative change of any node's pre-activations.

        Not of its states: where phi is flat these stand still while the former are on their way.
        """
        largest = 0.0
        for node in self.graph:
            new, old = self.P[node.index], before[node.index]
            if new is None:
                continue
            old = self.Z(node) if old is None else old
            size = torch.linalg.vector_norm(old).clamp_min(torch.finfo(old.dtype).tiny)
            change = float(torch.linalg.vector_norm(new - old) / size)
            largest = max(largest, change if change == change else math.inf)
        return largest

    # values

    def _phi(self, node: Node, z: Tensor) -> Tensor:
        return self.soft[node.index].activation.phi(z)

    def _value(self, node: Node) -> Tensor:
        value = self._values[node.index]
        if value is None:
            with torch.enable_grad():
                value = node.edge([self.X[s] for s in node.sources], self.switches)
            self._values[node.index] = value
        return value

    def put(self, node: Node, P: Tensor) -> None:
        """Give a state by its pre-activations; the edges above it are to be evaluated again."""
        self.P[node.index] = P
        self._set(node, self._phi(node, P))
        for reader in self.graph.consumers[node.index]:
            self._forget(reader)

    def _set(self, node: Node, X: Tensor) -> None:
        self.X[node.index] = X.detach().requires_grad_()  # a leaf: autograd ends at every state

    def _forget(self, node: Node) -> None:
        """An edge that will have another value: a state that was feed-forward is so no longer."""
        value, self._values[node.index] = self._values[node.index], None
        if value is not None and self.P[node.index] is None:
            self.P[node.index] = value.detach()


def _weighted(residual: Tensor, weight: Tensor) -> Tensor:
    if len(residual) != len(weight):
        raise ValueError(
            f"weights of {len(weight)} samples can't be given to a state of shape "
            f"{tuple(residual.shape)}: keep the samples first, (m, steps, features), between the "
            "model's activations, or leave the weights out."
        )
    return residual * weight.view(-1, *[1] * (residual.ndim - 1))
