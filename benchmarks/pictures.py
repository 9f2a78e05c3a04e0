"""Pictures of stored runs: accuracy over epochs, every line named at its end."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from numpy.typing import NDArray

from lpom.files import write_atomically

ENDING = ".svg"
GREY = "#5a5a5a"
#: Okabe and Ito's colours that show on white, and a grey; told apart by all kinds of colour vision.
COLORS = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#8a8a8a"

_TICKS = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9999)
_DEPTH = 0.05  # of a picture of points


@dataclass(frozen=True)
class _Line:
    name: str
    scores: NDArray[Any]  # (seeds, epochs)
    color: str
    bold: bool

    @property
    def x(self) -> NDArray[Any]:
        return np.arange(1.0, self.scores.shape[1] + 1)

    @property
    def mean(self) -> NDArray[Any]:
        return np.asarray(self.scores.mean(0))


def draw_curves(runs: Mapping[str, Sequence[Sequence[float]]], path: Path, title: str) -> None:
    """Accuracy over the epochs; ``runs`` has all seeds by name.

    Accuracies stand on a scale on which equal steps divide the errors by equal factors. A band
    goes from the lowest to the highest seed. A name without runs keeps its colour for another
    picture.
    """
    lines = [
        _Line(name, np.array(scores), COLORS[k], bold=name.startswith("LPOM"))
        for k, (name, scores) in enumerate(runs.items())
        if scores
    ]
    figure = Figure(figsize=(9, 5.6), dpi=72)
    figure.subplots_adjust(left=0.12, right=0.62, top=0.9, bottom=0.12)
    axes = figure.subplots()
    _error_scale(axes, lines, n_rows=50_000)  # the size of MNIST and CIFAR-10
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for line in lines:
        _plot(axes, line)
    _dress(axes, title)
    if any(len(line.scores) > 1 for line in lines):
        _explain(axes, "band: lowest to highest seed")
    else:
        _explain(axes, "")
    _name_lines(axes, lines)
    _save(figure, path)


def draw_points(
    scores: Mapping[str, Sequence[Sequence[float]]],
    places: Sequence[str],
    path: Path,
    title: str,
) -> None:
    """Accuracies at several places, a dot for each run, by name; a line is the mean of all runs.

    Where a run is more than `_DEPTH` below the best one, or came to nothing, which counts as 0, a
    cross stands at the foot.
    """
    figure = Figure(figsize=(9, 5), dpi=72)
    figure.subplots_adjust(top=0.92, bottom=0.28)
    axes = figure.subplots()
    low = max(value for rows in scores.values() for runs in rows for value in runs) - _DEPTH
    width = 0.8 / len(scores)
    for k, (name, rows) in enumerate(scores.items()):
        for place, runs in enumerate(rows):
            x = place + (k + 0.5) * width - 0.4
            shown = [100 * value for value in runs if value >= low]
            axes.plot([x] * len(shown), shown, ".", color=COLORS[k], alpha=0.5)
            if shown and len(shown) == len(runs):
                mean = sum(shown) / len(shown)
                axes.plot([x - width / 3, x + width / 3], [mean] * 2, color=COLORS[k], linewidth=3)
            elif runs:
                axes.plot(x, 100 * low, "x", color=COLORS[k])
        axes.plot([], [], color=COLORS[k], linewidth=3, label=name)
    axes.set_xticks(range(len(places)), places)
    axes.set_title(title)
    axes.set_ylabel("test accuracy in %")
    axes.set_xlabel("hidden layers; a cross: some run of it is far below, or diverged")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4, frameon=False)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    picture = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(picture, format="svg", dpi=72, metadata={"Date": None})
    # a short picture is a short diff: two decimals are a hundredth of a point
    short = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", picture.getvalue())
    write_atomically(path, re.sub(r" +$", "", short, flags=re.MULTILINE).encode())


def _plot(axes: Axes, line: _Line) -> None:
    width = 2.6 if line.bold else 1.6
    axes.plot(line.x, line.mean, "-", color=line.color, linewidth=width)
    if len(line.x) == 1:
        axes.plot(line.x, line.mean, "o", color=line.color, markersize=4)
    if len(line.scores) > 1:
        low, high = line.scores.min(0), line.scores.max(0)
        axes.fill_between(line.x, low, high, color=line.color, alpha=0.12, linewidth=0)


def _error_scale(axes: Axes, lines: Sequence[_Line], n_rows: int) -> None:
    """Accuracy a at height -log(1 - a); no error at all in the rows counts as half of one."""
    low = min(float(line.scores.min()) for line in lines)
    high = max(float(line.scores.max()) for line in lines)
    best = 1 - 0.5 / n_rows

    def height(accuracy: Any) -> Any:
        return -np.log10(1 - np.clip(accuracy, 0, best))

    def accuracy(height: Any) -> Any:
        return 1 - 10.0 ** -np.asarray(height)

    axes.set_yscale("function", functions=(height, accuracy))
    margin = max(0.04 * (height(high) - height(low)), 0.02)
    axes.set_ylim(accuracy(max(height(low) - margin, 0)), accuracy(height(high) + margin))
    bottom, top = axes.get_ylim()
    round_ones = [tick for tick in _TICKS if bottom <= tick <= top]
    few = len(round_ones) < 3
    axes.yaxis.set_major_locator(MaxNLocator(6) if few else FixedLocator(round_ones))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    axes.set_ylabel("accuracy (the error on a log scale)", color=GREY)


def _dress(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel("epochs", color=GREY)
    axes.tick_params(colors=GREY)
    axes.grid(True, axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b0b0b0")


def _explain(axes: Axes, note: str) -> None:
    axes.text(
        1.0,
        -0.1,
        note,
        transform=axes.transAxes,
        color=GREY,
        fontsize=9,
        horizontalalignment="right",
        verticalalignment="top",
    )


def _name_lines(axes: Axes, lines: Sequence[_Line]) -> None:
    """Names at the right, in the order of the lines' ends, apart from each other."""
    axes.autoscale_view(scaley=False)
    right = axes.transAxes.transform((1, 0))[0]
    ends = {line.name: axes.transData.transform((line.x[-1], line.mean[-1])) for line in lines}
    bottom, top = axes.transAxes.transform([(0, 0), (0, 1)])[:, 1]
    points = axes.figure.dpi / 72
    order = sorted(lines, key=lambda line: ends[line.name][1])
    heights = spread([ends[line.name][1] for line in order], 13 * points, bottom, top)
    for line, height in zip(order, heights, strict=True):
        axes.annotate(
            f"{line.name}  {100 * line.mean[-1]:.2f} %",
            xy=(line.x[-1], line.mean[-1]),
            xytext=(right + 16 * points, height),
            textcoords="figure pixels",
            color=line.color,
            fontsize=9.5,
            fontweight="bold" if line.bold else "normal",
            verticalalignment="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": line.color,
                "linewidth": 0.6,
                "alpha": 0.5,
                "relpos": (0, 0.5),
                "shrinkA": 1,
            },
        )


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places as near to the ``wanted`` ones, which are sorted, as a gap between them allows.

    Groups of neighbours that would overlap are merged and centred on their mean. They stay between
    ``low`` and ``high`` if there is room.

    >>> spread([1.0, 1.0, 9.0], 2.0, 0.0, 10.0)
    [0.0, 2.0, 9.0]
    """
    groups: list[tuple[float, int]] = []  # lowest place, members

    def fit(centre: float, count: int) -> float:
        lowest = centre - gap * (count - 1) / 2
        return max(min(lowest, high - gap * (count - 1)), low)

    for place in wanted:
        groups.append((fit(place, 1), 1))
        while len(groups) > 1 and groups[-2][0] + gap * groups[-2][1] > groups[-1][0]:
            (first, m), (second, n) = groups[-2:]
            centre = first * m + second * n + gap * (m * (m - 1) + n * (n - 1)) / 2
            groups[-2:] = [(fit(centre / (m + n), m + n), m + n)]
    return [lowest + gap * k for lowest, count in groups for k in range(count)]
