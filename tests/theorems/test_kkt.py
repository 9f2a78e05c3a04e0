"""Optimality (eqs. 17, 20, 27): residuals vanish at convergence; autograd agrees with all of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lpom import activations, losses
from lpom.activations import Activation
from lpom.methods import Batch
from lpom.methods.base import Problem
from lpom.methods.lpom import LPOM
from lpom.methods.lpom.states import BatchStates, sweep
from lpom.methods.lpom.weights import exact_step
from lpom.methods.optimizers import add_gradient
from lpom.network import Lifted, mlp
from lpom.objective import evaluate, kkt_residuals

from .strategies import ACTIVATIONS, SMOOTH, Case, cases, literal_F

moderate = st.floats(0.1, 2.0)


def leaves(case: Case) -> list[list[torch.Tensor]]:
    """Copies of all weights and biases, for autograd."""
    return [
        [parameter.detach().clone().requires_grad_() for parameter in layer.map.parameters()]
        for layer in case.network
    ]


@given(cases())
def test_F_is_eq_18_written_out(case):
    X = case.states(case.pre_activations())
    found = evaluate(case.network, case.loss, X, case.target, case.mu)
    expected = float(literal_F(case, X, leaves(case)).detach())
    assert found.total == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert found.total == pytest.approx(
        found.loss + sum(mu * gap for mu, gap in zip(case.mu, found.gaps, strict=True)), rel=1e-14
    )


@given(cases())
def test_feed_forward_states_leave_the_loss_alone(case):
    _, X = case.network.feed_forward(case.inputs)
    found = evaluate(case.network, case.loss, X, case.target, case.mu)
    loss = float(case.loss.value(X[-1], case.target).sum())
    for gap, x in zip(found.gaps, X[1:], strict=True):
        assert abs(gap) <= 1e-13 * float(1 + x.square().sum())
    assert found.loss == pytest.approx(loss, rel=1e-14)
    states, weights = kkt_residuals(case.network, case.loss, X, case.target, case.mu)
    assert states[:-1] == [0.0] * case.last and weights == [0.0] * len(case.network)


@given(cases())
def test_kkt_residuals_are_eqs_17_20_and_27(case):
    X = case.states(case.pre_activations())
    states, weights = kkt_residuals(case.network, case.loss, X, case.target, case.mu)
    W = [layer.map.matrix() for layer in case.network]
    bias = len(case.network[0].map.parameters()) == 2
    A = [torch.cat([x, torch.ones_like(x[:, :1])], 1) if bias else x for x in X[:-1]]
    for i in range(len(W)):
        miss = case.phi(i, A[i] @ W[i].T) - X[i + 1]
        gradient = miss.T @ A[i] / len(X[0])
        assert weights[i] == pytest.approx(float(gradient.square().mean().sqrt()), rel=1e-10)
        if i == case.last:
            pull = case.loss.gradient(X[-1], case.target) / case.mu[-1]
        else:
            above = case.phi(i + 1, A[i + 1] @ W[i + 1].T) - X[i + 2]
            pull = case.mu[i + 1] / case.mu[i] * above @ case.weight(i + 1)
        distance = X[i + 1] - case.phi(i, A[i] @ W[i].T - pull)
        expected = float(distance.square().mean().sqrt())
        assert states[i] == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(cases())
def test_weight_gradients_are_autograd_s(case):
    """``mu (phi(Z) - X_next)^T X`` is the derivative of F in W[i] and b[i], for any states."""
    X = case.states(case.pre_activations())
    W = leaves(case)
    flat = [parameter for parameters in W for parameter in parameters]
    expected = torch.autograd.grad(literal_F(case, X, W), flat)
    found = []
    for i, layer in enumerate(case.network):
        residual = case.phi(i, layer.map.apply(X[i])) - X[i + 1]
        one = torch.ones((), dtype=torch.float64)
        add_gradient(layer, X[i], residual, case.mu[i], None, one)
        found += [parameter.grad for parameter in layer.map.parameters()]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7 * float(1 + b.norm()))


@given(cases(), st.data())
def test_sample_weights_weigh_the_gradient(case, data):
    """As does F, whose samples they multiply; the batch's mean divides by their sum."""
    m = len(case.inputs)
    times = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=m, max_size=m)))
    weight = times.double()
    X = case.states(case.pre_activations())
    batch = Batch(case.inputs, case.target, weight)
    for i, layer in enumerate(case.network):
        residual = case.phi(i, layer.map.apply(X[i])) - X[i + 1]
        add_gradient(layer, X[i], residual, case.mu[i], weight, batch.total_weight)
        found = layer.map.parameters()[0].grad
        repeated = residual.repeat_interleave(times, 0).T @ X[i].repeat_interleave(times, 0)
        total = max(float(weight.sum()), 1.0)  # a batch that counts for nothing pulls nowhere
        torch.testing.assert_close(found, case.mu[i] * repeated / total, rtol=1e-10, atol=1e-10)
    F = evaluate(case.network, case.loss, X, case.target, case.mu, weight)
    each = [
        evaluate(case.network, case.loss, [x[j : j + 1] for x in X], t, case.mu).total
        for j, t in enumerate(case.target.split(1))
    ]
    expected = float(torch.tensor(each, dtype=torch.float64) @ weight)
    assert F.total == pytest.approx(expected, rel=1e-12, abs=1e-12)


