"""Optimality (eqs. 17, 20, 27): residuals vanish at convergence; autograd agrees with all of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lpom import activations, losses, mlp
from lpom.activations import Activation
from lpom.methods import Batch
from lpom.objectives import evaluate, kkt_residuals
from lpom.states import States, Sweeps
from lpom.weights.blocks import Block, Use, blocks
from lpom.weights.exact import exact_step

from .networks import Skips
from .strategies import ACTIVATIONS, KINDS, SMOOTH, Case, cases, literal_F, of_kind

moderate = st.floats(0.1, 2.0)
every_kind = pytest.mark.parametrize("kind", KINDS)


def residuals(case: Case, X: list[Tensor]) -> tuple[list[float], list[float]]:
    return kkt_residuals(case.graph, case.loss, X, case.target, case.mu, case.switches)


def rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


@every_kind
@given(data=st.data())
@settings(max_examples=10)
def test_F_is_eq_18_written_out(kind, data):
    case = data.draw(of_kind(kind))
    X = case.states(case.pre_activations())
    found = evaluate(case.graph, case.loss, X, case.target, case.mu, None, case.switches)
    expected = float(literal_F(case, X).detach())
    assert found.total == pytest.approx(expected, rel=1e-9, abs=1e-9)
    gaps = zip(case.mu[1:], found.gaps, strict=True)
    assert found.total == pytest.approx(found.loss + sum(mu * gap for mu, gap in gaps), rel=1e-14)


@every_kind
@given(data=st.data())
@settings(max_examples=10)
def test_feed_forward_states_leave_the_loss_alone(kind, data):
    case = data.draw(of_kind(kind))
    X = case.feed_forward()
    found = evaluate(case.graph, case.loss, X, case.target, case.mu, None, case.switches)
    outputs = X[case.output]
    if not case.switches:  # else they are those of one pass alone
        torch.testing.assert_close(outputs, case.model(case.inputs).detach())
    for node, gap in zip(case.graph, found.gaps, strict=True):
        size = X[node.index].square().sum() + case.edge(node.index, X).square().sum()
        assert abs(gap) <= 1e-13 * float(1 + size.detach())
    assert found.loss == pytest.approx(float(case.loss.value(outputs, case.target).sum()), 1e-14)
    states, weights = residuals(case, X)
    assert [states[v - 1] for v in case.hidden] == [0.0] * len(case.hidden)
    assert weights == [0.0] * len(case.graph.parameters)


@given(cases())
def test_kkt_residuals_are_eqs_17_20_and_27(case):
    X = case.states(case.pre_activations())
    states, weights = residuals(case, X)
    bias = case.graph[1].edge.linear.bias is not None
    A = [torch.cat([x, torch.ones_like(x[:, :1])], 1) if bias else x for x in X[:-1]]

    def Z(v: int) -> Tensor:
        linear = case.graph[v].edge.linear
        W = torch.cat([linear.weight, linear.bias[:, None]], 1) if bias else linear.weight
        return A[v - 1] @ W.detach().T

    found = iter(weights)
    for v in range(1, len(X)):
        gradient = (case.phi(v, Z(v)) - X[v]).T @ A[v - 1] / len(X[0])
        width = case.weight(v).shape[1]
        assert next(found) == pytest.approx(rms(gradient[:, :width]), rel=1e-10)
        if bias:
            assert next(found) == pytest.approx(rms(gradient[:, width]), rel=1e-10)
        if v == case.output:
            pull = case.loss.gradient(X[v], case.target) / case.mu[v]
        else:
            above = case.phi(v + 1, Z(v + 1)) - X[v + 1]
            pull = case.mu[v + 1] / case.mu[v] * above @ case.weight(v + 1)
        expected = rms(X[v] - case.phi(v, Z(v) - pull))
        assert states[v - 1] == pytest.approx(expected, rel=1e-9, abs=1e-12)


@every_kind
@given(data=st.data())
@settings(max_examples=8)
def test_kkt_residuals_are_autograd_s(kind, data):
    """Pulls are the derivative of all of F but a state's own gap; weights have several uses."""
    case = data.draw(of_kind(kind, scale=moderate))
    X = [x.requires_grad_() for x in case.states(case.pre_activations())]
    states, weights = residuals(case, X)
    gradients = torch.autograd.grad(literal_F(case, X), case.graph.parameters)
    for parameter, gradient, found in zip(case.graph.parameters, gradients, weights, strict=True):
        largest = max(case.mu[node.index] for node in case.graph.uses[parameter])
        expected = rms(gradient) / largest / len(case.inputs)
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)
    for node in case.graph:
        v, act = node.index, node.activation
        Z = case.edge(v, X).detach()
        own = case.mu[v] * (act.conjugate(X[v]).sum() - (X[v] * Z).sum())
        (rest,) = torch.autograd.grad(literal_F(case, X) - own, X[v])
        distance = X[v] - act.phi(Z - rest / case.mu[v])
        size = 1 + float(rest.norm() / case.mu[v]) * case.gamma(v)
        assert states[v - 1] == pytest.approx(rms(distance.detach()), rel=1e-6, abs=1e-9 * size)


