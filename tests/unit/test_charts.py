from __future__ import annotations

import math
import re

from hypothesis import given
from hypothesis import strategies as st

from django_rmq.admin.charts import HEIGHT, WIDTH, Series, chart, scale, sparkline

VALUES = st.lists(
    st.none() | st.floats(min_value=0, max_value=1e15) | st.just(math.nan) | st.just(math.inf), max_size=50
)
PATH = re.compile(r"(M-?\d+(\.\d+)? -?\d+(\.\d+)?(L-?\d+(\.\d+)? -?\d+(\.\d+)?)*Z?)*")


def drawn(values: list[float | None], **options: object):
    times = [60.0 * i for i in range(len(values))]
    return chart(
        times,
        [Series("in", "sent", values)],
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
        assert all(0 <= x <= WIDTH for x in numbers[::2])
        assert all(0 <= y <= HEIGHT for y in numbers[1::2])
    assert found.empty == (not line.path)


@given(VALUES)
def test_a_sparkline_is_path_data_or_nothing(values: list[float | None]) -> None:
    found = sparkline(values)
    known = [value for value in values if value is not None and math.isfinite(value)]
    assert (found is None) == (len(known) < 2)
    if found is not None:
        assert PATH.fullmatch(found.path)
        assert found.most == max(known)


@given(st.floats(min_value=1e-6, max_value=1e15))
def test_the_axis_reaches_what_it_shows_and_has_few_labels(highest: float) -> None:
    top, step = scale(highest)
    assert top >= highest * (1 - 1e-6)
    assert 1 <= round(top / step) <= 5


def test_an_axis_of_nothing_is_from_zero_to_one() -> None:
    assert scale(0) == (1.0, 1.0)
    found = drawn([])
    assert found.empty
    assert found.columns == ()
    assert found.readings == ()


def test_a_missing_value_leaves_a_gap() -> None:
    found = drawn([1, 2, None, 3, 4])
    assert found.lines[0].path.count("M") == 2
    assert len(found.readings) == 4


def test_a_lone_value_is_a_dot() -> None:
    found = drawn([None, 5, None])
    assert re.fullmatch(r"M(\S+ \S+)L\1", found.lines[0].path)


def test_the_legend_has_last_least_and_most() -> None:
    (line,) = drawn([3, 1, 4, None]).lines
    assert (line.last, line.least, line.most) == ("4", "1", "4")


def test_labels_of_time_lie_on_round_hours_of_the_viewers_clock() -> None:
    times = [5 * 60 + 300.0 * i for i in range(12 * 12)]
    label = lambda at: f"{at:g}"  # noqa: E731 - two words of a test
    utc = chart(times, [], time_label=label, value_label=label)
    assert all(float(tick.label) % 7200 == 0 for tick in utc.columns)
    kolkata = chart(times, [], time_label=label, value_label=label, utc_offset=5.5 * 3600)
    assert all((float(tick.label) + 5.5 * 3600) % 7200 == 0 for tick in kolkata.columns)
    assert 2 <= len(kolkata.columns) <= 9
