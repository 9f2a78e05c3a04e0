"""Small plots as SVG: lines over epochs, dots, bars. Colours and fonts are those of style.css."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import final

WIDTH, HEIGHT = 380, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 14, 12, 42
_FEW = 80  # points, each of which can be pointed at
_DIGITS = 4


@final
@dataclass(frozen=True)
class Series:
    """A line: values over x, None where there is none; ``colour`` is a number in style.css."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: int = 1
    dashed: bool = False


@final
class Axis:
    """A scale from values to places on the page, with marks at round values."""

    def __init__(self, values: Iterable[float], start: float, end: float, log: bool = False):
        known = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
        self.log = log
        low, high = (min(known), max(known)) if known else (0.0, 1.0)
        low, high = (math.log10(low), math.log10(high)) if log and known else (low, high)
        if high - low < 1e-12 * max(abs(high), 1e-300):
            low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
        self.low, self.high, self.start, self.end = low, high, start, end

    def place(self, value: float) -> float:
        value = math.log10(value) if self.log else value
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def marks(self, about: int = 5) -> list[float]:
        if self.log and self.high - self.low >= 1:
            powers = range(math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9) + 1)
            step = max(1, math.ceil(len(powers) / about))
            return [10.0**power for power in powers if power % step == 0]
        low, high = (10**self.low, 10**self.high) if self.log else (self.low, self.high)
        rough = (high - low) / about
        power = 10 ** math.floor(math.log10(rough))
        step = next(power * k for k in (1, 2, 2.5, 5, 10) if power * k >= rough * 0.999)
        first = math.ceil(low / step - 1e-9)
        last = math.floor(high / step + 1e-9)
        return [round(k * step, 12) for k in range(first, last + 1)]


def lines(
    title: str, series: Sequence[Series], *, x_name: str = "epoch", percent: bool = False
) -> str:
    """Lines over epochs, on a logarithmic scale where the values differ by more than ten times."""
    series = [one for one in series if any(_known(value) for value in one.y)]
    if not series:
        return ""
    values = [value for one in series for value in one.y if value is not None and _known(value)]
    log = not percent and min(values) > 0 and max(values) > 10 * min(values)
    x = Axis([place for one in series for place in one.x], _LEFT, WIDTH - _RIGHT)
    y = Axis(values, HEIGHT - _BOTTOM, _TOP, log)
    parts = [_frame(x, y, x_name, percent=percent, whole=True)]
    for one in series:
        parts.append(_line(one, x, y, percent))
    names = [(one.name, one.colour, one.dashed) for one in series]
    return _figure(title, parts, names if len(series) > 1 else [])


def dots(title: str, x: Sequence[float], y: Sequence[float], x_name: str, y_name: str) -> str:
    """A dot for each pair, on one scale, and the line where both are equal."""
    both = [*x, *y]
    across, up = Axis(both, _LEFT, WIDTH - _RIGHT), Axis(both, HEIGHT - _BOTTOM, _TOP)
    parts = [_frame(across, up, x_name, y_name)]
    low, high = min(both), max(both)
    parts.append(
        f'<line class="equal" x1="{across.place(low):.1f}" y1="{up.place(low):.1f}" '
        f'x2="{across.place(high):.1f}" y2="{up.place(high):.1f}"/>'
    )
    parts += [
        f'<circle class="dot" cx="{across.place(a):.1f}" cy="{up.place(b):.1f}" r="3">'
        f"<title>{escape(x_name)} {number(a)}, {escape(y_name)} {number(b)}</title></circle>"
        for a, b in zip(x, y, strict=True)
    ]
    return _figure(title, parts, [])


