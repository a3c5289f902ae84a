"""Two-phase consumption: a program takes messages, and settles or extends each delivery.

The serializers of responses are here, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from django.db import connections as databases
from django.db import transaction
from django.utils.decorators import method_decorator
from rest_framework import serializers
from rest_framework.response import Response

from django_rmq.api import requests
from django_rmq.api.requests import Anything, Fields
from django_rmq.api.view import Json, ResponseSerializer, RmqView, maybe, route
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.topic import Topic
from django_rmq.operations import Deliveries, Permission
from django_rmq.operations.consumption import SettledDelivery, SettlementOutcome, seats
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


def taken(
    deliveries: Deliveries, declared: Topic, messages: Sequence[Message], next_slot: int | None
) -> Json:
    """Return what was handed out."""
    items = []
    for one in messages:
        body, encoding = readable_body(one.topic, one.raw)
        collected = one.envelope.bodies or (one.raw,)
        items.append(
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
    return {"messages": items, "timeout": declared.timeout, "next_slot": next_slot, "wait_refused": False}


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


# With ATOMIC_REQUESTS a request that waits would keep a transaction open all the time.
@method_decorator(transaction.non_atomic_requests, name="dispatch")
class PrepareView(RmqView):
    @route(
        "prepare",
        Permission.CONSUME,
        takes=requests.PrepareFields,
        answers={200: TakenAnswer},
        errors=[404, 507],
        examples={
            "wait for up to ten": {"consumer": "6f9619ff-8b86-4d01-b42d-00cf4fc964ff", "max": 10, "wait": 20},
            "after a lost answer": {"consumer": "6f9619ff-8b86-4d01-b42d-00cf4fc964ff", "held": True},
        },
        answered={
            "one message": {
                "messages": [
                    {
                        "id": "3.eyJza3UiOjF9",
                        "slot": 3,
                        "receipt": "1795377634414739.0b5c7c1f3e9d4a6f8b21",
                        "delivery": 1795377634414739,
                        "body": {"sku": 1},
                        "encoding": "json",
                        "key": None,
                        "headers": {},
                        "retries_left": 16,
                        "timeout": 30,
                        "bodies": [{"sku": 1}],
                    }
                ],
                "timeout": 30,
                "next_slot": None,
                "wait_refused": False,
            }
        },
    )
    def post(self, topic: Topic, fields: Fields) -> Json | Response:
        """Take messages, or list those that this consumer holds.

        A delivery that is neither settled nor extended in time ends, and its message is delivered again, or dies if it has no
        retries left.
        """
        deliveries = self.operations.deliveries(topic.name)
        if fields["held"]:
            held = deliveries.held(fields["consumer"], fields["first"])
            return taken(deliveries, topic, held.messages, held.next_slot)
        if not fields["wait"]:
            return taken(deliveries, topic, deliveries.take(fields["consumer"], fields["max"]), None)
        # A process that answers one request at a time would answer nobody while this one waits.
        has_threads = self.request.META.get("wsgi.multithread", True)
        with seats.seat(self.operations.actor, *self.operations.config.api.waiting(has_threads)) as may_wait:
            if may_wait:
                _let_go_of_databases()
            messages = deliveries.take(fields["consumer"], fields["max"], fields["wait"] if may_wait else 0)
        answer = taken(deliveries, topic, messages, None)
        if may_wait or messages:
            return answer
        return Response(answer | {"wait_refused": True}, headers={"Retry-After": "1"})


def _let_go_of_databases() -> None:
    """Close the database connections of a request that waits."""
    # Each of them would be idle for up to ``LONGEST_POLL`` s, and databases have few. One in a transaction, as in a test, stays.
    for database in databases.all(initialized_only=True):
        if not database.in_atomic_block:
            database.close()


class SettlingView(RmqView):
    """The base of views that end or extend deliveries."""

    def settle(self, topic: Topic, fields: Fields, verb: str, *outcomes: list[SettlementOutcome]) -> Json:
        settled = [SettledDelivery(one["id"], one["receipt"]) for one in fields["deliveries"]]
        words = getattr(self.operations.deliveries(topic.name), verb)(settled, *outcomes)
        results = [{"id": one.id, "outcome": word} for one, word in zip(settled, words, strict=True)]
        return {"results": results, "outcomes": dict(Counter(words))}


_SETTLED: dict[str, Any] = {
    "takes": requests.SettleFields,
    "answers": {200: SettlementAnswer},
    "errors": [404, 507],
    "examples": {
        "one": {"deliveries": [{"id": "3.eyJza3UiOjF9", "receipt": "1795377634414739.0b5c7c1f3e9d4a6f8b21"}]}
    },
}


class CommitView(SettlingView):
    @route("commit", Permission.CONSUME, **_SETTLED)
    def post(self, topic: Topic, fields: Fields) -> Json:
        """End deliveries as done."""
        return self.settle(topic, fields, "commit")


class ExtendView(SettlingView):
    @route("extend", Permission.CONSUME, **_SETTLED)
    def post(self, topic: Topic, fields: Fields) -> Json:
        """Restart the time-out of deliveries."""
        return self.settle(topic, fields, "extend")


class ReleaseView(SettlingView):
    @route("release", Permission.CONSUME, **_SETTLED)
    def post(self, topic: Topic, fields: Fields) -> Json:
        """Return deliveries whose processing has not started. This uses no retry."""
        return self.settle(topic, fields, "release")


class RollbackView(SettlingView):
    @route(
        "rollback",
        Permission.CONSUME,
        takes=requests.RollbackFields,
        answers={200: SettlementAnswer},
        errors=[404, 507],
        examples={
            "one": {
                "deliveries": [
                    {
                        "id": "3.eyJza3UiOjF9",
                        "receipt": "1795377634414739.0b5c7c1f3e9d4a6f8b21",
                        "error": "Timeout: no answer",
                    }
                ]
            }
        },
    )
    def post(self, topic: Topic, fields: Fields) -> Json:
        """End deliveries as failed: their messages are retried later, or go to Dead if no retries are left."""
        outcomes = [
            SettlementOutcome(
                one.get("error", ""), round(one["delay"] * 1000) if "delay" in one else None, one["reject"]
            )
            for one in fields["deliveries"]
        ]
        return self.settle(topic, fields, "rollback", outcomes)
