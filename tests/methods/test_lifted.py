"""Lifted networks: the inconsistency that the paper shows, and LPOM without it; the blocks."""

from __future__ import annotations

import pytest
import torch

import lpom
from lpom.methods import Batch, LiftedNetworks, Problem
from lpom.objectives import kkt_residuals

FORMULATIONS = ["quadratic", "divergence"]


def problem_of(sizes=(4, 6, 5, 3), output="relu"):
    model = lpom.mlp(list(sizes), "relu", output, seed=0, dtype=torch.float64)
    return model, Problem(model, lpom.losses.get("squared"))


def data(n=30, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return X, torch.rand(n, 3, generator=generator, dtype=torch.float64)


def gradients(method, model, X, target, weight=None):
    """Of the objective as the paper writes it, by autograd; states from X[1] on, then weights."""
    X = [X[0], *(x.detach().clone().requires_grad_() for x in X[1:])]
    linear = [module for module in model if isinstance(module, torch.nn.Linear)]
    values = (X[-1] - target).square().sum(1) / 2
    for i, layer in enumerate(linear):
        Z = layer(X[i])
        if method.formulation == "quadratic":
            values = values + method.mu / 2 * (X[i + 1] - Z).square().sum(1)
        else:
            values = values + method.mu * (X[i + 1].square() / 2 - X[i + 1] * Z).sum(1)
    ridge = sum(parameter.square().sum() for parameter in model.parameters())
    total = (values if weight is None else values * weight).sum() + method.rho * ridge
    return total, X, torch.autograd.grad(total, [*X[1:], *(layer.weight for layer in linear)])


def projected(x, gradient):
    """How far a step along the gradient, kept at or above zero, would move x."""
    return float((x - (x - gradient).clamp(min=0)).detach().abs().max())


@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_feed_forward_states_are_stationary_for_lpom_and_not_for_lifted_networks(formulation):
    """Subsection "Advantages of LPOM": targets are the outputs, so that nothing is left to learn.

    Then every feed-forward state fulfils the conditions of LPOM, for states and weights. Those
    of a hidden state in a lifted network are off by its pull :math:`R_i W_i`, those of the
    weights by :math:`R_i^T X_i`, even without the ridge.
    """
    model, problem = problem_of()
    inputs, _ = data()
    Z, X = problem.graph.feed_forward(inputs)
    target = X[-1]

    states, weights = kkt_residuals(problem.graph, problem.loss, X, target, [1.0] * 4)
    assert max(states) < 1e-12 and max(weights) < 1e-12

    method = LiftedNetworks(mu=1.0, rho=0.0, formulation=formulation)
    _, _, found = gradients(method, model, X, target)
    for i in (1, 2):  # hidden states
        R = Z[i + 1] - X[i + 1] if formulation == "quadratic" else -X[i + 1]
        pull = R @ problem.chain[i].map.matrix()[:, :-1]
        phi_inverse = X[i] - Z[i]  # where X > 0; elsewhere any number above Z will do
        torch.testing.assert_close(found[i - 1], phi_inverse + pull)
        assert projected(X[i], found[i - 1]) > 0.1
    for i in range(3):
        R = Z[i + 1] - X[i + 1] if formulation == "quadratic" else -X[i + 1]
        torch.testing.assert_close(found[3 + i], R.T @ X[i])
        assert float(found[3 + i].abs().max()) > 0.1


@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_lifted_networks_leave_a_network_that_is_already_right(formulation):
    """The loss is zero before the step, and one step of block descent moves away from it."""
    model, problem = problem_of()
    inputs, _ = data()
    target = model(inputs).detach()
    method = LiftedNetworks(mu=1.0, rho=1.0, formulation=formulation, ridge=1.0)
    method.step(problem, Batch(inputs, target), method.init(problem))
    assert float((model(inputs).detach() - target).abs().max()) > 0.01


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("formulation", FORMULATIONS)
@pytest.mark.parametrize("rows", [30, 3], ids=["tall", "wide"])
def test_blocks_are_minimisers(formulation, weighted, rows):
    """After each block its own gradient vanishes; the weights' with their proximal term."""
    model, problem = problem_of(output="identity")
    inputs, target = data(rows)
    weight = torch.linspace(0.5, 2, rows, dtype=inputs.dtype) if weighted else None
    method = LiftedNetworks(
        mu=0.5,
        rho=0.3,
        formulation=formulation,
        iterations=100,
        ridge=0.7,
        sweeps=40 if formulation == "quadratic" else 1,
    )
    state = method.init(problem)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    states = method.settle(problem, Batch(inputs, target, weight), state)
    if formulation == "quadratic":  # convex in all states at once: every one is at its minimum
        _, X, found = gradients(method, model, states, target)
        assert projected(X[1], found[0]) < 1e-6 and projected(X[2], found[1]) < 1e-6
        assert float(found[2].abs().max()) < 1e-6  # the output has no constraint

    method.step(problem, Batch(inputs, target, weight), state)
    _, X, found = gradients(method, model, states, target, weight)
    linear = [module for module in model if isinstance(module, torch.nn.Linear)]
    for i, layer in enumerate(linear):
        design = torch.cat([X[i], torch.ones(rows, 1, dtype=inputs.dtype)], 1).detach()
        if weighted:
            design = weight.sqrt()[:, None] * design
        strength = method.mu * method.ridge * design.square().sum() / design.shape[1]
        proximal = strength * (layer.weight.detach() - before[2 * i])
        torch.testing.assert_close(found[3 + i], -proximal, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_objective_reported_is_that_of_the_formulation(formulation):
    model, problem = problem_of()
    inputs, target = data()
    weight = torch.linspace(0.5, 2, len(inputs), dtype=inputs.dtype)
    method = LiftedNetworks(mu=2.0, rho=0.1, formulation=formulation)
    state, batch = method.init(problem), Batch(inputs, target, weight)
    method.step(problem, batch, state)
    states = method.settle(problem, batch, state)
    total, _, _ = gradients(method, model, states, target, weight)
    found = method.objective(problem, batch, state).total
    assert found == pytest.approx(float(total.detach()), rel=1e-10)


def test_without_a_ridge_the_divergence_is_refused():
    _, problem = problem_of()
    with pytest.raises(ValueError, match="rho.*0"):
        LiftedNetworks(rho=0.0, formulation="divergence").init(problem)
    with pytest.raises(ValueError, match="formulation.*quadratic"):
        LiftedNetworks(formulation="quadratik").init(problem)
