"""Actions on one message: its id, and the answer to each outcome."""

from __future__ import annotations

from collections.abc import Mapping

from rest_framework.response import Response

from django_rmq.api import errors
from django_rmq.exceptions import MessageGone, OperationRefused
from django_rmq.operations import Done, not_found

MESSAGE_ID = {"id": {"type": "string", "pattern": "^[0-9]{1,7}\\..+$"}}
"""A slot, and the part that names a message there."""


def outcome(done: Done, message_id: str, good: Mapping[str, int]) -> Response:
    """Return the response to the outcome of an action on one message. ``good``: outcome → status."""
    (word,) = done.found.values()
    if word == "gone":
        raise MessageGone(f"The message {message_id[:80]} does not exist.")
    if word == "not_found":
        raise OperationRefused(not_found(message_id))
    if word not in good:
        raise errors.Conflict(f"Not possible: the message is {word.replace('_', ' ')}.", word)
    return Response({"id": message_id, "outcome": word}, status=good[word])


__all__ = ["MESSAGE_ID", "outcome"]