@torch.no_grad()
def carried(case: Case, states: States, weight: Tensor | None, total: float) -> list[Tensor]:
    """The gradients that the library leaves on the weights at these states."""
    sums = {parameter: torch.zeros_like(parameter) for parameter in case.graph.parameters}
    for node in case.graph:
        gradients = states.weight_gradients(node, states.residual(node), weight)
        for parameter, gradient in gradients.items():
            sums[parameter] += gradient / total
    return list(sums.values())


@every_kind
@given(data=st.data())
@settings(max_examples=10)
def test_weight_gradients_are_autograd_s(kind, data):
    """``mu (phi(Z) - X_next)^T X``, summed over uses, is the derivative of F, for any states."""
    case = data.draw(of_kind(kind))
    states = case.at(case.pre_activations())
    expected = torch.autograd.grad(literal_F(case, states.X), case.graph.parameters)
    for a, b in zip(carried(case, states, None, 1.0), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7 * float(1 + b.norm()))


@every_kind
@given(data=st.data())
@settings(max_examples=8)
def test_sample_weights_weigh_the_gradient(kind, data):
    """As does F, whose samples they multiply; the batch's mean divides by their sum."""
    case = data.draw(of_kind(kind))
    m = len(case.inputs)
    times = data.draw(st.lists(st.integers(0, 5), min_size=m, max_size=m))
    weight = torch.tensor(times, dtype=torch.float64)
    states = case.at(case.pre_activations())
    F = literal_F(case, states.X, weight)
    assert case.F(states.X, weight) == pytest.approx(float(F.detach()), rel=1e-9, abs=1e-9)
    total = max(float(weight.sum()), 1.0)  # a batch that counts for nothing pulls nowhere
    expected = torch.autograd.grad(F / total, case.graph.parameters)
    batch = Batch(case.inputs, case.target, weight)
    for a, b in zip(carried(case, states, weight, batch.total_weight), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7 * float(1 + b.norm()))


@given(cases(), st.data())
def test_a_sample_s_weight_is_a_number_of_repetitions(case, data):
    m = len(case.inputs)
    times = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=m, max_size=m)))
    states = case.at(case.pre_activations())
    X = [x.detach() for x in states.X]
    total = max(float(times.sum()), 1.0)
    gradients = carried(case, states, times.double(), total)
    of = dict(zip(case.graph.parameters, gradients, strict=True))
    for node in case.graph:
        v = node.index
        R, below = states.residual(node).repeat_interleave(times, 0), X[v - 1]
        expected = case.mu[v] / total * R.T @ below.repeat_interleave(times, 0)
        found = of[node.edge.linear.weight]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10 * (1 + R.norm()))
    each = [
        evaluate(case.graph, case.loss, [x[j : j + 1] for x in X], t, case.mu).total
        for j, t in enumerate(case.target.split(1))
    ]
    expected = float(torch.tensor(each, dtype=torch.float64) @ times.double())
    assert case.F(X, times.double()) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@every_kind
@given(data=st.data())
@settings(max_examples=8)
def test_state_steps_follow_autograd_s_gradient(kind, data):
    """At ``X = phi(P)`` the derivative of F in X[v] is ``mu[v] (P - (Z - pull))``."""
    case = data.draw(of_kind(kind, acts=SMOOTH, scale=moderate))
    P = case.pre_activations(1.0)
    states = case.at(P)
    gradients = torch.autograd.grad(literal_F(case, states.X), states.X[1:])
    for node, expected in zip(case.graph, gradients, strict=True):
        v = node.index
        if not node.activation.elementwise:  # whose P its state does not determine
            continue
        with torch.no_grad():
            states.gather(node)
        pull = 0.0 if states.pulls[v] is None else states.pulls[v]
        found = case.mu[v] * (P[v] - (states.Z(node) - pull))
        atol = 1e-6 * case.mu[v] + 1e-9 * float(expected.norm())
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=atol)


@every_kind
@given(data=st.data(), order=st.sampled_from(["top-down", "paper", "parallel"]))
@settings(max_examples=5)
def test_sweeps_until_nothing_changes_solve_the_conditions_of_all_states(kind, data, order):
    case = data.draw(of_kind(kind, scale=st.floats(0.1, 0.7), mu=st.floats(0.8, 1.5)))
    if kind != "chain":
        case.calm(0.4)
    method = case.method(order=order, max_sweeps=3000, tolerance=1e-12)
    states = method.settle(case.problem, case.batch, method.init(case.problem))
    case.switches.update(states.switches)
    start = case.feed_forward()
    before, _ = residuals(case, start)
    after, _ = residuals(case, states.X)
    size = max(float(x.detach().norm()) for x in states.X)
    assert max(after) <= 1e-9 * (1 + max(before) + size)
    assert case.F(states.X) <= case.F(start) + 1e-12 * (1 + max(case.mu))


