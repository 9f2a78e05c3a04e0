"""Penalties at work: on which weights, how strong, and their steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, final

import torch
from torch import Tensor, nn

from lpom.penalties import Penalty, Sparse, Step
from lpom.settings import geometric
from lpom.weights.adaptive import step_sizes

#: With a target, the share of the run after which what vanished stays so; how much a strength grows
#: until then; and after how many steps it is seen anew which parts are the largest.
SETTLED, GROWTH, LOOK_EVERY = 0.75, 1e3, 10


@dataclass
class Term:
    """A penalty, the weights it acts on by name, and its strength now.

    With a target, ``free`` are the parts of each weight that the penalty passes over; once
    ``settled`` the others are gone for good. ``behind`` are the weights that an optimiser moves
    where the penalty is lazy, until it is settled.
    """

    penalty: Penalty
    weights: dict[str, nn.Parameter]
    strength: float
    free: dict[str, Tensor] = field(default_factory=dict)
    settled: bool = False
    behind: dict[str, Tensor] = field(default_factory=dict)

    @property
    def target(self) -> Sparse | None:
        """The penalty, if it has a target."""
        sparse = self.penalty if isinstance(self.penalty, Sparse) else None
        return sparse if sparse is not None and sparse.keep is not None else None

    def value(self) -> float:
        """Strength times the sum of h."""
        total = sum(self._value(name, W.detach()) for name, W in self.weights.items())
        if math.isinf(self.strength):  # a constraint, which holds to rounding
            sizes = [float(W.detach().abs().sum()) for W in self.weights.values()]
            return 0.0 if total <= 1e-5 * sum(sizes) else math.inf
        return self.strength * total

    def _value(self, name: str, W: Tensor) -> float:
        sparse = self.target
        if sparse is None or name not in self.free:
            return float(self.penalty.value(W))
        return float(sparse.value(sparse.restrict(W, ~self.free[name])))

    def prox(self, name: str, W: Tensor, step: Step) -> Tensor:
        sparse = self.target
        if sparse is None or name not in self.free:
            unbound = math.isinf(self.strength)  # whatever the step, which may be zero
            return self.penalty.prox(W, math.inf if unbound else step * self.strength)
        if self.settled or sparse.lazy:
            return sparse.restrict(W, self.free[name])
        return sparse.prox_but(W, step * self.strength, self.free[name])

    @torch.no_grad()
    def advance(self, progress: float, look: bool) -> None:
        """Be as strong as this share of the run wants it; ``look`` which parts are the largest."""
        sparse = self.target
        if sparse is None:
            self.strength = self.penalty.strength_at(progress)
        elif not self.settled:
            growth = min(progress / SETTLED, 1.0)
            self.strength = sparse.strength_at(progress) * GROWTH**growth
            self.settled = progress >= SETTLED
            if look or self.settled:
                self.free = self._largest(sparse, geometric((1.0, sparse.keep or 1.0), growth))
            if self.settled:
                for name, W in self.weights.items():
                    W.copy_(sparse.restrict(self.behind.pop(name, W), self.free[name]))

    def precede(self, name: str, W: Tensor) -> None:
        """Before an optimiser's step: the weights that it is to move."""
        if name in self.behind:
            W.copy_(self.behind[name])

    def follow(self, name: str, W: Tensor, step: Callable[[], Step]) -> None:
        """After it: the weights that the network is to have, ``step`` being that of each."""
        if self.penalty.lazy and not self.settled:
            if self.penalty.bound is not None:
                W.clamp_(-self.penalty.bound, self.penalty.bound)
            self.behind[name] = self.behind.get(name, torch.empty_like(W)).copy_(W)
        projects = self.settled or self.penalty.lazy
        W.copy_(self.prox(name, W, math.inf if projects else self.penalty.every * step()))

    def _largest(self, sparse: Sparse, share: float) -> dict[str, Tensor]:
        """This share of the parts of all weights together, but one of each weight at least."""
        sizes = {name: sparse.sizes(self.behind.get(name, W)) for name, W in self.weights.items()}
        together = torch.cat([size.flatten() for size in sizes.values()])
        kept = max(1, round(share * len(together)))
        least = together.kthvalue(len(together) - kept + 1).values  # ten times as fast as topk
        return {name: size >= torch.minimum(least, size.max()) for name, size in sizes.items()}


def _settles(term: Term) -> float:
    if term.target is not None:
        return SETTLED
    if term.penalty.lazy:
        return 0.0
    shares = [k / 100 for k in range(101)]
    bound = [share for share in shares if math.isinf(term.penalty.strength_at(share))]
    return bound[0] if bound else 0.0  # where it becomes a constraint, if ever


