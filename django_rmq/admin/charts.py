"""Charts of the history of topics: what each of them shows (``charts``, ``of_several``), and how ``chart`` draws lines as SVG.

The geometry makes no markup, which is the part of templates, so nothing has to be marked safe. A missing value (``None``) leaves
a gap in its line. Coordinates are user units of the ``viewBox``, rounded to a tenth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from django.utils import timezone
from django.utils.formats import date_format, get_format
from django.utils.translation import gettext as _
from django.utils.translation import pgettext

from django_rmq.admin.audit_log import translate_record
from django_rmq.core.model.topic import Topic
from django_rmq.operations import Minute, Operations, SummedMinute
from django_rmq.operations.measurements import Annotation
from django_rmq.templatetags.rmq_format import duration, number

Values = Sequence[float | None]

WIDTH, HEIGHT = 520, 190
LEFT, RIGHT, TOP, BOTTOM = 56, 10, 10, 24
MARKER_WIDTH = 8
"""Units between two markers, or they become one."""

DOT_WIDTH = 4
"""Units of the line that stands for a value without neighbours."""

MOST_LISTED = 20
"""The number of things that happened that are listed below charts: the last ones."""

MOST_LINES = 10
"""The number of lines that a marker says: the last ones."""

TICKS_OF_TIME = (60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000)
"""Seconds between two labels of the time axis; the first value of which at most ``MOST_STEPS`` fit into the chart is used."""

MOST_STEPS = 7
"""The steps of the time axis; it has at most one label more."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line: its readable ``name``, its ``kind`` (the CSS class of its colour), and a value for each time."""

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
class Marker:
    """A vertical line where something happened. ``kind`` is a CSS class, ``text`` says what happened, a line for each."""

    x: float
    kind: str
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
    times: Sequence[float] = ()
    """When each value was taken, in seconds."""
    markers: tuple[Marker, ...] = ()
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


def sparkline(values: Values, *, area: bool = True) -> Sparkline | None:
    """Return a small line over ``values``, from zero to their maximum; None if there are fewer than two.

    ``area``: with the area below it.
    """
    known = known_values(values)
    if len(known) < 2:
        return None
    frame = Sparkline("", "", max(known))
    top = frame.most or 1.0
    points = _points(values, 1, frame.width - 1, lambda value: _round(26 - 24 * value / top))
    return Sparkline(_path(points), _area(points, frame.height) if area else "", frame.most)


def chart(
    times: Sequence[float],
    series: Sequence[Series],
    *,
    time_label: Callable[[float], str],
    value_label: Callable[[float], str],
    tick_label: Callable[[float], str] | None = None,
    area: bool = False,
    utc_offset: float = 0.0,
) -> Chart:
    """Return ``series`` drawn over ``times`` (seconds, ascending, evenly spaced), from zero upwards.

    ``tick_label`` labels the time axis, if ``time_label`` does not. ``utc_offset`` (seconds) moves these labels to round
    hours of the viewer's clock.
    """
    known = [value for line in series for value in known_values(line.values)]
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
        _time_ticks(times, tick_label or time_label, utc_offset),
        _readings(times, series, time_label, value_label),
        empty=not known,
        times=times,
    )


def markers(
    times: Sequence[float], annotations: Iterable[Annotation], text: Callable[[Annotation], str]
) -> tuple[Marker, ...]:
    """Return the markers of ``annotations`` on a chart over ``times``, the earliest first; those that would overlap are one."""
    if len(times) < 2:
        return ()
    placed: list[tuple[float, list[Annotation]]] = []
    across = (WIDTH - RIGHT - LEFT) / (times[-1] - times[0])
    for one in annotations:
        x = _round(min(max(LEFT + across * (one.at_ms / 1000 - times[0]), LEFT), WIDTH - RIGHT))
        if placed and x - placed[-1][0] < MARKER_WIDTH:
            placed[-1][1].append(one)
        else:
            placed.append((x, [one]))
    return tuple(Marker(x, _kind_of(there), "\n".join(map(text, there[-MOST_LINES:]))) for x, there in placed)


def _kind_of(there: Sequence[Annotation]) -> str:
    # A new version explains more than an action beside it.
    return "version" if any(one.kind == "version" for one in there) else "action"


def scale(highest: float) -> tuple[float, float]:
    """Return the top of an axis that shows ``highest``, and the step between its two to five labels."""
    if not highest > 1e-9:
        return 1.0, 1.0
    rough = highest / 4
    power = 10.0 ** math.floor(math.log10(rough))
    # Labels have one decimal, so there is no step of 0.25.
    factors = (1, 2, 2.5, 5, 10) if power >= 1 else (1, 2, 5, 10)
    step = next(power * factor for factor in factors if power * factor >= rough * (1 - 1e-9))
    return step * math.ceil(highest / step * (1 - 1e-9)), step


