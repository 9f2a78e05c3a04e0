"""A solver as a layer: predict the costs of roads, then take the shortest path.

A linear predictor is trained by what its decisions cost. The solver is dynamic programming on a
grid and is only asked for solutions; it could be any. Writes solver_as_layer.svg.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import lpom
from lpom.activations import from_solver

SIZE = 8
torch.manual_seed(0)


def path(z):
    """The path from corner to corner, right and down, with the largest sum of z."""
    best = np.full((SIZE, SIZE), -np.inf)
    z = z.reshape(SIZE, SIZE)
    best[0, 0] = z[0, 0]
    for i, j in np.ndindex(SIZE, SIZE):
        before = [best[i - 1, j]] if i else []
        before += [best[i, j - 1]] if j else []
        if before:
            best[i, j] = z[i, j] + max(before)
    i = j = SIZE - 1
    taken = np.zeros((SIZE, SIZE), dtype=np.float32)
    taken[i, j] = 1
    while i or j:
        i, j = (i - 1, j) if j == 0 or (i and best[i - 1, j] > best[i, j - 1]) else (i, j - 1)
        taken[i, j] = 1
    return taken.ravel()


features = torch.randn(400, 6)
costs = (features @ torch.randn(6, SIZE**2) / 2 + 2).relu() ** 1.5 + 0.2

solver = from_solver(path, numpy=True, name="shortest path")
predictor = nn.Linear(6, SIZE**2)
decide = lpom.lift(nn.Sequential(predictor, solver.to_module()))  # of z, the gain of each cell
best = solver.phi(-costs)
optimizer = torch.optim.Adam(predictor.parameters(), 0.02)
regrets = []
for _ in range(15):
    for rows in torch.randperm(300).split(25):
        loss = (costs[rows] * decide(features[rows])).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        decided = solver.phi(predictor(features[300:]))
    worse = (costs[300:] * (decided - best[300:])).sum() / (costs[300:] * best[300:]).sum()
    regrets.append(100 * float(worse))
print(f"regret on new problems: {regrets[0]:.1f} % after 1 epoch, {regrets[-1]:.1f} % after 15")

figure, axes = plt.subplots(1, 3, figsize=(9, 3.2), layout="constrained")
axes[0].plot(range(1, 16), regrets, "o-")
axes[0].set(title="regret on new problems, %", xlabel="epoch", ylim=(0, None))
for axis, x, title in zip(axes[1:], (decided, best[300:]), ("decided", "best"), strict=True):
    axis.imshow(costs[300].reshape(SIZE, SIZE).numpy(), cmap="Greys")
    i, j = np.nonzero(x[0].reshape(SIZE, SIZE).numpy())
    axis.plot(j, i, "s", color="C1")
    axis.set(title=f"{title}: {float((costs[300] * x[0]).sum()):.1f}", xticks=[], yticks=[])
figure.savefig("solver_as_layer.svg")