def bars(title: str, names: Sequence[str], values: Sequence[float], spread: Sequence[float]) -> str:
    """A bar for each name, with its spread."""
    row, left = 22, 150
    height = row * len(names) + 8
    x = Axis(
        [0.0, *values, *(v + s for v, s in zip(values, spread, strict=True))], left, WIDTH - 60
    )
    parts = []
    for k, (name, value, around) in enumerate(zip(names, values, spread, strict=True)):
        top, zero, end = k * row + 6, x.place(0), x.place(value)
        short = name if len(name) <= 22 else f"{name[:21]}…"
        parts.append(
            f'<text class="name" x="{left - 8}" y="{top + 11}">{escape(short)}'
            f"<title>{escape(name)}</title></text>"
            f'<rect class="bar" x="{min(zero, end):.1f}" y="{top}" '
            f'width="{max(abs(end - zero), 0.5):.1f}" height="14"/>'
            f'<line class="spread" x1="{x.place(value - around):.1f}" y1="{top + 7}" '
            f'x2="{x.place(value + around):.1f}" y2="{top + 7}"/>'
            f'<text x="{x.place(max(value + around, 0)) + 6:.1f}" y="{top + 11}">{value:.3f}</text>'
        )
    return _figure(title, parts, [], height)


def number(value: float) -> str:
    """With as many digits as a mark needs."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    if 1e-4 <= abs(value) < 1e6:
        text = f"{value:,.{max(0, _DIGITS - 1 - math.floor(math.log10(abs(value))))}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return f"{value:.3g}"


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _line(one: Series, x: Axis, y: Axis, percent: bool) -> str:
    """Broken where a value is missing, or has no place on a logarithmic scale."""
    path, pen, circles = [], "M", []
    for a, b in zip(one.x, one.y, strict=True):
        if b is None or not math.isfinite(b) or (y.log and b <= 0):
            pen = "M"
            continue
        place = f"{x.place(a):.1f} {y.place(b):.1f}"
        path.append(f"{pen}{place}")
        pen = "L"
        if len(one.y) <= _FEW:
            across, up = place.split()
            shown = f"{100 * b:.2f} %" if percent else number(b)
            circles.append(
                f'<circle class="c{one.colour}" cx="{across}" cy="{up}" r="2.5">'
                f"<title>{escape(one.name)}, {number(a)}: {shown}</title></circle>"
            )
    style = f"line s{one.colour}" + (" dashed" if one.dashed else "")
    return f'<path class="{style}" d="{"".join(path)}"/>{"".join(circles)}'


def _frame(
    x: Axis, y: Axis, x_name: str, y_name: str = "", *, percent: bool = False, whole: bool = False
) -> str:
    bottom = HEIGHT - _BOTTOM
    parts = [f'<line class="axis" x1="{_LEFT}" y1="{bottom}" x2="{WIDTH - _RIGHT}" y2="{bottom}"/>']
    for value in y.marks():
        place = y.place(value)
        text = f"{100 * value:.4g} %" if percent else number(value)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" y1="{place:.1f}" x2="{WIDTH - _RIGHT}" '
            f'y2="{place:.1f}"/>'
            f'<text class="name" x="{_LEFT - 6}" y="{place + 4:.1f}">{text}</text>'
        )
    for value in x.marks():
        if not whole or value == round(value):
            parts.append(
                f'<text class="under" x="{x.place(value):.1f}" y="{bottom + 16}">'
                f"{number(value)}</text>"
            )
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text class="under" x="{middle}" y="{HEIGHT - 4}">{escape(x_name)}</text>')
    if y_name:
        parts.append(
            f'<text class="under" transform="translate(11 {bottom / 2}) rotate(-90)">'
            f"{escape(y_name)}</text>"
        )
    return "".join(parts)


def _figure(
    title: str, parts: Sequence[str], names: Sequence[tuple[str, int, bool]], height: int = HEIGHT
) -> str:
    legend = "".join(
        f'<span><svg class="key" viewBox="0 0 18 4"><path class="line s{colour}'
        f'{" dashed" if dashed else ""}" d="M0 2L18 2"/></svg>{escape(name)}</span> '
        for name, colour, dashed in names
    )
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>{f'<p class=legend>{legend}</p>' if legend else ''}</figure>"
    )
