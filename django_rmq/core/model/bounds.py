"""The bounds of values and times, and of what one script may do.

Scores are doubles, in Redis as in Lua, so most bounds follow from the digits that a double holds. The scripts have the same
numbers. The size of a body is checked by ``body_codec.check_size``.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TypeGuard

from django_rmq.durations import LONGEST, InvalidDuration, milliseconds, parse_duration

LARGEST = 1 << 53
"""The largest number accepted anywhere. A double, and therefore Lua and JSON, holds every integer up to it."""

MAX_DURATION_MS = 31_622_400_000
"""The longest ``time_range`` and ``delay`` of a send, constant BACKOFF, interval of a schedule, and delay of a rollback over
REST: 366 days. What a listener or a BACKOFF function gives is limited by ``delay_ms`` instead."""

SHORTEST_WAIT, LONGEST_WAIT = timedelta(milliseconds=1), timedelta(milliseconds=MAX_DURATION_MS)
"""The bounds of ``time_range``."""

MAX_INSTANT_MS = 4_102_444_800_000
"""The latest instant of a message: 2100-01-01."""

MAX_AGE = 3_200_000_000
"""The maximum age in seconds by which messages are selected: about a hundred years."""

OTHER_FORM = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
"""What reading a text raises that this package has not written: another program, or a later version of this one, has."""


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether ``value`` is an int or a float (not a bool), not NaN and not beyond ``LARGEST``."""
    # NaN fails the comparison, too.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether ``value`` is an int (not a bool) that is not beyond ``LARGEST``."""
    return isinstance(value, int) and is_number(value)


def abbreviated(value: object) -> str:
    """Return ``value`` for use in an error, in at most 80 characters."""
    if isinstance(value, int) and value.bit_length() > 256:
        # The decimal logarithm of 2 is 0.30103. Python refuses to print an integer of more than 4,300 digits.
        return f"a number of about {value.bit_length() * 30103 // 100_000} digits"
    try:
        text = repr(value)
    except ValueError:  # a container with an integer of more digits than Python prints
        text = f"a {type(value).__name__}"
    return f"{text[:77]}..." if len(text) > 80 else text


def abbreviated_error(error: BaseException) -> str:
    """Return the class and the first line of an error of a project's module, in at most 160 characters."""
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"{text[:157]}..." if len(text) > 160 else text


def delay_ms(delay: object) -> int:
    """Return the delay of ``Retry``, or the result of a BACKOFF function, in ms. It is limited to the longest duration.

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

LONGEST_ID = 1_200
"""Maximum number of characters of a message's id: 512 bytes of member are 683 of them."""

MAX_ERROR_BYTES = 1024
"""The maximum size of the error text stored per message, in bytes of UTF-8: ``cut_error`` keeps it, and so do the scripts."""

SLOWEST, FASTEST = 1e-6, 1e6
"""The bounds of a rate, in messages per second. A slot counts its rate in whole µs from one delivery to the next."""

BATCH = 1_000
"""The maximum number of messages per script: it limits how long Redis is blocked, and unpack takes 7,000 values."""

CLAIM_STEP = 4_000
"""The maximum number of messages that one script of a claim moves by commands of Redis: 0.6 to 1.4 µs each."""

NEVER = (1 << 53) - 1
"""A time in ms that never comes: the caller sleeps until it is woken."""
