"""What is known about one message."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from rest_framework import serializers

from django_rmq.api.responses import ResponseSerializer, maybe
from django_rmq.api.responses.message_responses import MessageAnswer, copy
from django_rmq.core.model.status import STATES, MessageStatus
from django_rmq.operations import Followed
from django_rmq.operations.wait_reasons import REASONS


class StatusAnswer(ResponseSerializer):
    """The status of a message. What is null or empty does not exist, or is not known."""

    state = serializers.ChoiceField(
        STATES, help_text="`done`, `removed` and `cancelled`: only on topics with OUTCOME_RETENTION"
    )
    due_ms = maybe(help_text="When it can be delivered next")
    priority = maybe()
    attempts = serializers.IntegerField(
        help_text="Deliveries that failed or succeeded since it last ended, and the one in flight"
    )
    worker = serializers.CharField(
        allow_blank=True, help_text="The worker that has it, or had it when it ended"
    )
    delivered_ms = maybe(help_text="When the delivery began that is in flight, or in which it ended")
    ended_ms = maybe()
    progress = maybe(
        serializers.FloatField, help_text="From 0 to 1, as the listener reported last; 1 once it is done"
    )
    progress_text = serializers.CharField(
        allow_blank=True, help_text="Empty without the permission view_bodies"
    )
    progress_ms = maybe(help_text="When the listener reported it")
    reason = serializers.CharField(allow_blank=True, help_text="Why it is dead")
    error_class = serializers.CharField(allow_blank=True, help_text="Class of the last error")
    first_failed_ms = maybe()
    last_failed_ms = maybe()


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


def status(one: MessageStatus) -> dict[str, Any]:
    """Return the status of a message."""
    return {
        "state": one.state,
        "due_ms": _ms(one.due),
        "priority": one.priority,
        "attempts": one.attempts,
        "worker": one.worker,
        "delivered_ms": _ms(one.delivered),
        "ended_ms": _ms(one.ended),
        "progress": one.progress,
        "progress_text": one.progress_text,
        "progress_ms": _ms(one.progress_at),
        "reason": one.reason,
        "error_class": one.error_class,
        "first_failed_ms": _ms(one.first_failed),
        "last_failed_ms": _ms(one.last_failed),
    }


def followed(found: Followed) -> dict[str, Any]:
    """Return a message with its status."""
    held_by = [
        {
            "reason": one.reason,
            "since_ms": one.since_ms,
            "count": one.count,
            "message": one.message_id or None,
        }
        for one in found.held_by
    ]
    return {
        "results": [copy(each) for each in found.copies],
        "status": status(found.status),
        "held_by": held_by,
    }


def _ms(when: datetime | None) -> int | None:
    return None if when is None else int(when.timestamp() * 1000)
