"""Random small problems in float64 for the properties of this folder, and F written out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from lpom import activations, losses
from lpom.activations import ELU, Activation, LeakyReLU, Softplus
from lpom.graph import Graph, Switches, trace
from lpom.losses import Loss
from lpom.methods import LPOM, Batch, Problem
from lpom.objectives import evaluate
from lpom.states import States, Sweeps

from . import networks

#: Every elementwise activation, jumps as ramps of width 1/2; some with other parameters.
ACTIVATIONS: list[Activation] = [
    *(
        activations.get(name).smoothed(0.5)
        for name in activations.names()
        if not activations.get(name).slope_bound
    ),
    LeakyReLU(0.3),
    ELU(2.0),
    Softplus(3.0),
]
#: Strictly increasing with a continuous derivative.
SMOOTH = [activations.get(name) for name in ("identity", "sigmoid", "tanh", "softplus", "elu")]
LOSSES: list[Loss] = [losses.get(name) for name in losses.names()]

seeds = st.integers(0, 2**32 - 1)
#: Factors over several orders of magnitude, for weights and for mu.
powers = st.floats(-1.5, 1.5).map(lambda exponent: 10.0**exponent)


@dataclass(frozen=True)
class Case:
    """A network with data, targets and mu; ``normal`` goes on drawing from the case's seed.

    States, pre-activations and mu are lists by the index of the node, as the library's are;
    ``switches`` are what one feed-forward pass chose.
    """

    model: nn.Module
    graph: Graph
    loss: Loss
    inputs: Tensor
    target: Tensor
    mu: list[float]
    switches: Switches
    generator: torch.Generator

    @classmethod
    def of(
        cls,
        model: nn.Module,
        loss: Loss,
        inputs: Tensor,
        target: Tensor,
        mu: Sequence[float],
        generator: torch.Generator | None = None,
    ) -> Case:
        """``mu`` without that of the data."""
        graph, switches = trace(model, inputs), {}
        graph.feed_forward(inputs, switches)
        generator = generator or torch.Generator().manual_seed(0)
        return cls(model, graph, loss, inputs, target, [1.0, *mu], switches, generator)

    def with_mu(self, factor: float) -> Case:
        return replace(self, mu=[factor * mu for mu in self.mu])

    @property
    def problem(self) -> Problem:
        return Problem.on(self.graph, self.loss, self.model)

    @property
    def batch(self) -> Batch:
        return Batch(self.inputs, self.target)

    def method(self, **sweeps: object) -> LPOM:
        """The library's method with this case's mu."""
        return LPOM(mu=self.mu[1:], states=Sweeps(**sweeps))

    @cached_property
    def shapes(self) -> list[torch.Size]:
        """Of every state."""
        return [x.shape for x in self.feed_forward()]

    @property
    def output(self) -> int:
        return self.graph.output

    @property
    def hidden(self) -> list[int]:
        """Indices of all states but the output."""
        return [node.index for node in self.graph if node.index != self.output]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def phi(self, v: int, z: Tensor) -> Tensor:
        return self.graph[v].activation.phi(z)

    def gamma(self, v: int) -> float:
        return self.graph[v].activation.lipschitz

    def edge(self, v: int, X: Sequence[Tensor]) -> Tensor:
        """What the edge of a node gives, for autograd."""
        node = self.graph[v]
        return node.edge([X[s] for s in node.sources], self.switches)

    def weight(self, v: int) -> Tensor:
        """Of a chain."""
        return self.graph[v].edge.linear.weight.detach()

    def jacobian(self, v: int, source: int, X: Sequence[Tensor]) -> Tensor:
        """The matrix of an edge in one of its sources, the whole batch flattened."""

        def of(x: Tensor) -> Tensor:
            return self.edge(v, [*X[:source], x, *X[source + 1 :]])

        J = torch.autograd.functional.jacobian(of, X[source].detach())
        return J.detach().reshape(-1, X[source].numel())

    def rate(self, v: int, X: Sequence[Tensor]) -> float:
        r""":math:`\gamma_v \sum_c (\mu_c / \mu_v) \gamma_c \|A_c\|^2`, and the loss's tau."""
        rate = self.loss.lipschitz / self.mu[v] if v == self.output else 0.0
        for above in self.graph.consumers[v]:
            norm = float(torch.linalg.matrix_norm(self.jacobian(above.index, v, X), 2))
            rate += self.mu[above.index] / self.mu[v] * self.gamma(above.index) * norm**2
        return rate * self.gamma(v)

    def calm(self, rate: float) -> None:
        """Raise mu until the plain step of every feed-forward state contracts by this rate."""
        X = self.feed_forward()
        for node in reversed(self.graph.nodes):
            self.mu[node.index] *= max(self.rate(node.index, X) / rate, 1.0)

    def pre_activation(self, v: int, spread: float = 2.0) -> Tensor:
        """A random P for the state ``X[v] = phi_v(P)``, in range whatever phi is."""
        return spread * self.normal(*self.shapes[v])

    def pre_activations(self, spread: float = 2.0) -> list[Tensor]:
        return [spread * self.normal(*shape) for shape in self.shapes]

    def feed_forward(self) -> list[Tensor]:
        return self.graph.feed_forward(self.inputs, self.switches)[1]

    def states(self, P: Sequence[Tensor]) -> list[Tensor]:
        return [self.inputs, *(self.phi(node.index, P[node.index]) for node in self.graph)]

    def at(self, P: Sequence[Tensor] | None = None) -> States:
        """The library's states, feed-forward or put at ``X[v] = phi_v(P[v])``."""
        with torch.no_grad():
            states = States(
                self.graph, self.inputs, self.target, self.loss, self.mu, switches=self.switches
            )
            for node in self.graph if P is not None else ():
                states.put(node, P[node.index])
        return states

    def F(self, X: Sequence[Tensor], weight: Tensor | None = None) -> float:
        found = evaluate(self.graph, self.loss, X, self.target, self.mu, weight, self.switches)
        return found.total


