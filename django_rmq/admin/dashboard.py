"""The dashboard: a page of topics, filtered and sorted, those first that the user has pinned, under the totals of all.

``topic_figures`` makes the row of a topic, and ``findings_panel`` says what needs attention. The page of a topic has both, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django.contrib.admin.utils import quote
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_rmq.admin import charts
from django_rmq.admin.findings_panel import findings_panel
from django_rmq.admin.labels import state_label
from django_rmq.admin.page import Pages, live_page, topic_page
from django_rmq.admin.page import number as number_of
from django_rmq.admin.topic_figures import Recent, depth_of, read_recent, row_of
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError
from django_rmq.operations import Operations, Permission, TopicStats
from django_rmq.operations.health import DEFAULT_THRESHOLDS, is_late, judge_schedule, judge_waiting
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
    page = Paginator(listed, TOPICS_SHOWN).get_page(number_of(query.get("p")) or 1)
    shown = {one.topic.name: one for one in page}
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
        "page": page.number,
        "pages": page.paginator.num_pages,
        "previous": _query(given, page.number - 1) if page.has_previous() else "",
        "next": _query(given, page.number + 1) if page.has_next() else "",
        "urls": {"live": pages.url("dashboard_live") + _query(given, page.number)},
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
    all_given = {name: value for name, value in values.items() if value}
    return f"?{urlencode(all_given | ({'p': str(page)} if page > 1 else {}))}"


@dataclass(frozen=True, slots=True)
class DashboardTotals:
    """All topics in a few numbers."""

    store: int
    due: int
    prepare: int
    retry: int
    dead: int
    claimed: int
    done: float | None
    failed: float | None
    workers: int | None
    """None: unknown."""
    topics: int
    measured: int
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
        depths = [depth_of(one, recent[one.topic.name]) for one in figures]
        rates = [recent[one.topic.name] for one in figures]
        done = [one.done for one in rates if one.done is not None]
        failed = [one.failed for one in rates if one.failed is not None]
        return cls(
            store=sum(depth.store for depth in depths),
            due=sum(depth.due for depth in depths),
            prepare=sum(depth.prepare for depth in depths),
            retry=sum(depth.retry for depth in depths),
            dead=sum(depth.dead for depth in depths),
            claimed=sum(depth.claimed for depth in depths),
            done=sum(done) if done else None,
            failed=sum(failed) if failed else None,
            workers=workers,
            topics=len(figures),
            measured=len(done),
        )
