"""A solver as the last layer: predict costs, then decide; PyEPO's problems and rivals.

Shortest path on a grid of 5 x 5 and a knapsack of 16 items with two limits, data by PyEPO's own
generators (degree 4, noise 0.5); a linear predictor, Adam. What counts is the regret: what the
decision costs more than the best one, in per cent of the best. Rivals, by PyEPO (``pip install
pyepo``):

- blackbox: Vlastelica et al., at each lambda of a grid; this is LPOM with mu = 1 / lambda
- spo+: Elmachtoub and Grigas, which needs the true costs
- fenchel-young: perturbed, Berthet et al.
- two-stage: least squares on the costs

    python benchmarks/solvers.py --seeds 3
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyepo
import torch
from pyepo import EPO
from pyepo.data import knapsack, shortestpath
from pyepo.model.opt import optModel
from torch import Tensor, nn

import lpom
from lpom.activations import from_solver

GRID = [0.1, 1.0, 10.0, 20.0, 100.0]


def paths(n: int) -> Tensor:
    """All monotone paths through a grid, by its edges in PyEPO's order."""
    edges: dict[tuple[int, int], int] = {}
    for i in range(n):
        for j in range(n - 1):
            edges[i * n + j, i * n + j + 1] = len(edges)
        if i < n - 1:
            for j in range(n):
                edges[i * n + j, (i + 1) * n + j] = len(edges)
    rows = []
    for turns in itertools.combinations(range(2 * n - 2), n - 1):
        row, node = torch.zeros(len(edges)), 0
        for step in range(2 * n - 2):
            following = node + (n if step in turns else 1)
            row[edges[node, following]] = 1
            node = following
        rows.append(row)
    return torch.stack(rows)


def choices(weights: np.ndarray, limit: float) -> Tensor:
    """All sets of items within the limits."""
    sets = torch.cartesian_prod(*[torch.arange(2.0)] * weights.shape[1])
    return sets[(sets @ torch.tensor(weights).float().T <= limit).all(1)]


class Enumerated(optModel):
    """PyEPO's view of a problem whose solutions are all known."""

    def __init__(self, solutions: Any, sense: Any) -> None:
        self.solutions, self.modelSense = torch.as_tensor(solutions), sense
        super().__init__()

    def _getModel(self) -> Any:
        return None, list(range(self.solutions.shape[1]))

    @property
    def num_cost(self) -> int:
        return self.solutions.shape[1]

    def setObj(self, c: Any) -> None:
        self.costs = torch.as_tensor(np.asarray(c)).float()

    def solve(self) -> Any:
        values = self.solutions @ self.costs
        best = values.argmin() if self.modelSense == EPO.MINIMIZE else values.argmax()
        return self.solutions[best].numpy(), float(values[best])


class Problem:
    """Features, true costs, all solutions; costs count with a sign, as a thing to be minimised."""

    def __init__(self, name: str, seed: int, n: int = 1000, tests: int = 1000) -> None:
        self.sense = EPO.MINIMIZE if name == "shortest path" else EPO.MAXIMIZE
        self.sign = 1.0 if self.sense == EPO.MINIMIZE else -1.0
        total = n + tests
        if name == "shortest path":
            x, c = shortestpath.genData(total, 5, (5, 5), 4, 0.5, 100 + seed)
            self.solutions = paths(5)
        else:
            weights, x, c = knapsack.genData(total, 5, 16, 2, 4, 0.5, 100 + seed)
            self.solutions = choices(weights, 20.0)
        features, costs = torch.tensor(x).float(), torch.tensor(c).float()
        self.train = features[:n], costs[:n]
        self.test = features[n:], costs[n:]
        self.model = Enumerated(self.solutions, self.sense)

    def best(self, z: Tensor) -> Tensor:
        """The solver that LPOM is given: the feasible x with the largest <z, x>."""
        return self.solutions[(z @ self.solutions.T).argmax(1)]

    @torch.no_grad()
    def regret(self, predictor: nn.Module) -> float:
        x, c = self.test
        decided = self.best(-self.sign * predictor(x))
        best = self.best(-self.sign * c)
        worse = self.sign * (c * (decided - best)).sum()
        return 100 * float(worse / (c * best).sum().abs())