def literal_F(case: Case, X: Sequence[Tensor], weight: Tensor | None = None) -> Tensor:
    """Eq. 18 as design.md writes it, for autograd in states and in the module's weights."""
    total = case.loss.value(X[case.output], case.target)
    for node in case.graph:
        x, Z, act = X[node.index], case.edge(node.index, X), node.activation
        for part in (act.conjugate(x), act.primitive(Z), -x * Z):
            total = total + case.mu[node.index] * part.flatten(1).sum(1)
    return total.sum() if weight is None else total @ weight


def targets(loss: Loss, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """What the loss may be asked to fit: classes or soft labels, +-1, or numbers."""
    raw = torch.randn(*shape, generator=generator, dtype=torch.float64)
    if loss.name == "cross-entropy":
        return torch.softmax(3 * raw, 1)
    if loss.name == "binary-cross-entropy":
        return torch.sigmoid(3 * raw)
    if loss.name == "hinge":
        return torch.where(raw > 0, 1.0, -1.0).double()
    return raw


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    acts: Sequence[Activation] = ACTIVATIONS,
    layers: tuple[int, int] = (1, 4),
    scale: st.SearchStrategy[float] = powers,
    mu: st.SearchStrategy[float] = powers,
    loss: Sequence[Loss] = LOSSES,
    batch: tuple[int, int] = (1, 9),
) -> Case:
    """Chains of 1 to 4 layers and widths 1 to 7; every layer its own activation and mu."""
    n_layers = draw(st.integers(*layers))
    widths = draw(st.lists(st.integers(1, 7), min_size=n_layers + 1, max_size=n_layers + 1))
    chosen = [draw(st.sampled_from(acts)) for _ in range(n_layers)]
    size, bias = draw(scale), draw(st.booleans())
    chosen_loss = draw(st.sampled_from(loss))
    mus = draw(st.lists(mu, min_size=n_layers, max_size=n_layers))
    generator = torch.Generator().manual_seed(draw(seeds))

    modules: list[nn.Module] = []
    for i, act in enumerate(chosen):
        linear = nn.Linear(widths[i], widths[i + 1], bias=bias, dtype=torch.float64)
        for parameter in linear.parameters():
            nn.init.normal_(parameter, std=size / widths[i] ** 0.5, generator=generator)
        modules += [linear, act.to_module()]
    m = draw(st.integers(*batch))
    inputs = torch.randn(m, widths[0], generator=generator, dtype=torch.float64)
    target = targets(chosen_loss, (m, widths[-1]), generator)
    return Case.of(nn.Sequential(*modules), chosen_loss, inputs, target, mus, generator)


@st.composite
def graphs(
    draw: st.DrawFn,
    kind: str,
    *,
    acts: Sequence[Activation] = ACTIVATIONS,
    scale: st.SearchStrategy[float] = powers,
    mu: st.SearchStrategy[float] = powers,
    loss: Sequence[Loss] = LOSSES,
    **options: object,
) -> Case:
    """Networks of one of the kinds of `networks.KINDS`; every node its own mu."""
    seed, size = draw(seeds), draw(scale)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():  # dropout draws from torch's own
        torch.manual_seed(seed)
        model, shape = networks.KINDS[kind](draw, acts, **options)
        model.double()
        for parameter in model.parameters():
            fan_in = max(1, parameter[0].numel())
            nn.init.normal_(parameter, std=size / fan_in**0.5, generator=generator)
        inputs = torch.randn(*shape, generator=generator, dtype=torch.float64)
        chosen_loss = draw(st.sampled_from(loss))
        with torch.no_grad():
            target = targets(chosen_loss, tuple(model(inputs).shape), generator)
        case = Case.of(model, chosen_loss, inputs, target, [], generator)
    n_nodes = len(case.graph)
    case.mu.extend(draw(st.lists(mu, min_size=n_nodes, max_size=n_nodes)))
    return case


#: A chain, or a graph of one of the kinds: what the theorems are drawn from.
KINDS = ("chain", *networks.KINDS)


def of_kind(kind: str, **options: object) -> st.SearchStrategy[Case]:
    """One of `KINDS`."""
    if kind == "chain":
        return cases(layers=(2, 4), **options)
    return graphs(kind, **options)
