"""The shapes of requests. ``operations`` checks what fits a topic.

An unknown key is an error. The fields of a JSON document are strict: ``"1"`` is no 1, and 1 is no ``"1"``. Those of a query
string read numbers from text. The body of a message is any JSON, or base64 for topics of bytes.
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from django.http import QueryDict
from django.utils.dateparse import parse_datetime
from rest_framework import serializers
from rest_framework.settings import api_settings

from django_rmq.api.schema import shaped
from django_rmq.core.model.bounds import (
    BATCH,
    FASTEST,
    LARGEST,
    LONGEST_ID,
    MAX_AGE,
    MAX_DURATION_MS,
    MAX_KEY_BYTES,
    MAX_PRIORITY,
    MAX_RETRIES_LIMIT,
    MAX_TIMEOUT,
    SLOWEST,
    is_number,
    is_whole,
)
from django_rmq.core.model.keys import MAX_SLOTS
from django_rmq.core.model.status import QUEUES, STATE_OF
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import InvalidMessage
from django_rmq.operations import MAX_IDS
from django_rmq.operations.bulk_actions import FASTEST_RATE, SLOWEST_RATE
from django_rmq.operations.consumption import LONGEST_POLL
from django_rmq.operations.messages import LONGEST_CURSOR, LONGEST_PAGE, MOST_EXAMINED

EARLIEST_MS, LATEST_MS = -LARGEST + 1, LARGEST - 1
"""The bounds of whole numbers that every client can represent."""

LAST_SLOT = MAX_SLOTS - 1

LARGEST_LIMIT = 1_000_000_000
"""The largest number of messages to which an action can be limited."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Fields = dict[str, Any]
"""The validated values of a request."""


class RequestSerializer(serializers.Serializer[object]):
    """Refuses unknown keys."""

    def to_internal_value(self, data: object) -> object:
        """Return the validated values."""
        if isinstance(data, QueryDict):
            # The parameter that chooses the renderer is not one of ours.
            data = {name: value for name, value in data.items() if name != api_settings.URL_FORMAT_OVERRIDE}
        if isinstance(data, Mapping):
            unknown = [str(name) for name in data if name not in self.fields]
            if unknown:
                raise serializers.ValidationError(
                    {name[:100]: ["There is no such field."] for name in unknown[:10]}, "unknown_field"
                )
        return super().to_internal_value(data)


class Whole(serializers.IntegerField):
    """A whole number in JSON."""

    def to_internal_value(self, data: object) -> int:
        if not is_whole(data):
            self.fail("invalid")
        return data


class Number(serializers.FloatField):
    """A number in JSON."""

    def to_internal_value(self, data: object) -> float:
        if not is_number(data):
            self.fail("invalid")
        return float(data)


class State(serializers.ChoiceField):
    """A state of messages; the name of its queue is taken, too."""

    def to_internal_value(self, data: Any) -> str:
        return super().to_internal_value(STATE_OF.get(data, data) if isinstance(data, str) else data)


class Flag(serializers.BooleanField):
    """True or false in JSON."""

    def to_internal_value(self, data: object) -> bool:
        if not isinstance(data, bool):
            self.fail("invalid", input=data)
        return data


