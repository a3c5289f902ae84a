"""The dashboard: a page of topics, filtered and sorted, those first that the user has pinned, under the totals of all.

A row shows figures of a topic as they are now, in the last sample or over the last hour. The panel of findings shows what
``operations.health`` has judged: what needs attention, worst first, with links. The page of a topic has both, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from django.contrib.admin.utils import quote
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.templatetags.static import static
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_rmq.admin import charts
from django_rmq.admin.body_display import visible
from django_rmq.admin.charts import Sparkline, Values, depths, known_values, rates, sparkline
from django_rmq.admin.labels import state_label
from django_rmq.admin.page import Pages, live_page, topic_page
from django_rmq.admin.page import number as number_of
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError
from django_rmq.operations import Health, Minute, Operations, Permission, TopicStats
from django_rmq.operations.health import (
    DEFAULT_THRESHOLDS,
    Finding,
    Severity,
    is_late,
    judge_schedule,
    judge_waiting,
    runs_too_long,
)
from django_rmq.operations.measurements import Depth
from django_rmq.operations.shared_reads import KEPT_MS, kept_ms
from django_rmq.templatetags.rmq_format import duration, number

TOPICS_SHOWN = 100
"""The number of topics on a page; the script that refreshes it fetches no more."""

LONGEST_SEARCH = 100

PINNED_COOKIE = "rmq_pinned"
"""The cookie with the names of the topics that are first on a user's dashboard."""

MOST_PINNED = 30

COOKIE_SECONDS = 365 * 86_400


_FILTERS: dict[str, Callable[[TopicStats], bool]] = {
    "": lambda one: True,
    "dead": lambda one: one.dead > 0,
    "late": is_late,
    "paused": lambda one: one.is_paused or one.is_partly_paused,
}
"""Name of a filter of topics → whether a topic is shown."""

_ORDERS: dict[str, Callable[[TopicStats], Any]] = {
    "name": lambda one: one.topic.name,
    "dead": lambda one: -one.dead,
    "age": lambda one: -max(one.age_ms or 0, one.undrained_ms or 0),
    "due": lambda one: -one.due,
}
"""Name of an order of topics → its key. Without one, topics have the order of the settings."""


@dataclass(frozen=True, slots=True)
class Link:
    """A way to another page, with what is to be known of it."""

    label: str
    url: str
    note: str = ""
    alarm: bool = False


@topic_page(Permission.VIEW)
def pin_view(pages: Pages, request: HttpRequest, operations: Operations, topic: Topic) -> HttpResponse:
    """Put a topic among the first of this user's dashboard, or back to its place."""
    response: HttpResponse = HttpResponseRedirect(pages.url("change", quote(topic.name)))
    if request.method != "POST":
        return response
    names = [name for name in pinned(request) if name != topic.name]
    if request.POST.get("pin"):
        names = [*names, topic.name][-MOST_PINNED:]
    response.set_cookie(
        PINNED_COOKIE,
        ",".join(names),
        max_age=COOKIE_SECONDS,
        path=pages.url("changelist"),
        secure=request.is_secure(),
        httponly=True,
        samesite="Lax",
    )
    return response


def pinned(request: HttpRequest) -> list[str]:
    """Return the names of the topics that the user has pinned, as the browser sent them."""
    return [name for name in request.COOKIES.get(PINNED_COOKIE, "").split(",") if name][:MOST_PINNED]


def _dashboard(pages: Pages, request: HttpRequest, operations: Operations) -> dict[str, object]:
    """Return all topics."""
    links = [
        Link(_("Workers"), pages.url("workers")),
        Link(_("Running now"), pages.url("running")),
        Link(_("In the background"), pages.url("background")),
        Link(_("Dead by cause"), pages.url("causes")),
        _schedules_link(operations, pages.url("schedules")),
        Link(_("Servers"), pages.url("servers")),
    ]
    if operations.config.uses_outbox:
        links.insert(3, _outbox_link(operations, pages.url("outbox")))
    return {
        **_figures(pages, operations, request.GET, pinned(request)),
        "links": links,
        "spark_labels": {
            "due": _("Due in the last hour"),
            "done": _("Done per minute in the last hour"),
            "dead": _("Dead in the last hour"),
            "late": _("Lateness of 99 of 100 messages in the last hour"),
        },
        "search_url": pages.url("search"),
    }


changelist_view, live_view = live_page(_dashboard, "topic/change_list.html", "topic/_dashboard_live.html")


