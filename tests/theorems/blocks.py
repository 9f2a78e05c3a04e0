"""One block of states at a time, moved by the library's own step: shared by Theorems 2 and 3."""

from __future__ import annotations

import math

from torch import Tensor

from lpom.methods.lpom.states import BatchStates

from .strategies import Case


def move_block(states: BatchStates, i: int) -> None:
    """One step of the state ``X[i]`` (eq. 25, or 28 for the outputs), the others fixed."""
    if i == len(states.network):
        states.move(i - 1, states.output_pull())
    else:
        states.move(i - 1, states.hidden_pull(i, states.residual(i)))
        states.refresh(i)


def iterate(case: Case, P: list[Tensor], i: int) -> Tensor:
    """``X[i]`` after one plain iteration from ``X[j + 1] = phi_j(P[j])``."""
    states = case.at(P)
    move_block(states, i)
    return states.X[i]


def settle(states: BatchStates, i: int, rate: float) -> None:
    """Iterate ``X[i]`` to its limit; each movement must be at most ``rate`` times the last."""
    movement = math.inf
    for _ in range(500):
        before = states.X[i]
        move_block(states, i)
        moved = float((states.X[i] - before).norm())
        size = float(1 + states.P[i - 1].norm() + states.Z[i - 1].norm())
        assert moved <= rate * movement * (1 + 1e-9) + 1e-13 * size
        if moved <= 1e-14 * size:
            return
        movement = moved
    raise AssertionError(f"still moving by {moved:g} after 500 iterations at rate {rate:g}")


def assert_minimum(case: Case, states: BatchStates, i: int) -> None:
    r"""F grows away from ``X[i]`` at least as ``mu / (2 gamma) |change|**2``, in any direction.

    So strongly convex is the conjugate; the rest of the block's objective is convex.
    """
    X, P = states.X, states.P[i - 1]
    lowest = case.F(X)
    for size in (1e-3, 0.03, 1.0, 10.0):
        other = case.phi(i - 1, P + size * case.normal(*P.shape))
        growth = case.F([*X[:i], other, *X[i + 1 :]]) - lowest
        strong = case.mu[i - 1] / (2 * case.gamma(i - 1)) * (other - X[i]).square().sum()
        assert growth >= strong * (1 - 1e-6) - 1e-11 * (1 + lowest)
