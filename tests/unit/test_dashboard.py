"""The dashboard: its rows, totals and charts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from django.utils import translation
from hypothesis import given
from hypothesis import strategies as st

from django_rmq.admin import charts
from django_rmq.admin.dashboard import DashboardTotals
from django_rmq.admin.topic_figures import HOUR_MINUTES, SPARK_POINTS, Recent, read_recent
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.monitoring.history import EDGES_MS, HELD_MINUTES, Depth, Lateness, Minute, Rates, summed
from django_rmq.operations import Annotation, TopicStats


@pytest.mark.parametrize(
    ("rates", "done", "is_part"),
    [((7.0, None), 7.0, True), ((7.0, 0.0), 7.0, False), ((None, None), None, False)],
)
def test_totals_say_whether_the_rate_of_a_topic_is_unknown(
    rates: tuple[float | None, float | None], done: float | None, is_part: bool
) -> None:
    figures = [TopicStats(Topic(name, TopicType.FIXED_TIME), looked_at=1) for name in "ab"]
    recent = {name: Recent(done=rate) for name, rate in zip("ab", rates, strict=True)}
    totals = DashboardTotals.of(figures, recent, workers=1)
    assert (totals.done, totals.is_part) == (done, is_part)


VALUES = st.lists(
    st.none() | st.floats(min_value=0, max_value=1e15) | st.just(math.nan) | st.just(math.inf), max_size=50
)
PATH = re.compile(r"(M-?\d+(\.\d+)? -?\d+(\.\d+)?(L-?\d+(\.\d+)? -?\d+(\.\d+)?)*Z?)*")


def drawn(values: list[float | None], **options: object):
    times = [60.0 * i for i in range(len(values))]
    return charts.chart(
        times,
        [charts.Series("in", "sent", values)],
        time_label=lambda at: f"{at:g}s",
        value_label=lambda value: f"{value:g}",
        **options,  # type: ignore[arg-type]
    )


@given(VALUES)
def test_whatever_the_values_the_path_is_path_data_within_the_frame(values: list[float | None]) -> None:
    found = drawn(values, area=True)
    (line,) = found.lines
    for path in (line.path, line.area):
        assert PATH.fullmatch(path), path
        numbers = [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", path)]
        assert all(0 <= x <= charts.WIDTH for x in numbers[::2])
        assert all(0 <= y <= charts.HEIGHT for y in numbers[1::2])
    assert found.empty == (not line.path)


@given(VALUES)
def test_a_sparkline_is_path_data_or_nothing(values: list[float | None]) -> None:
    found = charts.sparkline(values)
    known = [value for value in values if value is not None and math.isfinite(value)]
    assert (found is None) == (len(known) < 2)
    if found is not None:
        assert PATH.fullmatch(found.path)
        assert found.most == max(known)


@given(st.floats(min_value=1e-6, max_value=1e15))
def test_the_axis_reaches_what_it_shows_and_has_few_labels(highest: float) -> None:
    top, step = charts.scale(highest)
    assert top >= highest * (1 - 1e-6)
    assert 1 <= round(top / step) <= 5


def test_an_axis_of_one_has_labels_of_one_decimal() -> None:
    assert charts.scale(1) == (1.0, 0.5)


def test_an_axis_of_nothing_is_from_zero_to_one() -> None:
    assert charts.scale(0) == (1.0, 1.0)
    found = drawn([])
    assert found.empty
    assert found.columns == ()
    assert found.readings == ()


def test_a_missing_value_leaves_a_gap() -> None:
    found = drawn([1, 2, None, 3, 4])
    assert found.lines[0].path.count("M") == 2
    assert len(found.readings) == 4


def test_a_lone_value_is_a_short_line_that_can_be_seen() -> None:
    found = drawn([None, 5, None])
    left, top, right, bottom = map(float, re.findall(r"[\d.]+", found.lines[0].path))
    assert right - left == charts.DOT_WIDTH and top == bottom
    assert (left + right) / 2 == (found.left + found.right) / 2


def test_the_legend_has_last_least_and_most() -> None:
    (line,) = drawn([3, 1, 4, None]).lines
    assert (line.last, line.least, line.most) == ("4", "1", "4")


def test_labels_of_time_lie_on_round_hours_of_the_viewers_clock() -> None:
    times = [5 * 60 + 300.0 * i for i in range(12 * 12)]
    label = lambda at: f"{at:g}"  # noqa: E731 - two words of a test
    utc = charts.chart(times, [], time_label=label, value_label=label)
    assert all(float(tick.label) % 7200 == 0 for tick in utc.columns)
    kolkata = charts.chart(times, [], time_label=label, value_label=label, utc_offset=5.5 * 3600)
    assert all((float(tick.label) + 5.5 * 3600) % 7200 == 0 for tick in kolkata.columns)
    assert 2 <= len(kolkata.columns) <= 9


@pytest.mark.parametrize("language", ["en", "zh-hans"])
@pytest.mark.parametrize(("hours", "step"), charts.SPANS)
@pytest.mark.parametrize("late", range(0, 96, 17))
def test_the_labels_of_time_differ_and_do_not_overlap(
    hours: int, step: int, late: int, language: str
) -> None:
    begin_ms = 1_790_000_000_000 + late * 3_600_000
    minutes = [Minute(begin_ms + at * 60_000) for at in range(0, hours * 60, step)]
    with translation.override(language):
        found = charts.charts(TOPICS[0], minutes)[0].chart.columns
    assert 3 <= len(found) <= charts.MOST_STEPS + 1
    assert len({tick.label for tick in found}) == len(found)
    for left, right in pairwise(found):
        # A Latin letter is up to 6.5 units wide, and a Chinese one 11.
        widths = [sum(11 if ord(letter) > 255 else 6.5 for letter in tick.label) for tick in (left, right)]
        assert right.at - left.at > sum(widths) / 2


TOPICS = [Topic(name, TopicType.FIXED_TIME, slots=1) for name in ("one", "other")]


def sampled(at: int, due: int, done: float = 0.0, dead: int = 0, late: int | None = None) -> Minute:
    """Return a minute; ``late``: the class of the lateness of a hundred messages."""
    counts = tuple(100 if one == late else 0 for one in range(len(EDGES_MS) + 1))
    depth, rates = Depth(due, due, 0, 0, 0, dead, None), Rates(done, 0, done, done, 0, 0)
    return Minute(at * 60_000, at * 60_000, depth, rates, Lateness(counts) if late is not None else None)


class Reads:
    """Operations that answer from lists."""

    def __init__(self, **minutes: list[Minute]) -> None:
        self.minutes, self.asked = minutes, list[tuple[float, int]]()

    def shared_last_minutes(
        self, wanted: dict[Topic, int], minute: int, make: Callable[[list[Minute]], object]
    ) -> dict[str, object]:
        return {topic.name: make(self.minutes[topic.name][-count:]) for topic, count in wanted.items()}

    def history(self, name: str, hours: float, *, step: int) -> list[Minute]:
        self.asked.append((hours, step))
        points = round(hours * 60) // step
        return ([Minute(0)] * points + self.minutes[name])[-points:]


class Figures:
    is_partial = False
    now_ms = 59 * 60_000 + 30_000

    def __init__(self, topic: Topic) -> None:
        self.topic = topic


def hour_of(*minutes: Minute | None) -> list[Minute]:
    """Return an hour whose last minutes are these, and of which nothing else was sampled."""
    first = HOUR_MINUTES - len(minutes)
    listed = [one or Minute(at * 60_000) for at, one in enumerate(minutes, first)]
    return [Minute(at * 60_000) for at in range(first)] + listed


def recents(shown: list[Topic] = TOPICS, **minutes: list[Minute]) -> dict[str, Any]:
    operations: Any = Reads(**minutes)
    figures: list[Any] = [Figures(topic) for topic in TOPICS]
    return read_recent(operations, figures, [topic.name for topic in shown])


def test_a_small_line_begins_with_the_first_sample_and_keeps_the_highest_values() -> None:
    few = hour_of(*(sampled(at, at - 49, late=9) for at in range(50, 60)))
    many = hour_of(*(sampled(at, 7 if at == 31 else 1, dead=0) for at in range(60)))
    found = recents(one=few, other=many)
    ten, whole = (found[topic.name].trends for topic in TOPICS)
    # Ten minutes of data fill the line, from its left edge to its right one.
    assert ten.due.path.count("L") == 9
    assert ten.due.path.startswith("M1 ") and f"L{ten.due.width - 1} " in ten.due.path
    assert whole.due.path.count("L") == SPARK_POINTS - 1 and whole.due.most == 7
    # What has been zero for an hour is no line.
    assert whole.dead is None and ten.done is None and whole.late is None
    assert whole.late_seconds is None
    low, high = EDGES_MS[8] / 1000, EDGES_MS[9] / 1000
    assert low < ten.late_seconds <= high and low < ten.late.most <= high


def test_the_charts_of_the_site_are_the_sums_of_topics() -> None:
    one = hour_of(*(sampled(at, 10, done=2.0, dead=1) for at in range(50, 60)))
    # It was not sampled in every minute, and the present one may still come.
    gaps = [sampled(at, 5, done=1.0) if at % 2 == 0 else None for at in range(50, 60)]
    depth, rates = charts.of_several(summed([one, hour_of(*gaps)]))
    (due, dead), (sent, done, _) = depth.chart.lines, rates.chart.lines
    assert (due.least, due.most, dead.most) == ("15", "15", "1")
    assert (done.least, done.most, sent.last) == ("2", "3", "3")
    # Ten minutes of data, without the present one.
    assert len(depth.chart.readings) == 9
    assert charts.of_several(summed([])) == []
    assert summed([hour_of(), hour_of(sampled(59, 1))]) == []


def test_a_depth_is_not_held_for_longer_than_five_minutes() -> None:
    once = hour_of(sampled(20, 5), *([None] * 38), sampled(59, 9))
    other = hour_of(*(sampled(at, 1) for at in range(60)))
    depth, _ = charts.of_several(summed([once, other]))
    texts = [one.text for one in depth.chart.readings]
    assert sum("due 6" in text for text in texts) == HELD_MINUTES + 1
    assert sum("due 1" in text for text in texts) == 59 - HELD_MINUTES - 1


def test_topics_that_are_not_shown_are_read_for_three_minutes_and_have_no_trend() -> None:
    many = hour_of(*(sampled(at, 1, done=4.0) for at in range(60)))
    found = recents(TOPICS[:1], one=many, other=many)
    assert found["one"].trends.due is not None
    hidden = found["other"]
    assert (hidden.trends.due, hidden.done) == (None, 4.0)


@pytest.mark.parametrize(
    ("points", "asked", "shown"),
    [
        (5, [(6, 2), (1, 1)], 5),  # ten minutes of data
        (100, [(6, 2)], 100),
        (180, [(6, 2)], 180),
        (0, [(6, 2)], 180),
    ],
)
def test_a_short_history_fills_its_chart(points: int, asked: list[Any], shown: int) -> None:
    reads = Reads(one=[sampled(at, 1) for at in range(points)])
    found = charts.read_history(reads, TOPICS[0], 6)  # type: ignore[arg-type]
    assert (reads.asked, len(found)) == (asked, shown)


def happened(*seconds: float, kind: Any = "action") -> list[Annotation]:
    return [Annotation(round(at * 1000), kind, f"act {at:g}", "one", "anna") for at in seconds]


def test_markers_are_at_their_time_and_inside_the_plot() -> None:
    times = [60.0 * i for i in range(61)]
    first, middle, last = charts.markers(times, happened(0, 1800, 3659), lambda one: one.text)
    assert (first.x, last.x) == (charts.LEFT, charts.WIDTH - charts.RIGHT)
    assert middle.x == pytest.approx((charts.LEFT + charts.WIDTH - charts.RIGHT) / 2, abs=0.1)
    assert (first.text, middle.kind) == ("act 0", "action")
    assert charts.markers([0.0], happened(0), str) == ()


def test_what_is_too_near_is_one_marker_that_says_the_last_lines() -> None:
    times = [60.0 * i for i in range(61)]
    many = happened(*range(100, 100 + charts.MOST_LINES + 5)) + happened(116, kind="version") + happened(3000)
    near, far = charts.markers(times, many, lambda one: one.text)
    assert near.kind == "version" and far.kind == "action"
    lines = near.text.split("\n")
    assert len(lines) == charts.MOST_LINES and lines[-1] == "act 116"
    assert far.x - near.x >= charts.MARKER_WIDTH
