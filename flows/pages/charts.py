"""Line charts as inline SVG, drawn by hand: no library, no network, colours from the page's style sheet.

A figure also carries what it shows as JSON, for the script of the page (report.js), which draws it again to be zoomed.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any

WIDTH, HEIGHT = 460, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 26  # room around the plot for the numbers on the axes
_POINTS = 240  # along a line; more are drawn as the mean of their neighbours, with a band from least to greatest
_POINTS_TO_ZOOM = 1500  # likewise, of those that a figure carries

_COLOURS = ("#2563a8", "#bd5415", "#2c7d54", "#79489c", "#9a7500", "#1d7f8c", "#b03a6f", "#6b6f76")
_ALONE = (
    "text{font:11px system-ui,sans-serif;fill:#555}.title{font-weight:600;font-size:13px;fill:#222}"
    ".grid{stroke:#e2e0db}.axis{stroke:#777}.line{fill:none;stroke-width:1.8;stroke-linejoin:round}.band{opacity:.16}"
)


@dataclass(frozen=True)
class Series:
    """A named line. `marked` also shows each point, with its value on hovering; `errors` makes a band around the
    points, so far to either side. `run` says which of a page's runs it is of."""

    name: str
    points: Sequence[tuple[float, float]] = field(repr=False)
    marked: bool = False
    errors: Sequence[float] = ()
    run: int = 0


@dataclass(frozen=True)
class _Thinned:
    x: float
    low: float
    mean: float
    high: float


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_name: str = "step",
    note: str = "",
    level: float | None = None,
    room: float = 0.0,
    shared: bool = False,
) -> str:
    """A figure; empty text if no series has a point. At `level` a line goes across it, with at least so much `room`
    above and below. Lines that are `shared` by the charts of a page, one of each run, have one colour in all of them
    and are left out in all."""
    drawn = [replace(it, points=_finite(it.points)) for it in series]
    drawn = [it for it in drawn if it.points]
    if not drawn:
        return ""
    edges = [edge for it in drawn if it.errors for edge in (*_shifted(it, 1), *_shifted(it, -1))]
    if level is not None:
        edges += [(drawn[0].points[0][0], level + side * room) for side in (-1, 1)]
    scale = _Scale([point for it in drawn for point in it.points] + edges)
    coloured = [((it.run if shared else n) % len(_COLOURS), it) for n, it in enumerate(drawn)]
    lines = "".join(_line(it, colour, scale) for colour, it in coloured)
    lines = (scale.across(level) if level is not None else "") + lines
    legend = "".join(f'<button class="key k{colour}" disabled>{escape(it.name)}</button>' for colour, it in coloured)
    caption = f"<figcaption><b>{escape(title)}</b>{legend if len(drawn) > 1 else ''}</figcaption>"
    small = f'<p class="note">{escape(note)}</p>' if note else ""
    label = f"{title} by {x_name}: " + "; ".join(f"{it.name} ends at {number(it.points[-1][1])}" for it in drawn)
    carried = {"title": title, "x": x_name, "level": level, "room": room, "shared": shared}
    data = json.dumps({**carried, "lines": [_carried(it, colour) for colour, it in coloured]}, separators=(",", ":"))
    return (
        f'<figure data-chart="{escape(data)}">{caption}'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
        f"{scale.axes(x_name)}{lines}</svg>{small}</figure>"
    )


def picture(title: str, series: Sequence[Series], *, x_name: str) -> str:
    """The same chart as an SVG file of its own, on white, with the names of its lines above it; empty text likewise."""
    if not (figure := line_chart(title, series, x_name=x_name)):
        return ""
    inside = figure[figure.index(">", figure.index("<svg")) + 1 : figure.index("</svg>")]
    above = 20 + 15 * len(series)
    names = "".join(
        f'<text class="name d{n % len(_COLOURS)}" x="{_LEFT}" y="{35 + 15 * n - above}">{escape(it.name)}</text>'
        for n, it in enumerate(series)
    )
    colours = "".join(f".l{n}{{stroke:{c}}}.d{n},.b{n}{{fill:{c}}}" for n, c in enumerate(_COLOURS))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {-above} {WIDTH} {HEIGHT + above}" width="720">'
        f"<style>{_ALONE}{colours}</style>"
        f'<rect x="0" y="{-above}" width="{WIDTH}" height="{HEIGHT + above}" fill="#fff"/>'
        f'<text class="title" x="{_LEFT}" y="{16 - above}">{escape(title)}</text>{names}{inside}</svg>\n'
    )


