"""Checks of the options of a send: each returns the value in its final form, or raises ``InvalidMessage``.

They run before anything is written, so that a mistake never sends a part of a call. Times are in ms here; ``placement`` converts
durations and datetimes, and refuses naive ones. Which options a type of topics takes is decided there, too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import datetime

from django_rmq.core.model.limits import (
    MAX_DURATION_MS,
    MAX_INSTANT_MS,
    MAX_KEY_BYTES,
    MAX_PRIORITY,
    abbreviated,
    is_number,
    is_whole,
)
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import InvalidMessage

MAX_HEADER_BYTES = 8_192
"""The maximum size of all headers of a message, as JSON, in bytes."""

LONGEST_GUESSED = 10_000_000_000
"""An instant before this number of ms, in April 1970, is probably meant as something else."""

JUST_NOW_MS = 60_000
"""For how many ms an instant that has passed counts as now: ``fixed_time=timezone.now()`` is not a mistake."""


def check_time_range(value: int) -> int:
    """Return ``time_range``, which is in ms, or raise ``InvalidMessage``."""
    return _checked_ms("time_range", value, 1)


def check_delay(value: int) -> int:
    """Return ``delay``, which is in ms, or raise ``InvalidMessage``."""
    return _checked_ms("delay", value, 0)


def _checked_ms(name: str, value: int, least: int) -> int:
    if not is_whole(value) or not least <= value <= MAX_DURATION_MS:
        raise InvalidMessage(f"{name} must be from {least} to {MAX_DURATION_MS} ms, got {abbreviated(value)}")
    return value


def check_priority(topic: Topic, value: object) -> int:
    """Return ``priority``, or raise ``InvalidMessage``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidMessage(f"priority must be an integer, got {abbreviated(value)}")
    if not topic.min_priority <= value <= MAX_PRIORITY:
        raise InvalidMessage(
            f"priority must be from {topic.min_priority} (lower numbers are reserved for retries) to "
            f"{MAX_PRIORITY}, got {abbreviated(value)}"
        )
    return value


def check_fixed_time(at: int, *, name: str = "fixed_time", past: bool = False) -> int:
    """Return an instant, which is in ms since the epoch, or raise ``InvalidMessage`` about ``name``.

    A ``fixed_time`` of the last minute counts as now. ``past`` allows all past times.
    """
    if not is_whole(at):
        raise InvalidMessage(f"{name} must be whole ms since the epoch, got {abbreviated(at)}")
    now = time.time() * 1000
    if at <= now - (JUST_NOW_MS if name == "fixed_time" else 0) and not past:
        hint = "; is it a duration, or in seconds where ms are taken?" if 0 < at < LONGEST_GUESSED else ""
        raise InvalidMessage(f"{name} {_instant(at)} is not in the future{hint}")
    if at > MAX_INSTANT_MS:
        raise InvalidMessage(f"{name} {_instant(at)} is after {_instant(MAX_INSTANT_MS)}")
    if at <= 999:
        raise InvalidMessage(
            f"{name} {at} ms is too small: it must be above 999, smaller numbers are reserved for retries"
        )
    return at


def _instant(ms: int) -> str:
    try:
        return f"{datetime.fromtimestamp(ms / 1000).astimezone().isoformat()} ({ms} ms)"
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms"


def check_headers(headers: object) -> dict[str, str] | None:
    """Return headers in their stored form, or None if there are none."""
    if headers is None:
        return None
    if not isinstance(headers, Mapping):
        raise InvalidMessage(f"headers must be a mapping from str to str, got {abbreviated(headers)}")
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidMessage(
                f"headers must be pairs of str, got {abbreviated(name)}: {abbreviated(value)}"
            )
    copied = dict(headers)
    try:
        size = len(json.dumps(copied, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        raise InvalidMessage("headers contain text that is not valid Unicode") from None
    if size > MAX_HEADER_BYTES:
        raise InvalidMessage(f"headers have {size} bytes, more than {MAX_HEADER_BYTES}")
    return copied or None


def check_max_retries(topic: Topic, value: object) -> int:
    """Return how often a message may be tried again, or raise ``InvalidMessage``."""
    if not is_whole(value) or not 0 <= value <= topic.max_retries:
        raise InvalidMessage(
            f"max_retries must be a whole number from 0 to {topic.max_retries}, the MAX_RETRIES of topic {topic.name}, "
            f"got {abbreviated(value)}"
        )
    return value


def check_timeout(topic: Topic, value: float) -> int:
    """Return the time-out of a message in seconds, or raise ``InvalidMessage``."""
    if not is_number(value) or value != int(value) or not 1 <= value <= topic.timeout:
        raise InvalidMessage(
            f"timeout must be whole seconds from 1 to {topic.timeout}, the TIMEOUT of topic {topic.name}, "
            f"got {abbreviated(value)}"
        )
    return int(value)


def check_stored_basis(basis: bytes) -> str:
    """Return a slot basis in the form in which the envelope of a keyed message holds it."""
    # It is stored beside the body, so that the slot can be found again when the slot count changes.
    if len(basis) > MAX_KEY_BYTES:
        raise InvalidMessage(f"slot_basis has {len(basis)} bytes, more than {MAX_KEY_BYTES}")
    try:
        return basis.decode()
    except UnicodeDecodeError:
        raise InvalidMessage(f"slot_basis {basis!r} is not UTF-8, which keyed topics require") from None