def train(problem: Problem, loss: Callable[..., Tensor], seed: int, options: Any) -> nn.Module:
    x, c = problem.train
    torch.manual_seed(seed)
    predictor = nn.Linear(x.shape[1], c.shape[1])
    optimizer = torch.optim.Adam(predictor.parameters(), options.rate)
    best = problem.best(-problem.sign * c)
    for _ in range(options.epochs):
        for rows in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            loss(predictor, x[rows], c[rows], best[rows]).backward()
            optimizer.step()
    return predictor


def lifted(problem: Problem, **options: Any) -> Callable[..., Tensor]:
    """What the decision costs, with LPOM's rule at the solver."""
    mu = options.pop("mu", None)
    solver = from_solver(problem.best, batched=True, **options).to_module()

    class Decision(nn.Module):
        def forward(self, predictor: nn.Module, x: Tensor) -> Tensor:
            return solver(-problem.sign * predictor(x))

    decision = lpom.lift(Decision(), mu=mu, reduction="sum")

    def loss(predictor: nn.Module, x: Tensor, c: Tensor, best: Tensor) -> Tensor:
        return problem.sign * (c * decision(predictor, x)).sum(1).mean()

    return loss


def blackbox(problem: Problem, lam: float) -> Callable[..., Tensor]:
    layer = pyepo.func.blackboxOpt(problem.model, lam)

    def loss(predictor: nn.Module, x: Tensor, c: Tensor, best: Tensor) -> Tensor:
        return problem.sign * (c * layer(predictor(x))).sum(1).mean()

    return loss


def spo(problem: Problem) -> Callable[..., Tensor]:
    plus = pyepo.func.SPOPlus(problem.model)

    def loss(predictor: nn.Module, x: Tensor, c: Tensor, best: Tensor) -> Tensor:
        return plus(predictor(x), c, best, (c * best).sum(1, keepdim=True))

    return loss


def fenchel_young(problem: Problem) -> Callable[..., Tensor]:
    perturbed = pyepo.func.perturbedFenchelYoung(problem.model, n_samples=3, sigma=1.0)
    return lambda predictor, x, c, best: perturbed(predictor(x), best)


def two_stage(problem: Problem) -> Callable[..., Tensor]:
    return lambda predictor, x, c, best: (predictor(x) - c).square().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--quick", action="store_true", help="without the slow rivals")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    for name in ("shortest path", "knapsack"):
        print(f"\n{name}: regret in %", flush=True)
        rows: dict[str, Callable[[Problem], Any]] = {
            "lpom, auto": lifted,
            "lpom, one side": lambda p: lifted(p, sides=1),
        }
        for size in (0.1, 0.3, 3.0):
            rows[f"lpom, {size}"] = lambda p, size=size: lifted(p, displacement=size)
        for lam in GRID:
            rows[f"lpom, mu = 1 / {lam:g}"] = lambda p, lam=lam: lifted(p, mu=1 / lam)
        if not options.quick:
            for lam in GRID:
                rows[f"blackbox, {lam:g}"] = lambda p, lam=lam: blackbox(p, lam)
            rows |= {"spo+": spo, "fenchel-young": fenchel_young}
        rows["two-stage"] = two_stage
        for row, make in rows.items():
            scores = []
            for seed in range(options.seeds):
                problem = Problem(name, seed)
                scores.append(problem.regret(train(problem, make(problem), seed, options)))
            shown = " ".join(f"{score:5.2f}" for score in scores)
            print(f"  {row:22s} {math.fsum(scores) / len(scores):6.2f}   {shown}", flush=True)


if __name__ == "__main__":
    main()
