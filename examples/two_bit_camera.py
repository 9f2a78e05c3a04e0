"""A camera that keeps two bits of each random measurement, and the picture all the same."""

from __future__ import annotations

import sys

import matplotlib.pyplot as plt
import torch
from skimage import data, transform
from torch import nn

import lpom
from lpom.activations import Staircase
from lpom.inversion import TotalVariation

SIZE, RATIO = 32, 3


def psnr(x: torch.Tensor, truth: torch.Tensor) -> float:
    return float(-10 * ((x.clamp(0, 1) - truth) ** 2).mean().log10())


def main(out: str = "two_bit_camera.svg") -> None:
    torch.manual_seed(0)
    camera = transform.downscale_local_mean(data.camera()[64:320, 128:384] / 255, (8, 8))
    truth = torch.tensor(camera, dtype=torch.float32).reshape(1, -1)
    centred = truth - truth.mean()

    # jumps at -s, 0 and s: a staircase of three steps that the bias moves to the middle
    n = SIZE * SIZE
    linear = nn.Linear(n, RATIO * n).requires_grad_(False)
    linear.weight.normal_()
    step = 0.75 * float((centred @ linear.weight.T).std())
    linear.bias.fill_(1.5 * step)
    levels = nn.Sequential(linear, Staircase(levels=3, step=step).to_module())(centred)

    prior = TotalVariation(30.0, (SIZE, SIZE))
    quantised = nn.Sequential(linear, Staircase(levels=3, step=step).to_module())
    by_gap = lpom.invert(quantised, levels, prior=prior, tol=1e-3, max_iter=300)
    by_squares = lpom.invert(nn.Sequential(linear), levels, prior=prior, tol=1e-3, max_iter=300)

    pictures = {"picture": truth}
    for name, found in [("least squares", by_squares), ("gap", by_gap)]:
        x = found.x + truth.mean()
        pictures[f"{name}, {psnr(x, truth):.1f} dB"] = x
    print(*pictures, sep="\n")
    figure, axes = plt.subplots(1, 3, figsize=(8, 3), layout="constrained")
    for axis, (title, picture) in zip(axes, pictures.items(), strict=True):
        axis.imshow(picture.reshape(SIZE, SIZE).numpy(), cmap="gray", vmin=0, vmax=1)
        axis.set(title=title, xticks=[], yticks=[])
    figure.savefig(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
