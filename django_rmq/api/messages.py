"""Messages: lists of them, one with all its copies, and new ones."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from rest_framework.request import Request
from rest_framework.response import Response

from django_rmq import Send
from django_rmq.api import errors, requests
from django_rmq.api.outcome_errors import MESSAGE_ID, MessageRoute, outcome
from django_rmq.api.request_bodies import body_for
from django_rmq.api.responses import action_responses
from django_rmq.api.responses import message_responses as answers
from django_rmq.api.responses.status_responses import FollowedAnswer, followed
from django_rmq.api.schema import documented
from django_rmq.api.view import RmqView
from django_rmq.core.model.topic import Topic
from django_rmq.operations import Permission

LONGEST_KEY = 255
"""Maximum number of characters of an Idempotency-Key."""


class MessagesView(RmqView):
    """``topics/{topic}/messages/``."""

    needs = {"GET": Permission.VIEW, "POST": Permission.SEND}

    @documented(
        "messages",
        query=requests.MessagesQuery,
        answers={200: answers.MessagesAnswer},
        errors=[404, 409],
    )
    def get(self, request: Request, topic: str) -> Response:
        """List the messages of a topic in one state, page by page."""
        declared = self.topic(topic)
        asked = self.read(requests.MessagesQuery, request.query_params)
        order = asked.get("order")
        listing = self.operations.listing(
            declared.name,
            asked["state"],
            cursor=asked.get("cursor", ""),
            wanted=requests.wanted(asked),
            limit=asked.get("page_size"),
            descending=None if order is None else order == "descending",
        )
        following = None
        if listing.cursor:
            query = request.query_params.copy()
            query["cursor"] = listing.cursor
            following = f"{request.build_absolute_uri(request.path)}?{query.urlencode()}"
        return Response(answers.page(listing, following))

    @documented(
        "send",
        takes=("Sending", [requests.SendFields, requests.SendsFields]),
        headers={
            "Idempotency-Key": (
                "1 to 255 characters of your choice. A repeated request with the same key is executed once a day",
                {"type": "string", "minLength": 1, "maxLength": LONGEST_KEY, "pattern": "^[ -~]+$"},
            ),
        },
        answers={202: answers.SendsAnswer},
        errors=[404, 409, 422, 429, 507],
        examples={
            "a priority topic": {"body": {"sku": 1, "shop": 7}, "priority": 500},
            "a fixed_time topic": {"body": {"order": 9}, "fixed_time": "2030-01-31T12:00:00Z"},
            "unless it is there": {
                "body": {"order": 9},
                "fixed_time": "2030-01-31T12:00:00Z",
                "ensure": True,
            },
            "many of a range_merge topic": {"messages": [{"body": {"sku": 1}}, {"body": {"sku": 2}}]},
        },
        answered={
            "stored": {
                "results": [{"id": "3.eyJza3UiOjF9", "slot": 3, "status": "stored", "score": 1893456000000}],
                "outcomes": {"stored": 1},
            }
        },
    )
    def post(self, request: Request, topic: str) -> Response:
        """Send one message or many. If one cannot be sent, none is."""
        declared = self.topic(topic)
        data = request.data
        many = isinstance(data, Mapping) and "messages" in data
        asked = self.read(requests.SendsFields if many else requests.SendFields, data)
        sends = [_send(declared, one) for one in (asked["messages"] if many else [asked])]
        ensured = None if many else _ensured(asked)
        # Without it the framework reads no body.
        size = int(request.META["CONTENT_LENGTH"])
        key = request.headers.get("Idempotency-Key")
        if key is None:
            return Response(self._send(declared, sends, size, ensured), status=202)
        if not (1 <= len(key) <= LONGEST_KEY and key.isascii() and key.isprintable()):
            raise errors.Invalid(f"Idempotency-Key must be 1 to {LONGEST_KEY} printable characters of ASCII.")
        if len(sends) > requests.MOST_ONCE:
            raise errors.Invalid(
                f"At most {requests.MOST_ONCE} messages can be sent with an Idempotency-Key."
            )
        with self.operations.once(key, [declared.name, data], len(sends)) as attempt:
            if attempt.answer is None:
                attempt.done(self._send(declared, sends, size, ensured))
        return Response(attempt.answer, status=202)

    def _send(self, topic: Topic, sends: list[Send], size: int, ensured: Mapping[str, Any] | None) -> Any:
        operations = self.operations
        operations.spend_sends(len(sends), size)
        if ensured is not None:
            result = operations.ensure(topic.name, sends[0], entry=False, **ensured)
            return answers.sends([result], {result.status: 1}, operations.sent_id)
        results = operations.send_each(topic.name, sends)
        return answers.sends(results, results.counts(), operations.sent_id)


_OPTIONS = (
    "key",
    "priority",
    "fixed_time",
    "slot_basis",
    "headers",
    "expires",
    "max_retries",
    "timeout",
)


def _ensured(asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of ``Operations.ensure`` beside the message. None: the message is sent in any case."""
    if asked["ensure"]:
        return {"message_id": asked.get("id")}
    if "id" in asked:
        raise errors.Invalid("An id names a message that was sent: give it together with ensure.")
    return None


def _send(topic: Topic, asked: Mapping[str, Any]) -> Send:
    options = {name: asked[name] for name in _OPTIONS if name in asked}
    if "time_range_ms" in asked:
        options["time_range"] = timedelta(milliseconds=asked["time_range_ms"])
    if "delay_ms" in asked:
        options["delay"] = timedelta(milliseconds=asked["delay_ms"])
    return Send(body_for(topic, asked["body"]), **options)


class MessageView(MessageRoute):
    """``topics/{topic}/messages/{id}/``."""

    needs = {"GET": Permission.VIEW, "DELETE": Permission.DELETE}

    @documented(
        "message",
        path=MESSAGE_ID,
        query=requests.NameQuery,
        answers={200: FollowedAnswer},
        errors=[400, 404, 409],
    )
    def get(self, request: Request, topic: str, id: str) -> Response:  # noqa: A002 - the name in the address
        """List all copies of a message with the state of each, and its status, which can outlive them (OUTCOME_RETENTION)."""
        declared = self.topic(topic)
        return Response(followed(self.operations.follow(declared.name, self.id_of(declared, id))))

    @documented(
        "delete",
        path=MESSAGE_ID,
        query=requests.DeleteQuery,
        answers={200: action_responses.OutcomeAnswer, 202: action_responses.OutcomeAnswer},
        errors=[404, 409],
    )
    def delete(self, request: Request, topic: str, id: str) -> Response:  # noqa: A002
        """Delete a message. 202: a consumer has it, and it is deleted when that delivery ends."""
        declared, operations = self.topic(topic), self.operations
        copy = self.read(requests.DeleteQuery, request.query_params).get("copy")
        one, name = self.id_of(declared, id, requests.DeleteQuery), declared.name
        done = operations.delete_only(name, one) if copy is None else operations.delete(name, [one], copy)
        if "both" in done.outcomes:
            raise errors.Conflict(
                "The message is dead, and was sent again. Give copy=live or copy=dead.", "both"
            )
        return outcome(done, one, {"deleted": 200, "running": 202})
