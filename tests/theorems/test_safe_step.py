r"""The safe step: no block of states ever raises F, however large the weights are.

With mirror map :math:`\Phi^*` (1/gamma-strongly convex) and a rest that is
:math:`r \gamma_i \|W\|^2`-smooth, a move of share :math:`\alpha \le 1` changes the block's
objective by at most

.. math:: \left(1 - \tfrac{1}{\alpha}\right) D(x', x) - \tfrac{1}{\alpha} D(x, x')
          + \tfrac{1}{2} r \gamma_i \|W\|^2 |x' - x|^2,
          \qquad D \ge \tfrac{1}{2 \gamma_{i-1}} |x' - x|^2,

which is not positive up to :math:`\alpha = 2 / (1 + r \gamma_{i-1} \gamma_i \|W\|_2^2)`: twice
what the step takes. That factor is what covers a norm that power iteration sees from below.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lpom import activations, losses
from lpom.activations import Identity
from lpom.maps import Dense
from lpom.methods import Batch
from lpom.methods.base import Problem
from lpom.methods.lpom import LPOM
from lpom.methods.lpom.states import BatchStates, sweep
from lpom.network import Lifted, mlp

from .blocks import move_block
from .strategies import Case, cases, seeds

#: Norms from harmless to a million.
huge = st.floats(-2, 6).map(lambda exponent: 10.0**exponent)
any_mu = st.floats(-3, 3).map(lambda exponent: 10.0**exponent)
any_case = cases(scale=huge, mu=any_mu)


def safe_alpha(case: Case) -> list[float | torch.Tensor]:
    """The shares that the method itself computes, from its own power iteration."""
    method = LPOM(mu=case.mu, order="top-down", step_rule="safe")
    problem = Problem(case.network, case.loss)
    return method._alpha(case.network, problem, method.init(problem))


def largest_share(case: Case, i: int) -> float:
    """The largest share of the way of ``X[i]`` that the inequality above allows."""
    if i == len(case.network):
        smooth = case.gamma(i - 1) * case.loss.lipschitz / case.mu[i - 1]
    else:
        norm = torch.linalg.svdvals(case.weight(i)).max()
        smooth = case.mu[i] / case.mu[i - 1] * case.gamma(i - 1) * case.gamma(i) * float(norm) ** 2
    return min(1.0, 2 / (1 + smooth))


def rounding(case: Case, states: BatchStates) -> float:
    """What F is uncertain by: its terms are products of states and outputs of maps."""
    size = sum(
        mu * float((X.norm() + Z.norm()) * (1 + X.norm() + Z.norm()))
        for mu, X, Z in zip(case.mu, states.X[1:], states.Z, strict=True)
    )
    return 1e-13 * (1 + size)


def descends(case: Case, states: BatchStates, i: int) -> bool:
    """Whether one step of ``X[i]`` leaves F where it was or lowers it."""
    before, slack = case.F(states.X), rounding(case, states)
    move_block(states, i)
    return case.F(states.X) <= before + slack + rounding(case, states)


@given(any_case, st.sampled_from([0.1, 2.0, 30.0]))
@settings(max_examples=60)
def test_no_block_of_states_raises_F(case, spread):
    states = case.at(case.pre_activations(spread), safe_alpha(case))
    for _ in range(2):
        for i in range(1, len(case.network) + 1):
            assert descends(case, states, i)


@given(any_case, st.sampled_from(["top-down", "paper"]))
@settings(max_examples=40)
def test_no_sweep_raises_F(case, order):
    """From the feed-forward start, as in training: one block after the other."""
    states = BatchStates(
        case.network, case.loss, case.target, case.inputs, case.mu, safe_alpha(case)
    )
    for _ in range(4):
        before, slack = case.F(states.X), rounding(case, states)
        sweep(states, order)
        assert case.F(states.X) <= before + slack + rounding(case, states)


@given(any_case, st.sampled_from([0.1, 2.0, 30.0]))
def test_twice_the_share_is_still_safe(case, spread):
    alpha = [largest_share(case, i + 1) for i in range(len(case.network))]
    states = case.at(case.pre_activations(spread), alpha)
    for i in range(1, len(case.network) + 1):
        assert descends(case, states, i)


@given(cases(acts=[Identity()], layers=(2, 2), scale=st.floats(3, 100)))
def test_more_than_twice_the_share_is_not(case):
    """Without activations, off the block's minimum along the leading singular vector above."""
    W, ratio = case.weight(1), case.mu[1] / case.mu[0]
    share = largest_share(case, 1)
    assume(share < 0.9)
    states = case.at(case.pre_activations())
    constant = states.Z[1] - states.X[1] @ W.T  # the bias, if any
    normal_matrix = torch.eye(W.shape[1]).double() + ratio * W.T @ W
    pulls = states.Z[0] + ratio * (states.X[2] - constant) @ W
    minimum = torch.linalg.solve(normal_matrix, pulls.T).T
    P = [minimum + torch.linalg.svd(W).Vh[0], states.P[1]]
    assert descends(case, case.at(P, [0.98 * share, 1.0]), 1)
    assert not descends(case, case.at(P, [1.02 * share, 1.0]), 1)


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
    case = Case(
        Lifted.from_module(model), losses.get("squared"), inputs, target, [1.0] * 3, generator
    )

    def values(alpha):
        states = BatchStates(case.network, case.loss, target, inputs, case.mu, alpha)
        found = [case.F(states.X)]
        for _ in range(5):
            sweep(states, order)
            found.append(case.F(states.X))
        return torch.tensor(found, dtype=torch.float64)

    assert values(None).diff().max() > 1.0
    assert values(safe_alpha(case)).diff().max() < 0


