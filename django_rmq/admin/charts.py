"""Line charts over time as the geometry of an SVG: numbers and path data for templates to draw.

It uses neither Django nor Redis. It makes no markup, so nothing has to be marked safe. A missing value
(``None``) leaves a gap in its line. Coordinates are user units of the ``viewBox``, rounded to a tenth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Values = Sequence[float | None]

WIDTH, HEIGHT = 520, 190
LEFT, RIGHT, TOP, BOTTOM = 56, 10, 10, 24
TICKS_OF_TIME = (60, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
"""Seconds between two labels of the time axis; the first value that gives at most seven labels is used."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line: its readable ``name``, its ``kind`` (a CSS class), and a value for each time."""

    name: str
    kind: str
    values: Values


@dataclass(frozen=True, slots=True)
class Tick:
    """A labelled place on an axis."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Line:
    """One drawn series, and its figures for the legend (None: it has no values)."""

    name: str
    kind: str
    path: str
    area: str
    """The area under the line. Empty: the chart has none."""
    last: str | None
    least: str | None
    most: str | None


@dataclass(frozen=True, slots=True)
class Column:
    """An invisible column with a text, shown when the pointer is over one time."""

    x: float
    width: float
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """Everything that a template needs to draw a chart with axes."""

    lines: tuple[Line, ...]
    rows: tuple[Tick, ...]
    """Horizontal grid lines: y and the value there."""
    columns: tuple[Tick, ...]
    """Times: x and the label."""
    readings: tuple[Column, ...]
    empty: bool
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP
    bottom: int = HEIGHT - BOTTOM

    @property
    def plot_height(self) -> int:
        return self.bottom - self.top


@dataclass(frozen=True, slots=True)
class Sparkline:
    """A line without axes, for a cell of a table."""

    path: str
    area: str
    most: float
    width: int = 120
    height: int = 28


def sparkline(values: Values) -> Sparkline | None:
    """Return a small line over ``values``, from zero to their maximum; None if there are fewer than two."""
    known = _known(values)
    if len(known) < 2:
        return None
    frame = Sparkline("", "", max(known))
    top = frame.most or 1.0
    points = _points(values, 1, frame.width - 1, lambda value: _round(26 - 24 * value / top))
    return Sparkline(_path(points), _area(points, frame.height), frame.most)


def chart(
    times: Sequence[float],
    series: Sequence[Series],
    *,
    time_label: Callable[[float], str],
    value_label: Callable[[float], str],
    area: bool = False,
    utc_offset: float = 0.0,
) -> Chart:
    """Return ``series`` drawn over ``times`` (seconds, ascending, evenly spaced), from zero upwards.

    ``utc_offset`` (seconds) moves the labels of the time axis to round hours of the viewer's clock.
    """
    known = [value for line in series for value in _known(line.values)]
    highest, step = scale(max(known, default=0.0))
    plot = HEIGHT - BOTTOM - TOP

    def y(value: float) -> float:
        return _round(HEIGHT - BOTTOM - plot * min(max(value, 0.0), highest) / highest)

    lines = tuple(_line(one, y, value_label, area) for one in series)
    count = round(highest / step)
    rows = tuple(Tick(y(step * i), value_label(step * i)) for i in range(count + 1))
    return Chart(
        lines,
        rows,
        _time_ticks(times, time_label, utc_offset),
        _readings(times, series, time_label, value_label),
        empty=not known,
    )


def scale(highest: float) -> tuple[float, float]:
    """Return the top of an axis that shows ``highest``, and the step between its two to five labels."""
    if not highest > 1e-9:
        return 1.0, 1.0
    rough = highest / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))
    return step * math.ceil(highest / step * (1 - 1e-9)), step


def _known(values: Values) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _round(value: float) -> float:
    return round(value, 1)


_Point = tuple[float, float]


def _points(values: Values, left: float, right: float, y: Callable[[float], float]) -> list[list[_Point]]:
    """Return the points of each uninterrupted stretch."""
    gap = (right - left) / max(len(values) - 1, 1)
    stretches: list[list[_Point]] = [[]]
    for i, value in enumerate(values):
        if value is not None and math.isfinite(value):
            stretches[-1].append((_round(left + gap * i), y(value)))
        elif stretches[-1]:
            stretches.append([])
    return [stretch for stretch in stretches if stretch]


def _path(stretches: list[list[_Point]]) -> str:
    # A stretch of one point is drawn as a line of no length, which a round cap makes a dot.
    return "".join(
        f"M{stretch[0][0]:g} {stretch[0][1]:g}" + "".join(f"L{x:g} {y:g}" for x, y in stretch[1:] or stretch)
        for stretch in stretches
    )


def _area(stretches: list[list[_Point]], bottom: float) -> str:
    return "".join(
        f"M{stretch[0][0]:g} {bottom:g}"
        + "".join(f"L{x:g} {y:g}" for x, y in stretch)
        + f"L{stretch[-1][0]:g} {bottom:g}Z"
        for stretch in stretches
        if len(stretch) > 1
    )


def _line(series: Series, y: Callable[[float], float], label: Callable[[float], str], area: bool) -> Line:
    stretches = _points(series.values, LEFT, WIDTH - RIGHT, y)
    known = _known(series.values)
    return Line(
        series.name,
        series.kind,
        _path(stretches),
        _area(stretches, HEIGHT - BOTTOM) if area else "",
        label(known[-1]) if known else None,
        label(min(known)) if known else None,
        label(max(known)) if known else None,
    )


def _time_ticks(times: Sequence[float], label: Callable[[float], str], utc_offset: float) -> tuple[Tick, ...]:
    if len(times) < 2 or times[-1] <= times[0]:
        return ()
    begin, end = times[0], times[-1]
    step = next((gap for gap in TICKS_OF_TIME if (end - begin) / gap <= 7), TICKS_OF_TIME[-1])
    first = math.ceil((begin + utc_offset) / step) * step - utc_offset
    across = WIDTH - RIGHT - LEFT
    ticks = []
    at = first
    while at <= end:
        ticks.append(Tick(_round(LEFT + across * (at - begin) / (end - begin)), label(at)))
        at += step
    return tuple(ticks)


def _readings(
    times: Sequence[float],
    series: Sequence[Series],
    time_label: Callable[[float], str],
    value_label: Callable[[float], str],
) -> tuple[Column, ...]:
    gap = (WIDTH - RIGHT - LEFT) / max(len(times) - 1, 1)
    found = []
    for i, time in enumerate(times):
        parts = []
        for one in series:
            value = one.values[i]
            if value is not None and math.isfinite(value):
                parts.append(f"{one.name} {value_label(value)}")
        if parts:
            x = LEFT + gap * (i - 0.5)
            left, right = max(x, LEFT), min(x + gap, WIDTH - RIGHT)
            text = f"{time_label(time)}\n" + "\n".join(parts)
            found.append(Column(_round(left), _round(max(right - left, 0.1)), text))
    return tuple(found)
