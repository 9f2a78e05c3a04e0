r"""The lifted objective, its optimality conditions, and the rates of Theorems 2 and 3.

.. math:: F(W, X) = \mathrm{loss}(X_{out}, T) + \sum_v \mu_v \sum D_v(X_v, Z_v) + m\, h(W),
          \qquad Z_v = A_v(X_{sources}; W)

with the gap D of each node's activation (eq. 18 of the paper, up to a constant) and the penalties
h of the weights, if any, beside the mean over the m samples. Without them F equals the plain loss
when every state is feed-forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Real

import torch
from torch import Tensor, nn

from lpom.graph import Edge, Graph, Node, Switches
from lpom.losses import Loss

#: One number, one per node, or numbers by patterns of names, the first that fits: see `per_node`.
Mu = float | Sequence[float] | Mapping[str, float]


@dataclass(frozen=True)
class Objective:
    """Values summed over samples: the loss, and each node's gap before it is weighted by mu.

    ``penalty`` is what the penalties of the weights add.
    """

    loss: float
    gaps: tuple[float, ...]
    mu: tuple[float, ...]
    penalty: float = 0.0

    @property
    def layers(self) -> tuple[float, ...]:
        """What each node adds to the total: ``mu * gap``."""
        return tuple(mu * gap for mu, gap in zip(self.mu, self.gaps, strict=True))

    @property
    def total(self) -> float:
        return self.loss + sum(self.layers) + self.penalty


def per_node(mu: Mu, graph: Graph) -> list[float]:
    """The weight of every node's gap, by its index; the first, of the data, is not read.

    By patterns of names (as a shell's, the first that fits counts): a node has its own name, that
    of its activation, the names of the weights below it, and the last one is "output" too.
    """
    if isinstance(mu, Mapping):
        mu = [_by_name(mu, node, node.index == graph.output) for node in graph]
    return [1.0, *per_layer(mu, len(graph))]


def per_layer(
    mu: float | Sequence[float], n_layers: int, output: float | None = None
) -> list[float]:
    """One positive weight per layer from one number, a list, or a number and the last's.

    >>> per_layer(20.0, 3, output=5.0)
    [20.0, 20.0, 5.0]
    """
    if isinstance(mu, str):
        raise TypeError(f"mu must be a number or one number per layer, got the string {mu!r}.")
    values = [float(mu)] * n_layers if isinstance(mu, float | Real) else list(map(float, mu))
    if len(values) != n_layers:
        raise ValueError(
            f"mu needs one value per weight layer: this network has {n_layers}, "
            f"got {len(values)}. Give {n_layers} values or a single one."
        )
    if output is not None:
        values[-1] = float(output)
    bad = [value for value in values if not 0 < value < float("inf")]
    if bad:
        raise ValueError(f"mu must be positive and finite in every layer, got {bad[0]}.")
    return values


def _by_name(mu: Mapping[str, float], node: Node, last: bool) -> float:
    names = [node.name, node.activation.name, *node.edge.names, *["output"] * last]
    for pattern, value in mu.items():
        if any(fnmatchcase(name, pattern) for name in names):
            return float(value)
    raise ValueError(
        f"mu has no pattern for the node {node.name!r} ({', '.join(node.edge.names) or 'no'} "
        f"weights); it has {', '.join(map(repr, mu))}. End with '*' for all others."
    )


#: Rows or columns of a matrix up to which eigenvalues take less time than power iteration.
_NARROW = 32


@torch.no_grad()
def evaluate(
    graph: Graph,
    loss: Loss,
    X: Sequence[Tensor],
    target: Tensor,
    mu: Sequence[float],
    weight: Tensor | None = None,
    switches: Switches | None = None,
    penalty: float = 0.0,
    values: Callable[[Node], Tensor] | None = None,
) -> Objective:
    """F at the states ``X`` by index, the data first; ``weight`` per sample multiplies it.

    ``penalty`` is what the weights have to bear per sample; ``values`` gives what the edges say at
    these states, where some of that is known already.
    """
    said = values or (lambda node: value(node, X, switches))
    gaps = [total(node.activation.gap(X[node.index], said(node)), weight) for node in graph]
    size = len(X[0]) if weight is None else float(weight.sum())
    value_of_loss = total(loss.value(X[graph.output], target), weight)
    return Objective(value_of_loss, tuple(gaps), tuple(mu[1:]), size * penalty)


def value(node: Node, X: Sequence[Tensor], switches: Switches | None = None) -> Tensor:
    """What a node's edge gives at these states."""
    return node.edge([X[s] for s in node.sources], switches)


def total(values: Tensor, weight: Tensor | None = None) -> float:
    """The sum of all values, samples (rows) weighted; in double precision over samples."""
    per_sample = values.reshape(len(values), -1).sum(1).double()
    return float(per_sample.sum() if weight is None else per_sample @ weight.double())


def adjoint(
    node: Node,
    X: Sequence[Tensor],
    residual: Tensor,
    wanted: str = "states",
    switches: Switches | None = None,
) -> list[Tensor]:
    r""":math:`A^T R` for the sources of an edge, or for its weights (``wanted="weights"``)."""
    # words are data that nothing pulls
    sources = [X[s].detach().requires_grad_(X[s].is_floating_point()) for s in node.sources]
    with torch.enable_grad():
        Z = node.edge(sources, switches)
    ends = sources if wanted == "states" else list(node.edge.parameters)
    felt = [end for end in ends if end.requires_grad]
    given = torch.autograd.grad(Z, felt, residual, allow_unused=True) if felt else ()
    found = {id(end): pull for end, pull in zip(felt, given, strict=True) if pull is not None}
    return [found.get(id(end), torch.zeros_like(end)) for end in ends]


@torch.no_grad()
def kkt_residuals(
    graph: Graph,
    loss: Loss,
    X: Sequence[Tensor],
    target: Tensor,
    mu: Sequence[float],
    switches: Switches | None = None,
    prox: Callable[[nn.Parameter, Tensor, float], Tensor] | None = None,
) -> tuple[list[float], list[float]]:
    r"""How far states and weights are from the optimality conditions, root mean square.

    States (eqs. 17 and 27), as distance from the fixed point, zero exactly where they hold:
    :math:`X_v - \phi_v(Z_v - G_v)`. Weights (eq. 20), per sample:
    :math:`\sum_u \mu_u A_u^T R_u / m` over the uses of each weight, divided by the largest of
    their mu. One number per node, and one per weight in the order of ``graph.parameters``.
    """
    Z = [X[0], *(value(node, X, switches) for node in graph)]
    R = [X[0], *(node.activation.phi(Z[node.index]) - X[node.index] for node in graph)]
    G: list[Tensor] = [torch.zeros_like(z) for z in Z]
    gradients = {p: torch.zeros_like(p) for p in graph.parameters}
    G[graph.output] = loss.gradient(X[graph.output], target) / mu[graph.output]
    for node in graph:
        v = node.index
        for s, pull in zip(node.sources, adjoint(node, X, R[v], "states", switches), strict=True):
            if s:
                G[s] = G[s] + mu[v] / mu[s] * pull
        found = adjoint(node, X, R[v], "weights", switches)
        for parameter, gradient in zip(node.edge.parameters, found, strict=True):
            gradients[parameter] += mu[v] * gradient
    states = [_rms(X[n.index] - n.activation.phi(Z[n.index] - G[n.index])) for n in graph]
    weights = []
    for parameter, gradient in gradients.items():
        largest = max(mu[node.index] for node in graph.uses[parameter])
        gradient = gradient / len(X[0])
        if prox is not None:
            gradient = parameter - prox(parameter, parameter - gradient, 1.0)
        weights.append(_rms(gradient / largest))
    return states, weights


@torch.no_grad()
def edge_norm(
    edge: Edge,
    source: int,
    X: Sequence[Tensor],
    vector: Tensor | None = None,
    iterations: int = 20,
    switches: Switches | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Spectral norm of an edge in one of its sources, and the vector to go on from.

    By power iteration with the other sources where they are, from below; it gets closer as the
    vector is kept between calls. An edge that treats every sample alike is measured on one.
    """
    k = edge.sources.index(source)
    rows = slice(1) if edge.alone else slice(None)
    states = [X[s].detach()[rows] for s in edge.sources]
    if not states[k].is_floating_point():  # indices, which nothing is multiplied with
        return torch.zeros(()), torch.zeros(())
    if vector is None or vector.shape != states[k].shape:
        vector = start_vector(states[k])
    vector = vector.to(states[k])  # it may come from a state of another dtype
    if edge.linear is not None:
        return matrix_norm(edge.linear.weight.detach(), vector, iterations)
    leaf = states[k].requires_grad_()
    with torch.enable_grad():
        Z = edge([leaf if i == k else x for i, x in enumerate(states)], switches)
        probe = torch.zeros_like(Z).requires_grad_()
        back = None
        if Z.requires_grad:  # A^T as a function
            (back,) = torch.autograd.grad(Z, leaf, probe, create_graph=True, allow_unused=True)
    norm = vector.new_zeros(())
    if back is None:  # of this source it takes the size alone
        return norm, vector
    for _ in range(iterations):
        (image,) = torch.autograd.grad(back, probe, vector, retain_graph=True)
        norm = torch.linalg.vector_norm(image)
        (again,) = torch.autograd.grad(Z, leaf, image, retain_graph=True)
        vector = _unit(again, vector)
    return norm, vector


def matrix_norm(weight: Tensor, vector: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Spectral norm of a plain product, from below, and the vector to go on from."""
    tiny = torch.finfo(vector.dtype).tiny
    for _ in range(iterations - 1):
        back = vector @ weight.T @ weight
        vector = back / torch.linalg.vector_norm(back).clamp_min(tiny)
    image = vector @ weight.T
    return torch.linalg.vector_norm(image), _unit(image @ weight, vector)


def start_vector(like: Tensor) -> Tensor:
    """A unit vector of this shape, always the same."""
    generator = torch.Generator().manual_seed(like.shape[-1])
    vector = torch.randn(like.shape, generator=generator, dtype=torch.float64)
    unit: Tensor = (vector / torch.linalg.vector_norm(vector)).to(like)
    return unit


def _unit(vector: Tensor, old: Tensor) -> Tensor:
    """Norm one; a zero map, or a vector in its null space, keeps the vector it has."""
    size = torch.linalg.vector_norm(vector)
    return torch.where(size > 0, vector / size, old)


@torch.no_grad()
def spectral_rates(
    graph: Graph,
    loss: Loss,
    mu: Sequence[float],
    X: Sequence[Tensor],
    iterations: int = 20,
    switches: Switches | None = None,
) -> tuple[list[float], list[float]]:
    r"""The largest norm of each node's edge, and the factor by which its plain step contracts.

    For a state that factor is :math:`\gamma_v \sum_c (\mu_c / \mu_v) \gamma_c \|A_c\|^2` over the
    nodes that read it, with :math:`\tau = \gamma \eta / \mu` of the loss added at the output
    (Theorems 2 and 3; the spectral norm makes it sharper than `rho`). Below one it converges.
    ``X`` are states at which edges that multiply states are measured; a plain layer needs none.
    """
    norms = _norms(graph, X, iterations, switches)
    largest = [
        max((norms.get((node.index, s), 0.0) for s in node.sources), default=0.0) for node in graph
    ]
    return largest, _rates(graph, loss, mu, norms)


@torch.no_grad()
def contraction(
    graph: Graph, loss: Loss, mu: Sequence[float], X: Sequence[Tensor], iterations: int = 20
) -> list[float]:
    """The second of `spectral_rates` alone, for which edges on the data need not be measured."""
    return _rates(graph, loss, mu, _norms(graph, X, iterations, None, data=False))


def _norms(
    graph: Graph,
    X: Sequence[Tensor],
    iterations: int,
    switches: Switches | None,
    *,
    data: bool = True,
) -> dict[tuple[int, int], float]:
    """The norm of each edge in each of its sources, by their indices."""
    return {
        (node.index, s): _norm(node.edge, s, X, iterations, switches)
        for node in graph
        for s in node.sources
        if (s or data)
        # what is looked up by whole numbers has no norm
        and (node.edge.linear is not None or X[s].is_floating_point())
    }


def _norm(
    edge: Edge, source: int, X: Sequence[Tensor], iterations: int, switches: Switches | None
) -> float:
    if edge.linear is not None:
        W = edge.linear.weight.detach()
        if min(W.shape) > _NARROW:
            return float(matrix_norm(W, start_vector(W[:1]), iterations)[0])
        W = W.float() if W.dtype in (torch.float16, torch.bfloat16) else W
        gram = W @ W.T if W.shape[0] < W.shape[1] else W.T @ W
        return math.sqrt(max(0.0, float(torch.linalg.eigvalsh(gram)[-1])))
    return float(edge_norm(edge, source, X, None, iterations, switches)[0])


def _rates(
    graph: Graph, loss: Loss, mu: Sequence[float], norms: dict[tuple[int, int], float]
) -> list[float]:
    rates = []
    for node in graph:
        v, gamma = node.index, node.activation.lipschitz
        rate = gamma * loss.lipschitz / mu[v] if v == graph.output else 0.0
        for above in graph.consumers[v]:
            slope = gamma * above.activation.lipschitz
            rate += mu[above.index] / mu[v] * slope * norms[above.index, v] ** 2
        rates.append(rate)
    return rates


@torch.no_grad()
def rho(graph: Graph, mu: Sequence[float], X: Sequence[Tensor]) -> list[float]:
    r"""The rate of Theorem 2 for every state but the output:
    :math:`\sum_c \frac{\mu_c}{\mu_v} \gamma_v \gamma_c
    \sqrt{\||A_c^T||A_c|\|_1 \||A_c^T||A_c|\|_\infty}`.

    :math:`|A|` has the absolute values of A's entries; for an edge that is not a plain layer it is
    not to be had by products with A, and the rate is NaN.
    """
    rates = []
    for node in graph:
        if node.index == graph.output:
            continue
        rate = 0.0
        for above in graph.consumers[node.index]:
            ratio = mu[above.index] / mu[node.index]
            slope = node.activation.lipschitz * above.activation.lipschitz
            rate += ratio * slope * _absolute_bound(above.edge)
        rates.append(rate)
    return rates


def _absolute_bound(edge: Edge) -> float:
    """|W^T||W| is symmetric: both norms are its largest row sum, found by two products."""
    if edge.linear is None:
        return math.nan
    absolute = edge.linear.weight.detach().abs()
    return float((absolute.sum(1) @ absolute).max())


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
