"""The dashboard: a page of topics, found by a part of their names, under the totals of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

from django.http import QueryDict

from django_rmq.admin import trends
from django_rmq.admin.figures import Places, Totals, row_of
from django_rmq.operations import Operations

TOPICS_SHOWN = 100
"""Topics of a page: the script that keeps it fresh fetches no more."""

LONGEST_SEARCH = 100


def dashboard(
    operations: Operations, query: QueryDict, live: str, url: Callable[[str], str]
) -> dict[str, Any]:
    """Return what the dashboard shows of the page that ``query`` asks for (``q``: part of a name, ``p``: the page).

    ``live`` is the address of the figures alone, ``url`` the address of a topic.
    """
    seen = operations.survey()
    wanted = query.get("q", "").strip()[:LONGEST_SEARCH]
    found = [one for one in seen.topics if wanted.lower() in one.topic.name.lower()]
    pages = max(1, -(-len(found) // TOPICS_SHOWN))
    asked = query.get("p", "1")
    page = min(max(int(asked), 1), pages) if asked.isascii() and asked.isdigit() and len(asked) < 7 else 1
    shown = {one.topic for one in found[(page - 1) * TOPICS_SHOWN : page * TOPICS_SHOWN]}
    recent = trends.recent(operations.broker, seen.topics, shown)
    rows = [
        row_of(one, recent[one.topic], url(one.topic.name) if one.topic in shown else "")
        for one in seen.topics
    ]
    return {
        "overview": True,
        "rows": [row for row in rows if row.topic in shown],
        "totals": Totals.of(rows, seen.workers),
        "notes": [seen.problem] if seen.problem else [],
        "now_ms": seen.now_ms,
        "search": wanted,
        "searchable": len(seen.topics) > TOPICS_SHOWN or bool(wanted),
        "topics": len(found),
        "page": page,
        "pages": pages,
        "previous": _query(wanted, page - 1) if page > 1 else "",
        "next": _query(wanted, page + 1) if page < pages else "",
        "urls": Places(live=live + _query(wanted, page)),
    }


def _query(wanted: str, page: int) -> str:
    given = ({"q": wanted} if wanted else {}) | ({"p": str(page)} if page > 1 else {})
    return f"?{urlencode(given)}" if given else "?"


__all__ = ["TOPICS_SHOWN", "dashboard"]
