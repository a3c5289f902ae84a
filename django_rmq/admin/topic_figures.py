"""The figures of a topic on the dashboard and at the head of its page: now, in the last sample, and over the last hour."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from django_rmq.admin.charts import Sparkline, Values, depths, known_values, rates, sparkline
from django_rmq.exceptions import RmqError
from django_rmq.operations import Minute, Operations, TopicStats
from django_rmq.operations.health import runs_too_long
from django_rmq.operations.measurements import Depth

LONG_SECONDS = 60.0
"""Seconds from which pages say for how long a delivery has run."""


HOUR_MINUTES = 60
SPARK_POINTS = 20
"""The number of points of a small line: a page has four for each of a hundred topics."""

RECENT_MINUTES = 3
"""Minutes after which the last sampled rate is too old to be shown as current."""


@dataclass(frozen=True, slots=True)
class Trends:
    """The last hour of a topic in small lines. None: fewer than two samples, or nothing but zeros."""

    due: Sparkline | None = None
    done: Sparkline | None = None
    dead: Sparkline | None = None
    late: Sparkline | None = None
    """What 99 of 100 messages were late, in seconds."""
    late_seconds: float | None = None
    """What 99 of 100 messages of the whole hour were late."""


@dataclass(frozen=True, slots=True)
class Recent:
    """The figures of the last hour for a row of a table. Rates per minute; None: no recent sample."""

    trends: Trends = Trends()
    sent: float | None = None
    merged: float | None = None
    done: float | None = None
    failed: float | None = None
    sample: Minute | None = None
    """The last sampled minute."""
    problem: str = ""
    """Why the history cannot be read."""


def read_recent(
    operations: Operations, figures: Sequence[TopicStats], shown: Collection[str]
) -> dict[str, Recent]:
    """Return the figures of the last hour of topics, by name.

    For topics that are not ``shown`` only rates are read, if nothing else is needed: they count in totals.
    """
    asked_topics = {
        one.topic: HOUR_MINUTES if one.topic.name in shown or one.is_partial else RECENT_MINUTES
        for one in figures
    }
    minute = figures[0].now_ms // 60_000 if figures else 0
    return operations.shared_last_minutes(asked_topics, minute, _recent)


def _recent(minutes: Sequence[Minute] | RmqError) -> Recent:
    if isinstance(minutes, RmqError):
        return Recent(problem=str(minutes))
    last = next((minute.rates for minute in reversed(minutes[-RECENT_MINUTES:]) if minute.rates), None)
    trends = _trends(minutes) if len(minutes) == HOUR_MINUTES else Trends()
    sample = next((minute for minute in reversed(minutes) if minute.depth), None)
    if last is None:
        return Recent(trends, sample=sample)
    return Recent(trends, last.sent, last.merged, last.committed, last.failed, sample)


def _trends(minutes: Sequence[Minute]) -> Trends:
    known = [minute.lateness for minute in minutes if minute.lateness]
    counts = zip(*(one.counts for one in known), strict=True)
    whole = replace(known[0], counts=tuple(map(sum, counts))) if known else None
    return Trends(
        _small(depths(minutes, "due")),
        _small(rates(minutes, "committed")),
        _small(depths(minutes, "dead")),
        _small([minute.lateness.percentile(0.99) / 1000 if minute.lateness else None for minute in minutes]),
        whole.percentile(0.99) / 1000 if whole else None,
    )


def _small(values: Values) -> Sparkline | None:
    """Return a line of a few points from the first value on: of several minutes, the highest one."""
    if not any(values):
        return None
    first = next(at for at, value in enumerate(values) if value is not None)
    step = -(-(len(values) - first) // SPARK_POINTS)
    parts = [known_values(values[at : at + step]) for at in range(first, len(values), step)]
    return sparkline([max(part) if part else None for part in parts], area=False)


@dataclass(frozen=True, slots=True)
class TopicRow:
    """One topic on the dashboard, or at the head of its page."""

    figures: TopicStats
    depth: TopicStats | Depth
    """The figures with the depths: those of the workers' last sample, if not all slots were read."""
    recent: Recent
    url: str
    oldest_seconds: float | None
    undrained_seconds: float | None
    """Priority topics: the longest time for which a slot has not been empty."""
    running_seconds: float | None
    """The time since the first delivery began that runs now."""

    @property
    def later(self) -> int:
        return max(self.depth.store - self.depth.due, 0)

    @property
    def paused(self) -> str:
        """all, part, or empty."""
        return "all" if self.figures.is_paused else "part" if self.figures.is_partly_paused else ""

    @property
    def sampled_ms(self) -> int | None:
        """When the depths were sampled. None: they are current."""
        return (
            self.recent.sample.sampled_ms if self.depth is not self.figures and self.recent.sample else None
        )

    @property
    def is_partial(self) -> bool:
        """Whether the figures are those of a part of the slots, because no worker has sampled the topic."""
        return self.figures.is_partial and self.depth is self.figures

    @property
    def problems(self) -> list[str]:
        texts = (self.figures.definition_problem, *self.figures.problems, self.recent.problem)
        return [text for text in texts if text]

    @property
    def runs_long(self) -> bool:
        """Whether a delivery has run for so long that people see it."""
        return (self.running_seconds or 0) >= LONG_SECONDS

    @property
    def runs_too_long(self) -> bool:
        """Whether its listener may hang."""
        return runs_too_long(self.running_seconds or 0)

    @property
    def has_ages(self) -> bool:
        """Whether waiting messages have a time."""
        return not self.figures.topic.is_priority


def depth_of(figures: TopicStats, recent: Recent) -> TopicStats | Depth:
    """Return the figures with the depths of a topic: the last sample of all slots, if only a part was read now."""
    sampled = recent.sample.depth if figures.is_partial and recent.sample else None
    return sampled or figures


def row_of(figures: TopicStats, recent: Recent, url: str) -> TopicRow:
    depth = depth_of(figures, recent)
    instants = (depth.oldest_due_ms, depth.undrained_since_ms, figures.running_since_ms)
    return TopicRow(figures, depth, recent, url, *(_seconds_since(at, figures.now_ms) for at in instants))


def _seconds_since(at_ms: int | None, now_ms: int) -> float | None:
    return None if at_ms is None else max(0.0, (now_ms - at_ms) / 1000)
