"""Inversion by the gap, beside what else recovers inputs from outputs that bend or jump.

    python benchmarks/inversion.py                     # the rows without MNIST, 20 trials
    python benchmarks/inversion.py relu pictures --trials 50
    python benchmarks/inversion.py code                # an autoencoder on MNIST
    python benchmarks/inversion.py transition --out docs/pictures/transition.svg

Inputs and matrices are normal numbers, n = 50, without noise; "exact" is a relative error below
1e-4. Strengths of priors are chosen for each way by itself, on a picture that does not count.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lpom
from lpom.activations import Activation, Staircase, get
from lpom.inversion import Gaussian, Sparse, TotalVariation

N, EXACT = 50, 1e-4
Ways = dict[str, Tensor]


def layer(W: Tensor, activation: Activation, bias: float = 0.0) -> nn.Sequential:
    linear = nn.Linear(W.shape[1], W.shape[0]).to(W)
    linear.weight.data.copy_(W)
    linear.bias.data.fill_(bias)
    return nn.Sequential(linear, activation.to_module()).requires_grad_(False)


def problem(seed: int, ratio: float, n: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (round(ratio * n), n), (1, n)
    W, u = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return W, u


def error(x: Tensor, u: Tensor) -> float:
    return float((x - u).norm() / u.norm())


def by_squared_loss(
    model: nn.Module, y: Tensor, start: Tensor, optimiser: str, steps: int = 1500
) -> Tensor:
    """Back-propagation to the input, through derivatives that may be zero."""
    x = start.clone().requires_grad_()
    rate = 0.05 * float(start.std())

    def loss() -> Tensor:
        kind.zero_grad()
        value: Tensor = ((model(x) - y) ** 2).sum() / 2
        value.backward()
        return value

    kind: torch.optim.Optimizer
    if optimiser == "L-BFGS":
        kind = torch.optim.LBFGS([x], max_iter=steps, tolerance_grad=1e-12, tolerance_change=1e-14,
                                 line_search_fn="strong_wolfe")  # fmt: skip
        kind.step(lambda: float(loss().detach()))
        return x.detach()
    kind = torch.optim.Adam([x], lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(kind, 1.0, 0.0, steps)
    for _ in range(steps):
        loss()
        kind.step()
        schedule.step()
    return x.detach()


def random_start(u: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(u.shape, generator=generator, dtype=u.dtype)


def relu(seed: int, ratio: float = 2.5, rivals: bool = True) -> dict[str, float]:
    W, u = problem(seed, ratio)
    model, start = layer(W, get("relu")), random_start(u, seed)
    y = model(u)
    ways = {"gap": lpom.invert(model, y, tol=1e-9, max_iter=5000).x}
    for optimiser in ("Adam", "L-BFGS") if rivals else ("Adam",):
        steps = 3000 if rivals else 500
        ways[f"squared loss, {optimiser}"] = by_squared_loss(model, y, start, optimiser, steps)
    return {name: error(x, u) for name, x in ways.items()}


def clip(seed: int, ratio: float = 3.0, rivals: bool = True) -> dict[str, float]:
    W, u = problem(seed, ratio)
    limit = 0.5 * math.sqrt(N)  # 62 % of normal numbers are beyond half a deviation
    model, start = layer(W, get("hardtanh", min_val=-limit, max_val=limit)), random_start(u, seed)
    y = model(u)
    inside = y[0].abs() < limit
    ways = {"gap": lpom.invert(model, y, tol=1e-9, max_iter=5000).x}
    steps = 1500 if rivals else 500
    ways["squared loss, Adam"] = by_squared_loss(model, y, start, "Adam", steps)
    unsaturated = torch.linalg.lstsq(W[inside], y[0, inside, None], driver="gelsd").solution.T
    ways["least squares, unsaturated rows"] = unsaturated
    return {name: error(x, u) for name, x in ways.items()}


def quantiser(deviation: float) -> tuple[Activation, float]:
    """Two bits: jumps at -s, 0, s with s of 0.75 deviations; and the bias that centres it."""
    step = 0.75 * deviation
    return Staircase(levels=3, step=step), 1.5 * step


def two_bits(seed: int, ratio: float = 16.0, rivals: bool = True) -> dict[str, float]:
    W, u = problem(seed, ratio)
    activation, bias = quantiser(math.sqrt(N))
    model = layer(W, activation, bias)
    y = model(u)
    ways = {"gap": lpom.invert(model, y, tol=1e-6, max_iter=1000).x}
    ways["least squares"] = torch.linalg.lstsq(W, (y - bias).T).solution.T
    x, rate = torch.zeros_like(u), 1 / float(torch.linalg.matrix_norm(W, 2)) ** 2
    steps = 300
    for k in range(steps):  # the squared loss, its jumps passed over; a rate that falls
        x = x - rate * (1 - k / steps) * (model(x) - y) @ W
    ways["straight-through"] = x
    return {name: error(x, u) for name, x in ways.items()}


def one_bit(seed: int, ratio: float = 10.0, n: int = 200, count: int = 10) -> dict[str, float]:
    """Signs tell no norm. BIHT finds the support; on that the problem of the gap is convex."""
    W, u = problem(seed, ratio, n)
    u[0, torch.randperm(n, generator=torch.Generator().manual_seed(seed))[count:]] = 0
    u = u / u.norm()
    y, keep = layer(W, get("sign"))(u), Sparse(count)
    x, step = torch.zeros_like(u), torch.ones(1)
    for _ in range(200):
        x = keep.prox(x + (y - torch.sign(x @ W.T)) @ W / (2 * len(W)), step)
    kept = x[0] != 0
    on_support = layer(W[:, kept], get("sign"))
    best = lpom.invert(on_support, y, prior=Gaussian(1e-2), max_iter=1000)
    ours = torch.zeros_like(x)
    ours[:, kept] = best.x
    ways = {"gap, on BIHT's support": ours, "BIHT": x, "matched filter": keep.prox(y @ W, step)}
    return {name: float((v / v.norm() - u).norm()) for name, v in ways.items()}


# Pictures


def pictures(trials: int, size: int = 32, ratio: float = 2.0) -> dict[str, list[float]]:
    """Two-bit random measurements of pieces of scikit-image's pictures; PSNR in dB."""
    truth = pieces(trials + 1, size)
    n = size * size
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(round(ratio * n), n, generator=generator)
    activation, bias = quantiser(math.sqrt(n) * 0.2)  # of pixels that vary by 0.2 about the mean
    mean = truth.mean(1, keepdim=True)  # which is told
    y = layer(W, activation, bias)(truth - mean)
    scale = float(((y - bias) * ((truth - mean) @ W.T)).sum() / ((y - bias) ** 2).sum())
    linear = {"gap": (layer(W, activation, bias), y),
              "least squares": (layer(W, get("identity")), scale * (y - bias))}  # fmt: skip
    found: dict[str, list[float]] = {}
    for name, (model, seen) in linear.items():
        strengths = [10 ** (k / 2) * n**0.5 for k in range(-2, 4)]

        def solve(strength: float, rows: slice, model=model, seen=seen) -> Tensor:  # type: ignore[no-untyped-def]
            prior = TotalVariation(strength, (size, size), iterations=15)
            found = lpom.invert(model, seen[rows], prior=prior, tol=1e-3, max_iter=150)
            return psnr(found.x + mean[rows], truth[rows])

        best = max(strengths, key=lambda s: float(solve(s, slice(0, 1))))
        found[f"{name} + total variation"] = solve(best, slice(1, None)).tolist()
    return found