@given(cases(acts=SMOOTH, scale=moderate))
def test_state_steps_follow_autograd_s_gradient(case):
    """At ``X = phi(P)`` the derivative of F in X[i + 1] is ``mu[i] (P - (Z - pull))``."""
    P = case.pre_activations(1.0)
    states = case.at(P)
    X = [x.clone().requires_grad_() for x in states.X]
    expected = torch.autograd.grad(literal_F(case, X, leaves(case)), X[1:])
    for i in range(len(P)):
        if i == case.last:
            pull = states.output_pull()
        else:
            pull = states.hidden_pull(i + 1, states.residual(i + 1))
        found = case.mu[i] * (P[i] - (states.Z[i] - pull))
        torch.testing.assert_close(found, expected[i], rtol=1e-6, atol=1e-6 * case.mu[i])


@given(
    cases(scale=st.floats(0.1, 0.7), mu=st.floats(0.8, 1.5)),
    st.sampled_from(["top-down", "paper", "parallel"]),
)
def test_sweeps_until_nothing_changes_solve_the_conditions_of_all_states(case, order):
    method = LPOM(mu=case.mu, order=order, sweeps=3000, tolerance=1e-12)
    X = method.settle(Problem(case.network, case.loss), Batch(case.inputs, case.target))
    _, start = case.network.feed_forward(case.inputs)
    before, _ = kkt_residuals(case.network, case.loss, start, case.target, case.mu)
    after, _ = kkt_residuals(case.network, case.loss, X, case.target, case.mu)
    assert max(after) <= 1e-9 * (1 + max(before) + max(float(x.norm()) for x in X))
    assert case.F(X) <= case.F(start) + 1e-12


def alternate(case: Case, rounds: int) -> BatchStates:
    """Safe sweeps and exact weight steps in turn, on one batch, until every residual is small."""
    method = LPOM(mu=case.mu, order="top-down")
    problem = Problem(case.network, case.loss)
    state = method.init(problem)
    states = BatchStates(case.network, case.loss, case.target, case.inputs, case.mu)
    for _ in range(rounds):
        states.alpha = method._alpha(case.network, problem, state)
        sweep(states, "top-down")
        for i, layer in enumerate(case.network):
            exact_step(layer, states.X[i], states.X[i + 1], iterations=5, ridge=1e-3)
        states.refresh_all(weights_moved=True)
        residuals = kkt_residuals(case.network, case.loss, states.X, case.target, case.mu)
        if max(*residuals[0], *residuals[1]) < 1e-8:
            return states
    raise AssertionError(f"after {rounds} rounds the residuals are {residuals}")


def full_batch(sizes: list[int], samples: int, hidden: Activation, output: Activation) -> Case:
    model = mlp(sizes, hidden, output, seed=3, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, sizes[0], generator=generator, dtype=torch.float64)
    target = output.phi(torch.randn(samples, sizes[-1], generator=generator, dtype=torch.float64))
    network = Lifted.from_module(model)
    return Case(network, losses.get("squared"), inputs, target, [1.0] * len(network), generator)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_states_and_exact_weights_in_turn_solve_eqs_20_and_27(activation):
    """One layer that cannot fit its 12 samples: a minimum with a loss and a gap."""
    case = full_batch([3, 2], 12, activation, activation)
    states = alternate(case, 1000)
    found = evaluate(case.network, case.loss, states.X, case.target, case.mu)
    assert found.loss > 0.01 and found.gaps[0] > 0.001


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_states_and_exact_weights_in_turn_solve_eqs_17_20_and_27(activation):
    """Two layers that can fit their 3 samples: F falls to zero, and X[1] is feed-forward again."""
    case = full_batch([5, 4, 2], 3, activation, activations.get("identity"))
    _, start = case.network.feed_forward(case.inputs)
    states = alternate(case, 1000)
    assert case.F(states.X) <= 1e-9 * case.F(start)


def test_a_saturated_state_is_not_taken_for_a_settled_one():
    """From Z = 2.8 the safe step first moves P alone: hardtanh says 1 until P falls below it."""
    one = torch.ones(1, 1, dtype=torch.float64)
    model = mlp([1, 1], "relu", "hardtanh", dtype=torch.float64)
    torch.nn.init.constant_(model[0].weight, 2.8)
    problem = Problem(Lifted.from_module(model), losses.get("squared"))
    method = LPOM(mu=1.0, order="top-down", sweeps=200, tolerance=1e-12)
    X = method.settle(problem, Batch(one, -one))
    assert float(X[-1]) == pytest.approx(0.9)  # x = 2.8 - (x + 1)
