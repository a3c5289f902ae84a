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
from django_rmq.core.redis.broker import Broker
from django_rmq.core.telling import history
from django_rmq.core.telling.history import Minute
from django_rmq.core.words.messages import Topic
from django_rmq.exceptions import RmqError
from django_rmq.operations import TopicFigures
from django_rmq.templatetags.rmq_times import duration, number

SPANS = ((1, 1), (6, 2), (24, 10), (48, 20), (168, 60), (744, 360))
"""Hours that can be looked at, and the minutes that are one point then."""

HOUR_MINUTES = 60
RECENT_MINUTES = 3
"""Rates in tables are those of the last sampled minute; one that is older than this says nothing of now."""


@dataclass(frozen=True, slots=True)
class Recent:
    """What the last hour tells in a row of a table. Rates per minute; None: nobody has sampled them of late."""

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


def recent(broker: Broker, figures: Sequence[TopicFigures], shown: Collection[Topic]) -> dict[Topic, Recent]:
    """Return what the last hour of topics tells.

    Of topics that are not ``shown`` only rates are looked for, where nothing else is needed: they count in totals.
    """
    wanted = {
        one.topic: HOUR_MINUTES if one.topic in shown or one.is_partial else RECENT_MINUTES for one in figures
    }
    return {topic: _recent(minutes) for topic, minutes in history.read_last(broker, wanted).items()}


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


def spans(hours_kept: int) -> list[int]:
    """Return the hours that can be looked at where so many are kept."""
    return [hours for hours, _step in SPANS if hours <= max(hours_kept, 1)]


def charts(topic: Topic, minutes: Sequence[Minute]) -> list[Titled]:
    """Return the charts of ``minutes``: depth by state, dead, rates, merging, and lateness."""
    return [item for item in _charts(topic, minutes) if item is not None]


def read(broker: Broker, topic: Topic, hours: int) -> list[Minute]:
    """Return the history of ``hours``, in as many minutes per point as a chart can show."""
    return history.read(broker, topic, hours, step=dict(SPANS)[hours])


def _charts(topic: Topic, minutes: Sequence[Minute]) -> list[Titled | None]:
    times = [minute.at_ms / 1000 for minute in minutes]

    def drawn(
        name: str, title: str, series: Sequence[Series], label: Callable[[float], str], note: str = ""
    ) -> Titled:
        return Titled(
            name,
            title,
            chart(
                times,
                series,
                time_label=_day_and_time if times[-1] - times[0] > 86_400 else _time,
                value_label=label,
                area=len(series) < 3,
                utc_offset=_utc_offset(),
            ),
            note,
        )

    def depth(field: str) -> list[float | None]:
        return [getattr(minute.depth, field) if minute.depth else None for minute in minutes]

    def rate(field: str) -> list[float | None]:
        return [getattr(minute.rates, field) if minute.rates else None for minute in minutes]

    def late(part: float) -> list[float | None]:
        return [minute.lateness.percentile(part) / 1000 if minute.lateness else None for minute in minutes]

    waiting = [Series(_("store"), "store", depth("store"))]
    if not topic.is_priority:
        waiting.append(Series(_("of these due"), "prepare", depth("due")))
    return [
        drawn("depth", pgettext("state of messages", "Store"), waiting, number),
        drawn(
            "rates",
            _("Per minute"),
            [
                Series(_("in"), "sent", rate("sent")),
                Series(_("done"), "done", rate("committed")),
                Series(_("failed"), "failed", rate("failed")),
            ],
            number,
        ),
        drawn(
            "trouble",
            _("Prepare, retry, dead"),
            [
                Series(_("prepare"), "prepare", depth("prepare")),
                Series(_("retry"), "retry", depth("retry")),
                Series(_("dead"), "dead", depth("dead")),
            ],
            number,
        ),
        None
        if topic.is_priority
        else drawn(
            "lateness",
            _("Lateness when handed out"),
            [
                Series("p50", "p50", late(0.5)),
                Series("p95", "p95", late(0.95)),
                Series("p99", "p99", late(0.99)),
            ],
            duration,
        ),
        drawn(
            "merging",
            _("Sends that met a waiting copy"),
            [
                Series(
                    _("part of all sends"),
                    "merged",
                    [
                        None if minute.rates is None or minute.rates.merge_ratio is None
                        # Two ledgers are read one after the other: a sum may be ahead of its whole by a little.
                        else min(minute.rates.merge_ratio, 1.0)
                        for minute in minutes
                    ],
                )
            ],
            lambda part: f"{part * 100:.0f} %",
        ),
    ]  # fmt: skip


def _local(seconds: float) -> datetime:
    return timezone.localtime(datetime.fromtimestamp(seconds, UTC))


def _time(seconds: float) -> str:
    return date_format(_local(seconds), "H:i")


def _day_and_time(seconds: float) -> str:
    return date_format(_local(seconds), "D H:i")


def _utc_offset() -> float:
    offset = timezone.localtime().utcoffset()
    return offset.total_seconds() if offset else 0.0