def number(value: float) -> str:
    """A value as short as it stays readable."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e5 or size < 1e-3:
        return f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e")
    digits = max(0, 2 - math.floor(math.log10(size)))
    text = f"{value:.{min(digits, 4)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


class _Scale:
    """From values to places in the picture."""

    def __init__(self, points: Sequence[tuple[float, float]]):
        xs, ys = [x for x, _ in points], [y for _, y in points]
        self.x_range = _widened(min(xs), max(xs))
        self.x_ticks = [tick for tick in _ticks(*self.x_range, 6) if self.x_range[0] <= tick <= self.x_range[1]]
        self.y_ticks = _ticks(*_widened(min(ys), max(ys)), 5)
        self.y_range = self.y_ticks[0], self.y_ticks[-1]

    def x(self, value: float) -> float:
        low, high = self.x_range
        return round(_LEFT + (value - low) / (high - low) * (WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return round(HEIGHT - _BOTTOM - (value - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM), 1)

    def across(self, level: float) -> str:
        return f'<line class="level" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{self.y(level)}" y2="{self.y(level)}"/>'

    def axes(self, x_name: str) -> str:
        right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
        rows = [
            f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{self.y(tick)}" y2="{self.y(tick)}"/>'
            f'<text class="tick" x="{_LEFT - 6}" y="{self.y(tick) + 3.5}" text-anchor="end">{number(tick)}</text>'
            for tick in self.y_ticks
        ]
        columns = [
            f'<text class="tick" x="{self.x(tick)}" y="{bottom + 16}" text-anchor="middle">{number(tick)}</text>'
            for tick in self.x_ticks
            if self.x(tick) < right - 40
        ]
        axis = f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'
        name = f'<text class="tick" x="{right}" y="{bottom + 16}" text-anchor="end">{escape(x_name)}</text>'
        return "".join([*rows, *columns, axis, name])


def _carried(series: Series, colour: int) -> dict[str, Any]:
    """A line as JSON: its points, and from where to where they reach if that is not the points themselves."""
    points = _thin(series.points, _POINTS_TO_ZOOM)
    line = {"name": series.name, "run": series.run, "colour": colour, "marked": series.marked}
    bounds: dict[str, Sequence[float]] = {"x": [p.x for p in points], "y": [p.mean for p in points]}
    if series.errors:
        bounds |= {"low": [y for _, y in _shifted(series, -1)], "high": [y for _, y in _shifted(series, 1)]}
    elif len(points) < len(series.points):
        bounds |= {"low": [p.low for p in points], "high": [p.high for p in points]}
    return {**line, **{name: [json.loads(f"{value:.7g}") for value in values] for name, values in bounds.items()}}


def _line(series: Series, number_of_line: int, scale: _Scale) -> str:
    points = _thin(series.points)
    path = " ".join(f"{scale.x(p.x)},{scale.y(p.mean)}" for p in points)
    parts = [f'<polyline class="line l{number_of_line}" points="{path}"/>']
    if len(points) < len(series.points):
        upper = [f"{scale.x(p.x)},{scale.y(p.high)}" for p in points]
        lower = [f"{scale.x(p.x)},{scale.y(p.low)}" for p in reversed(points)]
        parts.insert(0, f'<polygon class="band b{number_of_line}" points="{" ".join(upper + lower)}"/>')
    if series.errors:
        around = [f"{scale.x(x)},{scale.y(y)}" for x, y in (*_shifted(series, 1), *reversed(_shifted(series, -1)))]
        parts.insert(0, f'<polygon class="band b{number_of_line}" points="{" ".join(around)}"/>')
    if series.marked or len(points) == 1:
        parts += [
            f'<circle class="dot d{number_of_line}" cx="{scale.x(p.x)}" cy="{scale.y(p.mean)}" r="3">'
            f"<title>{escape(series.name)} {number(p.mean)} at {number(p.x)}</title></circle>"
            for p in points
        ]
    return "".join(parts)


def _shifted(series: Series, side: int) -> list[tuple[float, float]]:
    return [(x, y + side * error) for (x, y), error in zip(series.points, series.errors, strict=True)]


def _thin(points: Sequence[tuple[float, float]], most: int = _POINTS) -> list[_Thinned]:
    size = math.ceil(len(points) / most)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        _Thinned(
            sum(x for x, _ in g) / len(g), min(y for _, y in g), sum(y for _, y in g) / len(g), max(y for _, y in g)
        )
        for g in groups
    ]


def _finite(points: Sequence[tuple[float | None, float | None]]) -> list[tuple[float, float]]:
    known = [(x, y) for x, y in points if x is not None and y is not None]
    return sorted((float(x), float(y)) for x, y in known if math.isfinite(x) and math.isfinite(y))


def _ticks(low: float, high: float, wanted: int) -> list[float]:
    """Round numbers from just below `low` to just above `high`, about as many as wanted."""
    rough = (high - low) / wanted
    size = 10.0 ** math.floor(math.log10(rough))
    step = next((size * factor for factor in (1, 2, 2.5, 5) if size * factor >= rough), size * 10)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, last + 1)]


def _widened(low: float, high: float) -> tuple[float, float]:
    """A range that is not empty."""
    if high - low > 1e-12 * max(abs(low), abs(high)):
        return low, high
    if 0 <= low <= 1:  # a share, most likely
        return 0.0, 1.0
    half = abs(low) * 0.5
    return low - half, high + half
