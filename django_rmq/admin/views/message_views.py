"""One message: all its copies, and its body as a file."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django.contrib.admin.utils import quote
from django.http import Http404, HttpRequest, HttpResponse
from django.utils.translation import gettext as _

from django_rmq.admin.body_display import show_body, visible
from django_rmq.admin.labels import (
    END_NAMES,
    MARKS,
    REASONS,
    STATE_NOTES,
    STATES,
)
from django_rmq.admin.page_actions import named_acts
from django_rmq.admin.timeline import timeline
from django_rmq.admin.views.page import Pages, page
from django_rmq.admin.views.request_values import back_of, short_id
from django_rmq.exceptions import InvalidRequest, MessageGone
from django_rmq.operations import (
    Followed,
    MessageCopy,
    Operations,
    Permission,
)
from django_rmq.operations.body_redaction import is_redacted


@page(Permission.VIEW)
def message_view(pages: Pages, request: HttpRequest, object_id: str, message_id: str) -> HttpResponse:
    """Show a message with all its copies."""
    operations, topic = pages.asked(request, object_id)
    followed, status = None, 200
    try:
        followed = operations.follow(topic.name, short_id(message_id))
    except (MessageGone, InvalidRequest):
        status = 404
    back = back_of(request.GET.get("back"))
    places = pages.places(topic.name)
    return pages.render(
        request,
        "topic/message.html",
        {
            "topic": topic,
            "copies": [
                _copy(pages, operations, copy, back) for copy in (followed.copies if followed else ())
            ],
            "ended": "" if followed is None or followed.copies else END_NAMES.get(followed.status.state, ""),
            "steps": [] if followed is None else timeline(followed.status),
            "slot": _slot_of(followed, message_id),
            "now_ms": operations.broker.now_ms(),
            "urls": places,
            "back": back,
            "back_url": f"{places.topic}?{back}",
            "here": _("Message"),
        },
        topic,
        status,
    )


def _slot_of(followed: Followed | None, message_id: str) -> str:
    """Return the slot in which a message is, or the one in its id; a re-slotting may have moved it since."""
    if followed is not None and followed.copies:
        return str(followed.copies[0].slot)
    return message_id.partition("~")[0].partition(".")[0][:8]


def _copy(pages: Pages, operations: Operations, copy: MessageCopy, back: str) -> dict[str, Any]:
    topic = copy.topic
    redacted = is_redacted(topic)
    may_edit = all(
        operations.actor.may(one) for one in (Permission.REPLAY, Permission.EDIT, Permission.VIEW_BODIES)
    )
    query = urlencode({"state": copy.queue, "back": back})
    return {
        "copy": copy,
        "id": copy.id,
        "state": copy.queue,
        "state_name": STATES[copy.queue],
        "state_note": STATE_NOTES[copy.queue],
        "body": None if copy.raw is None else show_body(topic, copy.raw),
        "key": None if copy.key is None else visible(copy.key),
        "slot_basis": visible(copy.slot_basis or ""),
        "headers": [(visible(str(name)), visible(str(value))) for name, value in copy.headers.items()],
        "reason": REASONS.get(copy.failed, copy.failed),
        "mark": MARKS.get(copy.mark, copy.mark),
        "error": visible(copy.error),
        "error_class": visible(copy.error_class),
        "withheld": copy.raw is None or redacted,
        "acts": named_acts(operations, topic, copy.queue),
        "edit_url": f"{pages.url('edit', quote(topic.name), copy.id)}?{query}"
        if copy.state == "dead" and may_edit
        else "",
        "raw_url": f"{pages.url('raw', quote(topic.name), copy.id)}?{query}"
        if copy.raw is not None and not redacted
        else "",
    }


@page(Permission.VIEW, Permission.VIEW_BODIES)
def raw_view(pages: Pages, request: HttpRequest, object_id: str, message_id: str) -> HttpResponse:
    """Return a body as it was stored, as a file."""
    operations, topic = pages.asked(request, object_id)
    try:
        raw = operations.body(topic.name, short_id(message_id), request.GET.get("state", ""))
    except (MessageGone, InvalidRequest) as error:
        raise Http404(str(error)) from error
    response = HttpResponse(raw, content_type="text/plain; charset=utf-8")
    response["Content-Disposition"] = 'attachment; filename="body.txt"'
    response["X-Content-Type-Options"] = "nosniff"
    return response


__all__ = ["message_view", "raw_view"]
