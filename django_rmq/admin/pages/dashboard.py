"""The dashboard: a page of topics, searched by part of their names, under the totals of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

from django.contrib.admin.utils import quote
from django.http import HttpRequest, HttpResponse, QueryDict
from django.utils.translation import gettext as _

from django_rmq.admin import trends
from django_rmq.admin.figures import Places, Totals, row_of
from django_rmq.admin.pages.answers import Pages, page
from django_rmq.operations import Operations, Permission

TOPICS_SHOWN = 100
"""The number of topics on a page; the script that refreshes it fetches no more."""

LONGEST_SEARCH = 100


@page(Permission.VIEW)
def changelist_view(pages: Pages, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
    """Show all topics."""
    uses_outbox = pages.operations(request).config.uses_outbox
    context = {
        "outbox_url": pages.url("outbox") if uses_outbox else "",
        "schedules_url": pages.url("schedules"),
        **_dashboard(pages, request),
    }
    return pages.render(request, "topic/change_list.html", {**context, **(extra_context or {})})


@page(Permission.VIEW)
def live_view(pages: Pages, request: HttpRequest) -> HttpResponse:
    """Return the current figures of the dashboard."""
    return pages.fragment(request, "topic/_dashboard.html", _dashboard(pages, request))


def _dashboard(pages: Pages, request: HttpRequest) -> dict[str, Any]:
    return dashboard(
        pages.operations(request),
        request.GET,
        pages.url("dashboard_live"),
        lambda name: pages.url("change", quote(name)),
    )


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
    number = min(max(int(asked), 1), pages) if asked.isascii() and asked.isdigit() and len(asked) < 7 else 1
    shown = {one.topic for one in found[(number - 1) * TOPICS_SHOWN : number * TOPICS_SHOWN]}
    recent = trends.recent(operations, found, shown)
    rows = [
        row_of(one, recent[one.topic], url(one.topic.name) if one.topic in shown else "") for one in found
    ]
    return {
        "overview": True,
        "rows": [row for row in rows if row.topic in shown],
        "totals": Totals.of(rows, seen.workers),
        "notes": [*_server_notes(operations), *([seen.problem] if seen.problem else [])],
        "now_ms": seen.now_ms,
        "search": wanted,
        "searchable": len(names) > TOPICS_SHOWN or bool(wanted),
        "topics": len(found),
        "page": number,
        "pages": pages,
        "previous": _query(wanted, number - 1) if number > 1 else "",
        "next": _query(wanted, number + 1) if number < pages else "",
        "urls": Places(live=live + _query(wanted, number)),
    }


def _server_notes(operations: Operations) -> list[str]:
    """Return a sentence for each server that refuses writes, or will soon."""
    notes = []
    for server in operations.servers() or ():
        where = f" ({server.node})" if server.node else ""
        for text, reasons in (
            (_("Redis%(node)s refuses writes: %(reason)s."), server.refusals),
            (_("Redis%(node)s: %(reason)s."), server.warnings),
        ):
            notes += [text % {"node": where, "reason": reason} for reason in reasons]
    return notes


def _query(wanted: str, page: int) -> str:
    given = ({"q": wanted} if wanted else {}) | ({"p": str(page)} if page > 1 else {})
    return f"?{urlencode(given)}" if given else "?"


__all__ = ["TOPICS_SHOWN", "changelist_view", "live_view"]
