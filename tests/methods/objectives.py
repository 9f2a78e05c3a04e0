"""The objective of every method once more, written with plain torch modules only.

Each takes a trial and its variables, so that autograd gives the optimality conditions as well.
"""

from __future__ import annotations

import torch

LINEAR = torch.nn.Linear


def layers(model):
    """(linear, activation) pairs; no activation is the identity."""
    starts = [k for k, module in enumerate(model) if isinstance(module, LINEAR)]
    stops = [*starts[1:], len(model)]
    return [(model[a], model[a + 1 : b]) for a, b in zip(starts, stops, strict=True)]


def square(values):
    return values.square().sum(1) / 2


def back_propagation(trial, v):
    return trial.loss.value(trial.model(trial.batch.inputs), trial.batch.target)


def eq3(trial, v):
    value, X = trial.loss.value(v["X"][-1], trial.batch.target), v["X"]
    for i, (linear, phi) in enumerate(layers(trial.model)):
        value = value + trial.method.mu * square(X[i + 1] - phi(linear(X[i])))
    return value


def eq5(trial, v):
    X, U = v["X"], v["U"]
    value = trial.loss.value(X[-1], trial.batch.target)
    for i, (linear, phi) in enumerate(layers(trial.model)):
        both = square(U[i] - linear(X[i])) + square(X[i + 1] - phi(U[i]))
        value = value + trial.state.mu[i] * both
    return value


def eq6(trial, v):
    X, U, method = v["X"], v["U"], trial.method
    *hidden, (output, _) = layers(trial.model)
    value = trial.loss.value(U[-1], trial.batch.target)
    value = value + method.beta * square(U[-1] - output(X[-1]) + trial.state.M)
    for i, (linear, phi) in enumerate(hidden):
        value = value + method.mu * (square(U[i] - linear(X[i])) + square(X[i + 1] - phi(U[i])))
    return value


def eq8(trial, v):
    X, U, A, B = v["X"], v["U"], trial.state.A, trial.state.B
    value = trial.loss.value(X[-1], trial.batch.target)
    for i, (linear, phi) in enumerate(layers(trial.model)):
        both = square(U[i] - X[i] + A[i]) + square(X[i + 1] - phi(linear(U[i])) + B[i])
        value = value + trial.method.mu * both
    return value


def eq10(trial, v):
    X = v["X"]
    value = trial.loss.value(X[-1], trial.batch.target)
    for i, (linear, _) in enumerate(layers(trial.model)):
        value = value + trial.method.mu * square(X[i + 1] - linear(X[i]))
    return value


def eq10_with_ridge(trial, v):
    """The ridge is no sum over samples: each bears its share of it."""
    ridge = sum(parameter.square().sum() for parameter in trial.model.parameters())
    return eq10(trial, v) + trial.method.rho * ridge / trial.total_weight


def eq18(trial, v):
    """With f and g of Table 1, each put together with the square to stay finite in form."""
    value, X = trial.loss.value(v["X"][-1], trial.batch.target), v["X"]
    for i, (linear, phi) in enumerate(layers(trial.model)):
        x, z = X[i + 1], linear(X[i])
        kind = type(phi[0]).__name__ if len(phi) else "Identity"
        if kind == "Tanh":
            f = ((1 - x) * torch.log(1 - x) + (1 + x) * torch.log(1 + x)) / 2 - x**2 / 2
            g = torch.log(torch.cosh(z)) - z**2 / 2
        elif kind == "ReLU":
            f, g = torch.zeros_like(x), -(z.clamp(max=0) ** 2) / 2
        else:
            f, g = torch.zeros_like(x), torch.zeros_like(z)
        mu = trial.state.mu[i + 1] if trial.state.mu else 20.0  # what gaps are measured with
        value = value + mu * ((f + g).sum(1) + square(x - z))
    return value


def copies_and_outputs(trial):
    """What the multipliers of eq. 8 are there for: both constraints of every layer."""
    X, U = trial.state.X, trial.state.U
    pairs = enumerate(layers(trial.model))
    return [
        gap for i, (linear, phi) in pairs for gap in (U[i] - X[i], X[i + 1] - phi(linear(U[i])))
    ]


def output(trial):
    """The one constraint of eq. 6 that has a multiplier."""
    return [trial.state.U[-1] - trial.model[-1](trial.state.X[-1])]