def _outbox_link(operations: Operations, url: str) -> Link:
    """Return the way to the outbox, with what is in it, and whether that needs somebody's attention."""
    try:
        waits = operations.shared_outbox()
    except RmqError:
        return Link(_("Outbox"), url, _("unreadable"), True)
    waiting, refused = sum(one.messages for one in waits), sum(one.refused for one in waits)
    age = max(((one.oldest_ms or 0) / 1000 for one in waits), default=0.0)
    notes = []
    if waiting:
        notes.append(
            _("%(count)s waiting, oldest %(age)s") % {"count": number(waiting), "age": duration(age)}
        )
    if refused:
        notes.append(_("%(count)s refused") % {"count": number(refused)})
    is_bad = any(judge_waiting(one, DEFAULT_THRESHOLDS).needs_attention for one in waits)
    return Link(_("Outbox"), url, _(", ").join(notes), is_bad)


def _schedules_link(operations: Operations, url: str) -> Link:
    """Return the way to the schedules, with the number of those that need somebody's attention."""
    try:
        wrong = sum(
            judge_schedule(one, DEFAULT_THRESHOLDS).needs_attention for one in operations.shared_schedules()
        )
    except RmqError:
        return Link(_("Schedules"), url, _("unreadable"), True)
    note = ngettext("%(count)s needs attention", "%(count)s need attention", wrong) % {"count": number(wrong)}
    return Link(_("Schedules"), url, note if wrong else "", wrong > 0)


