"""The list of the messages of one state with its filter and actions, and one message with all its copies."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlencode

from django.contrib.admin.utils import quote
from django.http import Http404, HttpRequest, HttpResponse, QueryDict
from django.utils.translation import gettext as _

from django_rmq.admin.body_display import show_body, summary, visible
from django_rmq.admin.dashboard_rows import PageAddresses, timeline
from django_rmq.admin.filter_form import FilterForm
from django_rmq.admin.labels import EMPTY, END_NAMES, MARKS, REASONS, STATE_NOTES, STATES
from django_rmq.admin.page_actions import named_acts, sweeping_acts
from django_rmq.admin.views.page import LONGEST_ID, Pages, back_of, page, short_id, topic_page
from django_rmq.core.model.body_codec import dumps
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import CallerError, InvalidRequest, MessageGone
from django_rmq.operations import Followed, MessageCopy, Operations, Permission
from django_rmq.operations.authorization import is_redacted, may_search
from django_rmq.operations.message_view import body_columns

LONGEST_CELL = 40
"""Maximum number of characters of a value of a body in a list."""


@topic_page(Permission.VIEW)
def message_view(
    pages: Pages, request: HttpRequest, operations: Operations, topic: Topic, message_id: str
) -> HttpResponse:
    """Show a message with all its copies."""
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


def _copy(pages: Pages, operations: Operations, copy: MessageCopy, back: str) -> dict[str, object]:
    topic = copy.topic
    redacted = is_redacted(topic)
    may_edit = operations.may(topic, Permission.REPLAY, Permission.EDIT, Permission.VIEW_BODIES)
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
        "stack_url": pages.url("stack", quote(topic.name), copy.id)
        if copy.queue == "prepare" and operations.may(topic, Permission.VIEW_STACK)
        else "",
        "edit_url": f"{pages.url('edit', quote(topic.name), copy.id)}?{query}"
        if copy.state == "dead" and may_edit
        else "",
        "raw_url": f"{pages.url('raw', quote(topic.name), copy.id)}?{query}"
        if copy.raw is not None and not redacted
        else "",
    }


@topic_page(Permission.VIEW, Permission.VIEW_BODIES)
def raw_view(
    pages: Pages, request: HttpRequest, operations: Operations, topic: Topic, message_id: str
) -> HttpResponse:
    """Return a body as it was stored, as a file."""
    try:
        raw = operations.body(topic.name, short_id(message_id), request.GET.get("state", ""))
    except (MessageGone, InvalidRequest) as error:
        raise Http404(str(error)) from error
    response = HttpResponse(raw, content_type="text/plain; charset=utf-8")
    response["Content-Disposition"] = 'attachment; filename="body.txt"'
    response["X-Content-Type-Options"] = "nosniff"
    return response


def panel(
    pages: Pages, request: HttpRequest, operations: Operations, topic: Topic, state: str
) -> dict[str, object]:
    """Return the content of the list."""
    form = filter_form(operations, topic, state, request.GET)
    wanted = form.wanted
    errors = [str(error) for found in form.errors.values() for error in found]
    cursor = request.GET.get("cursor", "")
    try:
        listing = operations.listing(topic.name, state, cursor=cursor, wanted=wanted)
    except CallerError as error:
        errors.append(str(error))
        listing = operations.listing(topic.name, state)
        cursor = ""
    columns = operations.config.admin.columns_of(topic.name)
    note = ""
    if operations.actor.may(Permission.VIEW_BODIES) and not may_search(operations.actor, topic):
        note = _("Bodies of this topic are redacted and cannot be searched.")
    return {
        "state": state,
        "filter_form": form,
        "filter_errors": errors,
        "filter_note": note,
        "filter_values": form.values,
        "filtered": not wanted.is_empty,
        "exported": "" if errors else urlencode([("tab", state), *form.values]),
        "listing": listing,
        "columns": columns,
        "lines": [
            {**list_line(pages, topic, copy, request), "cells": _cells(copy, columns)}
            for copy in listing.copies
        ],
        "first_page": not cursor,
        "acts": named_acts(operations, topic, state),
        "mass_acts": sweeping_acts(operations, topic, state, wanted)
        if listing.copies or listing.cursor
        else [],
        "empty": EMPTY[state],
    }


def filter_form(operations: Operations, topic: Topic, state: str, data: QueryDict) -> FilterForm:
    """Return the filter form, filled with ``data``."""
    return FilterForm(topic, state, may_search=may_search(operations.actor, topic), data=data)


def _cells(copy: MessageCopy, columns: Sequence[str]) -> list[str]:
    """Return the texts of the columns that the settings name."""
    return [
        "–"
        if value is None
        else _cut(visible(value if isinstance(value, str) else dumps(value, ensure_ascii=False)))
        for value in body_columns(copy, columns).values()
    ]


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_CELL else f"{text[: LONGEST_CELL - 1]}…"


@page(Permission.VIEW)
def search_view(pages: Pages, request: HttpRequest, operations: Operations) -> HttpResponse:
    """Show the messages of all topics that have the given id or key, or contain the given text."""
    text = request.GET.get("q", "").strip().replace("\0", "")[:LONGEST_ID]
    found = operations.search_messages(text)
    context = {
        "heading": _("Find messages"),
        "search": text,
        "search_url": pages.url("search"),
        "found": found,
        "lines": [_found_line(pages, operations, copy, request, text) for copy in found.copies],
        "now_ms": operations.broker.now_ms(),
        "urls": PageAddresses(),
    }
    return pages.render(request, "topic/search.html", context)


def _found_line(
    pages: Pages, operations: Operations, copy: MessageCopy, request: HttpRequest, text: str
) -> dict[str, object]:
    place = pages.places(copy.topic.name).topic
    filtered = "text" if may_search(operations.actor, copy.topic) else "error"
    return {
        **list_line(pages, copy.topic, copy, request),
        "topic": copy.topic.name,
        "state": STATES[copy.queue],
        "topic_url": f"{place}?{urlencode({'tab': copy.queue, filtered: text})}",
    }


def list_line(pages: Pages, topic: Topic, copy: MessageCopy, request: HttpRequest) -> dict[str, object]:
    """Return what the line of a list shows of a message."""
    if copy.raw is None:
        line = _("%(size)s bytes, %(id)s") % {"size": copy.size, "id": copy.id.rpartition("~")[2][:16]}
    elif copy.key is not None:
        line = f"{visible(copy.key)}  {summary(topic, copy.raw)}"
    else:
        line = summary(topic, copy.raw)
    error = copy.error.partition("\n")[0][:200]
    return {
        "copy": copy,
        "id": copy.id,
        "summary": line or _("(empty)"),
        "error": visible(error or copy.error_class),
        "reason": REASONS.get(copy.failed, copy.failed),
        "mark": MARKS.get(copy.mark, copy.mark),
        "url": pages.url("message", quote(topic.name), copy.id)
        + f"?{urlencode({'back': back_of(request.GET.urlencode())})}",
    }
