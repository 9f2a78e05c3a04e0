"""The pictures of the README and of docs/mathematics.md: python docs/draw.py writes them.

The README's is of stored results, benchmarks/results/networks.jsonl.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib
import torch

from lpom import activations

matplotlib.use("svg")
matplotlib.rcParams |= {"svg.hashsalt": "lpom", "font.size": 10, "axes.spines.top": False}
matplotlib.rcParams |= {"axes.spines.right": False, "figure.facecolor": "white"}

from matplotlib import pyplot as plt  # noqa: E402

PICTURES = Path(__file__).parent / "pictures"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "networks.jsonl"
#: Rows of the results and how the picture calls them; what is not there is not drawn.
NETWORKS = {
    "lenet5-mnist": "LeNet-5, MNIST",
    "vgg5-cifar": "VGG5, CIFAR-10",
    "resnet8-cifar": "ResNet-8, CIFAR-10",
    "residual20-cifar": "20 layers, CIFAR-10",
    "transformer-mnist": "transformer, MNIST",
    "rnn-mnist": "RNN, MNIST",
    "lstm-mnist": "LSTM, MNIST",
}
COLOURS = {"lpom": "tab:blue", "adam": "tab:orange"}


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


def overview() -> None:
    """What comes back through a step, and how far LPOM gets beside Adam where both can go."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.2), layout="constrained")
    _through_a_step(axes[0])
    _learning_curves(axes[1], "resnet8-cifar")
    _differences(axes[2])
    _save(figure, "overview.svg")


def _through_a_step(ax: Any) -> None:
    step = activations.get("step")
    z = torch.linspace(-2, 2, 401, dtype=torch.float64)
    mu, g = 20.0, 1.0
    answer = mu * step.smoothed(2.0).response(z, torch.full_like(z, g / mu))
    ax.plot(z, step.phi(z), color="lightgrey", linewidth=3)
    ax.plot(z, answer, color=COLOURS["lpom"])
    ax.plot(z, torch.zeros_like(z), color=COLOURS["adam"])
    ax.annotate("step(z)", (1.95, 0.93), ha="right", va="top", color="grey")
    ax.annotate("LPOM", (0, 0.54), ha="center", color=COLOURS["lpom"])
    ax.annotate("derivative", (0, 0.04), ha="center", color=COLOURS["adam"])
    ax.set(title="Carried back through a step function", xlabel="z", ylim=(-0.06, 1.08))


def _learning_curves(ax: Any, name: str) -> None:
    """Test accuracy after every epoch: the mean over seeds, and from the worst to the best."""
    for method, colour in COLOURS.items():
        runs = [
            [100 * score for score in record["curve"]["validation_score"]]
            for record in _records(name, method)
        ]
        epochs = range(1, len(runs[0]) + 1)
        lowest, highest = map(min, zip(*runs, strict=True)), map(max, zip(*runs, strict=True))
        ax.fill_between(epochs, [*lowest], [*highest], color=colour, alpha=0.2, linewidth=0)
        ax.plot(
            epochs, [statistics.fmean(epoch) for epoch in zip(*runs, strict=True)], color=colour
        )
        ax.plot([], [], color=colour, label={"lpom": "LPOM", "adam": "Adam"}[method])
    ax.legend(frameon=False, loc="lower right")
    ax.set(title=f"{NETWORKS[name]}: test accuracy, %", xlabel="epoch")


def _differences(ax: Any) -> None:
    most = 0.5
    names = [name for name in NETWORKS if _records(name, "lpom")]
    for row, name in enumerate(names):
        theirs = {record["seed"]: record["score"] for record in _records(name, "adam")}
        points = [100 * (r["score"] - theirs[r["seed"]]) for r in _records(name, "lpom")]
        most = max(most, *map(abs, points))
        ax.plot(points, [row] * len(points), "o", color=COLOURS["lpom"], alpha=0.6)
        ax.plot(statistics.fmean(points), row, "|", color="black", markersize=14)
    ax.axvline(0, color=COLOURS["adam"], linewidth=1)
    ax.set_yticks(range(len(names)), [NETWORKS[name] for name in names])
    ax.set(title="Test accuracy, LPOM minus Adam", xlabel="points; a dot is a seed, | their mean")
    ax.set(ylim=(len(names) - 0.5, -0.5), xlim=(-1.15 * most, 1.15 * most))


def _records(name: str, method: str) -> list[dict[str, Any]]:
    records = map(json.loads, RESULTS.read_text(encoding="utf-8").splitlines())
    return [r for r in records if r["row"] == name and r["column"] == method]


def _save(figure: matplotlib.figure.Figure, name: str) -> None:
    PICTURES.mkdir(exist_ok=True)
    figure.savefig(PICTURES / name, metadata={"Date": None})


if __name__ == "__main__":
    overview()
    gap()
    answer()