class Text(serializers.CharField):
    """A text in JSON, unchanged."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"trim_whitespace": False, **options})

    def to_internal_value(self, data: object) -> str:
        if not isinstance(data, str):
            self.fail("invalid")
        return super().to_internal_value(data)


class Uuid(serializers.UUIDField):
    """A UUID as text."""

    def to_internal_value(self, data: object) -> UUID:
        if not isinstance(data, str):
            self.fail("invalid", value=data)
        return super().to_internal_value(data)


class Age(serializers.FloatField):
    """An age in an address, in seconds, which may be left out."""

    def __init__(self, **options: Any) -> None:
        super().__init__(required=False, min_value=0, max_value=MAX_AGE, **options)

    def to_internal_value(self, data: Any) -> float:
        seconds = super().to_internal_value(data)
        if not is_number(seconds):
            self.fail("invalid")
        return seconds


@shaped(
    {
        "oneOf": [
            {"type": "integer", "minimum": EARLIEST_MS, "maximum": LATEST_MS},
            {"type": "string", "format": "date-time"},
        ]
    }
)
class Instant(serializers.Field[datetime, object, str, object]):
    """An instant: milliseconds since the epoch, or ISO 8601 with an offset (``2026-01-31T12:00:00Z``)."""

    default_error_messages = {
        "invalid": "Give whole milliseconds since the epoch, or a time as 2026-01-31T12:00:00Z."
    }

    def to_internal_value(self, data: object) -> datetime:
        with suppress(ValueError, OverflowError):
            if isinstance(data, int) and not isinstance(data, bool):
                return _EPOCH + timedelta(milliseconds=data)
            if isinstance(data, str) and len(data) <= 40:
                instant = parse_datetime(data)
                if instant is not None and instant.tzinfo is not None:
                    return instant
        raise serializers.ValidationError(self.error_messages["invalid"], "invalid")


@shaped({})
class Anything(serializers.Field[object, object, object, object]):
    """Any JSON."""

    def to_internal_value(self, data: object) -> object:
        return data


@shaped({"oneOf": [{"type": "string", "minLength": 1}, {"type": "integer"}]})
class Scalar(serializers.Field[str | int, object, str, object]):
    """A text or a whole number."""

    default_error_messages = {"invalid": "Give a text or a whole number."}

    def to_internal_value(self, data: object) -> str | int:
        if isinstance(data, bool) or not isinstance(data, (str, int)) or data == "":
            self.fail("invalid")
        return data


def body_for(topic: Topic, body: Any) -> object:
    """Return a body in the form of its topic: bytes come as base64."""
    if topic.body != "bytes":
        return body
    try:
        return b64decode(body, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise InvalidMessage(f"topic {topic.name} has BODY 'bytes': body must be base64") from None


def some(kind: type[RequestSerializer]) -> object:
    """Return a field for a list of 1 to 1,000 items."""
    several: Any = kind
    return several(many=True, min_length=1, max_length=BATCH)


LONGEST_TEXT = 1_000
"""Maximum number of characters of a text in a request. The admin searches for shorter texts, because its links contain them."""

LONGEST_NAMING_BODY = 4_096
"""Maximum number of characters of a body in an address, which web servers limit to some thousands."""

MOST_ONCE = 100
"""Maximum number of messages of a send with an Idempotency-Key; its answer is kept in Redis."""


class SlotsQuery(RequestSerializer):
    """The range of slots."""

    topic = Text(max_length=100)
    first = serializers.IntegerField(min_value=0, max_value=LAST_SLOT, default=0)
    limit = serializers.IntegerField(min_value=1, max_value=5_000, default=1_000)


class CausesQuery(RequestSerializer):
    """The topic whose dead messages are grouped, and how many are looked at."""

    topic = Text(required=False, max_length=100, help_text="One topic; without it, all topics")
    limit = serializers.IntegerField(
        min_value=1,
        max_value=MOST_EXAMINED,
        default=100_000,
        help_text="How many messages are looked at, of each topic an equal part (at least 1,000), evenly spread",
    )


class TextConditions(RequestSerializer):
    """The conditions that are texts."""

    text = Text(
        required=False, max_length=LONGEST_TEXT, help_text="Text that the body, the key or the error contains"
    )
    error = Text(
        required=False, max_length=200, help_text="Class of the last error, with or without its module"
    )
    cause = Text(required=False, max_length=12, help_text="The id of a cause of failures, from `causes/`")


class FilterFields(TextConditions):
    """The selection of messages in a query; all conditions must hold."""

    older_than = Age(help_text="Seconds")
    newer_than = Age(help_text="Seconds")
    slot = serializers.IntegerField(required=False, min_value=0, max_value=LAST_SLOT)
    priority = serializers.IntegerField(
        required=False, min_value=1, max_value=MAX_PRIORITY, help_text="Priority of waiting messages"
    )


class LimitsFields(RequestSerializer):
    """Limits of a topic at run time. One that is left out is that of the settings; null: there is none."""

    max_rate = Number(
        required=False,
        allow_null=True,
        min_value=SLOWEST,
        max_value=FASTEST,
        help_text="Deliveries per second of the topic",
    )
    max_in_flight = Whole(
        required=False,
        allow_null=True,
        min_value=1,
        max_value=LATEST_MS,
        help_text="Messages that run at the same time",
    )


class MessagesQuery(FilterFields):
    """The page and the selection of messages."""

    state = State(list(QUEUES), default="waiting")
    cursor = Text(required=False, max_length=LONGEST_CURSOR)
    page_size = serializers.IntegerField(required=False, min_value=1, max_value=LONGEST_PAGE)
    order = serializers.ChoiceField(["ascending", "descending"], required=False, help_text="Order by score")


class NameQuery(RequestSerializer):
    """How a message is named if the address has `-` in place of its id: by its `key`, or by its `body`."""

    key = Text(
        required=False, max_length=MAX_KEY_BYTES, help_text="With `-` as the id: the key of the message"
    )
    body = Text(
        required=False,
        allow_blank=True,
        max_length=LONGEST_NAMING_BODY,
        help_text="With `-` as the id: the body of the message, as JSON, a text or base64, as the topic's BODY says; "
        "beside `key`, on topics with SLOT_BASIS: an object with that field",
    )
    slot_basis = Text(
        required=False, max_length=LONGEST_TEXT, help_text="With `-` as the id: the slot basis of the send"
    )


KEEP_HELP = "false: delete for good, and free the memory at once"


class DeleteQuery(NameQuery):
    """The message, and the copy of it."""

    copy = serializers.ChoiceField(
        ["live", "dead"], required=False, help_text="Required if the message is both live and dead"
    )
    keep = serializers.BooleanField(default=True, help_text=KEEP_HELP)


class HealthQuery(RequestSerializer):
    """The limits of good health; only for users who may see topics. Without one, what is unusual is a note."""

    max_age = Age(help_text="Maximum age in seconds of a due message")
    max_dead = serializers.IntegerField(required=False, min_value=0, max_value=LATEST_MS)
    max_outbox_age = Age(help_text="Maximum age in seconds of a message in the outbox")
    max_schedule_lateness = Age(help_text="Maximum seconds by which a schedule may be late")
    max_running = Age(help_text="Maximum seconds for which a delivery may have run")
    workers = serializers.BooleanField(
        default=False, help_text="True: every topic with a listener must have a live worker"
    )


class MessageFields(RequestSerializer):
    """One message of many. `body` is any JSON, a text, or base64, as the topic's BODY says."""

    body = Anything(allow_null=True)
    key = Text(required=False, max_length=MAX_KEY_BYTES)
    priority = Whole(required=False, min_value=1, max_value=MAX_PRIORITY)
    time_range_ms = Whole(required=False, min_value=1, max_value=MAX_DURATION_MS)
    fixed_time = Instant(required=False)
    delay_ms = Whole(required=False, min_value=0, max_value=MAX_DURATION_MS)
    slot_basis = Scalar(required=False)
    headers = serializers.DictField(child=Text(allow_blank=True), required=False)
    expires = Instant(required=False)
    max_retries = Whole(
        required=False, min_value=0, max_value=MAX_RETRIES_LIMIT, help_text="At most the topic's MAX_RETRIES"
    )
    timeout = Whole(
        required=False, min_value=1, max_value=MAX_TIMEOUT, help_text="Seconds; at most the topic's TIMEOUT"
    )


