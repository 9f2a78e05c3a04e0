"""A weight step in the metric of both Kronecker factors, beside Adam: seconds to an accuracy.

    python experiments/factored.py [--seeds 0,1]

MNIST 784-300-100-10, 50,000 rows, 10,000 others held out; the test set is not touched. With X the
states below a layer and R the residuals above it, the gradient is R^T X and the step
(R P_G)^T (X P_A), its running mean scaled to the root mean square of the learning rate. P is about
(S + d I)^-1 for S = X^T X / m or R^T R / m: on a basis U of the largest eigenvectors, followed by
orthogonal iteration every so many steps, and a multiple of the identity beside it,

    P = I - U diag((s - rho) / (s + d)) U^T,    d = damping * tr(S) / n,

rho the mean of the other eigenvalues. So it costs two thin products where an inverse would take as
long as the gradient. Seconds are of the processor, one thread. Writes bench/tried.json, of which
performance.py makes a table of docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from lpom import datasets
from lpom.experiments.bench.contest import Report, Row, Stopwatch
from lpom.networks.mlp import mlp
from lpom.weights.adam import Adam

HERE = Path(__file__).parent
LEVELS = (0.97, 0.98)


@dataclass(frozen=True)
class Plan:
    """``rank`` 0 is Adam; the two dampings are those of the states and of the residuals."""

    rate: float
    batch: int
    epochs: int
    rank: int = 0
    damping: tuple[float, float] = (1.0, 1.0)
    every: int = 10


PLANS = (
    Plan(6e-3, 200, 3),
    Plan(4e-3, 100, 3),
    Plan(1e-3, 250, 2, rank=32),
    Plan(2e-3, 250, 2, rank=32, damping=(3.0, 3.0)),
    Plan(2e-3, 250, 2, rank=32, damping=(10.0, 1.0)),
)


class Factor:
    """The largest eigenvectors of a running mean of Y^T Y / m."""

    def __init__(self, n: int, rank: int, damping: float, keep: float = 0.95) -> None:
        generator = torch.Generator().manual_seed(n)
        self.n, self.rank, self.damping, self.keep = n, min(rank, n), damping, keep
        self.U = torch.linalg.qr(torch.randn(n, self.rank, generator=generator))[0]
        self.s, self.trace, self.seen = torch.zeros(self.rank), 0.0, 0
        self.V = self.U

    def see(self, Y: Tensor) -> None:
        self.seen += 1
        keep = min(self.keep, 1 - 1 / self.seen)
        self.trace = keep * self.trace + (1 - keep) * float(Y.square().sum()) / len(Y)
        moved = Y.T @ (Y @ self.U) / len(Y)
        self.U, upper = torch.linalg.qr(keep * self.U * self.s + (1 - keep) * moved)
        self.s = upper.diagonal().abs().clone()
        rest = max(self.trace - float(self.s.sum()), 0.0) / max(self.n - self.rank, 1)
        d = self.damping * self.trace / self.n
        self.V = self.U * ((self.s - rest) / (self.s + d))

    def apply(self, Y: Tensor) -> Tensor:
        return torch.addmm(Y, Y @ self.V, self.U.T, alpha=-1)


@torch.no_grad()
def curve(
    plan: Plan, train: tuple[Tensor, Tensor], held: tuple[Tensor, Tensor], seed: int
) -> list[tuple[float, float, float]]:
    """Seconds and held-out accuracy, four times an epoch."""
    (X, y), clock = train, Stopwatch()
    model = mlp((784, 300, 100, 10), seed=seed)
    layers = [layer for layer in model if isinstance(layer, torch.nn.Linear)]
    both = [
        (
            Factor(W.shape[1], plan.rank, plan.damping[0]),
            Factor(W.shape[0], plan.rank, plan.damping[1]),
        )
        for W in (layer.weight for layer in layers)
    ]
    means = [torch.zeros_like(layer.weight) for layer in layers]
    adam = Adam([p for p in model.parameters() if p.ndim == 1 or not plan.rank], plan.rate)
    T, generator = F.one_hot(y, 10).float(), torch.Generator().manual_seed(seed)
    steps, done, points = len(X) // plan.batch, 0, []
    for _ in range(plan.epochs):
        order = torch.randperm(len(X), generator=generator)
        for k in range(steps):
            clock.start()
            rows = order[k * plan.batch : (k + 1) * plan.batch]
            states = [X.index_select(0, rows)]
            for layer in layers:
                Z = F.linear(states[-1], layer.weight, layer.bias)
                states.append(Z if layer is layers[-1] else Z.relu_())
            R = torch.softmax(states[-1].T, 0).T - T.index_select(0, rows)
            rate = plan.rate * (1 - done / (steps * plan.epochs))
            for i in reversed(range(len(layers))):
                layer, below = layers[i], states[i]
                pull = R @ layer.weight if i else R
                layer.bias.grad = R.mean(0)
                if not plan.rank:
                    layer.weight.grad = R.T @ below / len(R)
                else:
                    if done % plan.every == 0 or done < 10:
                        both[i][0].see(below)
                        both[i][1].see(R)
                    means[i].mul_(0.9).add_(both[i][1].apply(R).T @ both[i][0].apply(below))
                    layer.weight.sub_(means[i] * (rate / means[i].square().mean().sqrt()))
                R = pull.mul_(below > 0) if i else R
            adam.param_groups[0]["lr"] = rate
            adam.step()
            clock.stop()
            done += 1
            if done * 4 // steps > (done - 1) * 4 // steps:
                right = (model(held[0]).argmax(1) == held[1]).double().mean()
                points.append((clock.seconds, done / steps, float(right)))
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0,1")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    known = datasets.load("mnist")
    order = torch.randperm(len(known.x_train), generator=torch.Generator().manual_seed(1))
    X, y = (
        torch.as_tensor(known.x_train)[order].float(),
        torch.as_tensor(known.y_train)[order].long(),
    )
    train, held = (X[:50_000].contiguous(), y[:50_000]), (X[50_000:], y[50_000:])
    found: dict[Plan, list[list[tuple[float, float, float]]]] = {}
    for seed in map(int, given.seeds.split(",")):
        for plan in PLANS:
            found.setdefault(plan, []).append(curve(plan, train, held, seed))
            print(plan, seed, found[plan][-1][-1], flush=True)
    rows = []
    for plan, curves in found.items():
        kind = "Adam" if not plan.rank else f"factors of rank {plan.rank}, damping {plan.damping}"
        name = f"{kind}, rate {plan.rate:g}, batch {plan.batch}, {plan.epochs} epochs"
        ends = ", ".join(f"{100 * points[-1][2]:.2f}" for points in curves)
        rows.append(
            Row(
                "whole run",
                name,
                statistics.median(c[-1][0] for c in curves),
                "s",
                note=f"{ends} %",
            )
        )
        for level in LEVELS:
            times = [next((s for s, _, a in points if a >= level), None) for points in curves]
            there = [time for time in times if time is not None]
            amount = statistics.median(there) if there else None
            rows.append(
                Row(
                    f"{100 * level:g} %",
                    name,
                    amount,
                    "s",
                    note=f"{len(there)} of {len(times)} seeds",
                )
            )
    rows.sort(key=lambda row: row.case)
    report = Report("tried", {"seeds": given.seeds, "plans": [asdict(p) for p in PLANS]}, rows)
    command = f"python experiments/factored.py --seeds {given.seeds}"
    path = HERE / "bench" / "tried.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"command": command} | report.as_dict(), indent=1) + "\n")


if __name__ == "__main__":
    main()