def known_values(values: Values) -> list[float]:
    """Return the values that can be drawn."""
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
    return "".join(
        f"M{stretch[0][0]:g} {stretch[0][1]:g}" + "".join(f"L{x:g} {y:g}" for x, y in stretch[1:])
        for stretch in map(_widened, stretches)
    )


def _widened(stretch: list[_Point]) -> list[_Point]:
    """Return a stretch of one point as a short line, which can be seen; others as they are."""
    if len(stretch) > 1:
        return stretch
    x, y = stretch[0]
    return [(x - DOT_WIDTH / 2, y), (x + DOT_WIDTH / 2, y)]


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
    known = known_values(series.values)
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
    step = next((gap for gap in TICKS_OF_TIME if (end - begin) / gap <= MOST_STEPS), TICKS_OF_TIME[-1])
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
    columns = []
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
            columns.append(Column(_round(left), _round(max(right - left, 0.1)), text))
    return tuple(columns)


SPANS = ((1, 1), (6, 2), (24, 10), (48, 20), (168, 60), (744, 360))
"""The hours that can be selected, and the minutes per point for each."""


@dataclass(frozen=True, slots=True)
class Titled:
    """A chart with its heading."""

    id: str
    title: str
    chart: Chart


def from_first_sample(minutes: Sequence[Minute]) -> Sequence[Minute]:
    """Return the minutes from the first one that was sampled on; of fewer than two, all."""
    first = next((at for at, minute in enumerate(minutes) if minute.depth), 0)
    return minutes[first:] if len(minutes) - first > 1 else minutes


def of_several(minutes: Sequence[SummedMinute]) -> list[Titled]:
    """Return charts of several topics together; none before two minutes."""
    if len(minutes) < 2:
        return []

    def line(name: str, kind: str, at: int, field: str) -> Series:
        sums = (getattr(minute, field) for minute in minutes)
        return Series(name, kind, [values[at] if values else None for values in sums])

    waiting = [line(_("due"), "store", 0, "depths"), line(_("dead"), "dead", 1, "depths")]
    events = [
        line(_("sent"), "sent", 0, "rates"),
        line(_("done"), "done", 1, "rates"),
        line(_("failed"), "failed", 2, "rates"),
    ]
    return [
        _drawn(minutes, "site-depth", _("Due and dead"), waiting, number),
        _drawn(minutes, "site-rates", _("Per minute"), events, number),
    ]


def spans(seconds_kept: float) -> list[int]:
    """Return the hours that can be selected if this many seconds are kept."""
    return [hours for hours, _step in SPANS if hours <= max(seconds_kept / 3600, 1)]


def charts(topic: Topic, minutes: Sequence[Minute]) -> list[Titled]:
    """Return the charts of ``minutes``: store, rates, trouble (prepare, retry, dead), lateness if it is known, and merging."""
    lateness = [] if topic.is_priority else [_lateness(minutes)]
    return [_store(topic, minutes), _rates(minutes), _trouble(minutes), *lateness, _merging(minutes)]


def read_history(operations: Operations, topic: Topic, hours: int) -> list[Minute]:
    """Return the history of ``hours``, in as many minutes per point as a chart can show.

    A history that is shorter is returned from its first sample on, and with more points if it fits a shorter span.
    """
    steps = dict(SPANS)
    minutes = from_first_sample(operations.history(topic.name, hours, step=steps[hours]))
    shorter = min((span for span in steps if span * 60 >= len(minutes) * steps[hours]), default=hours)
    if shorter < hours:
        minutes = from_first_sample(operations.history(topic.name, shorter, step=steps[shorter]))
    return list(minutes)


def _drawn(
    minutes: Sequence[Minute | SummedMinute],
    name: str,
    title: str,
    series: Sequence[Series],
    label: Callable[[float], str],
) -> Titled:
    times = [minute.at_ms / 1000 for minute in minutes]
    seconds = times[-1] - times[0]
    drawn = chart(
        times,
        series,
        time_label=_day_and_time if seconds > 86_400 else _time,
        value_label=label,
        # Ticks are then whole days, and the time of each is midnight.
        tick_label=_date if seconds / 43_200 > MOST_STEPS else None,
        area=len(series) < 3,
        utc_offset=_utc_offset(times[-1]),
    )
    return Titled(name, title, drawn)


