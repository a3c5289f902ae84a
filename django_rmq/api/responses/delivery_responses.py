"""Deliveries, and the results of settling them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rest_framework import serializers

from django_rmq.api.fields import Anything
from django_rmq.api.responses import ResponseSerializer, maybe
from django_rmq.core.model.message import Message
from django_rmq.core.model.topic import Topic
from django_rmq.operations import Deliveries
from django_rmq.operations.consumption import SettledDelivery
from django_rmq.operations.message_view import readable_body


class DeliveryAnswer(ResponseSerializer):
    """One message that was delivered."""

    id = serializers.CharField()
    slot = serializers.IntegerField()
    receipt = serializers.CharField(help_text="Anyone who has it can settle or extend the delivery")
    delivery = serializers.IntegerField(
        help_text="Rises with every delivery of a slot. Use it as a fencing token where the consumer writes"
    )
    body = Anything(allow_null=True)
    encoding = serializers.ChoiceField(["json", "text", "base64"])
    key = maybe(serializers.CharField)
    headers = serializers.DictField()
    retries_left = serializers.IntegerField()
    timeout = serializers.IntegerField(help_text="Seconds until this delivery times out")
    bodies = serializers.ListField(
        child=Anything(allow_null=True),
        help_text="Topics with ACCUMULATE: all bodies in the order of sending",
    )


class TakenAnswer(ResponseSerializer):
    """The messages that a consumer has taken or holds."""

    messages = DeliveryAnswer(many=True)
    timeout = serializers.IntegerField(
        help_text="Seconds until a delivery times out that has no time-out of its own"
    )
    next_slot = maybe(help_text="`held` only: the value of `first` for the next request; null: these are all")
    wait_refused = serializers.BooleanField(
        help_text="Too many requests were waiting, so this one did not wait; repeat it after Retry-After"
    )


def taken(deliveries: Deliveries, declared: Topic, messages: Sequence[Message], next_slot: int | None) -> Any:
    """Return what was handed out."""
    found = []
    for one in messages:
        body, encoding = readable_body(one.topic, one.raw)
        collected = one.envelope.bodies or (one.raw,)
        found.append(
            {
                "id": deliveries.id(one),
                "slot": one.slot,
                "receipt": deliveries.receipt(one),
                "delivery": one.receipt,
                "body": body,
                "encoding": encoding,
                "key": one.key,
                "headers": one.headers,
                "retries_left": one.retries_left,
                "timeout": one.timeout,
                "bodies": [readable_body(one.topic, raw)[0] for raw in collected]
                if declared.accumulate
                else [body],
            }
        )
    return {
        "messages": found,
        "timeout": declared.timeout,
        "next_slot": next_slot,
        "wait_refused": False,
    }


class SettledAnswer(ResponseSerializer):
    """The result for one delivery: `ok`, or `stale` if it had ended before.

    `cancelled`: somebody has cancelled the delivery. After `extend` it is valid, after `rollback` it has ended so.
    """

    id = serializers.CharField()
    outcome = serializers.ChoiceField(["ok", "cancelled", "stale"])


class SettlementAnswer(ResponseSerializer):
    """The result of each delivery, in the order given."""

    results = SettledAnswer(many=True)
    outcomes = serializers.DictField(child=serializers.IntegerField())


def settled(named: Sequence[SettledDelivery], words: Sequence[str]) -> dict[str, Any]:
    """Return the results of settling deliveries."""
    results = [{"id": one.id, "outcome": word} for one, word in zip(named, words, strict=True)]
    return {"results": results, "outcomes": dict(Counter(words))}