class SendFields(MessageFields):
    """One message. `body` is any JSON, a text, or base64, as the topic's BODY says."""

    ensure = Flag(
        default=False,
        help_text="True: send nothing if the message already waits, rests or runs. Its status is then `present`",
    )
    id = Text(
        required=False,
        max_length=LONGEST_ID,
        help_text="With `ensure`, in place of `key`: the id of an earlier send of the message",
    )


class SendsFields(RequestSerializer):
    """Many messages."""

    messages = some(MessageFields)


class EditFields(RequestSerializer):
    """An edited body, if any."""

    body = Anything(allow_null=True, required=False)


class BuryFields(RequestSerializer):
    """The reason."""

    why = Text(required=False, max_length=LONGEST_TEXT)


class RescheduleFields(RequestSerializer):
    """Another due time, or another priority."""

    due = Instant(required=False)
    priority = Whole(required=False, min_value=1, max_value=MAX_PRIORITY)


class StrictFilter(TextConditions):
    """The selection of messages; all conditions must hold. Ages in seconds."""

    older_than = Number(required=False, min_value=0, max_value=MAX_AGE)
    newer_than = Number(required=False, min_value=0, max_value=MAX_AGE)
    slot = Whole(required=False, min_value=0, max_value=LAST_SLOT)


class WaitingFilter(StrictFilter):
    """The selection of waiting messages; all conditions must hold. Ages in seconds."""

    priority = Whole(required=False, min_value=1, max_value=MAX_PRIORITY)


