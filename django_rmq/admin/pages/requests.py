"""What comes from a request is anything: it is read with care, and what is no answer is nothing."""

from __future__ import annotations

import json
import re
from urllib.parse import urlencode

from django.http import Http404, QueryDict

from django_rmq.admin.filters import LONGEST_TEXT, PARAMETERS
from django_rmq.admin.words import OUTCOMES

_LONGEST_BACK = {"tab": 20, "cursor": 512, "hours": 20, "first": 20} | {
    name: LONGEST_TEXT if name in ("text", "error") else 20 for name in PARAMETERS
}
"""Bytes of the longest parameters of a list: with them a link to a message stays short enough for any web server."""

LONGEST_ID = 1_200
"""Characters of the longest id: 512 bytes of member are 683 of them."""


def number(text: str | None) -> int:
    """Return a whole number of a query or form; 0 for anything else."""
    return int(text) if text and re.fullmatch(r"[0-9]{1,15}", text) else 0


def short_id(message_id: str) -> str:
    """Return an id, if it is no longer than any that there is."""
    if len(message_id) > LONGEST_ID:
        raise Http404("no such message")
    return message_id


def back_of(text: str | None) -> str:
    """Return the query string to go back to, with the parameters that a list has and no others."""
    given = QueryDict((text or "")[:4000])
    known = {
        name: given[name]
        for name, longest in _LONGEST_BACK.items()
        if name in given and len(given[name].encode("utf-8", "replace")) <= longest
    }
    return urlencode(known)


def so_far(text: str | None) -> dict[str, int]:
    """Return the outcomes that a page carried on; whatever it made of them, they are only shown."""
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
