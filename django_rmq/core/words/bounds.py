"""Bounds of the numbers that come from outside, and the checks that a value is a usable number.

A value that passes ``is_number`` can be compared, rounded, divided and printed without an ``OverflowError``.
``shown`` formats any value for an error, including integers that Python refuses to print.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any, TypeGuard

LARGEST = 1 << 53
"""The largest number accepted anywhere. A double, and therefore Lua and JSON, holds every integer up to it."""

MAX_DURATION_MS = 31_622_400_000
"""The longest ``time_range``, ``BACKOFF`` and delay of a rollback: 366 days."""

MAX_INSTANT_MS = 4_102_444_800_000
"""The latest instant of a message: 2100-01-01."""

MAX_AGE = 3_200_000_000
"""The maximum age in seconds by which messages are selected: about a hundred years."""

LONGEST_DELAY_MS = 1 << 42
"""The maximum delay that a listener can request, 139 years; a longer one is shortened to it."""


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether ``value`` is an int or a float (not a bool), not NaN and not beyond ``LARGEST``."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether ``value`` is an int (not a bool) that is not beyond ``LARGEST``."""
    return isinstance(value, int) and is_number(value)


def shown(value: object) -> str:
    """Return ``value`` for use in an error, in at most 80 characters."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of about {value.bit_length() * 30103 // 100_000} digits"
    try:
        text = repr(value)
    except ValueError:  # a container with an integer of more digits than Python prints
        text = f"a {type(value).__name__}"
    return f"{text[:77]}..." if len(text) > 80 else text


def delay_ms(seconds: Any) -> int:
    """Return a listener's delay (seconds or a timedelta) in ms, limited to the range from 0 to ``LONGEST_DELAY_MS``.

    Raises ``TypeError`` for a value that is not a number, and ``ValueError`` for NaN.
    """
    if isinstance(seconds, timedelta):
        seconds = seconds.total_seconds()
    if isinstance(seconds, float) and math.isnan(seconds):
        raise ValueError("a delay cannot be NaN")
    ms: int = round(min(max(seconds, 0), LONGEST_DELAY_MS / 1000) * 1000)
    return ms


__all__ = [
    "LARGEST",
    "LONGEST_DELAY_MS",
    "MAX_AGE",
    "MAX_DURATION_MS",
    "MAX_INSTANT_MS",
    "MAX_TIMEOUT",
    "delay_ms",
    "is_number",
    "is_whole",
    "shown",
]

MAX_PRIORITY = 1 << 43
"""The maximum priority: with ten bits for retries below it, a double still holds it exactly."""

MAX_RETRIES_LIMIT = 999
"""The maximum MAX_RETRIES: the Prepare score keeps it in three decimal digits."""

MAX_TIMEOUT = 604_800
"""The maximum TIMEOUT in seconds: a week."""

MAX_KEY_BYTES = 512
"""The maximum size of the key of a keyed message, in bytes of UTF-8."""

MAX_ERROR_BYTES = 1024
"""The maximum size of the error text stored per message, in bytes of UTF-8."""

BATCH = 1_000
"""The maximum number of messages per script: it limits how long Redis is blocked, and unpack takes 7,000 values."""

CLAIM_STEP = 10_000
"""The maximum number of messages that one script of a claim moves by commands of Redis: 0.6 to 1.4 µs each."""

CLAIM_STEP_BYTES = 4_194_304
"""The maximum number of bytes that one script of a claim moves, by estimate. Renaming a whole Store moves none."""

NEVER = (1 << 53) - 1
"""A time in ms that never comes: the caller sleeps until it is woken."""

GATE = 1 << 53
"""``sleeping_until`` of a caller that was answered busy: it waits for the gate to open."""
