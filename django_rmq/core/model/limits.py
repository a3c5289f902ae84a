"""The limits of values and times, the limits of a topic that a person has changed at run time, and what a score means.

Scores are doubles, in Redis as in Lua, so most bounds follow from the digits that a double holds. The scripts have the same
numbers. A score says when its message is due, or its priority, and its retries left. The size of a body is checked by
``body_codec.check_size``.

Changed limits take precedence over MAX_RATE and MAX_IN_FLIGHT. Redis keeps them as JSON, a field for each topic, and workers
read all of them with their reports. Another program may have written a field, so every value is checked when it is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeGuard

from django_rmq.core.model.topic import Topic
from django_rmq.durations import LONGEST, InvalidDuration, milliseconds, parse_duration

LARGEST = 1 << 53
"""The largest number accepted anywhere. A double, and therefore Lua and JSON, holds every integer up to it."""

MAX_DURATION_MS = 31_622_400_000
"""The longest ``time_range``, ``BACKOFF`` and delay of a rollback: 366 days."""

SHORTEST_WAIT, LONGEST_WAIT = timedelta(milliseconds=1), timedelta(milliseconds=MAX_DURATION_MS)
"""The bounds of ``time_range``."""

MAX_INSTANT_MS = 4_102_444_800_000
"""The latest instant of a message: 2100-01-01."""

MAX_AGE = 3_200_000_000
"""The maximum age in seconds by which messages are selected: about a hundred years."""


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether ``value`` is an int or a float (not a bool), not NaN and not beyond ``LARGEST``."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether ``value`` is an int (not a bool) that is not beyond ``LARGEST``."""
    return isinstance(value, int) and is_number(value)


