"""One block of states at a time, moved by the library's own step: shared by Theorems 2 and 3."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lpom.states import States

from .strategies import Case


@torch.no_grad()
def move_block(case: Case, states: States, v: int, alpha: float | Tensor | None = None) -> None:
    """One step of the state ``X[v]`` (eq. 25, or 28 for the outputs), the others fixed."""
    states.gather(case.graph[v])
    states.move(case.graph[v], alpha)


def iterate(case: Case, P: list[Tensor], v: int) -> Tensor:
    """``X[v]`` after one plain iteration from ``X = phi(P)``."""
    states = case.at(P)
    move_block(case, states, v)
    return states.X[v].detach()


def put(values: list[Tensor], v: int, value: Tensor) -> list[Tensor]:
    return [*values[:v], value, *values[v + 1 :]]


@torch.no_grad()
def settle(case: Case, states: States, v: int, rate: float) -> None:
    """Iterate ``X[v]`` to its limit; each movement must be at most ``rate`` times the last."""
    movement = math.inf
    for _ in range(500):
        before = states.X[v]
        move_block(case, states, v)
        moved = float((states.X[v] - before).norm())
        size = float(1 + states.P[v].norm() + states.Z(case.graph[v]).norm())
        assert moved <= rate * movement * (1 + 1e-9) + 1e-13 * size
        if moved <= 1e-14 * size:
            return
        movement = moved
    raise AssertionError(f"still moving by {moved:g} after 500 iterations at rate {rate:g}")


@torch.no_grad()
def assert_minimum(case: Case, states: States, v: int) -> None:
    r"""F grows away from ``X[v]`` at least as ``mu / (2 gamma) |change|**2``, in any direction.

    So strongly convex is the conjugate; the rest of the block's objective is convex.
    """
    X, P = states.X, states.P[v]
    lowest = case.F(X)
    for size in (1e-3, 0.03, 1.0, 10.0):
        other = case.phi(v, P + size * case.normal(*P.shape))
        growth = case.F(put(X, v, other)) - lowest
        strong = case.mu[v] / (2 * case.gamma(v)) * (other - X[v]).square().sum()
        assert growth >= strong * (1 - 1e-6) - 1e-11 * (1 + lowest)
