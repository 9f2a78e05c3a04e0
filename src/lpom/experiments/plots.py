"""Pictures of runs: accuracy over epochs or seconds, every line named at its end."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from lpom import methods
from lpom.experiments.table import Row
from lpom.files import write_atomically

BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#5a5a5a"
#: Okabe and Ito's colours that show on white, and a grey; told apart by all kinds of colour vision.
COLORS = (BLUE, ORANGE, "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#8a8a8a")
_DASHES = {False: ("-", ":"), True: ("--", "-.")}  # by full_batch; the second when colours run out

_TICKS = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9999)
_WORST_R2 = -0.2  # what is below has nothing to tell and is cut off


@dataclass(frozen=True)
class _Line:
    name: str
    x: NDArray[Any]
    scores: NDArray[Any]  # (seeds, epochs)
    color: str
    dash: str = "-"
    bold: bool = False
    label: str = ""  # beside the name: what came out

    @property
    def mean(self) -> NDArray[Any]:
        return np.asarray(self.scores.mean(0))


def draw(rows: Sequence[Row], path: Path, title: str, score: str, n_test: int, by: str) -> None:
    """Test score of finished rows over "epochs" or "seconds", as a PNG file.

    Accuracies stand on a scale on which equal steps divide the errors by equal factors. A band
    goes from the lowest to the highest seed.
    """
    lines = [_line(row, by, score) for row in rows]
    figure, axes = _canvas()
    if score == "accuracy":
        _error_scale(axes, lines, n_test)
    else:
        low = max(min(float(line.scores.min()) for line in lines), _WORST_R2)
        high = max(float(line.scores.max()) for line in lines)
        axes.set_ylim(low, high + 0.05 * (high - low))
    if by == "seconds":
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    notes = ["dashed: full batch"] if any(row.full_batch for row in rows) else []
    _draw(figure, axes, lines, path, f"{title}: test {score}", by, notes)


def _canvas() -> tuple[Figure, Axes]:
    """A figure with axes, and at the right a share of the width for the names of the lines."""
    figure = Figure(figsize=(9, 5.6), dpi=150)
    figure.subplots_adjust(left=0.12, right=0.77, top=0.9, bottom=0.12)
    return figure, figure.subplots()


def _draw(
    figure: Figure,
    axes: Axes,
    lines: Sequence[_Line],
    path: Path,
    title: str,
    by: str,
    notes: list[str],
) -> None:
    """Lines, names and file; the scales are set already, since names stand where lines end."""
    if by == "epochs":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for line in lines:
        _plot(axes, line)
    _dress(axes, title, by)
    if any(len(line.scores) > 1 for line in lines):
        notes = ["band: lowest to highest seed", *notes]
    _explain(axes, notes)
    _name_lines(axes, lines)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_atomically(path, picture.getvalue())


def _line(row: Row, by: str, score: str) -> _Line:
    curves = [record["curve"] for record in row.finished]
    scores = np.array([[epoch["validation_score"] for epoch in curve] for curve in curves])
    x = np.arange(1.0, scores.shape[1] + 1)
    if by == "seconds":
        seconds = np.array([[epoch["seconds"] for epoch in curve] for curve in curves])
        x = seconds.cumsum(1).mean(0)
    alike = [name for name in methods.METHODS if methods.METHODS[name].full_batch == row.full_batch]
    turn, place = divmod(alike.index(row.method), len(COLORS))
    color = COLORS[-1 - place] if row.full_batch else COLORS[place]
    end = float(scores.mean(0)[-1])
    return _Line(
        row.method,
        x,
        scores,
        color,
        _DASHES[row.full_batch][turn % 2],
        bold=row.method == "lpom",
        label=f"{100 * end:.2f} %" if score == "accuracy" else f"{end:.3f}",
    )


def _plot(axes: Axes, line: _Line) -> None:
    width = 2.6 if line.bold else 1.6
    axes.plot(line.x, line.mean, line.dash, color=line.color, linewidth=width)
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


def _dress(axes: Axes, title: str, by: str) -> None:
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel("epochs" if by == "epochs" else "seconds of training", color=GREY)
    axes.tick_params(colors=GREY)
    axes.grid(True, axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b0b0b0")


def _explain(axes: Axes, notes: Sequence[str]) -> None:
    axes.text(
        1.0,
        -0.1,
        ";  ".join(notes),
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
            f"{line.name}  {line.label}",
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
            path_effects=[withStroke(linewidth=2, foreground="white")],
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
