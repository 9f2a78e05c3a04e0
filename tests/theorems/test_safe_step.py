r"""The safe step: no block of states ever raises F, however large the weights are.

With mirror map :math:`\Phi^*` (1/gamma-strongly convex) and a rest that is
:math:`s = \sum_c (\mu_c / \mu_v) \gamma_c \|A_c\|^2`-smooth, c running over the nodes that read the
state, a move of share :math:`\alpha \le 1` changes the block's objective by at most

.. math:: \left(1 - \tfrac{1}{\alpha}\right) D(x', x) - \tfrac{1}{\alpha} D(x, x')
          + \tfrac{s}{2} |x' - x|^2, \qquad D \ge \tfrac{1}{2 \gamma_v} |x' - x|^2,

which is not positive up to :math:`\alpha = 2 / (1 + \gamma_v s)`: twice what the step takes. That
factor is what covers a norm that power iteration sees from below.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lpom import activations, losses, mlp
from lpom.activations import Identity
from lpom.states import States, Sweeps

from .blocks import move_block, put
from .strategies import KINDS, Case, cases, of_kind, seeds

#: Norms from harmless to a million.
huge = st.floats(-2, 6).map(lambda exponent: 10.0**exponent)
any_mu = st.floats(-3, 3).map(lambda exponent: 10.0**exponent)
every_kind = pytest.mark.parametrize("kind", KINDS)


@torch.no_grad()
def share(case: Case, states: States, v: int) -> float | Tensor:
    """What the states themselves take, from their own power iteration."""
    return states.damping(case.graph[v])


def largest_share(case: Case, X: list[Tensor], v: int) -> float:
    """The largest share of the way of ``X[v]`` that the inequality above allows."""
    return min(1.0, 2 / (1 + case.rate(v, X)))


@torch.no_grad()
def rounding(case: Case, states: States) -> float:
    """What F is uncertain by: its terms are products of states and outputs of edges."""
    size = 0.0
    for node in case.graph:
        X, Z = states.X[node.index].norm(), states.Z(node).norm()
        size += case.mu[node.index] * float((X + Z) * (1 + X + Z))
    return 1e-13 * (1 + size)


def descends(case: Case, states: States, v: int, alpha: float | Tensor | None) -> bool:
    """Whether one step of ``X[v]`` leaves F where it was or lowers it."""
    before, slack = case.F(states.X), rounding(case, states)
    move_block(case, states, v, alpha)
    return case.F(states.X) <= before + slack + rounding(case, states)


@every_kind
@given(data=st.data(), spread=st.sampled_from([0.1, 2.0, 30.0]))
@settings(max_examples=12)
def test_no_block_of_states_raises_F(kind, data, spread):
    case = data.draw(of_kind(kind, scale=huge, mu=any_mu))
    states = case.at(case.pre_activations(spread))
    for _ in range(2):
        for v in range(1, len(states.X)):
            assert descends(case, states, v, share(case, states, v))


@every_kind
@given(data=st.data(), order=st.sampled_from(["top-down", "paper"]))
@settings(max_examples=12)
def test_no_sweep_raises_F(kind, data, order):
    """From the feed-forward start, as in training: one block after the other."""
    case = data.draw(of_kind(kind, scale=huge, mu=any_mu))
    how, states = Sweeps(order=order), case.at()
    for _ in range(4):
        before, slack = case.F(states.X), rounding(case, states)
        with torch.no_grad():
            states.settle(how)
        assert case.F(states.X) <= before + slack + rounding(case, states)


@every_kind
@given(data=st.data(), spread=st.sampled_from([0.1, 2.0, 30.0]))
@settings(max_examples=12)
def test_twice_the_share_is_still_safe(kind, data, spread):
    case = data.draw(of_kind(kind, scale=huge, mu=any_mu))
    states = case.at(case.pre_activations(spread))
    for v in range(1, len(states.X)):
        alpha = largest_share(case, [x.detach() for x in states.X], v)
        assert descends(case, states, v, alpha)


@given(cases(acts=[Identity()], layers=(2, 2), scale=st.floats(3, 100)))
def test_more_than_twice_the_share_is_not(case):
    """Without activations, off the block's minimum along the leading singular vector above."""
    W, ratio = case.weight(2), case.mu[2] / case.mu[1]
    P = case.pre_activations()
    X = case.states(P)
    largest = largest_share(case, X, 1)
    assume(largest < 0.9)
    Z1, Z2 = case.edge(1, X).detach(), case.edge(2, X).detach()
    constant = Z2 - X[1] @ W.T  # the bias, if any
    normal_matrix = torch.eye(W.shape[1]).double() + ratio * W.T @ W
    pulls = Z1 + ratio * (X[2] - constant) @ W
    minimum = torch.linalg.solve(normal_matrix, pulls.T).T
    start = put(P, 1, minimum + torch.linalg.svd(W).Vh[0])
    assert descends(case, case.at(start), 1, 0.98 * largest)
    assert not descends(case, case.at(start), 1, 1.02 * largest)