def _figures(
    pages: Pages, operations: Operations, query: QueryDict, pinned: Collection[str]
) -> dict[str, object]:
    """Return the topics of the dashboard for ``query``, their figures, and what is wrong with them.

    ``q``: part of a name; ``show``: dead, late or paused; ``sort``: name, dead, age or due; ``p``: the page. ``pinned``: the
    topics that are first.
    """
    names = list(operations.topics())
    search = query.get("q", "").strip()[:LONGEST_SEARCH]
    matching = [name for name in names if search.lower() in name.lower()]
    # What one page can show is read alone; more than that is better shared with those who look at all topics.
    seen = operations.shared_survey(matching if len(matching) <= TOPICS_SHOWN else None)
    chosen = frozenset(matching)
    topics = [one for one in seen.topics if one.topic.name in chosen]
    show, sort = query.get("show", ""), query.get("sort", "")
    show, sort = show if show in _FILTERS else "", sort if sort in _ORDERS else ""
    listed = _listed(topics, pinned, show, sort)
    all_listed = [one.topic for one in listed]
    count = max(1, -(-len(listed) // TOPICS_SHOWN))
    at = min(max(number_of(query.get("p")), 1), count)
    shown = {one.topic.name: one for one in listed[(at - 1) * TOPICS_SHOWN : at * TOPICS_SHOWN]}
    recent = read_recent(operations, topics, shown)
    given = {"q": search, "show": show, "sort": sort}
    return {
        "rows": [row_of(one, recent[name], pages.url("change", quote(name))) for name, one in shown.items()],
        "pinned": pinned,
        "show": show,
        "sort": sort,
        "filters": _filters(topics, given),
        "orders": {name: _query({**given, "sort": "" if name == sort else name}) for name in _ORDERS},
        "states": {state: state_label(state) for state in ("store", "prepare", "retry")},
        "totals": DashboardTotals.of(topics, recent, seen.workers),
        "trends": charts.annotated(
            operations, charts.of_several(operations.shared_hour(all_listed)), all_listed
        ),
        "findings": findings_panel(
            pages, operations.shared_health(topics, seen.problem, only_these=bool(search))
        ),
        "now_ms": seen.now_ms,
        "as_of": seen.now_ms if kept_ms(seen) > KEPT_MS else None,
        "search": search,
        "searchable": len(names) > TOPICS_SHOWN or bool(search),
        "topics": len(listed),
        "page": at,
        "pages": count,
        "previous": _query(given, at - 1) if at > 1 else "",
        "next": _query(given, at + 1) if at < count else "",
        "urls": {"live": pages.url("dashboard_live") + _query(given, at)},
    }


def _listed(topics: Sequence[TopicStats], pinned: Collection[str], show: str, sort: str) -> list[TopicStats]:
    """Return the topics that a filter shows, in an order, those first that are pinned."""
    listed = [one for one in topics if _FILTERS[show](one)]
    if sort:
        listed.sort(key=_ORDERS[sort])
    return sorted(listed, key=lambda one: one.topic.name not in pinned)


def _filters(topics: Sequence[TopicStats], query: Mapping[str, str]) -> list[dict[str, object]]:
    """Return the ways to the topics that each filter shows, with their numbers."""
    labels = {"": _("All"), "dead": _("With dead"), "late": _("Late"), "paused": _("Paused")}
    return [
        {
            "label": labels[name],
            "count": sum(map(is_shown, topics)),
            "url": _query({**query, "show": name}),
            "is_current": name == query["show"],
        }
        for name, is_shown in _FILTERS.items()
    ]


def _query(values: Mapping[str, str], page: int = 1) -> str:
    """Return the query string of a page of the dashboard."""
    all_given = {name: value for name, value in values.items() if value}
    return f"?{urlencode(all_given | ({'p': str(page)} if page > 1 else {}))}"


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
class DashboardRow:
    """One topic on the dashboard."""

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


def _depth_of(figures: TopicStats, recent: Recent) -> TopicStats | Depth:
    """Return the figures with the depths of a topic: the last sample of all slots, if only a part was read now."""
    sampled = recent.sample.depth if figures.is_partial and recent.sample else None
    return sampled or figures


def row_of(figures: TopicStats, recent: Recent, url: str) -> DashboardRow:
    depth = _depth_of(figures, recent)
    instants = (depth.oldest_due_ms, depth.undrained_since_ms, figures.running_since_ms)
    return DashboardRow(figures, depth, recent, url, *(_seconds_since(at, figures.now_ms) for at in instants))


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
    claimed: int = 0
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
            for name in ("store", "due", "prepare", "retry", "dead", "claimed"):
                setattr(totals, name, getattr(totals, name) + getattr(depth, name))
            if of_last_hour.done is not None:
                totals.done = (totals.done or 0.0) + of_last_hour.done
                totals.measured += 1
            if of_last_hour.failed is not None:
                totals.failed = (totals.failed or 0.0) + of_last_hour.failed
        return totals


SHOWN = 3
"""How many findings of one check and severity are listed; the others are counted, and can be opened."""

MOST_OPENED = 50
"""How many of these others can be opened."""

MOST_COUNTED = 9
"""The largest number for which there is an icon; that of ten says "9+"."""

_SITE_PAGES = {
    "dashboard": "changelist",
    "servers": "servers",
    "workers": "workers",
    "outbox": "outbox",
    "running": "running",
    "schedules": "schedules",
}
"""Page of a check, if it is not one of a topic → the name of its address."""


@dataclass(frozen=True, slots=True)
class FindingLine:
    """One sentence of the findings."""

    topic: str
    text: str
    url: str
    """The page that explains it, or where it is repaired; empty if there is none."""
    is_alarm: bool
    """Whether it needs attention."""
    others: tuple[FindingLine, ...] = ()
    """The findings that the sentence counts, so that a person can open them."""


@dataclass(frozen=True, slots=True)
class FindingsPanel:
    """What is to be said of the queues in a few sentences."""

    lines: list[FindingLine]
    count: int
    """How many findings need attention, also those that are not listed."""
    icon: str
    """The address of the icon with the count; empty if nothing needs attention."""


def findings_panel(pages: Pages, health: Health) -> FindingsPanel:
    """Return what a page says about these findings."""
    findings = sorted(health.findings, key=lambda one: one.is_intended)
    lines = list[FindingLine]()
    of_kind: dict[tuple[bool, Severity, str], list[Finding]] = {}
    for one in findings:
        of_kind.setdefault((one.is_intended, one.severity, one.name), []).append(one)
    for alike in of_kind.values():
        lines += [_line(pages, one) for one in alike[:SHOWN]]
        if others := alike[SHOWN:]:
            lines.append(_counted(pages, others))
    count = sum(one.needs_attention for one in findings)
    return FindingsPanel(
        lines, count, static(f"django_rmq/findings-{min(count, MOST_COUNTED + 1)}.svg") if count else ""
    )


def _line(pages: Pages, one: Finding) -> FindingLine:
    return FindingLine(one.topic, visible(one.text), _url(pages, one), one.needs_attention)


def _counted(pages: Pages, others: list[Finding]) -> FindingLine:
    """Return the line that counts findings of one kind."""
    text = ngettext("and %(count)s more like these", "and %(count)s more like these", len(others)) % {
        "count": len(others)
    }
    opened = [_line(pages, one) for one in others[:MOST_OPENED]]
    if left := len(others) - len(opened):
        listed_by = ngettext(
            "and %(count)s more, which manage.py rmqhealth -v 2 lists",
            "and %(count)s more, which manage.py rmqhealth -v 2 lists",
            left,
        ) % {"count": left}
        opened.append(FindingLine("", listed_by, "", opened[0].is_alarm))
    return FindingLine("", text, "", opened[0].is_alarm, tuple(opened))


def _url(pages: Pages, one: Finding) -> str:
    where = one.check.page
    if name := _SITE_PAGES.get(where):
        return pages.url(name)
    if not one.topic:
        return ""
    topic = pages.url("change", quote(one.topic))
    return topic if where == "topic" else f"{topic}?tab={where}"
