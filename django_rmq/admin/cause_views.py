"""The pages of dead messages by cause: of one topic, or of all."""

from __future__ import annotations

from urllib.parse import urlencode

from django.contrib.admin.utils import quote
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _

from django_rmq.admin.body_display import visible
from django_rmq.admin.charts import Sparkline, sparkline
from django_rmq.admin.page import Pages, page, topic_page
from django_rmq.admin.page_actions import sweeping_acts
from django_rmq.core.model.topic import Topic
from django_rmq.operations import Filter, GroupSample, MessageGroup, Operations, Permission
from django_rmq.operations.authorization import EDITED_REPLAY
from django_rmq.operations.message_groups import READ_SECONDS, groups_of

MESSAGES_READ = 200_000
"""The number of messages that one request reads, in equal parts of its topics. Of each topic it reads at least a page."""

LONG_READ_SECONDS = 5.0
"""``READ_SECONDS`` if a person asks for more of the messages."""

LONG_MESSAGES_READ = 2_000_000
"""``MESSAGES_READ`` if a person asks for more of the messages."""

HOURS_SHOWN = 24

_HOUR_MS = 3_600_000


@topic_page(Permission.VIEW)
def topic_causes_view(
    pages: Pages, request: HttpRequest, operations: Operations, topic: Topic
) -> HttpResponse:
    """Show the causes of one topic."""
    return _causes(pages, request, operations, topic)


@page(Permission.VIEW)
def causes_view(pages: Pages, request: HttpRequest, operations: Operations) -> HttpResponse:
    """Show the causes of all topics."""
    return _causes(pages, request, operations, None)


def _causes(pages: Pages, request: HttpRequest, operations: Operations, topic: Topic | None) -> HttpResponse:
    is_long = request.GET.get("look") == "longer"
    causes = operations.causes(
        None if topic is None else [topic.name],
        limit=LONG_MESSAGES_READ if is_long else MESSAGES_READ,
        seconds=LONG_READ_SECONDS if is_long else READ_SECONDS,
    )
    now_ms = operations.broker.now_ms()
    lines = [
        _group_line(pages, operations, operations.declared(name), group, now_ms)
        # ``group.share`` is the part of its topic; the page shows the part of all topics.
        | {"share": group.count / causes.looked_at}
        for name, group in groups_of(causes)
    ]
    context = {
        "heading": _("Dead by cause"),
        "is_one": topic is not None,
        "lines": lines,
        "found": causes,
        "may_look_longer": not (is_long or causes.is_complete),
        "now_ms": now_ms,
        "urls": {} if topic is None else pages.places(topic.name),
        "all_url": pages.url("causes"),
    }
    return pages.render(request, "topic/causes.html", context, topic)


def _group_line(
    pages: Pages, operations: Operations, topic: Topic, group: MessageGroup, now_ms: int
) -> dict[str, object]:
    wanted = Filter(error=group.error_class, cause=group.cause)
    places = pages.places(topic.name)
    selection = {"tab": "dead", "error": group.error_class, "cause": group.cause}
    query = urlencode({name: value for name, value in selection.items() if value})
    may_edit = operations.may(topic, *EDITED_REPLAY, Permission.VIEW_BODIES)
    return {
        "topic": topic.name,
        "group": group,
        "error_class": visible(group.error_class),
        "error": visible(group.error),
        "spark": _spark(group, now_ms),
        "url": f"{places['topic']}?{query}",
        "back": query,
        "samples": [_address(pages, topic, one, "message", query) for one in group.samples],
        "edit_url": _address(pages, topic, group.samples[0], "edit", query) if may_edit else "",
        "act_url": places["act"],
        "acts": sweeping_acts(operations, topic, "dead", wanted),
    }


def _spark(group: MessageGroup, now_ms: int) -> Sparkline | None:
    """Return a line over the deaths of each of the last hours."""
    now = now_ms // _HOUR_MS * _HOUR_MS
    counts = dict(group.hours)
    return sparkline([float(counts.get(now - back * _HOUR_MS, 0)) for back in range(HOURS_SHOWN)][::-1])


def _address(pages: Pages, topic: Topic, sample: GroupSample, place: str, back: str) -> str:
    return f"{pages.url(place, quote(topic.name), sample.id)}?{urlencode({'state': 'dead', 'back': back})}"
