"""The pages of messages: their list by state, one message with its timeline, and the search.

Here are also the forms for writing a message: a new one, or another body for a dead one. ``export_views`` has a list as a file,
``cause_views`` dead messages by cause.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import NamedTuple
from urllib.parse import urlencode

from django.contrib import messages
from django.contrib.admin.utils import quote
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_rmq.admin.body_display import readable, show_body, summary, visible
from django_rmq.admin.forms import BodyForm, FilterForm, SendForm
from django_rmq.admin.labels import EMPTY, END_NAMES, MARKS, REASONS, STATE_NOTES, STATES, Text
from django_rmq.admin.page import Pages, back_of, page, short_id, show_outcomes, topic_page
from django_rmq.admin.page_actions import named_acts, sweeping_acts
from django_rmq.core.model.body_codec import dumps, dumps_beginning
from django_rmq.core.model.bounds import LONGEST_ID
from django_rmq.core.model.error_causes import error_pattern
from django_rmq.core.model.status import ENDS, MessageStatus
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import CallerError, InvalidRequest, MessageGone, ServerTrouble
from django_rmq.operations import Followed, MessageCopy, Operations, Permission
from django_rmq.operations.authorization import EDITED_REPLAY, is_redacted, sees_content, sees_stored
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
            "back_url": f"{places['topic']}?{back}",
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
    redacted = is_redacted(topic.name)
    may_edit = operations.may(topic, *EDITED_REPLAY, Permission.VIEW_BODIES)
    query = urlencode({"state": copy.queue, "back": back})
    return {
        "copy": readable(copy),
        "state_name": STATES[copy.queue],
        "state_note": STATE_NOTES[copy.queue],
        "body": None if copy.raw is None else show_body(topic, copy.raw),
        "headers": [(visible(str(name)), visible(str(value))) for name, value in copy.headers.items()],
        "reason": REASONS.get(copy.failed, copy.failed),
        "mark": MARKS.get(copy.mark, copy.mark),
        "retries_left": copy.topic.retries_of(copy.max_retries)
        if copy.retries_left is None
        else copy.retries_left,
        "withheld": copy.raw is None or redacted,
        "acts": named_acts(operations, topic, copy.queue),
        "stack_url": pages.url("stack", quote(topic.name), copy.id)
        if copy.queue == "prepare" and operations.may(topic, Permission.VIEW_STACK)
        else "",
        "edit_url": f"{pages.url('edit', quote(topic.name), copy.id)}?{query}"
        if copy.state == "dead" and may_edit and _is_text(copy)
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
    errors, cursor = form.problems, request.GET.get("cursor", "")
    try:
        listing = operations.listing(topic.name, state, cursor=cursor, wanted=wanted)
    except CallerError as error:
        errors.append(str(error))
        listing = operations.listing(topic.name, state)
        cursor = ""
    columns = operations.config.admin.columns_of(topic.name)
    note = ""
    if sees_content(operations.actor, topic.name) and not sees_stored(operations.actor, topic.name):
        note = _("Bodies of this topic are redacted and cannot be searched.")
    cause = cause_text(listing.copies) if wanted.cause else ""
    return {
        "state": state,
        "filter_form": form,
        "filter_errors": errors,
        "filter_note": note,
        "cause": cause,
        "filter_values": form.values,
        "filtered": not wanted.is_empty,
        "exported": "" if errors else urlencode([("tab", state), *form.values]),
        "listing": listing,
        "columns": columns,
        "lines": [
            {
                **list_line(pages, topic, copy, request),
                "cells": zip(columns, _cells(copy, columns), strict=True),
            }
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
    return FilterForm(topic, state, may_search=sees_stored(operations.actor, topic.name), data=data)


def cause_text(copies: Sequence[MessageCopy]) -> str:
    """Return the cause of the messages of a list that shows one cause; empty if there are none."""
    if not copies:
        return ""
    one = copies[0]
    return visible(": ".join(filter(None, (one.error_class, error_pattern(one.error, one.error_class)))))


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
    result = operations.search_messages(text)
    context = {
        "heading": _("Find messages"),
        "search": text,
        "search_url": pages.url("search"),
        "found": result,
        # An id is looked up, and lists are not searched for it: filtered by it, they would be empty.
        "lines": [
            _found_line(pages, operations, copy, request, text if result.looked_at else "")
            for copy in result.copies
        ],
        "now_ms": operations.broker.now_ms(),
    }
    return pages.render(request, "topic/search.html", context)


def _found_line(
    pages: Pages, operations: Operations, copy: MessageCopy, request: HttpRequest, text: str
) -> dict[str, object]:
    query = {"tab": copy.queue}
    if text:
        query["text" if sees_stored(operations.actor, copy.topic.name) else "error"] = text
    return {
        **list_line(pages, copy.topic, copy, request),
        "state": STATES[copy.queue],
        "topic_url": f"{pages.url('change', quote(copy.topic.name))}?{urlencode(query)}",
    }


def list_line(pages: Pages, topic: Topic, copy: MessageCopy, request: HttpRequest) -> dict[str, object]:
    """Return what the line of a list shows of a message."""
    if copy.raw is None:
        line = _("%(size)s bytes, %(id)s") % {"size": copy.size, "id": copy.id.rpartition("~")[2][:16]}
    else:
        line = summary(topic, copy.raw, key=copy.key)
    error = copy.error.partition("\n")[0][:200]
    return {
        "copy": copy,
        "summary": line or _("(empty)"),
        "error": visible(error or copy.error_class),
        "reason": REASONS.get(copy.failed, copy.failed),
        "mark": MARKS.get(copy.mark, copy.mark),
        "url": pages.url("message", quote(topic.name), copy.id)
        + f"?{urlencode({'back': back_of(request.GET.urlencode())})}",
    }


@topic_page(Permission.VIEW, Permission.VIEW_BODIES, *EDITED_REPLAY)
def edit_view(
    pages: Pages, request: HttpRequest, operations: Operations, topic: Topic, message_id: str
) -> HttpResponse:
    """Show the form for another body of a dead message, and replay the message with it."""
    leave = f"{pages.url('change', quote(topic.name))}?{back_of(request.GET.get('back'))}"
    if request.method == "POST":
        form = BodyForm(topic, request.POST)
    else:
        dead = _dead_copy(operations, topic, short_id(message_id))
        if dead is None:
            messages.warning(request, _("This message is no longer dead."))
            return HttpResponseRedirect(leave)
        if not _is_text(dead):
            messages.warning(request, _("This body is not UTF-8 text, so it cannot be edited here."))
            return HttpResponseRedirect(leave)
        if dead.topic.body != "json" and b"\r" in (dead.raw or b""):
            messages.warning(request, _("This body has line ends with CR. A replay from here makes them LF."))
        form = BodyForm(topic, initial={"body": _editable(dead)})

    def replay() -> None:
        done = operations.replay_edited(topic.name, short_id(message_id), form.cleaned_data["body"])
        show_outcomes(request, _("Edit and replay"), done.outcomes)

    return pages.form_page(
        request,
        form,
        replay,
        back_url=leave,
        topic=topic,
        heading=_("Edit and replay"),
        submit=_("Replay with this body"),
        why=_why_it_died(operations, topic, short_id(message_id)),
        notes=_notes(topic),
    )


def _dead_copy(operations: Operations, topic: Topic, message_id: str) -> MessageCopy | None:
    try:
        copies = operations.get(topic.name, message_id)
    except (MessageGone, InvalidRequest):
        return None
    return next((copy for copy in copies if copy.state == "dead"), None)


def _why_it_died(operations: Operations, topic: Topic, message_id: str) -> str:
    """Return the first line of a dead message's error; empty if it is unknown."""
    try:
        dead = _dead_copy(operations, topic, message_id)
    except ServerTrouble:
        return ""
    return "" if dead is None else visible(dead.error.partition("\n")[0])


