"""Routes of one message: how it is named, and the answer to each outcome of an action."""

from __future__ import annotations

from collections.abc import Mapping

from rest_framework.response import Response

from django_rmq.api import errors, requests
from django_rmq.api.requests import Fields, Strict, body_for
from django_rmq.api.view import RmqView
from django_rmq.core.model.body_codec import exact_json
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import MessageGone, OperationRefused
from django_rmq.operations import ActionResult, not_found

MESSAGE_ID = {"id": {"type": "string", "pattern": "^([0-9]{1,7}[.~].+|-)$"}}
"""A slot, and the part that names a message there; or ``-`` if the query names it."""


class MessageRoute(RmqView):
    """A route of one message. The address has its id, or ``-`` if the query names it by its key or body."""

    def named(self, topic: Topic, message_id: str, query: type[Strict] = requests.NameQuery) -> Fields:
        """Return how the message is named: ``id``, or the arguments ``key``, ``body`` and ``slot_basis``."""
        asked = self.read(query, self.request.query_params)
        named: Fields = {name: asked[name] for name in ("key", "body", "slot_basis") if name in asked}
        if message_id != "-":
            if named:
                raise errors.Invalid("An id is the whole name of a message: give no key, body or slot_basis.")
            return {"id": message_id}
        if not named.keys() & {"key", "body"}:
            raise errors.Invalid("Name the message by an id in the address, or by ?key= or ?body=.")
        if "body" in named and topic.body == "json":
            try:
                named["body"] = exact_json(named["body"])
            except (ValueError, RecursionError) as error:
                raise errors.Invalid(f"body is not JSON: {error}") from None
        elif "body" in named:
            named["body"] = body_for(topic, named["body"])
        return named

    def id_of(self, topic: Topic, message_id: str, query: type[Strict] = requests.NameQuery) -> str:
        """Return the id of the message, which may not exist."""
        named = self.named(topic, message_id, query)
        return str(named["id"]) if "id" in named else self.operations.id_of(topic.name, **named)


def outcome(done: ActionResult, message_id: str, good: Mapping[str, int]) -> Response:
    """Return the response to the outcome of an action on one message. ``good``: outcome → status."""
    (word,) = done.found.values()
    if word == "gone":
        raise MessageGone(f"The message {message_id[:80]} does not exist.")
    if word == "not_found":
        raise OperationRefused(not_found(message_id))
    if word not in good:
        raise errors.Conflict(f"Not possible: the message is {word.replace('_', ' ')}.", word)
    return Response({"id": message_id, "outcome": word}, status=good[word])
