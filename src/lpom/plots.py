"""Pictures of a run. Figures are made without pyplot: no window, no state of the user touched."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from lpom.files import write_atomically
from lpom.training.history import History

BLUE, ORANGE = "#0072b2", "#d55e00"  # told apart by every kind of colour vision
GREY = "#5a5a5a"


def curves(history: History, path: str | os.PathLike[str]) -> None:
    """Loss, accuracy or R2, and the gap of every layer, epoch by epoch, as a PNG file."""
    with_gaps = any(epoch.gaps for epoch in history)
    panels = 3 if with_gaps else 2
    layout = ConstrainedLayoutEngine(wspace=0.06)
    figure = Figure(figsize=(4.4 * panels, 3.4), dpi=150, layout=layout)
    axes = figure.subplots(1, panels)
    _panel(axes[0], history, "loss", "loss per sample")
    losses = [v for name in ("loss", "validation_loss") for v in history.column(name) if v]
    if losses and 0 < 10 * min(losses) < max(losses):
        axes[0].set_yscale("log")
    _panel(axes[1], history, "score", "R²" if history.metric == "r2" else history.metric)
    if history.metric != "r2":
        axes[1].yaxis.set_major_formatter(lambda share, _: f"{100 * share:.4g} %")
    if with_gaps:
        _gaps(axes[2], history)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_atomically(Path(path), picture.getvalue())


def _panel(axes: Axes, history: History, column: str, title: str) -> None:
    """Training and validation values of one quantity."""
    for name, key, color, style in (
        ("training", column, BLUE, "-"),
        ("validation", f"validation_{column}", ORANGE, "--"),
    ):
        values = [math.nan if v is None else v for v in history.column(key)]
        if any(map(math.isfinite, values)):
            _line(axes, values, name, color, style)
    _dress(axes, title)


def _gaps(axes: Axes, history: History) -> None:
    """One line per layer, light to dark from the input to the output."""
    layers = history.by_layer("gaps")
    for i, gaps in enumerate(layers):
        # a gap of exactly zero has no place on a logarithmic axis
        values = [gap if gap is not None and gap > 0 else math.nan for gap in gaps]
        shade = _between("#9fc8e8", "#08306b", i / max(len(layers) - 1, 1))
        end = " (output)" if i == len(layers) - 1 else ""
        _line(axes, values, f"layer {i + 1}{end}", shade, "-")
    axes.set_yscale("log")
    _dress(axes, "gap per sample")


def _line(axes: Axes, values: Sequence[float], name: str, color: str, style: str) -> None:
    marker = "o" if len(values) <= 12 else ""
    epochs = range(1, len(values) + 1)
    axes.plot(epochs, values, style, color=color, label=name, marker=marker, ms=4, lw=1.6)


def _dress(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel("epoch", color=GREY)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.tick_params(colors=GREY)
    axes.grid(True, axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#b0b0b0")
    if axes.get_lines():
        axes.legend(frameon=False, fontsize=9)


def _between(light: str, dark: str, share: float) -> str:
    parts = [(int(light[k : k + 2], 16), int(dark[k : k + 2], 16)) for k in (1, 3, 5)]
    return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in parts)
