"""Rows and totals of the dashboard, the tabs of a topic, and the timeline of a message, in the form that templates use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_rmq.admin.body_display import visible
from django_rmq.admin.charts import Recent, Trends
from django_rmq.admin.labels import END_NAMES, REASONS, Text
from django_rmq.core.model.status import ENDS, MessageStatus
from django_rmq.core.model.topic import Topic
from django_rmq.operations import ScheduleStats, TopicStats
from django_rmq.operations.health import USUAL_LIMITS, USUAL_UNDRAINED
from django_rmq.operations.measurements import Depth


class TimelineStep(NamedTuple):
    """One thing that happened, or will."""

    what: Text
    at_ms: float | None
    """None: the time is not known."""
    note: Text = ""


def timeline(one: MessageStatus) -> list[TimelineStep]:
    """Return the steps of a message. What Redis does not keep is said, and not guessed."""
    steps = sorted(_known(one), key=lambda step: step.at_ms or 0)
    sent = TimelineStep(
        _("Sent"), None, _("When it was sent, and how often sends were merged, is not recorded.")
    )
    return [sent, *steps, *_coming(one)]


def _known(one: MessageStatus) -> Iterator[TimelineStep]:
    ended = one.state in ENDS
    # The last delivery of what was removed or cancelled counts, but is no failure.
    succeeded = one.state == "done" or (one.state in ("removed", "cancelled") and one.delivered is not None)
    runs = one.state.startswith("running")
    failures = one.attempts - (1 if succeeded or runs else 0)
    if one.first_failed and one.first_failed != one.last_failed:
        yield TimelineStep(_("Failed for the first time"), _ms(one.first_failed))
    if one.last_failed:
        times = ngettext("%(count)s failure in all", "%(count)s failures in all", failures) % {
            "count": failures
        }
        yield TimelineStep(
            _("Failed"), _ms(one.last_failed), f"{times}, {one.error_class}" if one.error_class else times
        )
    elif failures > 0 and ended:
        times = ngettext("%(count)s failure in all", "%(count)s failures in all", failures) % {
            "count": failures
        }
        yield TimelineStep(_("Failed"), None, f"{times}, {one.error_class}" if one.error_class else times)
    if one.delivered:
        yield TimelineStep(_("Delivered"), _ms(one.delivered), visible(one.worker))
    if one.progress_at and one.progress is not None:
        note = _("%(percent)s %% done") % {"percent": round(one.progress * 100)}
        text = visible(one.progress_text)
        yield TimelineStep(_("Progress"), _ms(one.progress_at), f"{note}: {text}" if text else note)
    if ended:
        yield TimelineStep(END_NAMES[one.state], _ms(one.ended), REASONS.get(one.reason, one.reason))


def _coming(one: MessageStatus) -> Iterator[TimelineStep]:
    if one.due:
        yield TimelineStep(_("Next delivery"), _ms(one.due))


def _ms(when: datetime | None) -> float | None:
    return None if when is None else when.timestamp() * 1000


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
    def name(self) -> str:
        return self.topic.name

    @property
    def type(self) -> str:
        return self.topic.type.value

    @property
    def slots(self) -> int:
        return self.topic.slots

    @property
    def listener(self) -> bool:
        return self.topic.listener

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
        return (self.running_seconds or 0) > (USUAL_LIMITS.max_running or 0)

    @property
    def has_ages(self) -> bool:
        """Whether waiting messages have a time."""
        return not self.topic.is_priority


def _depth_of(figures: TopicStats, recent: Recent) -> TopicStats | Depth:
    """Return the figures with the depths of a topic: the last sample of all slots, if only a part was read now."""
    sampled = recent.sample.depth if figures.is_partial and recent.sample else None
    return sampled or figures


def row_of(figures: TopicStats, recent: Recent, url: str) -> DashboardRow:
    """Return the row of a topic."""
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


@dataclass(frozen=True, slots=True)
class Tab:
    """A tab of a topic."""

    name: str
    label: str
    url: str
    current: bool
    count: int | None = None
    alarm: bool = False
    word: str = ""
    """The state of its messages in plain words, if its label is another one."""


@dataclass(frozen=True, slots=True)
class Link:
    """A way to another page, with what is to be known of it."""

    label: str
    url: str
    note: str = ""
    alarm: bool = False


def is_old_in_outbox(seconds: float) -> bool:
    """Return whether a message has been in the outbox for longer than is usual."""
    return seconds > (USUAL_LIMITS.max_outbox_age or 0)


def is_late_topic(one: TopicStats) -> bool:
    """Return whether messages of a topic have been due for longer than is usual."""
    age, undrained = (one.age_ms or 0) / 1000, (one.undrained_ms or 0) / 1000
    return age > (USUAL_LIMITS.max_age or 0) or undrained > USUAL_UNDRAINED


def is_late(one: ScheduleStats) -> bool:
    """Return whether a schedule is later than is usual."""
    return one.late_ms / 1000 > (USUAL_LIMITS.max_schedule_lateness or 0)


def needs_attention(one: ScheduleStats) -> bool:
    """Return whether the last run of a schedule died, or the next one is late, unknown or missing."""
    return bool(one.outcome == "dead" or one.problem or one.is_missing or is_late(one))


@dataclass(frozen=True, slots=True)
class Banner:
    """The content of a banner."""

    title: str
    text: str


@dataclass(slots=True)
class PageAddresses:
    """The addresses to which a page links."""

    topic: str = ""
    live: str = ""
    act: str = ""
    send: str = ""
    log: str = ""
    claims: str = ""
    causes: str = ""
    pin: str = ""
    export: str = ""
