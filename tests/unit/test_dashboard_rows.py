"""Rows and totals of the dashboard."""

from __future__ import annotations

import pytest

from django_rmq.admin.dashboard_rows import DashboardTotals, Recent
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.operations import TopicStats


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
