"""Declipping: a signal of few frequencies, of which two thirds of the samples were cut off."""

from __future__ import annotations

import math
import sys

import matplotlib.pyplot as plt
import torch
from torch import nn

import lpom
from lpom.penalties import L1


def cosines(n: int) -> torch.Tensor:
    """The orthonormal cosine basis, a wave in each column."""
    k, t = torch.arange(n), torch.arange(n) + 0.5
    waves = torch.cos(math.pi / n * torch.outer(t, k)) * math.sqrt(2 / n)
    waves[:, 0] /= math.sqrt(2)
    return waves


def main(out: str = "declipping.svg") -> None:
    n, limit = 400, 0.35
    torch.manual_seed(1)
    waves = cosines(n)
    coefficients = torch.zeros(1, n)
    coefficients[0, torch.randperm(60)[:8]] = 6 * torch.randn(8)
    signal = coefficients @ waves.T

    model = nn.Sequential(nn.Linear(n, n, bias=False), nn.Hardtanh(-limit, limit))
    model.requires_grad_(False)[0].weight.copy_(waves)
    clipped = model(coefficients)

    found = lpom.invert(model, clipped, prior=L1(1e-3), max_iter=20_000, tol=1e-4)
    restored = found.x @ waves.T
    error = float((restored - signal).norm() / signal.norm())
    share = float((clipped.abs() == limit).float().mean())
    print(f"{share:.0%} of the samples are clipped; relative error after: {error:.3f}")

    figure, axis = plt.subplots(figsize=(8, 3), layout="constrained")
    axis.plot(signal[0], color="0.7", linewidth=4, label="signal")
    axis.plot(restored[0], color="tab:blue", label="restored")
    axis.plot(clipped[0], color="tab:red", label=f"clipped, {share:.0%} of the samples")
    axis.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.2))
    figure.savefig(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
