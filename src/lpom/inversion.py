r"""Inversion: what went into a layer, a quantiser or a network, from what came out.

Of one layer :math:`y = \phi(A u + b)` with a monotone :math:`\phi`, the gap

.. math:: \min_u \; D(y, A u + b) + h(u), \qquad
    D(y, z) = \Phi^*(y) + \Phi(z) - \langle y, z \rangle

is convex in u if the prior h is, with the gradient :math:`A^T (\phi(A u + b) - y)`. Of several
layers the hidden states :math:`x_i = \phi_i(p_i)` are variables too, and the sum of the gaps is
convex in each: they move one by one, from the top down, by the safe step of `lpom.states`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from lpom.activations import Activation, Identity, from_module, is_activation
from lpom.checks import check_number
from lpom.exceptions import ConvergenceWarning, UntrainableError, warn
from lpom.modes import evaluating
from lpom.penalties import Penalty
from lpom.terms import (
    Elementwise,
    FenchelYoung,
    Gap,
    Gaussian,
    Prior,
    Sparse,
    TotalVariation,
    by_row,
    dot,
    size,
)

__all__ = ["FenchelYoung", "Gaussian", "Gap", "Result", "Sparse", "TotalVariation", "invert"]

_MARGIN = 1.02  # power iteration sees a norm from below


@final
@dataclass(frozen=True)
class Result:
    """Inputs ``x`` with a row per row of y; the rest has one number per row.

    ``residual`` is that of the optimality condition, relative to the size of its terms.
    """

    x: Tensor
    objective: Tensor
    residual: Tensor
    n_iter: Tensor
    converged: Tensor


@final
class Layer:
    """``phi(A(x))`` with A affine; its adjoint is autograd on A alone."""

    def __init__(self, modules: Sequence[nn.Module], activation: Activation) -> None:
        self.edge, self.activation = nn.Sequential(*modules), activation
        self.gap = Gap(activation)
        self.norm = 0.0

    def pulled(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """A(x), and the gradient of D(y, A(x)) for x."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            z = self.edge(x)
        (pull,) = torch.autograd.grad(z, x, self.gap.gradient(z.detach(), y))
        return z.detach(), pull

    def measure(self, x: Tensor, iterations: int = 60) -> Tensor:
        """Find the norm of A for inputs like one row x by power iteration; phi(A(x))."""
        zero = self.edge(torch.zeros_like(x))
        generator = torch.Generator().manual_seed(0)
        v, w = (torch.randn(8, *x.shape[1:], generator=generator).to(x) for _ in range(2))
        both = self.edge(v + w) - self.edge(v) - self.edge(w) + zero
        if not float(both.abs().max()) <= 1e-3 * float((self.edge(v) - zero).abs().max() + 1e-30):
            raise UntrainableError(f"not affine, as inversion needs it (max-pooling?): {self.edge}")
        v = v[:1]
        for _ in range(iterations):
            with torch.enable_grad():
                v = (v / v.norm()).requires_grad_()
                z = self.edge(v)
            image = z.detach() - zero
            (v,) = torch.autograd.grad(z, v, image)
        self.norm = _MARGIN * float(image.norm())
        return self.activation.phi(self.edge(x))


def layers_of(model: nn.Module) -> list[Layer]:
    """The layers of a Sequential: affine modules, each time up to an activation."""
    layers, between = list[Layer](), list[nn.Module]()
    for name, module in _flat(model, ""):
        if not is_activation(module):
            between.append(module)
            continue
        activation = from_module(module)
        if activation.slope_bound > 0:
            raise UntrainableError(f"{name} is not monotone, so its gap is not convex: {module}.")
        layers.append(Layer(between, activation))
        between = []
    if between:
        layers.append(Layer(between, Identity()))
    for layer in layers[:-1]:
        if layer.activation.jumps:
            raise UntrainableError(f"{layer.activation} jumps, which only the last one may do.")
    return layers


