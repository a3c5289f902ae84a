"""Calls by which workers share the limits of a topic, and spenders use their rates."""

from __future__ import annotations

from typing import Any

from django_rmq.core.commands.codecs import number
from django_rmq.core.commands.script_call import Call
from django_rmq.core.commands.script_keys import Named
from django_rmq.core.model.keys import bucket_key, limits_key
from django_rmq.core.model.topic import Topic
from django_rmq.core.model.worker_records import Allowance


def _allowance(reply: list[Any]) -> Allowance:
    tokens, wait_us, permits, waiting = reply
    return Allowance(tokens, wait_us, permits, waiting == b"yes")


def allow(
    topic: Topic, worker: str, *, tokens: int, in_use: int, wanted: int, lease_ms: int
) -> Call[Allowance]:
    """Request a share of what MAX_RATE and MAX_IN_FLIGHT of ``topic`` leave, and report what is in use.

    ``tokens``: deliveries to begin; a negative number gives tokens back. ``wanted``: messages that could be
    in flight.
    """
    return Call(
        "limits/allow",
        Named(limits_key, topic.name),
        (worker, number(topic.max_rate or 0), tokens, topic.max_in_flight or 0, in_use, wanted, lease_ms),
        _allowance,
    )


def end_permits(topic: Topic, worker: str, ended: int, lease_ms: int = 0) -> Call[int]:
    """Reduce what ``worker`` has in flight by ``ended`` messages; return what it has left.

    ``lease_ms``: how long what is left is kept from now on. 0: the lease does not change.
    """
    return Call("limits/ended", Named(limits_key, topic.name), (worker, ended, lease_ms), int)


def spend(spender: str, each_us: float, size: int, wanted: int) -> Call[int]:
    """Take ``wanted`` tokens, or none, from a bucket of ``size`` that gains one per ``each_us``; below 0 gives them back.

    Returns 0, or the time in microseconds until there are enough. ``spender``: letters and digits.
    """
    return Call("limits/spend", Named(bucket_key, spender), (number(each_us), size, wanted), int)
