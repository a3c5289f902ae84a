"""Calls by which workers share the limits of a topic, and spenders their rates."""

from __future__ import annotations

from typing import Any

from django_rmq.core.calls.call import Call
from django_rmq.core.calls.places import Named
from django_rmq.core.calls.texts import number
from django_rmq.core.words.keys import bucket_key, limits_key
from django_rmq.core.words.topics import Topic
from django_rmq.core.words.workers import Allowance


def _allowance(reply: list[Any]) -> Allowance:
    tokens, wait_us, permits, waiting = reply
    return Allowance(tokens, wait_us, permits, waiting == b"yes")


def allow(
    topic: Topic, worker: str, *, tokens: int, in_use: int, wanted: int, lease_ms: int
) -> Call[Allowance]:
    """Ask for a part of what MAX_RATE and MAX_IN_FLIGHT of ``topic`` leave, and say what is in use.

    ``tokens``: deliveries to begin, negative to give back; ``wanted``: messages that could be in flight.
    """
    return Call(
        "limits/allow",
        Named(limits_key, topic.name),
        (worker, number(topic.max_rate or 0), tokens, topic.max_in_flight or 0, in_use, wanted, lease_ms),
        _allowance,
        locals(),
        "allow",
    )


def end_permits(topic: Topic, worker: str, ended: int, lease_ms: int = 0) -> Call[int]:
    """Count ``ended`` messages less for what ``worker`` has in flight; return what it has left.

    ``lease_ms``: what is left is kept for so long from now on; 0: as long as before.
    """
    return Call(
        "limits/ended", Named(limits_key, topic.name), (worker, ended, lease_ms), int, locals(), "end_permits"
    )


def spend(spender: str, each_us: float, size: int, wanted: int) -> Call[int]:
    """Spend ``wanted`` of a bucket of ``size`` that gains one each ``each_us``, or nothing; below 0: give back.

    Returns 0, or us until there is enough. ``spender``: letters and digits.
    """
    return Call(
        "limits/spend", Named(bucket_key, spender), (number(each_us), size, wanted), int, locals(), "spend"
    )