class RescheduleAllFields(RescheduleFields):
    """All waiting messages that a filter selects, and their new due time or priority. An empty filter selects all."""

    state = State(["waiting", "resting"], default="waiting")
    filter = WaitingFilter()
    limit = Whole(required=False, min_value=1, max_value=LARGEST_LIMIT)
    dry_run = Flag(default=False)


class ReplayNamedFields(RequestSerializer):
    """Dead messages by their ids."""

    ids = serializers.ListField(child=Text(max_length=LONGEST_ID), min_length=1, max_length=MAX_IDS)


class ReplayFilterFields(RequestSerializer):
    """All dead messages that a filter selects. An empty filter selects all."""

    filter = StrictFilter()
    limit = Whole(required=False, min_value=1, max_value=LARGEST_LIMIT)
    dry_run = Flag(default=False)


class BackgroundFields(RequestSerializer):
    """What workers do in the background. A purge selects by age and slot only."""

    action = serializers.ChoiceField(["replay", "delete", "purge"])
    state = Text(default="dead", help_text="dead, waiting or resting")
    filter = StrictFilter(default=dict)
    rate = Number(
        required=False,
        min_value=SLOWEST_RATE,
        max_value=FASTEST_RATE,
        help_text="Messages per second at most",
    )
    keep = Flag(default=True, help_text=KEEP_HELP)


class PurgeFields(RequestSerializer):
    """The messages to delete without examining them."""

    state = State(["waiting", "resting", "dead"])
    older_than = Number(required=False, min_value=0, max_value=MAX_AGE)
    slot = Whole(required=False, min_value=0, max_value=LAST_SLOT)
    limit = Whole(required=False, min_value=1, max_value=LARGEST_LIMIT)
    dry_run = Flag(default=False)
    keep = Flag(default=True, help_text=KEEP_HELP)


class PrepareFields(RequestSerializer):
    """A request for up to `max` messages. If there is none, the answer waits up to `wait` seconds for the first."""

    consumer = Uuid(
        help_text="Created once by each consumer, which processes its messages one after the other"
    )
    max = Whole(default=1, min_value=1, max_value=BATCH)
    wait = Number(default=0.0, min_value=0, max_value=LONGEST_POLL)
    held = Flag(default=False, help_text="True: take nothing, list the messages that this consumer holds")
    first = Whole(
        default=0, min_value=0, max_value=LAST_SLOT, help_text="`held` only: the first slot to look at"
    )


class DeliveryFields(RequestSerializer):
    """One delivery, as named by `prepare`."""

    id = Text(max_length=LONGEST_ID)
    receipt = Text(max_length=100)


class FailedFields(DeliveryFields):
    """One delivery, and how it failed."""

    error = Text(required=False, allow_blank=True, max_length=10_000)
    delay = Number(
        required=False,
        min_value=0,
        max_value=MAX_DURATION_MS // 1000,
        help_text="Seconds until the retry; default: the topic's BACKOFF",
    )
    reject = Flag(default=False, help_text="True: move the message to Dead without another retry")


class SettleFields(RequestSerializer):
    """Deliveries."""

    deliveries = some(DeliveryFields)


class RollbackFields(RequestSerializer):
    """Deliveries that failed."""

    deliveries = some(FailedFields)
