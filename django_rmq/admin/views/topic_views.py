"""A topic: its figures, and below them the list of one state, its slots, or its history."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _

from django_rmq.admin import charts
from django_rmq.admin.dashboard_rows import DashboardRow, Tab, row_of
from django_rmq.admin.labels import PLAIN_STATES, STATES
from django_rmq.admin.views import history_panel, message_views, slots_panel
from django_rmq.admin.views.page import Pages, back_of, page
from django_rmq.core.model.topic import Topic
from django_rmq.operations import Operations, Permission


@page(Permission.VIEW)
def change_view(
    pages: Pages, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
) -> HttpResponse:
    """Show a topic: the list of one state, or its slots, or its history."""
    operations, topic = pages.asked(request, object_id)
    context = _topic(pages, request, operations, topic)
    if context["tab"] in STATES:
        context |= message_views.panel(pages, request, operations, topic, context["tab"])
    return pages.render(request, "topic/change_form.html", {**context, **(extra_context or {})}, topic)


@page(Permission.VIEW)
def live_view(pages: Pages, request: HttpRequest, object_id: str) -> HttpResponse:
    """Return the current figures of a topic; a list of messages is not refreshed by itself."""
    operations, topic = pages.asked(request, object_id)
    context = _topic(pages, request, operations, topic)
    if context["tab"] in STATES:
        context["panel"] = ""
    return pages.fragment(request, "topic/_live.html", context)


def _topic(pages: Pages, request: HttpRequest, operations: Operations, topic: Topic) -> dict[str, Any]:
    figures = operations.topic(topic.name)
    places = pages.places(topic.name)
    row = row_of(figures, charts.recent(operations, [figures], {figures.topic})[figures.topic], places.topic)
    wanted = request.GET.get("tab", "")
    tab = wanted if wanted in (*STATES, "slots", "history") else "store"
    query = {"tab": tab} | {name: request.GET[name][:8] for name in ("hours", "first") if name in request.GET}
    places.live = f"{places.live}?{urlencode(query)}"
    context: dict[str, Any] = {
        "topic": topic,
        "row": row,
        "now_ms": figures.now_ms,
        "tab": tab,
        "tabs": _tabs(row, tab),
        "urls": places,
        "back": back_of(request.GET.urlencode()),
        "may": {
            "send": operations.actor.may(Permission.SEND),
            "pause": operations.actor.may(Permission.PAUSE),
        },
        "notes": [*row.problems, *([figures.workers_problem] if figures.workers_problem else [])]
        + (
            [
                _("Only %(looked)s of %(slots)s slots were read.")
                % {"looked": figures.looked_at, "slots": topic.slots}
            ]
            if row.is_partial
            else []
        ),
        "panel": "admin/django_rmq/topic/_messages.html",
    }
    if tab == "slots":
        context |= slots_panel.panel(request, operations, topic)
    elif tab == "history":
        context |= history_panel.panel(request, operations, topic)
    return context


def _tabs(row: DashboardRow, current: str) -> list[Tab]:
    counts = {"store": row.store, "prepare": row.prepare, "retry": row.retry, "dead": row.dead}
    if row.claims or current == "claim":
        counts["claim"] = row.claims
    tabs = [
        Tab(
            state,
            str(STATES[state]),
            f"{row.url}?tab={state}",
            state == current,
            count,
            state == "dead" and count > 0,
            str(PLAIN_STATES.get(state, "")),
        )
        for state, count in counts.items()
    ]
    tabs.append(Tab("slots", _("Consumers and slots"), f"{row.url}?tab=slots", current == "slots"))
    tabs.append(Tab("history", _("History"), f"{row.url}?tab=history", current == "history"))
    return tabs


__all__ = ["change_view", "live_view"]