def with_singular_values(values: torch.Tensor, n_in: int, n_out: int, seed: int) -> Lifted:
    """Identity, then one map with these singular values in random directions."""
    generator = torch.Generator().manual_seed(seed)
    model = mlp([1, n_in, n_out], "identity", seed=0, dtype=torch.float64)
    U, _ = torch.linalg.qr(torch.randn(n_out, n_out, generator=generator, dtype=torch.float64))
    V, _ = torch.linalg.qr(torch.randn(n_in, n_in, generator=generator, dtype=torch.float64))
    k = len(values)
    with torch.no_grad():
        model[-1].weight.copy_(U[:, :k] * values @ V[:, :k].T)
    return Lifted.from_module(model)


def share_of(network: Lifted) -> float:
    method = LPOM(mu=1.0, order="top-down")
    problem = Problem(network, losses.get("squared"))
    return float(method._alpha(network, problem, method.init(problem))[0])


@given(seeds, st.integers(1, 40), st.integers(1, 40), st.floats(1.0, 50.0), st.floats(0.1, 1e3))
@settings(max_examples=100)
def test_power_iteration_is_never_below_what_the_step_covers(seed, n_in, n_out, ahead, scale):
    """The leading singular value a little, or much, ahead of a cluster of all the others."""
    values = torch.full((min(n_in, n_out),), scale, dtype=torch.float64)
    values[0] = scale * ahead
    true = float(values.max()) ** 2
    share = share_of(with_singular_values(values, n_in, n_out, seed))
    assert share <= 2 / (1 + true)
    assert share >= 0.8 / (1 + true)  # and it is not needlessly short


@given(seeds, st.integers(2, 40))
def test_power_iteration_on_gaussian_matrices(seed, n):
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(n, n, generator=generator, dtype=torch.float64)
    values = torch.linalg.svdvals(matrix)
    share = share_of(with_singular_values(values, n, n, seed))
    assert 0.8 / (1 + float(values[0]) ** 2) <= share <= 2 / (1 + float(values[0]) ** 2)


@given(seeds, st.integers(2, 20), st.floats(0.01, 0.2))
def test_the_kept_vector_follows_weights_that_move(seed, n, size):
    """Two iterations a batch are enough while weights change by up to a fifth of their norm."""
    generator = torch.Generator().manual_seed(seed)
    network = with_singular_values(torch.linspace(1, 2, n).double(), n, n, seed)
    map_ = network[1].map
    assert isinstance(map_, Dense)
    method = LPOM(mu=1.0, order="top-down")
    problem = Problem(network, losses.get("squared"))
    state = method.init(problem)
    for _ in range(20):
        change = torch.randn(n, n, generator=generator, dtype=torch.float64)
        norm = torch.linalg.matrix_norm(map_.weight, 2)
        map_.weight.add_(change, alpha=float(size * norm / torch.linalg.matrix_norm(change, 2)))
        true = float(torch.linalg.matrix_norm(map_.weight, 2)) ** 2
        assert float(method._alpha(network, problem, state)[0]) <= 2 / (1 + true)


def test_the_share_counts_the_lipschitz_constants_of_both_layers():
    """Sigmoid below and a ramp of slope 4 above, mu 2 and 6, and the loss on the outputs."""
    model = mlp([2, 3, 4], "sigmoid", activations.get("sign").smoothed(0.5), seed=0)
    network = Lifted.from_module(model.double())
    method = LPOM(mu=[2.0, 6.0], order="top-down")
    problem = Problem(network, losses.get("hinge"))
    alpha = method._alpha(network, problem, method.init(problem))
    true = float(torch.linalg.matrix_norm(model[-2].weight.detach(), 2)) ** 2
    margin = (1 / float(alpha[0]) - 1) / (3 * 0.25 * 4 * true)
    assert 1.0 <= margin <= 1.2
    assert alpha[1] == pytest.approx(1 / (1 + 4 * 2 / 6))


@pytest.mark.parametrize("name", ["relu", "sigmoid", "tanh", "softplus"])
@pytest.mark.parametrize("noise", [0.0, 1e-4, 1e-2, 1.0])
def test_only_sweeps_that_truly_raise_F_are_called_diverging(name, noise):
    """In float32 and close to a perfect fit F is all rounding, and says nothing."""
    network = Lifted.from_module(mlp([10, 20, 20, 5], name, seed=0))
    problem = Problem(network, losses.get("squared"))
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(50, 10, generator=generator)
    outputs = network.feed_forward(inputs)[1][-1]
    batch = Batch(inputs, outputs + noise * torch.randn(50, 5, generator=generator))
    for rule, scale in [("safe", 1.0), ("plain", 20.0)]:
        for layer in network:
            layer.map.set_matrix(scale * layer.map.matrix())
        method = LPOM(order="top-down", sweeps=10, step_rule=rule)
        state = method.init(problem)
        method.end_epoch(problem, batch, state)
        assert list(state.remarks) == ([] if rule == "safe" else ["diverging sweep"])