def abbreviated(value: object) -> str:
    """Return ``value`` for use in an error, in at most 80 characters."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of about {value.bit_length() * 30103 // 100_000} digits"
    try:
        text = repr(value)
    except ValueError:  # a container with an integer of more digits than Python prints
        text = f"a {type(value).__name__}"
    return f"{text[:77]}..." if len(text) > 80 else text


def delay_ms(delay: object) -> int:
    """Return the result of a back-off function in ms. A number or timedelta is limited to the longest duration.

    A function such as ``2**failures`` has no bounds of its own. Raises ``ValueError`` for a value that is not a duration.
    """
    try:
        return milliseconds(parse_duration(_limited(delay)))
    except InvalidDuration as error:
        raise ValueError(f"a delay must be {error}, got {error.given}") from None


def _limited(delay: object) -> object:
    if isinstance(delay, timedelta):
        return min(max(delay, timedelta()), LONGEST)
    if isinstance(delay, (int, float)) and not isinstance(delay, bool):
        longest = LONGEST.total_seconds()
        # NaN stays NaN here, and ``parse_duration`` refuses it.
        return 0 if delay < 0 else min(delay, longest)
    return delay


MAX_PRIORITY = 1 << 43
"""The maximum priority: with ten bits for retries below it, a double still holds it exactly."""

MAX_RETRIES_LIMIT = 999
"""The maximum MAX_RETRIES: the Prepare score keeps it in three decimal digits."""

MAX_TIMEOUT = 604_800
"""The maximum TIMEOUT in seconds: a week."""

SHUTDOWN_SECONDS = 30.0
"""How long a worker that ends waits for its running listeners, unless SHUTDOWN_TIMEOUT says otherwise."""

MAX_REPLICAS = 100
"""The maximum number of replicas that a send may ask to confirm."""

MAX_KEY_BYTES = 512
"""The maximum size of the key of a keyed message, in bytes of UTF-8."""

MAX_ERROR_BYTES = 1024
"""The maximum size of the error text stored per message, in bytes of UTF-8."""

SLOWEST, FASTEST = 1e-6, 1e6
"""The bounds of a rate, in messages per second. A slot counts its rate in whole µs from one delivery to the next."""

BATCH = 1_000
"""The maximum number of messages per script: it limits how long Redis is blocked, and unpack takes 7,000 values."""

CLAIM_STEP = 10_000
"""The maximum number of messages that one script of a claim moves by commands of Redis: 0.6 to 1.4 µs each."""

NEVER = (1 << 53) - 1
"""A time in ms that never comes: the caller sleeps until it is woken."""


LAST_RETRY = 999
"""The highest score in Store of a retry, on topics ordered by time."""

LAST_INSTANT_MS = 1e14
"""The bound of scores that are times: no send gives a message a later one."""


def is_retry(topic: Topic, score: float) -> bool:
    """Return whether a score in Store is that of a message that failed and waits again."""
    if topic.is_fifo:
        return False
    if not topic.is_priority:
        return score <= LAST_RETRY
    return score <= topic.min_priority - 1 or (math.isfinite(score) and score % 1 != 0)


def due_of(topic: Topic, score: float) -> datetime | None:
    """Return when a message with this score in Store was due, or None on priority topics and for a retry."""
    if topic.is_priority or is_retry(topic, score) or not LAST_RETRY < score < LAST_INSTANT_MS:
        return None
    return datetime.fromtimestamp(math.floor(score) / 1000, UTC)


def priority_of(topic: Topic, score: float) -> int | None:
    """Return the priority of a message with this score in Store, or None on other topics and for a retry without one."""
    if not topic.is_priority or not math.isfinite(score) or score <= topic.min_priority - 1:
        return None
    return math.floor(score)


def retries_left(topic: Topic, state: str, score: float, failures: int, own: int | None) -> int | None:
    """Return the retries left after the next delivery of a message (in prepare: after the present one).

    None if all are left, if the message is dead, or if the score has no meaning. ``own`` is the number in the message's
    envelope; the message may have joined a later send, which has another number.
    """
    most = topic.retries_of(own)
    if state in ("store", "claim") and topic.is_fifo:
        return max(0, most - failures) if failures else None
    if not math.isfinite(score):
        return None
    if state == "prepare":
        return int(score) % 1000
    in_fraction = state == "retry" or (topic.is_priority and score > topic.min_priority - 1)
    if state == "retry" or (state in ("store", "claim") and is_retry(topic, score)):
        q = round(score % 1 * 1024) if in_fraction else math.floor(score)
        return min(max(0, q - 1), most)
    return None


LONGEST_NAME = 200
"""Maximum length of the name of the person who changed limits."""

LIMITS = ("max_rate", "max_in_flight")
"""The fields of ``Topic`` that can be changed at run time."""


@dataclass(frozen=True, slots=True)
class ChangedLimits:
    """What a person has changed of one topic."""

    values: Mapping[str, Any]
    """Field of ``Topic`` -> the limit, or None if there is none. Fields that are missing are those of the settings."""
    by: str = ""
    at_ms: int = 0
    """When they were changed, by the clock of Redis."""

    def encode(self) -> str:
        """Return the text that Redis keeps."""
        return json.dumps(asdict(self), separators=(",", ":"))


def check_limit(name: str, value: object) -> float | int | None:
    """Return a limit, or None if there is none. Raises ``ValueError`` with what is allowed."""
    if value is None:
        return None
    if name == "max_rate":
        if is_number(value) and SLOWEST <= value <= FASTEST:
            return float(value)
        raise ValueError("max_rate must be a number of messages per second from 0.000001 to 1000000, or null")
    if is_whole(value) and 1 <= value < LARGEST:
        return value
    raise ValueError("max_in_flight must be a whole number from 1, or null")


def decode_limits(text: bytes) -> ChangedLimits | None:
    """Return the limits in a text, or None if another program wrote it."""
    try:
        fields = json.loads(text)
        values = {
            name: check_limit(name, fields["values"][name]) for name in LIMITS if name in fields["values"]
        }
        by, at_ms = fields["by"], fields["at_ms"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not (isinstance(by, str) and is_whole(at_ms)):
        return None
    # A lone surrogate is no valid text in a page.
    return ChangedLimits(values, by[:LONGEST_NAME].encode("utf-8", "replace").decode(), at_ms)


def limited(topic: Topic, changed: ChangedLimits | None) -> Topic:
    """Return ``topic`` with the limits in effect."""
    return replace(topic, **changed.values) if changed is not None else topic