def _notes(topic: Topic) -> list[str]:
    notes = []
    if is_redacted(topic.name):
        notes.append(_("This is the stored body, without redaction."))
    if not topic.keyed:
        notes.append(_("The body identifies the message, so an edited message is a different message."))
    return notes


MOST_INDENTED = 1 << 20
"""The maximum number of characters of a body with indents in a field; a body with more is there without them."""


def _is_text(copy: MessageCopy) -> bool:
    """Return whether a field can hold the body of a copy."""
    try:
        (copy.raw or b"").decode()
    except UnicodeDecodeError:
        return False
    return True


def _editable(copy: MessageCopy) -> str:
    """Return the body of a copy as the text of a field."""
    raw = copy.raw or b""
    if copy.topic.body == "json":
        with contextlib.suppress(ValueError, RecursionError):
            text, is_whole = dumps_beginning(
                copy.body(), MOST_INDENTED, ensure_ascii=False, indent=2, sort_keys=True
            )
            return text if is_whole else dumps(copy.body(), ensure_ascii=False, sort_keys=True)
    return raw.decode()


@topic_page(Permission.VIEW, Permission.SEND)
def send_view(pages: Pages, request: HttpRequest, operations: Operations, topic: Topic) -> HttpResponse:
    """Show the form for a message, and send it."""
    form = SendForm(topic, request.POST if request.method == "POST" else None)

    def send() -> None:
        sent = operations.send(topic.name, form.cleaned_data["body"], **form.options)
        show_outcomes(request, _("Send"), {sent.status: 1})

    back_url, heading = pages.url("change", quote(topic.name)), _("Send a message")
    return pages.form_page(
        request, form, send, back_url=back_url, topic=topic, heading=heading, submit=_("Send")
    )


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
    coming = [TimelineStep(_("Next delivery"), _ms(one.due))] if one.due else []
    return [sent, *steps, *coming]


def _known(one: MessageStatus) -> Iterator[TimelineStep]:
    ended = one.state in ENDS
    # The last delivery of what was removed or cancelled counts, but is no failure.
    succeeded = one.state == "done" or (one.state in ("removed", "cancelled") and one.delivered is not None)
    runs = one.state.startswith("running")
    failures = one.attempts - (1 if succeeded or runs else 0)
    if one.first_failed and one.first_failed != one.last_failed:
        yield TimelineStep(_("Failed for the first time"), _ms(one.first_failed))
    if one.last_failed or (failures > 0 and ended):
        times = ngettext("%(count)s failure in all", "%(count)s failures in all", failures) % {
            "count": failures
        }
        note = f"{times}, {one.error_class}" if one.error_class else times
        yield TimelineStep(_("Failed"), _ms(one.last_failed), note)
    if one.delivered:
        yield TimelineStep(_("Delivered"), _ms(one.delivered), visible(one.worker))
    if one.progress_at and one.progress is not None:
        note = _("%(percent)s %% done") % {"percent": round(one.progress * 100)}
        text = visible(one.progress_text)
        yield TimelineStep(_("Progress"), _ms(one.progress_at), f"{note}: {text}" if text else note)
    if ended:
        yield TimelineStep(END_NAMES[one.state], _ms(one.ended), REASONS.get(one.reason, one.reason))


def _ms(when: datetime | None) -> float | None:
    return None if when is None else when.timestamp() * 1000