def _flat(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    if type(module) is nn.Sequential:
        for key, child in module.named_children():
            yield from _flat(child, f"{name}.{key}".lstrip("."))
    else:
        yield name, module


@torch.no_grad()
def invert(
    model: nn.Module,
    y: Tensor,
    *,
    prior: Prior | Penalty | None = None,
    start: Tensor | None = None,
    max_iter: int = 2000,
    tol: float = 1e-5,
) -> Result:
    """Find inputs for which ``model`` gives ``y``; each row is a problem by itself.

    One layer is a convex problem, solved by accelerated proximal gradient steps; of several layers
    the input and the hidden states move block by block, and a start may matter. The objective
    never rises.

    Parameters
    ----------
    model : an ``nn.Sequential`` of affine modules and monotone activations; it is not changed
    y : its outputs, with noise perhaps
    prior : one of `lpom.penalties` that acts on each number by itself (L1, Box), or one of this
        module; weighed against the sum of the gaps of a row
    start : inputs to begin with; by default zeros, of the size of the first Linear layer
    tol : a row has converged if the residual of its optimality condition is below

    >>> model = nn.Sequential(nn.Linear(3, 30), nn.ReLU())
    >>> u = torch.tensor([[1.0, -1.0, 0.5]])
    >>> bool((invert(model, model(u).detach()).x - u).abs().max() < 1e-3)
    True
    """
    check_number("max_iter", max_iter, whole=True)
    check_number("tol", tol)
    layers = layers_of(model)
    if start is None:
        first = next(iter(layers[0].edge), None)
        if not isinstance(first, nn.Linear):
            raise ValueError("the model does not begin with a Linear layer: give `start`.")
        start = y.new_zeros(len(y), first.in_features)
    known = Elementwise(prior) if isinstance(prior, Penalty) else prior
    with evaluating(model):
        x = start[:1]
        for layer in layers:
            x = layer.measure(x)
        if x.shape[1:] != y.shape[1:]:
            raise ValueError(f"the model gives {tuple(x.shape[1:])} per row, y has {y.shape[1:]}.")
        last = layers[-1].activation
        y = y.clamp(last.lower, last.upper)  # noise may have brought it out of the range
        return _Solver(layers, known, tol).solve(start.clone(), y, max_iter)


class _Solver:
    """Sweeps with momentum, which each row drops where its objective would rise."""

    def __init__(self, layers: list[Layer], prior: Prior | None, tol: float) -> None:
        self.layers, self.prior, self.tol = layers, prior, tol

    def solve(self, start: Tensor, y: Tensor, max_iter: int) -> Result:
        V = [start]  # the input, then the hidden states by their p
        for layer in self.layers[:-1]:
            below = V[0] if len(V) == 1 else self.layers[len(V) - 2].activation.phi(V[-1])
            V.append(layer.edge(below))
        n = len(y)
        before = [v.clone() for v in V]
        t, slower = y.new_ones(n), y.new_ones(n)
        objective = self.objective(V, y)
        slack = 32 * torch.finfo(y.dtype).eps * (1 + objective.abs())  # rounding of the sums
        residual = torch.full_like(objective, math.inf)
        n_iter = torch.zeros(n, dtype=torch.long)
        for _ in range(max_iter):
            rows = (residual > self.tol).nonzero()[:, 0]
            if not len(rows):
                break
            n_iter[rows] += 1
            old, older, target = [v[rows] for v in V], [v[rows] for v in before], y[rows]
            ahead = (1 + (1 + 4 * t[rows] ** 2).sqrt()) / 2
            momentum = (t[rows] - 1) / ahead
            point = [v + by_row(momentum, v) * (v - w) for v, w in zip(old, older, strict=True)]
            new, found = self.sweep(point, target, slower[rows])
            value = self.objective(new, target)
            falls = value <= objective[rows] + slack[rows]
            turned = sum(dot(p - b, b - a) for p, b, a in zip(point, new, old, strict=True)) > 0
            for v, w, a, b in zip(V, before, old, new, strict=True):
                w[rows] = a
                v[rows] = torch.where(by_row(falls, a), b, a)
            objective[rows] = torch.where(falls, value, objective[rows])
            residual[rows] = torch.where(falls, found, residual[rows])
            t[rows] = torch.where(falls & ~turned, ahead, 1.0)
            factor = torch.where(falls, 0.9, torch.where(momentum > 0, 1.0, 2.0))
            slower[rows] = (slower[rows] * factor.to(slower)).clamp_min(1)
            residual[rows[slower[rows] > 1e6]] = 0.0  # nothing is left but rounding
        converged = residual <= self.tol
        if missing := int((~converged).sum()):
            message = f"{missing} of {n} rows did not converge. Raise max_iter ({max_iter}) or tol."
            warn(message, ConvergenceWarning)
        return Result(V[0], objective, residual, n_iter, converged)

    def sweep(self, V: list[Tensor], y: Tensor, slower: Tensor) -> tuple[list[Tensor], Tensor]:
        """Move every state, from the top down; the relative residual of the conditions."""
        V, X = list(V), self.states(V, y)
        residual = torch.zeros_like(slower, dtype=torch.float64)
        for k in range(len(V) - 1, 0, -1):
            layer, above = self.layers[k - 1], self.layers[k]
            z = layer.edge(X[k - 1])
            step = V[k] - z + above.pulled(X[k], X[k + 1])[1]
            alpha = 1 / (1 + layer.gap.lipschitz * above.gap.lipschitz * above.norm**2)
            residual = torch.maximum(residual, size(step) / (size(V[k]) + size(z) + 1e-30))
            V[k] = V[k] - by_row(alpha / slower, step) * step
            X[k] = layer.activation.phi(V[k])
        first = self.layers[0]
        z, pull = first.pulled(V[0], X[1])
        step = 1 / (slower * first.gap.lipschitz * max(first.norm, 1e-30) ** 2)
        moved = V[0] - by_row(step, pull) * pull
        moved = moved if self.prior is None else self.prior.prox(moved, step)
        scale = first.norm * torch.maximum(size(X[1]), size(first.activation.phi(z))) + 1e-30
        residual = torch.maximum(residual, size(moved - V[0]) / step / scale)
        return [moved, *V[1:]], residual

    def states(self, V: list[Tensor], y: Tensor) -> list[Tensor]:
        hidden = zip(self.layers, V[1:], strict=False)
        return [V[0], *(layer.activation.phi(p) for layer, p in hidden), y]

    def objective(self, V: list[Tensor], y: Tensor) -> Tensor:
        X = self.states(V, y)
        total = torch.zeros(len(y), dtype=torch.float64)
        for layer, below, above in zip(self.layers, X[:-1], X[1:], strict=True):
            total = total + layer.gap.value(layer.edge(below), above)
        return total if self.prior is None else total + self.prior.value(V[0])