def test_more_than_twice_the_share_is_not_for_a_state_with_two_consumers():
    """The same matrix above it twice, where no relu bends: their rates add up."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.left, self.right = (nn.Linear(2, 2, bias=False) for _ in range(3))

        def forward(self, x):
            x = torch.relu(self.first(x))
            return torch.cat([torch.relu(self.left(x)), torch.relu(self.right(x))], 1)

    model = Twice().double()
    with torch.no_grad():
        for layer in (model.first, model.left, model.right):
            layer.weight.copy_(torch.diag(torch.tensor([3.0, 1.0])))
    one = torch.ones(1, 2).double()
    case = Case.of(model, losses.get("squared"), one, torch.ones(1, 4).double(), [2.0, 4, 6, 1])
    assert [node.sources for node in case.graph] == [(0,), (1,), (1,), (2, 3)]
    X = case.feed_forward()
    assert case.rate(1, X) == pytest.approx((4 + 6) / 2 * 9)
    found = float(share(case, case.at(), 1))
    assert 0.85 / (1 + case.rate(1, X)) <= found <= 1 / (1 + case.rate(1, X)) + 1e-12
    # F is a parabola in X[1]: start off its minimum in the first direction, at it in the second
    minimum = [(2 * 3 + (4 + 6) * 3 * 31) / (2 + 10 * 9), (2 * 1 + (4 + 6) * 31) / (2 + 10)]
    start = torch.tensor([[minimum[0] + 1, minimum[1]]]).double()
    P = [one, start, 31 * one, 31 * one, torch.ones(1, 4).double()]
    largest = largest_share(case, X, 1)
    assert descends(case, case.at(P), 1, 0.98 * largest)
    assert not descends(case, case.at(P), 1, 1.02 * largest)


@pytest.mark.parametrize("name", ["identity", "relu", "leaky_relu", "tanh", "softplus", "elu"])
@pytest.mark.parametrize("order", ["top-down", "paper"])
def test_the_plain_iteration_does_raise_F(name, order):
    """Glorot weights four times too large; the safe step does not."""
    model = mlp([6, 6, 6, 6], name, seed=1, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    target = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    case = Case.of(model, losses.get("squared"), inputs, target, [1.0] * 3, generator)

    @torch.no_grad()
    def values(rule):
        how, states = Sweeps(order=order, rule=rule), case.at()
        found = [case.F(states.X)]
        for _ in range(5):
            states.settle(how)
            found.append(case.F(states.X))
        return torch.tensor(found, dtype=torch.float64)

    assert values("plain").diff().max() > 1.0
    assert values("safe").diff().max() < 0


def with_singular_values(values: Tensor, n_in: int, n_out: int, seed: int) -> Case:
    """Identity, then one map with these singular values in random directions."""
    generator = torch.Generator().manual_seed(seed)
    model = mlp([1, n_in, n_out], "identity", seed=0, dtype=torch.float64)
    U, _ = torch.linalg.qr(torch.randn(n_out, n_out, generator=generator, dtype=torch.float64))
    V, _ = torch.linalg.qr(torch.randn(n_in, n_in, generator=generator, dtype=torch.float64))
    k = len(values)
    with torch.no_grad():
        model[-1].weight.copy_(U[:, :k] * values @ V[:, :k].T)
    one = torch.ones(1, 1).double()
    return Case.of(model, losses.get("squared"), one, torch.ones(1, n_out).double(), [1.0, 1.0])


@given(seeds, st.integers(1, 40), st.integers(1, 40), st.floats(1.0, 50.0), st.floats(0.1, 1e3))
@settings(max_examples=60)
def test_power_iteration_is_never_below_what_the_step_covers(seed, n_in, n_out, ahead, scale):
    """The leading singular value a little, or much, ahead of a cluster of all the others."""
    values = torch.full((min(n_in, n_out),), scale, dtype=torch.float64)
    values[0] = scale * ahead
    true = float(values.max()) ** 2
    case = with_singular_values(values, n_in, n_out, seed)
    found = float(share(case, case.at(), 1))
    assert found <= 2 / (1 + true)
    assert found >= 0.8 / (1 + true)  # and it is not needlessly short


@given(seeds, st.integers(2, 40))
def test_power_iteration_on_gaussian_matrices(seed, n):
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(n, n, generator=generator, dtype=torch.float64)
    values = torch.linalg.svdvals(matrix)
    case = with_singular_values(values, n, n, seed)
    found, true = float(share(case, case.at(), 1)), float(values[0]) ** 2
    assert 0.8 / (1 + true) <= found <= 2 / (1 + true)


@every_kind
@given(data=st.data())
@settings(max_examples=8)
def test_power_iteration_on_every_edge(kind, data):
    """On one sample where the edge treats all alike, and on the whole batch where it does not."""
    case = data.draw(of_kind(kind))
    X = case.states(P := case.pre_activations())
    states = case.at(P)
    for v in range(1, len(X)):
        true, found = case.rate(v, X), float(share(case, states, v))
        assert 0.8 / (1 + true) <= found <= 1.5 / (1 + true)


@given(seeds, st.integers(2, 20), st.floats(0.01, 0.2))
def test_the_kept_vector_follows_weights_that_move(seed, n, size):
    """Two iterations a batch are enough while weights change by up to a fifth of their norm."""
    generator = torch.Generator().manual_seed(seed)
    case = with_singular_values(torch.linspace(1, 2, n).double(), n, n, seed)
    weight, states = case.weight(2), case.at()
    for _ in range(20):
        change = torch.randn(n, n, generator=generator, dtype=torch.float64)
        norm = torch.linalg.matrix_norm(weight, 2)
        weight.add_(change, alpha=float(size * norm / torch.linalg.matrix_norm(change, 2)))
        true = float(torch.linalg.matrix_norm(weight, 2)) ** 2
        assert float(share(case, states, 1)) <= 2 / (1 + true)


def test_the_share_counts_the_lipschitz_constants_of_both_layers():
    """Sigmoid below and a ramp of slope 4 above, mu 2 and 6, and the loss on the outputs."""
    model = mlp([2, 3, 4], "sigmoid", activations.get("sign").smoothed(0.5), seed=0).double()
    one = torch.ones(1, 2).double()
    case = Case.of(model, losses.get("hinge"), one, torch.ones(1, 4).double(), [2.0, 6.0])
    true = float(torch.linalg.matrix_norm(case.weight(2), 2)) ** 2
    margin = (1 / float(share(case, case.at(), 1)) - 1) / (3 * 0.25 * 4 * true)
    assert 1.0 <= margin <= 1.2
    assert share(case, case.at(), 2) == pytest.approx(1 / (1 + 4 * 2 / 6))


@pytest.mark.parametrize("name", ["relu", "sigmoid", "tanh", "softplus"])
@pytest.mark.parametrize("noise", [0.0, 1e-4, 1e-2, 1.0])
def test_only_sweeps_that_truly_raise_F_are_called_diverging(name, noise):
    """In float32 and close to a perfect fit F is all rounding, and says nothing."""
    model = mlp([10, 20, 20, 5], name, seed=0)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(50, 10, generator=generator)
    target = model(inputs).detach() + noise * torch.randn(50, 5, generator=generator)
    case = Case.of(model, losses.get("squared"), inputs, target, [20.0] * 3)
    for rule, scale in [("safe", 1.0), ("plain", 20.0)]:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(scale)
        method = case.method(order="top-down", max_sweeps=10, rule=rule)
        state = method.init(case.problem)
        method.end_epoch(case.problem, case.batch, state)
        assert list(state.remarks) == ([] if rule == "safe" else ["diverging sweep"])
