"""Messages, and the results of sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rest_framework import serializers

from django_rmq.api.fields import Anything
from django_rmq.api.responses import ResponseSerializer, maybe
from django_rmq.core.model.send_results import SendResult
from django_rmq.core.model.status import QUEUES
from django_rmq.operations import Listing, MessageCopy
from django_rmq.operations.message_view import is_redacted, shown_body


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


def copy(one: MessageCopy) -> dict[str, Any]:
    """Return one copy of a message, as far as it may be seen."""
    body, encoding = shown_body(one)
    return {
        "id": one.id,
        "state": one.state,
        "slot": one.slot,
        "at_ms": one.at_ms,
        "priority": one.priority,
        "retries_left": one.retries_left,
        "body": body,
        "encoding": encoding,
        "redacted": one.raw is not None and is_redacted(one.topic),
        "size": one.size,
        "key": one.key,
        "headers": one.headers,
        "slot_basis": one.slot_basis,
        "expires_ms": one.expires_ms or None,
        "max_retries": one.max_retries,
        "timeout": one.timeout,
        "failed": one.failed,
        "failures": one.failures,
        "first_failed_ms": one.first_failed_ms,
        "last_failed_ms": one.last_failed_ms,
        "error_class": one.error_class,
        "error": one.error,
        "mark": one.mark,
    }


def page(listing: Listing, following: str | None) -> dict[str, Any]:
    """Return a page of messages. ``following``: the address of the next one."""
    return {
        "results": [copy(one) for one in listing.copies],
        "next": following,
        "cursor": listing.cursor or None,
        "scanned": listing.scanned,
        "problems": listing.problems,
    }


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


def sends(
    results: Sequence[SendResult], outcomes: Mapping[str, int], id_of: Callable[[SendResult], str]
) -> dict[str, Any]:
    """Return the results of a send. ``id_of``: the ids that the sender may use."""
    return {
        "results": [
            {
                "id": id_of(one),
                "slot": one.slot,
                "status": one.status,
                "score": int(one.score) if one.score == one.score else None,
            }
            for one in results
        ],
        "outcomes": dict(outcomes),
    }
