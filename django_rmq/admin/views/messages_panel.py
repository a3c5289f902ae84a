"""The list of the messages of one state, with its filter and actions."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django.contrib.admin.utils import quote
from django.http import HttpRequest, QueryDict
from django.utils.translation import gettext as _

from django_rmq.admin.body_display import summary, visible
from django_rmq.admin.filter_form import FilterForm
from django_rmq.admin.labels import EMPTY, MARKS, REASONS
from django_rmq.admin.page_actions import named_acts, sweeping_acts
from django_rmq.admin.views.page import Pages
from django_rmq.admin.views.request_values import back_of
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import CallerError
from django_rmq.operations import MessageCopy, Operations, Permission
from django_rmq.operations.body_redaction import may_search


def panel(
    pages: Pages, request: HttpRequest, operations: Operations, topic: Topic, state: str
) -> dict[str, Any]:
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
        "listing": listing,
        "lines": [_line(pages, topic, copy, request) for copy in listing.copies],
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


def _line(pages: Pages, topic: Topic, copy: MessageCopy, request: HttpRequest) -> dict[str, Any]:
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


__all__ = ["filter_form", "panel"]
