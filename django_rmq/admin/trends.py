"""The history of a topic as sparkline, rates and charts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from django.utils import timezone
from django.utils.formats import date_format
from django.utils.translation import gettext as _
from django.utils.translation import pgettext

from django_rmq.admin.charts import Chart, Series, Sparkline, chart, sparkline
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError
from django_rmq.operations import Minute, Operations, TopicStats
from django_rmq.templatetags.rmq_times import duration, number

SPANS = ((1, 1), (6, 2), (24, 10), (48, 20), (168, 60), (744, 360))
"""The hours that can be selected, and the minutes per point for each."""

HOUR_MINUTES = 60
RECENT_MINUTES = 3
"""Minutes after which the last sampled rate is too old to be shown as current."""


@dataclass(frozen=True, slots=True)
class Recent:
    """The figures of the last hour for a row of a table. Rates per minute; None: no recent sample."""

    spark: Sparkline | None = None
    sent: float | None = None
    merged: float | None = None
    done: float | None = None
    failed: float | None = None
    sample: Minute | None = None
    """The last sampled minute."""
    problem: str = ""
    """Why the history cannot be read."""


@dataclass(frozen=True, slots=True)
class Titled:
    """A chart with its heading."""

    id: str
    title: str
    chart: Chart
    note: str = ""


def recent(
    operations: Operations, figures: Sequence[TopicStats], shown: Collection[Topic]
) -> dict[Topic, Recent]:
    """Return the figures of the last hour of topics.

    For topics that are not ``shown`` only rates are read, if nothing else is needed: they count in totals.
    """
    wanted = {
        one.topic: HOUR_MINUTES if one.topic in shown or one.is_partial else RECENT_MINUTES for one in figures
    }
    return {topic: _recent(minutes) for topic, minutes in operations.last_minutes(wanted).items()}


def _recent(minutes: Sequence[Minute] | RmqError) -> Recent:
    if isinstance(minutes, RmqError):
        return Recent(problem=str(minutes))
    rates = next((minute.rates for minute in reversed(minutes[-RECENT_MINUTES:]) if minute.rates), None)
    spark = None
    if len(minutes) == HOUR_MINUTES:
        spark = sparkline([minute.rates.committed if minute.rates else None for minute in minutes])
    sample = next((minute for minute in reversed(minutes) if minute.depth), None)
    if rates is None:
        return Recent(spark, sample=sample)
    return Recent(spark, rates.sent, rates.merged, rates.committed, rates.failed, sample)


def spans(seconds_kept: float) -> list[int]:
    """Return the hours that can be selected if this many seconds are kept."""
    return [hours for hours, _step in SPANS if hours <= max(seconds_kept / 3600, 1)]


def charts(topic: Topic, minutes: Sequence[Minute]) -> list[Titled]:
    """Return the charts of ``minutes``: depth by state, dead, rates, merging, and lateness."""
    lateness = [] if topic.is_priority else [_lateness(minutes)]
    return [_store(topic, minutes), _rates(minutes), _trouble(minutes), *lateness, _merging(minutes)]


def read(operations: Operations, topic: Topic, hours: int) -> list[Minute]:
    """Return the history of ``hours``, in as many minutes per point as a chart can show."""
    return operations.history(topic.name, hours, step=dict(SPANS)[hours])


def _drawn(
    minutes: Sequence[Minute], name: str, title: str, series: Sequence[Series], label: Callable[[float], str]
) -> Titled:
    times = [minute.at_ms / 1000 for minute in minutes]
    drawn = chart(
        times,
        series,
        time_label=_day_and_time if times[-1] - times[0] > 86_400 else _time,
        value_label=label,
        area=len(series) < 3,
        utc_offset=_utc_offset(),
    )
    return Titled(name, title, drawn)


def _depth(minutes: Sequence[Minute], field: str) -> list[float | None]:
    return [getattr(minute.depth, field) if minute.depth else None for minute in minutes]


def _rate(minutes: Sequence[Minute], field: str) -> list[float | None]:
    return [getattr(minute.rates, field) if minute.rates else None for minute in minutes]


def _store(topic: Topic, minutes: Sequence[Minute]) -> Titled:
    waiting = [Series(_("store"), "store", _depth(minutes, "store"))]
    if not topic.is_priority:
        waiting.append(Series(_("due"), "prepare", _depth(minutes, "due")))
    return _drawn(minutes, "depth", pgettext("state of messages", "Store"), waiting, number)


def _rates(minutes: Sequence[Minute]) -> Titled:
    series = [
        Series(_("sent"), "sent", _rate(minutes, "sent")),
        Series(_("done"), "done", _rate(minutes, "committed")),
        Series(_("failed"), "failed", _rate(minutes, "failed")),
    ]
    return _drawn(minutes, "rates", _("Per minute"), series, number)


def _trouble(minutes: Sequence[Minute]) -> Titled:
    series = [
        Series(_("prepare"), "prepare", _depth(minutes, "prepare")),
        Series(_("retry"), "retry", _depth(minutes, "retry")),
        Series(_("dead"), "dead", _depth(minutes, "dead")),
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


def _utc_offset() -> float:
    offset = timezone.localtime().utcoffset()
    return offset.total_seconds() if offset else 0.0