def pieces(count: int, size: int) -> Tensor:
    """Pieces of pictures, made smaller by four, as rows of numbers from 0 to 1."""
    from skimage import color, data

    found = []
    for k in range(count):
        name = ("camera", "astronaut", "coins", "moon", "coffee", "chelsea", "rocket")[k % 7]
        picture = getattr(data, name)()
        gray = color.rgb2gray(picture) if picture.ndim == 3 else picture / 255
        place = np.random.default_rng(k)
        top, left = (place.integers(0, s - 4 * size + 1) for s in gray.shape)
        part = gray[top : top + 4 * size, left : left + 4 * size]
        found.append(part.reshape(size, 4, size, 4).mean((1, 3)).ravel())
    return torch.tensor(np.array(found), dtype=torch.float32)


def psnr(x: Tensor, truth: Tensor) -> Tensor:
    return -10 * ((x.clamp(0, 1) - truth) ** 2).flatten(1).mean(1).log10()


def code(trials: int, width: int = 300, epochs: int = 3) -> dict[str, list[float]]:
    """The code of an autoencoder, 784 - 300 - 784 with ReLU: PSNR in dB of what it was made of."""
    from data import load

    digits = load("mnist")
    train, test = (torch.tensor(x).float().flatten(1) for x in (digits.x_train, digits.x_test))
    largest = float(train.max())
    train, test = train / largest, test[: trials + 1] / largest
    torch.manual_seed(0)
    encoder, decoder = nn.Linear(784, width), nn.Linear(width, 784)
    adam = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(train)).split(100):
            loss = F.mse_loss(decoder(F.relu(encoder(train[rows]))), train[rows])
            adam.zero_grad()
            loss.backward()
            adam.step()
    model = nn.Sequential(encoder, nn.ReLU()).requires_grad_(False)
    codes = model(test)
    ways = {"trained decoder": decoder(codes).detach()[1:]}

    def solve(strength: float, rows: slice) -> Tensor:
        prior = TotalVariation(strength, (28, 28), low=0.0, high=1.0)
        return lpom.invert(model, codes[rows], prior=prior, tol=1e-4, max_iter=1000).x

    strengths = [1e-4, 1e-3, 1e-2]
    best = max(strengths, key=lambda s: float(psnr(solve(s, slice(0, 1)), test[:1])))
    ways["gap + total variation"] = solve(best, slice(1, None))
    start = 0.1 + 0.05 * torch.randn(test[1:].shape)
    descent = by_squared_loss(model, codes[1:], start, "Adam", 1000)
    ways["gradient descent on the input"] = descent
    return {name: psnr(x, test[1:]).tolist() for name, x in ways.items()}


