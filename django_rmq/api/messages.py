"""Messages: lists of a state, sends, and what is known about one message with all its copies.

The causes of deaths and the serializers of responses are here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import cast

from rest_framework import serializers
from rest_framework.response import Response

from django_rmq import Send
from django_rmq.api import actions, errors, requests
from django_rmq.api.requests import Anything, Fields, body_for
from django_rmq.api.view import (
    InstantField,
    Json,
    MessageRoute,
    ResponseSerializer,
    RmqView,
    maybe,
    message_route,
    outcome,
    route,
)
from django_rmq.core.model.send_results import SendResult
from django_rmq.core.model.status import QUEUES, STATES
from django_rmq.core.model.topic import Topic
from django_rmq.operations import Causes, Followed, MessageCopy, Permission
from django_rmq.operations.authorization import PERMISSION_OF, is_redacted
from django_rmq.operations.filters import filter_of
from django_rmq.operations.message_details import REASONS
from django_rmq.operations.message_groups import READ_SECONDS, groups_of
from django_rmq.operations.message_view import shown_body


class MessageAnswer(ResponseSerializer):
    """One copy of a message in one state."""

    id = serializers.CharField()
    state = serializers.ChoiceField(list(QUEUES))
    slot = serializers.IntegerField()
    at_ms = maybe(help_text="When the message is due, is retried, was delivered or extended, or went to Dead")
    priority = maybe()
    retries_left = maybe(
        help_text="Retries left after the next delivery; null: all of them, or the message is dead"
    )
    body = Anything(allow_null=True, help_text="Null without the permission view_bodies")
    encoding = serializers.ChoiceField(["json", "text", "base64", "hidden", "withheld"])
    redacted = serializers.BooleanField(help_text="True: a formatter changed `body`; the stored body differs")
    size = serializers.IntegerField(help_text="Size of the body in bytes")
    key = maybe(serializers.CharField)
    headers = serializers.DictField()
    slot_basis = maybe(serializers.CharField)
    expires_ms = maybe()
    max_retries = maybe(help_text="The message's own number of retries; null: that of its topic")
    timeout = maybe(help_text="The message's own time-out in seconds; null: that of its topic")
    failed = serializers.CharField(allow_blank=True)
    failures = serializers.IntegerField()
    first_failed_ms = maybe()
    last_failed_ms = maybe()
    error_class = serializers.CharField(allow_blank=True)
    error = serializers.CharField(allow_blank=True)
    mark = serializers.CharField(
        allow_blank=True, help_text="An action that takes effect when the current delivery ends"
    )


class MessagesAnswer(ResponseSerializer):
    """A page of messages. A short or empty page can have a next one."""

    results = MessageAnswer(many=True)
    next = maybe(serializers.CharField, help_text="The URL of the next page; null: this is the last page")
    cursor = maybe(serializers.CharField, help_text="The value of `cursor` for the next page")
    scanned = serializers.IntegerField()
    problems = serializers.ListField(child=serializers.CharField())


def copy(one: MessageCopy) -> Json:
    """Return one copy of a message, as far as it may be seen."""
    body, encoding = shown_body(one)
    return MessageAnswer.of(
        one,
        body=body,
        encoding=encoding,
        redacted=one.raw is not None and is_redacted(one.topic.name),
        expires_ms=one.expires_ms or None,
    )


class CauseAnswer(ResponseSerializer):
    """Dead messages whose last error has the same class and first line."""

    topic = serializers.CharField()
    cause = serializers.CharField(help_text="Its id, which selects the messages in lists and actions")
    error_class = serializers.CharField(allow_blank=True)
    error = serializers.CharField(
        allow_blank=True,
        help_text="The first line without the class; # stands for each number and id, '…' for quoted text. Empty "
        "without the permission view_bodies",
    )
    count = serializers.IntegerField()
    share = serializers.FloatField(
        help_text="The fraction of the dead messages of the topic that were looked at"
    )
    first_ms = maybe(help_text="The first death")
    last_ms = maybe(help_text="The last death")
    hours = serializers.ListField(
        child=serializers.ListField(child=serializers.IntegerField()),
        help_text="The beginning of each hour in ms, and how many died in it",
    )
    samples = serializers.ListField(
        child=serializers.CharField(), help_text="The ids of up to three of the messages"
    )


class CausesAnswer(ResponseSerializer):
    """Why messages are dead, the cause with the most messages first."""

    results = CauseAnswer(many=True)
    looked_at = serializers.IntegerField(
        help_text="How many dead messages were looked at, evenly spread over slots and time"
    )
    total = serializers.IntegerField(help_text="How many dead messages these topics have")
    complete = serializers.BooleanField(source="is_complete", help_text="Whether all were looked at")
    unread = serializers.IntegerField(help_text="How many topics were not read, because the time was over")
    problems = serializers.ListField(child=serializers.CharField())


def causes(all_causes: Causes) -> Json:
    rows = [
        CauseAnswer.of(group, topic=name, samples=[sample.id for sample in group.samples])
        for name, group in groups_of(all_causes)
    ]
    return CausesAnswer.of(all_causes, results=rows)


class SentAnswer(ResponseSerializer):
    """The result of sending one message."""

    id = serializers.CharField()
    slot = serializers.IntegerField()
    status = serializers.ChoiceField(["stored", "merged", "replaced", "superseded", "present", "refused"])
    score = maybe(help_text="The due time in milliseconds, or the priority; null if the message was refused")


class SendsAnswer(ResponseSerializer):
    """The result of sending each message, in the order given."""

    results = SentAnswer(many=True)
    outcomes = serializers.DictField(
        child=serializers.IntegerField(), help_text="Status → number of messages"
    )


def sends_response(
    results: Sequence[SendResult], outcomes: Mapping[str, int], id_of: Callable[[SendResult], str]
) -> Json:
    """Return the results of a send. ``id_of``: the ids that the sender may use."""
    rows = [
        SentAnswer.of(one, id=id_of(one), score=int(one.score) if one.score == one.score else None)
        for one in results
    ]
    return {"results": rows, "outcomes": dict(outcomes)}


class StatusAnswer(ResponseSerializer):
    """The status of a message. What is null or empty does not exist, or is not known."""

    state = serializers.ChoiceField(
        STATES, help_text="`done`, `removed` and `cancelled`: only on topics with OUTCOME_RETENTION"
    )
    due_ms = maybe(InstantField, source="due", help_text="When it can be delivered next")
    priority = maybe()
    attempts = serializers.IntegerField(
        help_text="Deliveries that failed or succeeded since it last ended, and the one in flight"
    )
    worker = serializers.CharField(
        allow_blank=True, help_text="The worker that has it, or had it when it ended"
    )
    delivered_ms = maybe(
        InstantField,
        source="delivered",
        help_text="When the delivery began that is in flight, or in which it ended",
    )
    ended_ms = maybe(InstantField, source="ended")
    progress = maybe(
        serializers.FloatField, help_text="From 0 to 1, as the listener reported last; 1 once it is done"
    )
    progress_text = serializers.CharField(
        allow_blank=True, help_text="Empty without the permission view_bodies"
    )
    progress_ms = maybe(InstantField, source="progress_at", help_text="When the listener reported it")
    reason = serializers.CharField(allow_blank=True, help_text="Why it is dead")
    error_class = serializers.CharField(allow_blank=True, help_text="Class of the last error")
    first_failed_ms = maybe(InstantField, source="first_failed")
    last_failed_ms = maybe(InstantField, source="last_failed")


class HoldAnswer(ResponseSerializer):
    """Something that keeps a message from being delivered now."""

    reason = serializers.ChoiceField(REASONS)
    since_ms = maybe(
        help_text="`slot_busy`: when the longest delivery began. `not_due`: when the message is due"
    )
    count = maybe(
        serializers.FloatField,
        help_text="`slot_busy`, `claimed`, `behind`: number of messages. `rate` (per second), `in_flight_limit`: the limit",
    )
    message = maybe(
        serializers.CharField,
        help_text="Id of the message that is first (`behind`), failed (`behind_failed`) or runs (`slot_busy`)",
    )


class FollowedAnswer(ResponseSerializer):
    """All copies of one message, none if it has ended, its status, and why it waits."""

    results = MessageAnswer(many=True)
    status = StatusAnswer()
    held_by = HoldAnswer(
        many=True,
        help_text="What keeps it from being delivered now, the worst first; empty: nothing, or it does not wait",
    )


def followed(message: Followed) -> Json:
    """Return a message with its status."""
    return FollowedAnswer.of(
        message,
        results=[copy(each) for each in message.copies],
        held_by=[HoldAnswer.of(one, message=one.message_id or None) for one in message.held_by],
    )


LONGEST_KEY = 255
"""Maximum number of characters of an Idempotency-Key."""


class MessagesView(RmqView):
    @route(
        "messages",
        Permission.VIEW,
        query=requests.MessagesQuery,
        answers={200: MessagesAnswer},
        errors=[404],
    )
    def get(self, topic: Topic, query: Fields) -> Json:
        """List the messages of a topic in one state, page by page."""
        order = query.get("order")
        listing = self.operations.listing(
            topic.name,
            query["state"],
            cursor=query.get("cursor", ""),
            wanted=filter_of(query),
            limit=query.get("page_size"),
            descending=None if order is None else order == "descending",
        )
        following = None
        if listing.cursor:
            params = self.request.query_params.copy()
            params["cursor"] = listing.cursor
            following = f"{self.request.build_absolute_uri(self.request.path)}?{params.urlencode()}"
        return MessagesAnswer.of(
            listing,
            results=[copy(one) for one in listing.copies],
            next=following,
            cursor=listing.cursor or None,
        )

    @route(
        "send",
        Permission.SEND,
        takes=("Sending", [requests.SendFields, requests.SendsFields]),
        headers={
            "Idempotency-Key": (
                "1 to 255 characters of your choice. A repeated request with the same key is executed once a day",
                {"type": "string", "minLength": 1, "maxLength": LONGEST_KEY, "pattern": "^[ -~]+$"},
            )
        },
        answers={202: SendsAnswer},
        errors=[404, 422, 507],
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
    def post(self, topic: Topic) -> Json:
        """Send one message or many. If one is invalid, none is sent.

        A full slot refuses its messages: their status is refused, and the others are sent. 507: all were refused.
        """
        data = self.request.data
        many = isinstance(data, Mapping) and "messages" in data
        fields = self.read(requests.SendsFields if many else requests.SendFields, data)
        sends = [_send(topic, one) for one in (fields["messages"] if many else [fields])]
        ensured = None if many else _ensured(fields)
        # Without it the framework reads no body.
        size = int(self.request.META["CONTENT_LENGTH"])
        key = self.request.headers.get("Idempotency-Key")
        if key is None:
            return self._send(topic, sends, size, ensured)
        if not (1 <= len(key) <= LONGEST_KEY and key.isascii() and key.isprintable()):
            raise errors.Invalid(f"Idempotency-Key must be 1 to {LONGEST_KEY} printable characters of ASCII.")
        if len(sends) > requests.MOST_ONCE:
            raise errors.Invalid(
                f"At most {requests.MOST_ONCE} messages can be sent with an Idempotency-Key."
            )
        with self.operations.once(key, [topic.name, data], len(sends)) as attempt:
            if attempt.answer is None:
                attempt.done(self._send(topic, sends, size, ensured))
        return cast("Json", attempt.answer)

    def _send(self, topic: Topic, sends: list[Send], size: int, ensured: Fields | None) -> Json:
        operations = self.operations
        operations.spend_sends(len(sends), size)
        if ensured is not None:
            result = operations.ensure(topic.name, sends[0], entry=False, **ensured)
            return sends_response([result], {result.status: 1}, operations.sent_id)
        results = operations.send_each(topic.name, sends)
        return sends_response(results, results.counts(), operations.sent_id)


_OPTIONS = ("key", "priority", "fixed_time", "slot_basis", "headers", "expires", "max_retries", "timeout")
"""The fields of ``MessageFields`` that are options of ``Send`` as they are. The others are durations in ms."""


def _ensured(fields: Fields) -> Fields | None:
    """Return the arguments of ``Operations.ensure`` beside the message. None: the message is sent in any case."""
    if fields["ensure"]:
        return {"message_id": fields.get("id")}
    if "id" in fields:
        raise errors.Invalid("An id names a message that was sent: give it together with ensure.")
    return None


def _send(topic: Topic, fields: Fields) -> Send:
    options = {name: fields[name] for name in _OPTIONS if name in fields}
    if "time_range_ms" in fields:
        options["time_range"] = timedelta(milliseconds=fields["time_range_ms"])
    if "delay_ms" in fields:
        options["delay"] = timedelta(milliseconds=fields["delay_ms"])
    return Send(body_for(topic, fields["body"]), **options)


class CausesView(RmqView):
    @route("causes", Permission.VIEW, query=requests.CausesQuery, answers={200: CausesAnswer}, errors=[404])
    def get(self, query: Fields) -> Json:
        """Group the dead messages of a topic, or of all, by the class and the first line of their last error."""
        names = [self.topic(query["topic"]).name] if "topic" in query else self.known()
        return causes(self.operations.causes(names, limit=query["limit"], seconds=READ_SECONDS))


class MessageView(MessageRoute):
    @message_route("message", Permission.VIEW, answers={200: FollowedAnswer}, errors=[400, 404])
    def get(self, topic: Topic, message_id: str, query: Fields) -> Json:
        """List all copies of a message with the state of each, and its status, which can outlive them (OUTCOME_RETENTION)."""
        return followed(self.operations.follow(topic.name, self.id_of(topic, message_id, query)))

    @message_route(
        "delete",
        PERMISSION_OF["delete"],
        query=requests.DeleteQuery,
        answers={200: actions.OutcomeAnswer, 202: actions.OutcomeAnswer},
        errors=[404],
    )
    def delete(self, topic: Topic, message_id: str, query: Fields) -> Response:
        """Delete a message. 202: a consumer has it, and it is deleted when that delivery ends."""
        one, keep = self.id_of(topic, message_id, query), query["keep"]
        if "copy" in query:
            result = self.operations.delete(topic.name, [one], query["copy"], keep=keep)
        else:
            result = self.operations.delete_only(topic.name, one, keep=keep)
        if "both" in result.outcomes:
            raise errors.Conflict(
                "The message is dead, and was sent again. Give copy=live or copy=dead.", "both"
            )
        return outcome(result, one, {"deleted": 200, "running": 202})
