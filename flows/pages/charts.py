"""Line charts as SVG. This module draws the charts of all pages. A browser shows them without scripts or network.

Points of lines have the values of the data as their coordinates, divided by a unit if values are tiny or huge. The
view box of the plot says which values are shown, and the script of a report (report/charts.js) zooms by giving the plot
another view box. The templates in templates/charts/ write what this module computes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from flows.pages.rendering import render
from flows.pages.values import number

_POINTS = 240  # of a line; a longer line shows means of neighbouring points, with a band from lowest to highest
_ZOOMED_POINTS = 1000  # of a line in a zoomed chart
_X_NAME_WIDTH = 40  # at the right end of the x axis, where no number stands
_UNITS = ((120, 1, "seconds"), (7200, 60, "minutes"), (math.inf, 3600, "hours"))
"""The units of the time axis, each with two lengths in seconds, and its name. The unit is used if the longest run is
shorter than the first length. The second is that of the unit."""

_COLOURS = ("#2563a8", "#bd5415", "#2c7d54", "#79489c", "#9a7500", "#1d7f8c", "#b03a6f", "#6b6f76")
_FILE_STYLE = Markup(
    "text{font:11px system-ui,sans-serif;fill:#555}.title{font-weight:600;font-size:13px;fill:#222}"
    ".grid{stroke:#e2e0db}.axis{stroke:#777}.plot{overflow:visible}.plot *{vector-effect:non-scaling-stroke}"
    ".line{fill:none;stroke-width:2.5;stroke-linejoin:round}.dot{stroke-width:8;stroke-linecap:round}.band{opacity:.16}"
    + "".join(f".l{n}{{stroke:{c}}}.d{n},.b{n}{{fill:{c}}}" for n, c in enumerate(_COLOURS))
)
"""The style of a chart that is saved as its own file. Its background is always white."""

Clock = tuple[Sequence[float], Sequence[float]]
"""The steps of a run, and for each step the seconds that the trainer had worked by its end. Pauses between lives of the
trainer do not count."""


@dataclass(frozen=True)
class Series:
    """A named line. If it is `marked`, each point is shown too, with its value on hovering. `errors` has, for each
    point, the height of the band above and below the point. `run` is the number of the run that the line belongs to, on
    a page about several runs."""

    name: str
    points: Sequence[tuple[float | None, float | None]] = field(repr=False)
    marked: bool = False
    errors: Sequence[float] = ()
    run: int = 0


class _Point(NamedTuple):
    """A point of a line, from `low` to `high` if the line has a band."""

    x: float
    low: float
    y: float
    high: float


_Line = tuple[Series, list[_Point]]


@dataclass(frozen=True)
class _Shape:
    """The coordinates of a line, its band and its marked points, at one level of detail, as SVG text."""

    line: str
    band: str
    dots: list[_Point]


@dataclass(frozen=True)
class _Curve:
    """A line as a chart draws it. `shapes` has the line with few points for the whole chart and, if the chart can be
    zoomed, also with more points."""

    name: str
    key: str
    colour: int
    can_be_smoothed: bool
    shapes: list[_Shape]


@dataclass(frozen=True)
class _Tick:
    place: float
    text: str


@dataclass(frozen=True)
class _Axis:
    """An axis: the coordinates of its ends, the numbers written beside it, and the unit by which values are divided to
    make coordinates."""

    low: float
    high: float
    ticks: list[_Tick]
    unit: float = 1.0


@dataclass(frozen=True)
class _Drawing:
    """Everything in the picture of a chart. Drawings with the same `linked` name are zoomed together."""

    x_name: str
    x: _Axis
    y: _Axis
    level: float | None
    curves: list[_Curve]
    linked: str = ""
    left: int = 52
    top: int = 10
    width: int = 396  # width and height of the plot without its axes
    height: int = 184


@dataclass(frozen=True)
class Chart:
    """A line chart. If `level` is set, a horizontal line is drawn there, with at least `room` above and below it. If
    `shared` is true, every chart of the page has one line of each run: a run then has the same colour in all charts,
    and hiding its line hides it in all charts."""

    title: str
    series: Sequence[Series]
    x_name: str = "step"
    note: str = ""
    level: float | None = None
    room: float = 0.0
    shared: bool = False

    def figure(self, clocks: Sequence[Clock] = ()) -> Markup:
        """Return the chart as HTML; empty text if no series has a point. With the clocks of the runs, the chart can be
        zoomed, and has a second drawing with time instead of steps."""
        lines = self._lines()
        if not lines:
            return Markup()
        drawings = [self._draw(lines, self.x_name)]
        if self.x_name == "step" and any(len(steps) > 1 for steps, _ in clocks):
            unit, unit_name = _unit(clocks)
            timed = [(series, _over_time(points, clocks[series.run], unit)) for series, points in lines]
            drawings = [self._draw(lines, "step", "step"), self._draw(timed, unit_name, "time")]
        label = "; ".join(f"{series.name} ends at {number(points[-1].y)}" for series, points in lines)
        return render("charts/figure.html", chart=self, drawings=drawings, label=label)

    def picture(self) -> str:
        """Return the text of an SVG file with the chart, and with the names of its lines above it; empty text if no
        series has a point."""
        lines = self._lines()
        if not lines:
            return ""
        drawing = self._draw(lines, self.x_name)
        above = 20 + 15 * len(lines)
        return str(render("charts/picture.svg", chart=self, drawing=drawing, above=above, style=_FILE_STYLE)) + "\n"

    def _lines(self) -> list[_Line]:
        return [(series, points) for series in self.series if (points := _finite_points(series))]

    def _draw(self, lines: Sequence[_Line], x_name: str, linked: str = "") -> _Drawing:
        every = [point for _, points in lines for point in points]
        ends = [end for point in every for end in (point.low, point.high)]
        if self.level is not None:
            ends += [self.level - self.room, self.level + self.room]
        low, high = _widened([point.x for point in every], 1e-7, 1e-5)
        steps = _ticks(low, high, 6)
        levels = _ticks(*_widened(ends, 1e-5), 5)
        unit = _coordinate_unit(levels[-1] - levels[0])
        made = _Drawing(
            x_name,
            _Axis(low, high, []),
            _Axis(levels[0] / unit, levels[-1] / unit, [], unit),
            None if self.level is None else self.level / unit,
            [self._curve(n, *line, unit, is_zoomable=bool(linked)) for n, line in enumerate(lines)],
            linked,
        )
        for value in steps:
            place = made.left + (value - low) / (high - low) * made.width
            if low <= value <= high and place < made.left + made.width - _X_NAME_WIDTH:
                made.x.ticks.append(_Tick(round(place, 1), number(value)))
        for value in levels:
            place = made.top + (made.y.high - value / unit) / (made.y.high - made.y.low) * made.height
            made.y.ticks.append(_Tick(round(place, 1), number(value)))
        return made

    def _curve(self, place: int, series: Series, points: Sequence[_Point], unit: float, *, is_zoomable: bool) -> _Curve:
        key = series.name if self.shared else f"{self.title}/{series.name}"
        colour = (series.run if self.shared else place) % len(_COLOURS)
        sizes = [_POINTS, _ZOOMED_POINTS] if is_zoomable and len(points) > _POINTS else [_POINTS]
        shapes = [_shape(series, _thin(points, size), unit) for size in sizes]
        return _Curve(series.name, key, colour, not series.marked and not series.errors, shapes)


def _finite_points(series: Series) -> list[_Point]:
    errors = series.errors or [0.0] * len(series.points)
    known = [
        (float(x), float(y), error)
        for (x, y), error in zip(series.points, errors, strict=True)
        if x is not None and y is not None and math.isfinite(x) and math.isfinite(y)
    ]
    return [_Point(x, y - error, y, y + error) for x, y, error in sorted(known)]


def _unit(clocks: Sequence[Clock]) -> tuple[int, str]:
    """Return the unit of time that suits the longest run, as its number of seconds and its name."""
    longest = max(seconds[-1] for _, seconds in clocks)
    return next((size, name) for most, size, name in _UNITS if longest < most)


def _over_time(points: Sequence[_Point], clock: Clock, unit: int) -> list[_Point]:
    """Return the points with times in place of steps. Times between two steps of the clock are interpolated."""
    times = np.interp([point.x for point in points], *clock) / unit
    return [point._replace(x=float(time)) for point, time in zip(points, times, strict=True)]


def _thin(points: Sequence[_Point], most: int) -> list[_Point]:
    size = math.ceil(len(points) / most)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        _Point(
            sum(point.x for point in group) / len(group),
            min(point.low for point in group),
            sum(point.y for point in group) / len(group),
            max(point.high for point in group),
        )
        for group in groups
    ]


def _shape(series: Series, points: Sequence[_Point], unit: float) -> _Shape:
    above, below = [(point.x, point.high / unit) for point in points], [(point.x, point.low / unit) for point in points]
    return _Shape(
        _coordinates([(point.x, point.y / unit) for point in points]),
        _coordinates([*above, *reversed(below)]) if above != below else "",
        list(points) if series.marked or len(points) == 1 else [],
    )


def _coordinates(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.7g},{y:.7g}" for x, y in points)


def _ticks(low: float, high: float, wanted: int) -> list[float]:
    """Return about `wanted` round numbers, evenly spaced, which begin at or below `low` and end at or above `high`."""
    rough = (high - low) / wanted
    size = 10.0 ** math.floor(math.log10(rough))
    step = next((size * factor for factor in (1, 2, 2.5, 5) if size * factor >= rough), size * 10)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, last + 1)]


def _coordinate_unit(height: float) -> float:
    """Return the power of ten by which values are divided to make coordinates that are neither tiny nor huge. Browsers
    treat sizes below one in a million as zero."""
    exponent = math.floor(math.log10(height))
    return 1.0 if -1 <= exponent <= 6 else 10.0**exponent


def _widened(values: Sequence[float], least_share: float, least: float = 0.0) -> tuple[float, float]:
    """Return the lowest and the highest value. If their range is too small to be drawn, return a wider range that
    contains them. A range is too small if it is at most `least`, or at most the share `least_share` of the largest
    absolute value. Browsers compute coordinates with only seven digits."""
    low, high = min(values), max(values)
    if high - low > max(least, least_share * max(abs(low), abs(high))):
        return low, high
    if low >= 0 and high <= 1:  # a share, most likely
        return 0.0, 1.0
    half = abs(low) * 0.5
    return low - half, high + half