def uses(case: Case, states: States, block: Block) -> list[Use]:
    """All uses of a block of weights, as the method counts them."""
    largest = max(case.mu[v] for v in block.uses)
    return [
        states.use(case.graph[v], None, case.mu[v] / largest, fresh=block.alone) for v in block.uses
    ]


@torch.no_grad()
def alternate(case: Case, rounds: int) -> States:
    """Safe sweeps and exact weight steps in turn, on one batch, until every residual is small."""
    how, states = Sweeps(order="top-down"), case.at()
    for _ in range(rounds):
        states.settle(how)
        for block in blocks(case.graph):
            exact_step(block, uses(case, states, block), iterations=5, ridge=1e-3)
            states.weights_moved()
        found = residuals(case, states.X)
        if max(*found[0], *found[1]) < 1e-8:
            return states
    raise AssertionError(f"after {rounds} rounds the residuals are {found}")


def full_batch(model: nn.Module, shape: tuple[int, int], output: Activation) -> Case:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(*shape, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        width = model(inputs).shape[1]
    target = output.phi(torch.randn(shape[0], width, generator=generator, dtype=torch.float64))
    case = Case.of(model, losses.get("squared"), inputs, target, [], generator)
    case.mu.extend([1.0] * len(case.graph))
    return case


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_states_and_exact_weights_in_turn_solve_eqs_20_and_27(activation):
    """One layer that cannot fit its 12 samples: a minimum with a loss and a gap."""
    model = mlp([3, 2], activation, activation, seed=3, dtype=torch.float64)
    case = full_batch(model, (12, 3), activation)
    states = alternate(case, 1000)
    found = evaluate(case.graph, case.loss, states.X, case.target, case.mu)
    assert found.loss > 0.01 and found.gaps[0] > 0.001


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_states_and_exact_weights_in_turn_solve_eqs_17_20_and_27(activation):
    """Two layers that can fit their 3 samples: F falls to zero, and X[1] is feed-forward again."""
    identity = activations.get("identity")
    case = full_batch(mlp([5, 4, 2], activation, seed=3, dtype=torch.float64), (3, 5), identity)
    start = case.feed_forward()
    states = alternate(case, 1000)
    assert case.F(states.X) <= 1e-9 * case.F(start)


def test_states_and_exact_weights_in_turn_solve_all_conditions_of_a_graph():
    """With additions and a concatenation over a block."""
    acts = [activations.get(a).to_module() for a in ("leaky_relu", "tanh", "identity")]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Skips(3, 4, acts).double()
    case = full_batch(model, (4, 3), activations.get("identity"))
    start = case.F(case.feed_forward())
    assert case.F(alternate(case, 1000).X) < 0.9 * start


@every_kind
@given(data=st.data())
@settings(max_examples=3)
def test_exact_steps_solve_eq_20_for_weights_with_all_their_uses(kind, data):
    """The states stand still; one iteration after the other on one block of weights."""
    acts = [activations.get(name) for name in ("identity", "leaky_relu", "softplus")]
    mu = st.floats(0.5, 2.0)
    case = data.draw(of_kind(kind, acts=acts, scale=st.floats(0.3, 1.0), mu=mu))
    states = case.at(case.pre_activations(0.5))
    for block in blocks(case.graph):
        before = dict(zip(case.graph.parameters, residuals(case, states.X)[1], strict=True))
        exact_step(block, uses(case, states, block), iterations=30, ridge=0.02)
        states.weights_moved()
        after = dict(zip(case.graph.parameters, residuals(case, states.X)[1], strict=True))
        for parameter in block.parameters:
            assert after[parameter] <= 0.1 * max(before[p] for p in block.parameters) + 1e-9


def test_a_saturated_state_is_not_taken_for_a_settled_one():
    """From Z = 2.8 the safe step first moves P alone: hardtanh says 1 until P falls below it."""
    one = torch.ones(1, 1, dtype=torch.float64)
    model = mlp([1, 1], "relu", "hardtanh", dtype=torch.float64)
    torch.nn.init.constant_(model[0].weight, 2.8)
    case = Case.of(model, losses.get("squared"), one, -one, [1.0])
    method = case.method(order="top-down", max_sweeps=200, tolerance=1e-12)
    states = method.settle(case.problem, case.batch, method.init(case.problem))
    assert float(states.X[-1].detach()) == pytest.approx(0.9)  # x = 2.8 - (x + 1)