@final
class Penalised:
    """All penalties of a run. Without any it does nothing.

    ``multipliers`` are those of exact steps, by the name of a block's first weight: of convex
    penalties, where they come ever closer to the ones that solve the problem.
    """

    def __init__(
        self,
        penalties: Penalty | Mapping[str, Penalty] | None = None,
        names: Mapping[nn.Parameter, str] | None = None,
    ) -> None:
        self.terms: list[Term] = []
        self._of: dict[nn.Parameter, tuple[Term, str]] = {}
        self.multipliers: dict[str, Tensor] = {}
        self._steps = 0
        self._progress = 0.0
        self._last = False  # whether this is the last step of the run
        if penalties is None or names is None:
            return
        names = {p: name for p, name in names.items() if p.requires_grad}
        if isinstance(penalties, Penalty):
            found = {name: p for p, name in names.items() if p.ndim >= 2}
            self._add(penalties, found, "a weight that is a matrix or a kernel")
            return
        for pattern, penalty in penalties.items():
            found = {
                name: p
                for p, name in names.items()
                if fnmatchcase(name, pattern) and p not in self._of
            }
            self._add(penalty, found, f"{pattern!r} among {', '.join(names.values())}")

    def _add(self, penalty: Penalty, weights: dict[str, nn.Parameter], wanted: str) -> None:
        if not weights:
            raise ValueError(f"penalties: there is no {wanted} for {penalty!r} to act on.")
        flat = [name for name, W in weights.items() if W.ndim < penalty.least_dimensions]
        if flat:
            raise ValueError(
                f"penalties: {type(penalty).__name__} acts on matrices and kernels, and {flat[0]} "
                "has one dimension. Name the weights alone, e.g. '*.weight'."
            )
        term = Term(penalty, weights, penalty.strength_at(0.0))
        self.terms.append(term)
        self._of |= {W: (term, name) for name, W in weights.items()}

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._of

    def convex(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether all that acts on these weights is."""
        terms = [self._of[p][0] for p in parameters if p in self._of]
        return all(term.penalty.convex and term.target is None for term in terms)

    @property
    def settles(self) -> float:
        """The share of the run from which on the weights are as the penalties want them."""
        return max((_settles(term) for term in self.terms), default=0.0)

    def value(self) -> float:
        """The sum of all penalties, which stands beside the mean over samples."""
        return sum(term.value() for term in self.terms)

    def prox(self, parameter: nn.Parameter, W: Tensor, step: Step) -> Tensor:
        """The proximal operator of what acts on ``parameter``, at ``W``."""
        if parameter not in self._of:
            return W
        term, name = self._of[parameter]
        return term.prox(name, W, step)

    def advance(self, progress: float) -> None:
        """Before a step: strengths for this share of the run."""
        for term in self.terms:
            every = max(LOOK_EVERY, term.penalty.every)
            term.advance(progress, look=self._steps % every == 0)
        self._last = progress > self._progress and 2 * progress - self._progress > 1 - 1e-9
        self._progress = progress
        self._steps += 1

    def at_end(self) -> None:
        """Strengths of the end of a run, the weights as they are; a target counts as reached."""
        for term in self.terms:
            term.strength = term.penalty.strength_at(1.0)
            if term.target is not None:
                term.settled = True
                term.free = {name: term.target.sizes(W) > 0 for name, W in term.weights.items()}

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """One of an optimiser, then the proximal ones, with its own step for each weight."""
        steps = step_sizes(optimizer)
        moving = {W: of for W, of in self._of.items() if W.grad is not None and W in steps}
        for W, (term, name) in moving.items():
            term.precede(name, W)
        optimizer.step()
        for W, (term, name) in moving.items():
            every = term.penalty.every
            if self._steps % every == 0 or self._last:
                term.follow(name, W.detach(), steps[W])

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self._steps,
            "progress": self._progress,
            "multipliers": dict(self.multipliers),
            "weights": [list(term.weights) for term in self.terms],
            "free": [dict(term.free) for term in self.terms],
            "settled": [term.settled for term in self.terms],
            "behind": [dict(term.behind) for term in self.terms],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take up what `state_dict` gave, if it is of as many penalties on the same weights."""
        if saved["weights"] != [list(term.weights) for term in self.terms]:
            return
        self._steps, self._progress = saved["steps"], saved["progress"]
        weights = {name: W for term in self.terms for name, W in term.weights.items()}
        self.multipliers = {
            name: U.to(weights[name]) for name, U in saved["multipliers"].items() if name in weights
        }
        parts = zip(self.terms, saved["free"], saved["settled"], saved["behind"], strict=True)
        for term, free, settled, behind in parts:
            term.free = {name: mask.to(weights[name].device) for name, mask in free.items()}
            term.settled = settled
            term.behind = {name: W.to(weights[name]) for name, W in behind.items()}