@dataclass(frozen=True, slots=True)
class AnnotatedCharts:
    """Charts of the same times with markers of what happened, and a list of it, the last first."""

    charts: Sequence[Titled] = ()
    annotations: Sequence[Annotation] = ()
    more: int = 0
    """How many are only in the charts."""


def annotated(operations: Operations, drawn: Sequence[Titled], topics: Iterable[Topic]) -> AnnotatedCharts:
    """Return charts of ``topics`` until now with what happened to them."""
    if not drawn:
        return AnnotatedCharts()
    times = drawn[0].chart.times
    stored = operations.annotations_of([topic.name for topic in topics], times[0] * 1000)
    annotations = [
        one._replace(text=translate_record(one.text)) if one.kind == "action" else one for one in stored
    ]
    places = markers(times, annotations, _said)
    marked = [replace(one, chart=replace(one.chart, markers=places)) for one in drawn]
    return AnnotatedCharts(
        marked, annotations[: -MOST_LISTED - 1 : -1], max(0, len(annotations) - MOST_LISTED)
    )


def _said(one: Annotation) -> str:
    at = _day_and_time(one.at_ms / 1000)
    if one.kind == "version":
        return f"{at} " + _("Version %(name)s") % {"name": one.text}
    return f"{at} {one.topic}: {one.actor}: {one.text}"


def depths(minutes: Sequence[Minute], field: str) -> list[float | None]:
    """Return a depth of each minute, or None where nothing was sampled."""
    return [getattr(minute.depth, field) if minute.depth else None for minute in minutes]


def rates(minutes: Sequence[Minute], field: str) -> list[float | None]:
    """Return a rate of each minute, or None where none is known."""
    return [getattr(minute.rates, field) if minute.rates else None for minute in minutes]


def _store(topic: Topic, minutes: Sequence[Minute]) -> Titled:
    waiting = [Series(_("store"), "store", depths(minutes, "store"))]
    if not topic.is_priority:
        # Store is drawn beside it, so what is due has another colour here, that of prepare.
        waiting.append(Series(_("due"), "prepare", depths(minutes, "due")))
    return _drawn(minutes, "depth", pgettext("state of messages", "Store"), waiting, number)


def _rates(minutes: Sequence[Minute]) -> Titled:
    series = [
        Series(_("sent"), "sent", rates(minutes, "sent")),
        Series(_("done"), "done", rates(minutes, "committed")),
        Series(_("failed"), "failed", rates(minutes, "failed")),
    ]
    return _drawn(minutes, "rates", _("Per minute"), series, number)


def _trouble(minutes: Sequence[Minute]) -> Titled:
    series = [
        Series(_("prepare"), "prepare", depths(minutes, "prepare")),
        Series(_("retry"), "retry", depths(minutes, "retry")),
        Series(_("dead"), "dead", depths(minutes, "dead")),
    ]
    return _drawn(minutes, "trouble", _("Prepare, retry, dead"), series, number)


def _lateness(minutes: Sequence[Minute]) -> Titled:
    def late(part: float) -> list[float | None]:
        return [minute.lateness.percentile(part) / 1000 if minute.lateness else None for minute in minutes]

    series = [Series(name, name, late(part)) for name, part in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))]
    return _drawn(minutes, "lateness", _("Lateness at delivery"), series, duration)


def _merging(minutes: Sequence[Minute]) -> Titled:
    # Two ledgers are read one after the other, so a sum may slightly exceed its whole.
    merged = [
        None
        if minute.rates is None or minute.rates.merge_ratio is None
        else min(minute.rates.merge_ratio, 1.0)
        for minute in minutes
    ]
    series = [Series(_("share of all sends"), "merged", merged)]
    return _drawn(minutes, "merging", _("Merged sends"), series, lambda part: f"{part * 100:.0f} %")


def _local(seconds: float) -> datetime:
    return timezone.localtime(datetime.fromtimestamp(seconds, UTC))


def _time(seconds: float) -> str:
    return date_format(_local(seconds), "H:i")


def _day_and_time(seconds: float) -> str:
    return date_format(_local(seconds), "D H:i")


def _date(seconds: float) -> str:
    # Before a change to daylight saving time, a label at midnight of the last value lies an hour before midnight.
    return date_format(_local(seconds + 3600), get_format("MONTH_DAY_FORMAT").replace("F", "M"))


def _utc_offset(seconds: float) -> float:
    offset = _local(seconds).utcoffset()
    return offset.total_seconds() if offset else 0.0
