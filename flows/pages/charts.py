"""Line charts as inline SVG: no library, no network, colours from the style sheet of the page.

This module computes the places of everything in a picture; the templates in templates/charts/ write them as SVG. A
figure also carries its data as JSON, for the script of the report (report/charts.js), which draws it again when a
reader zooms, smooths, or chooses another axis. Both must agree, and a test in a browser
compares them.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from markupsafe import Markup

from flows.pages.rendering import render
from flows.pages.values import number

WIDTH, HEIGHT = 460, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 26  # room around the plot for the numbers on the axes
_POINTS = 240  # along a line; more are drawn as the mean of their neighbours, with a band from lowest to highest
_POINTS_TO_ZOOM = 1500  # along a line that a figure carries for the script
_NAME = 40  # room for the name of the x axis, where no number stands
MEASURES = {
    "width": WIDTH, "height": HEIGHT, "left": _LEFT, "right": _RIGHT, "top": _TOP, "bottom": _BOTTOM, "name": _NAME,
    "points": _POINTS,
}  # fmt: skip
"""What the script of a report has to know to draw a chart in the same way."""

_COLOURS = ("#2563a8", "#bd5415", "#2c7d54", "#79489c", "#9a7500", "#1d7f8c", "#b03a6f", "#6b6f76")
_ALONE = Markup(
    "text{font:11px system-ui,sans-serif;fill:#555}.title{font-weight:600;font-size:13px;fill:#222}"
    ".grid{stroke:#e2e0db}.axis{stroke:#777}.line{fill:none;stroke-width:1.8;stroke-linejoin:round}.band{opacity:.16}"
    + "".join(f".l{n}{{stroke:{c}}}.d{n},.b{n}{{fill:{c}}}" for n, c in enumerate(_COLOURS))
)
"""The style of a picture that is a file of its own."""


@dataclass(frozen=True)
class Series:
    """A named line. `marked` also shows each point, with its value on hovering. `errors` makes a band around the
    points, so far to either side. `run` is the number of the run on a page about several."""

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


@dataclass(frozen=True)
class _Tick:
    place: float
    text: str


@dataclass(frozen=True)
class _Dot:
    x: float
    y: float
    text: str


@dataclass(frozen=True)
class _Line:
    """A line in the picture: its path, bands behind it, and dots on it."""

    name: str
    colour: int
    path: str
    bands: list[str]
    dots: list[_Dot]


@dataclass(frozen=True)
class _Drawing:
    """Everything in the picture of a chart, with its place there."""

    title: str
    x_name: str
    x_ticks: list[_Tick]
    y_ticks: list[_Tick]
    level: float | None
    lines: list[_Line]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    right: int = WIDTH - _RIGHT
    bottom: int = HEIGHT - _BOTTOM


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_name: str = "step",
    note: str = "",
    level: float | None = None,
    room: float = 0.0,
    shared: bool = False,
) -> Markup:
    """Return a figure; empty text if no series has a point. A line goes across it at `level`, with at least `room`
    above and below that line. Lines that are `shared` by the charts of a page, one of each run, have one colour in all
    charts and are left out in all of them together."""
    series = _with_points(series)
    if not series:
        return Markup()
    coloured = [((it.run if shared else n) % len(_COLOURS), it) for n, it in enumerate(series)]
    label = f"{title} by {x_name}: " + "; ".join(f"{it.name} ends at {number(it.points[-1][1])}" for it in series)
    carried = {"title": title, "x": x_name, "level": level, "room": room, "shared": shared}
    data = json.dumps({**carried, "lines": [_carried(it, colour) for colour, it in coloured]}, separators=(",", ":"))
    drawing = _draw(title, coloured, x_name, level, room)
    return render("charts/figure.html", drawing=drawing, data=data, label=label, note=note)


def picture(title: str, series: Sequence[Series], *, x_name: str) -> str:
    """Return the same chart as an SVG file of its own, on white, with the names of its lines above it; empty text if no
    series has a point."""
    series = _with_points(series)
    if not series:
        return ""
    drawing = _draw(title, [(n % len(_COLOURS), it) for n, it in enumerate(series)], x_name, None, 0.0)
    return str(render("charts/picture.svg", drawing=drawing, above=20 + 15 * len(series), colours=_ALONE)) + "\n"


def _with_points(series: Sequence[Series]) -> list[Series]:
    finite = [replace(it, points=_finite(it.points)) for it in series]
    return [it for it in finite if it.points]


def _draw(
    title: str, coloured: Sequence[tuple[int, Series]], x_name: str, level: float | None, room: float
) -> _Drawing:
    series = [it for _, it in coloured]
    edges = [edge for it in series if it.errors for edge in (*_shifted(it, 1), *_shifted(it, -1))]
    if level is not None:
        edges += [(series[0].points[0][0], level + side * room) for side in (-1, 1)]
    scale = _Scale([point for it in series for point in it.points] + edges)
    return _Drawing(
        title,
        x_name,
        [_Tick(scale.x(it), number(it)) for it in scale.x_ticks if scale.x(it) < WIDTH - _RIGHT - _NAME],
        [_Tick(scale.y(it), number(it)) for it in scale.y_ticks],
        None if level is None else scale.y(level),
        [_line(it, colour, scale) for colour, it in coloured],
    )


class _Scale:
    """Converts values to places in the picture."""

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

    def path(self, points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{self.x(x)},{self.y(y)}" for x, y in points)


def _carried(series: Series, colour: int) -> dict[str, Any]:
    """Return a line as JSON: its points, and the range that each point stands for if it stands for several values."""
    points = _thin(series.points, _POINTS_TO_ZOOM)
    line = {"name": series.name, "run": series.run, "colour": colour, "marked": series.marked}
    bounds: dict[str, Sequence[float]] = {"x": [p.x for p in points], "y": [p.mean for p in points]}
    if series.errors:
        bounds |= {"low": [y for _, y in _shifted(series, -1)], "high": [y for _, y in _shifted(series, 1)]}
    elif len(points) < len(series.points):
        bounds |= {"low": [p.low for p in points], "high": [p.high for p in points]}
    return {**line, **{name: [json.loads(f"{value:.7g}") for value in values] for name, values in bounds.items()}}


def _line(series: Series, colour: int, scale: _Scale) -> _Line:
    points = _thin(series.points)
    bands = []
    if series.errors:
        bands.append(scale.path([*_shifted(series, 1), *reversed(_shifted(series, -1))]))
    if len(points) < len(series.points):
        bands.append(scale.path([*((p.x, p.high) for p in points), *((p.x, p.low) for p in reversed(points))]))
    dots = points if series.marked or len(points) == 1 else []
    return _Line(
        series.name,
        colour,
        scale.path([(p.x, p.mean) for p in points]),
        bands,
        [_Dot(scale.x(p.x), scale.y(p.mean), f"{series.name} {number(p.mean)} at {number(p.x)}") for p in dots],
    )


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
    """Return round numbers from just below `low` to just above `high`, about as many as wanted."""
    rough = (high - low) / wanted
    size = 10.0 ** math.floor(math.log10(rough))
    step = next((size * factor for factor in (1, 2, 2.5, 5) if size * factor >= rough), size * 10)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, last + 1)]


def _widened(low: float, high: float) -> tuple[float, float]:
    """Return a range that is not empty."""
    if high - low > 1e-12 * max(abs(low), abs(high)):
        return low, high
    if 0 <= low <= 1:  # a share, most likely
        return 0.0, 1.0
    half = abs(low) * 0.5
    return low - half, high + half
