"""Rows and totals of the dashboard: which figures of a topic are shown, those read now or those of the last sample.

``views.dashboard`` decides which topics are listed, and in which order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from django_rmq.admin.charts import Recent, Trends
from django_rmq.core.model.topic import Topic
from django_rmq.operations import TopicStats
from django_rmq.operations.health import runs_too_long
from django_rmq.operations.measurements import Depth

LONG_SECONDS = 60.0
"""Seconds from which pages say for how long a delivery has run."""


@dataclass(frozen=True, slots=True)
class DashboardRow:
    """One topic on the dashboard. If not all slots were read, the figures are the workers' last sample."""

    topic: Topic
    url: str
    store: int
    due: int
    prepare: int
    retry: int
    dead: int
    claims: int
    unleased: int
    """How many of the claimed messages have a lease that has ended."""
    oldest_seconds: float | None
    undrained_seconds: float | None
    """Priority topics: the longest time for which a slot has not been empty."""
    running_seconds: float | None
    """The time since the first delivery began that runs now."""
    paused: str
    """all, part, or empty."""
    workers: int
    sampled_ms: int | None
    """When the figures were sampled. None: they are current."""
    is_partial: bool
    """Whether the figures are those of a part of the slots, because no worker has sampled the topic."""
    problems: Sequence[str]
    trends: Trends
    sent: float | None = None
    merged: float | None = None
    done: float | None = None
    failed: float | None = None

    @property
    def later(self) -> int:
        return max(self.store - self.due, 0)

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
        return not self.topic.is_priority


def _depth_of(figures: TopicStats, recent: Recent) -> TopicStats | Depth:
    """Return the figures with the depths of a topic: the last sample of all slots, if only a part was read now."""
    sampled = recent.sample.depth if figures.is_partial and recent.sample else None
    return sampled or figures


def row_of(figures: TopicStats, recent: Recent, url: str) -> DashboardRow:
    depth = _depth_of(figures, recent)
    is_sampled = depth is not figures
    return DashboardRow(
        figures.topic,
        url,
        depth.store,
        depth.due,
        depth.prepare,
        depth.retry,
        depth.dead,
        depth.claimed,
        figures.unleased,
        _seconds_since(depth.oldest_due_ms, figures.now_ms),
        _seconds_since(depth.undrained_since_ms, figures.now_ms),
        _seconds_since(figures.running_since_ms, figures.now_ms),
        "all" if figures.is_paused else "part" if figures.is_partly_paused else "",
        figures.consumers,
        recent.sample.sampled_ms if is_sampled and recent.sample else None,
        figures.is_partial and not is_sampled,
        [text for text in (figures.definition_problem, *figures.problems, recent.problem) if text],
        recent.trends,
        recent.sent,
        recent.merged,
        recent.done,
        recent.failed,
    )


def _seconds_since(at_ms: int | None, now_ms: int) -> float | None:
    return None if at_ms is None else max(0.0, (now_ms - at_ms) / 1000)


@dataclass(slots=True)
class DashboardTotals:
    """All topics in a few numbers."""

    store: int = 0
    due: int = 0
    prepare: int = 0
    retry: int = 0
    dead: int = 0
    claims: int = 0
    done: float | None = None
    failed: float | None = None
    workers: int | None = 0
    """None: unknown."""
    topics: int = 0
    measured: int = 0
    """The number of topics whose rates are known: workers have sampled them twice in the last minutes."""

    @property
    def is_part(self) -> bool:
        """Whether the rates of some topics are unknown, so that the sums leave them out."""
        return 0 < self.measured < self.topics

    @classmethod
    def of(
        cls, figures: Sequence[TopicStats], recent: Mapping[str, Recent], workers: int | None
    ) -> DashboardTotals:
        """Add up topics; a rate that no topic has stays unknown. ``recent``: by the names of topics."""
        totals = cls(workers=workers, topics=len(figures))
        for one in figures:
            of_last_hour = recent[one.topic.name]
            depth = _depth_of(one, of_last_hour)
            totals.store += depth.store
            totals.due += depth.due
            totals.prepare += depth.prepare
            totals.retry += depth.retry
            totals.dead += depth.dead
            totals.claims += depth.claimed
            if of_last_hour.done is not None:
                totals.done = (totals.done or 0.0) + of_last_hour.done
                totals.measured += 1
            if of_last_hour.failed is not None:
                totals.failed = (totals.failed or 0.0) + of_last_hour.failed
        return totals