# What is printed


def transition(trials: int, out: Path) -> None:
    """Shares of exact recoveries (ReLU, clip) and errors (two bits) by m / n, as a picture."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    rows: list[tuple[str, Callable[..., dict[str, float]], list[float]]] = [
        ("ReLU", relu, [1.5, 1.75, 2, 2.25, 2.5, 3]),
        ("clipped, 62 % saturated", clip, [1.5, 2, 2.5, 3, 3.5, 4]),
        ("two bits", two_bits, [2, 4, 8, 16]),
    ]
    for axis, (title, run, ratios) in zip(axes, rows, strict=True):
        results = {r: [run(seed, r, False) for seed in range(trials)] for r in ratios}
        exact = run is not two_bits
        for way in results[ratios[0]][0]:
            errors = np.array([[trial[way] for trial in results[r]] for r in ratios])
            values = (errors < EXACT).mean(1) if exact else errors.mean(1)
            axis.plot(ratios, values, "o-", label=way)
        axis.set(title=title, xlabel="m / n", ylabel="exact" if exact else "relative error")
        axis.legend(fontsize=7)
    axes[2].set(xscale="log", yscale="log")
    figure.savefig(out)
    print(f"written to {out}")


ROWS: dict[str, tuple[Callable[..., dict[str, float]], str]] = {
    "relu": (relu, "ReLU, m/n = 2.5"),
    "clip": (clip, "clipped, 62 % saturated, m/n = 3"),
    "two-bits": (two_bits, "2-bit quantiser, m/n = 16"),
    "one-bit": (one_bit, "one bit, m/n = 10, 5 % sparse"),
}


def show(title: str, results: Iterable[dict[str, float]]) -> None:
    trials = list(results)
    print(f"\n{title} ({len(trials)} trials)")
    for way in trials[0]:
        errors = np.array([trial[way] for trial in trials])
        print(f"  {way:34} exact {np.mean(errors < EXACT):5.0%}   error {errors.mean():.4f}")


def show_pictures(title: str, found: dict[str, list[float]]) -> None:
    print(f"\n{title} ({len(next(iter(found.values())))} pictures)")
    for way, values in found.items():
        print(f"  {way:34} {np.mean(values):5.2f} dB")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    others = ["pictures", "code", "transition"]
    parser.add_argument(
        "rows", nargs="*", default=[*ROWS, "pictures"], choices=[*ROWS, *others, []]
    )
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("transition.svg"))
    given: Any = parser.parse_args(arguments)
    warnings.simplefilter("ignore", lpom.ConvergenceWarning)
    for name in given.rows or [*ROWS, "pictures"]:
        if name in ROWS:
            run, title = ROWS[name]
            show(title, (run(seed) for seed in range(given.trials)))
        elif name == "pictures":
            show_pictures("2-bit random measurements, m/n = 2", pictures(given.trials))
        elif name == "code":
            show_pictures("code of 300 numbers, MNIST", code(given.trials))
        else:
            transition(given.trials, given.out)


if __name__ == "__main__":
    main()
