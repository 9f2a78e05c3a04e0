"""The pictures of docs/mathematics.md: python docs/draw.py writes docs/pictures/*.svg."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import torch

from lpom import activations

matplotlib.use("svg")
matplotlib.rcParams |= {"svg.hashsalt": "lpom", "font.size": 10, "axes.spines.top": False}
matplotlib.rcParams |= {"axes.spines.right": False, "figure.facecolor": "white"}

from matplotlib import pyplot as plt  # noqa: E402

PICTURES = Path(__file__).parent / "pictures"


def gap() -> None:
    """The gap is the area between the curve of phi and the height x, from phi's own place to z."""
    phi = activations.get("sigmoid")
    z = torch.linspace(-4, 4, 401, dtype=torch.float64)
    figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    axes[0].plot(z, phi.phi(z), color="black")
    at, x = 2.0, 0.4
    root = torch.logit(torch.tensor(x, dtype=torch.float64))
    between = z[(z >= root) & (z <= at)]
    axes[0].fill_between(between, x, phi.phi(between), color="tab:blue", alpha=0.4, linewidth=0)
    axes[0].plot([at, at], [0, x], ":", color="grey")
    axes[0].plot([-4, at], [x, x], ":", color="grey")
    axes[0].plot(at, x, "o", color="tab:blue")
    axes[0].annotate("D(x, z)", (0.9, 0.5), color="tab:blue")
    axes[0].annotate(r"$x = \phi(z)$", (1.3, 0.92), ha="right")
    axes[0].set(xticks=[at], yticks=[0, x, 1], title="the gap is an area", ylim=(0, 1.02))
    axes[0].set_xticklabels(["z"])
    axes[0].set_yticklabels(["0", "x", "1"])

    for name in ("relu", "sigmoid", "tanh"):
        kind = activations.get(name)
        axes[1].plot(z, kind.gap(torch.full_like(z, 0.5), z), label=name)
    axes[1].set(xlabel="z", title="D(x, z) for x = 0.5, convex in z", ylim=(-0.05, 2.2))
    axes[1].legend(frameon=False, loc="upper center")
    _save(figure, "gap.svg")


def answer() -> None:
    """What comes down through an activation: back-propagation's g phi', and LPOM's difference."""
    z = torch.linspace(-3, 3, 601, dtype=torch.float64)
    g = 1.0
    kinds = [
        ("ReLU", activations.get("relu"), lambda z: (z > 0).double()),
        ("tanh", activations.get("tanh"), lambda z: 1 - torch.tanh(z) ** 2),
        ("step, moved by a ramp of width 2", activations.get("step").smoothed(2.0), None),
    ]
    figure, axes = plt.subplots(1, 3, figsize=(10, 3), layout="constrained", sharey=True)
    for ax, (title, kind, derivative) in zip(axes, kinds, strict=True):
        for mu, style in ((1.0, ":"), (5.0, "--"), (20.0, "-")):
            pull = torch.full_like(z, g / mu)
            ax.plot(z, mu * kind.response(z, pull), style, label=f"LPOM, mu = {mu:g}")
        slope = torch.zeros_like(z) if derivative is None else derivative(z)
        ax.plot(z, g * slope, color="black", linewidth=1, label="back-propagation")
        ax.set(title=title, xlabel="z")
    axes[0].set_ylabel("answer to g = 1")
    axes[0].legend(frameon=False, fontsize=8)
    _save(figure, "answer.svg")


def _save(figure: matplotlib.figure.Figure, name: str) -> None:
    PICTURES.mkdir(exist_ok=True)
    figure.savefig(PICTURES / name, metadata={"Date": None})


if __name__ == "__main__":
    gap()
    answer()
