"""The dashboard: a page of topics, searched by part of their names, under the totals of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

from django.contrib.admin.utils import quote
from django.http import HttpRequest, HttpResponse, QueryDict
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_rmq.admin import charts
from django_rmq.admin.dashboard_rows import (
    DashboardTotals,
    Link,
    PageAddresses,
    is_old_in_outbox,
    needs_attention,
    row_of,
)
from django_rmq.admin.views.page import Pages, page
from django_rmq.admin.views.verdict import verdict_of
from django_rmq.exceptions import RmqError
from django_rmq.operations import Operations, Permission
from django_rmq.templatetags.rmq_times import duration, number

TOPICS_SHOWN = 100
"""The number of topics on a page; the script that refreshes it fetches no more."""

LONGEST_SEARCH = 100


@page(Permission.VIEW)
def changelist_view(pages: Pages, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
    """Show all topics."""
    context = _dashboard(pages, request)
    return pages.render(request, "topic/change_list.html", {**context, **(extra_context or {})})


@page(Permission.VIEW)
def live_view(pages: Pages, request: HttpRequest) -> HttpResponse:
    """Return the current figures of the dashboard."""
    return pages.fragment(request, "topic/_dashboard_live.html", _dashboard(pages, request))


def _dashboard(pages: Pages, request: HttpRequest) -> dict[str, Any]:
    operations = pages.operations(request)
    content = dashboard(
        operations,
        request.GET,
        pages.url("dashboard_live"),
        lambda name: pages.url("change", quote(name)),
    )
    links = [
        Link(_("Dead by cause"), pages.url("causes")),
        _schedules_link(operations, pages.url("schedules")),
        Link(_("Servers"), pages.url("servers")),
    ]
    if operations.config.uses_outbox:
        links.insert(0, _outbox_link(operations, pages.url("outbox")))
    links.insert(0, Link(_("Workers"), pages.url("workers"), "", False))
    links.insert(1, Link(_("Running now"), pages.url("running")))
    return {**content, "links": links, "verdict": verdict_of(pages, content["health"])}


def _outbox_link(operations: Operations, url: str) -> Link:
    """Return the way to the outbox, with what is in it. Refused and old messages need somebody's attention."""
    try:
        found = operations.shared_outbox()
    except RmqError:
        return Link(_("Outbox"), url, _("unreadable"), True)
    waiting, refused = sum(one.messages for one in found), sum(one.refused for one in found)
    age = max(((one.oldest_ms or 0) / 1000 for one in found), default=0.0)
    notes = []
    if waiting:
        notes.append(
            _("%(count)s waiting, oldest %(age)s") % {"count": number(waiting), "age": duration(age)}
        )
    if refused:
        notes.append(_("%(count)s refused") % {"count": number(refused)})
    return Link(_("Outbox"), url, _(", ").join(notes), bool(refused) or is_old_in_outbox(age))


def _schedules_link(operations: Operations, url: str) -> Link:
    """Return the way to the schedules, with the number of those that need somebody's attention."""
    try:
        wrong = sum(needs_attention(one) for one in operations.shared_schedules())
    except RmqError:
        return Link(_("Schedules"), url, _("unreadable"), True)
    note = ngettext("%(count)s needs attention", "%(count)s need attention", wrong) % {"count": number(wrong)}
    return Link(_("Schedules"), url, note if wrong else "", wrong > 0)


def dashboard(
    operations: Operations, query: QueryDict, live: str, url: Callable[[str], str]
) -> dict[str, Any]:
    """Return the content of the dashboard for ``query`` (``q``: part of a name, ``p``: the page).

    ``live`` is the address of the figures alone, ``url`` the address of a topic.
    """
    names = list(operations.config.topics)
    wanted = query.get("q", "").strip()[:LONGEST_SEARCH]
    matching = [name for name in names if wanted.lower() in name.lower()]
    # What one page can show is read alone; more than that is better shared with those who look at all topics.
    seen = operations.shared_survey(matching if len(matching) <= TOPICS_SHOWN else None)
    chosen = frozenset(matching)
    found = [one for one in seen.topics if one.topic.name in chosen]
    pages = max(1, -(-len(found) // TOPICS_SHOWN))
    asked = query.get("p", "1")
    at = min(max(int(asked), 1), pages) if asked.isascii() and asked.isdigit() and len(asked) < 7 else 1
    shown = {one.topic for one in found[(at - 1) * TOPICS_SHOWN : at * TOPICS_SHOWN]}
    recent = charts.recent(operations, found, shown)
    rows = [
        row_of(one, recent[one.topic], url(one.topic.name) if one.topic in shown else "") for one in found
    ]
    return {
        "overview": True,
        "rows": [row for row in rows if row.topic in shown],
        "totals": DashboardTotals.of(rows, seen.workers),
        "health": operations.shared_health(found, seen.problem, only_these=bool(wanted)),
        "now_ms": seen.now_ms,
        "search": wanted,
        "searchable": len(names) > TOPICS_SHOWN or bool(wanted),
        "topics": len(found),
        "page": at,
        "pages": pages,
        "previous": _query(wanted, at - 1) if at > 1 else "",
        "next": _query(wanted, at + 1) if at < pages else "",
        "urls": PageAddresses(live=live + _query(wanted, at)),
    }


def _query(wanted: str, page: int) -> str:
    given = ({"q": wanted} if wanted else {}) | ({"p": str(page)} if page > 1 else {})
    return f"?{urlencode(given)}" if given else "?"


__all__ = ["TOPICS_SHOWN", "changelist_view", "live_view"]
