"""Reads values of requests; an invalid value counts as missing."""

from __future__ import annotations

import json
import re
from urllib.parse import urlencode

from django.http import Http404, QueryDict

from django_rmq.admin.filter_form import LONGEST_TEXT, PARAMETERS
from django_rmq.admin.labels import OUTCOMES

_LONGEST_BACK = {"tab": 20, "cursor": 512, "hours": 20, "first": 20} | {
    name: LONGEST_TEXT if name in ("text", "error") else 20 for name in PARAMETERS
}
"""Maximum size of a list's parameters in bytes; a link to a message then stays short enough for any web server."""

LONGEST_ID = 1_200
"""Maximum number of characters of an id: 512 bytes of member are 683 of them."""


def number(text: str | None) -> int:
    """Return a whole number from a query or form; 0 for anything else."""
    return int(text) if text and re.fullmatch(r"[0-9]{1,15}", text) else 0


def short_id(message_id: str) -> str:
    """Return an id, unless it is longer than any valid one."""
    if len(message_id) > LONGEST_ID:
        raise Http404("no such message")
    return message_id


def back_of(text: str | None) -> str:
    """Return the query string to go back to, with only the parameters of a list."""
    given = QueryDict((text or "")[:4000])
    known = {
        name: given[name]
        for name, longest in _LONGEST_BACK.items()
        if name in given and len(given[name].encode("utf-8", "replace")) <= longest
    }
    return urlencode(known)


def so_far(text: str | None) -> dict[str, int]:
    """Return the outcomes that a page carried on. They are only shown, so they need not be trusted."""
    try:
        given = json.loads(text or "{}")
        return {
            str(word): int(count)
            for word, count in given.items()
            if word in OUTCOMES and 0 <= int(count) < 1e15
        }
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}


__all__ = ["back_of", "number", "short_id", "so_far"]
