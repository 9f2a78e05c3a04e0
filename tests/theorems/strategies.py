"""Random small problems in float64 for the properties of this folder, and F written out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from lpom import activations, losses
from lpom.activations import ELU, Activation, LeakyReLU, Softplus
from lpom.losses import Loss
from lpom.methods.lpom.states import BatchStates
from lpom.network import Lifted
from lpom.objective import evaluate

#: Every activation of the registry, jumps as ramps of width 1/2; some with other parameters.
ACTIVATIONS: list[Activation] = [
    *(activations.get(name).smoothed(0.5) for name in activations.names()),
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
    """A network with data, targets and mu; ``normal`` goes on drawing from the case's seed."""

    network: Lifted
    loss: Loss
    inputs: Tensor
    target: Tensor
    mu: list[float]
    generator: torch.Generator

    @property
    def last(self) -> int:
        return len(self.network) - 1

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def phi(self, i: int, z: Tensor) -> Tensor:
        return self.network[i].activation.phi(z)

    def gamma(self, i: int) -> float:
        return self.network[i].activation.lipschitz

    def weight(self, i: int) -> Tensor:
        return self.network[i].map.parameters()[0].detach()

    def pre_activation(self, i: int, spread: float = 2.0) -> Tensor:
        """A random P for the state ``X[i + 1] = phi_i(P)``, in range whatever phi is."""
        return spread * self.normal(len(self.inputs), len(self.weight(i)))

    def pre_activations(self, spread: float = 2.0) -> list[Tensor]:
        return [self.pre_activation(i, spread) for i in range(len(self.network))]

    def states(self, P: Sequence[Tensor]) -> list[Tensor]:
        return [self.inputs, *(self.phi(i, p) for i, p in enumerate(P))]

    def at(self, P: Sequence[Tensor], alpha: Sequence[float | Tensor] | None = None) -> BatchStates:
        """The library's states, put at ``X[i + 1] = phi_i(P[i])`` instead of feed-forward."""
        states = BatchStates(self.network, self.loss, self.target, self.inputs, self.mu, alpha)
        states.P, states.X = list(P), self.states(P)
        states.refresh_all(weights_moved=True)
        return states

    def F(self, X: Sequence[Tensor]) -> float:
        return evaluate(self.network, self.loss, X, self.target, self.mu).total


def literal_F(case: Case, X: Sequence[Tensor], weights: Sequence[Sequence[Tensor]]) -> Tensor:
    """Eq. 18 as design.md writes it, for autograd; ``weights[i]`` is (W,) or (W, b)."""
    total = case.loss.value(X[-1], case.target).sum()
    for i, (parameters, layer) in enumerate(zip(weights, case.network, strict=True)):
        Z = X[i] @ parameters[0].T
        if len(parameters) == 2:
            Z = Z + parameters[1]
        act = layer.activation
        D = act.conjugate(X[i + 1]) + act.primitive(Z) - X[i + 1] * Z
        total = total + case.mu[i] * D.sum()
    return total


def targets(loss: Loss, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
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
    """Networks of 1 to 4 layers and widths 1 to 7; every layer its own activation and mu."""
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
    network = Lifted.from_module(nn.Sequential(*modules))
    return Case(network, chosen_loss, inputs, target, mus, generator)
