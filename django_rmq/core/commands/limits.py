"""Calls about limits: rates and permits that workers share, rates of requests, and limits of topics changed at run time."""

from __future__ import annotations

from django_rmq.core.commands.script_call import Call, Named, RedisCommand, Reply, Single, number, pairs
from django_rmq.core.model.changed_limits import ChangedLimits, decode_limits
from django_rmq.core.model.keys import bucket_key, changed_limits_key, limits_key
from django_rmq.core.model.replies import Allowance
from django_rmq.core.model.topic import Topic


def _allowance(reply: list[Reply]) -> Allowance:
    tokens, wait_us, permits, waiting = reply
    return Allowance(tokens, wait_us, permits, waiting == b"yes")


def allow(
    topic: Topic, worker: str, *, tokens: int, in_use: int, wanted: int, lease_ms: int
) -> Call[Allowance]:
    """Request a share of the MAX_RATE and MAX_IN_FLIGHT of ``topic``, and report how many messages are in flight here.

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
    """Lower the number of messages that ``worker`` has in flight by ``ended``; return the number left.

    ``lease_ms``: how long the remaining permits are kept from now on; 0 leaves the lease as it is.
    """
    return Call("limits/end_permits", Named(limits_key, topic.name), (worker, ended, lease_ms), int)


def spend(spender: str, each_us: float, size: int, wanted: int) -> Call[int]:
    """Take ``wanted`` tokens, or none, from a bucket of ``size`` that gains one per ``each_us``; below 0 gives them back.

    Returns 0, or the time in microseconds until there are enough. ``spender``: letters and digits.
    """
    return Call("limits/spend", Named(bucket_key, spender), (number(each_us), size, wanted), int)


_CHANGED_LIMITS = Single(changed_limits_key)


def _limits(reply: Reply) -> dict[str, ChangedLimits]:
    limits = ((topic.decode("utf-8", "replace"), decode_limits(text)) for topic, text in pairs(reply))
    return {topic: changed for topic, changed in limits if changed is not None}


def read_changed_limits() -> Call[dict[str, ChangedLimits]]:
    """Return the limits that were changed at run time, by topic."""
    return RedisCommand("HGETALL", _CHANGED_LIMITS, (), _limits)


def write_changed_limits(topic: str, changed: ChangedLimits) -> Call[int]:
    """Keep these limits of a topic in place of those that were changed before."""
    return RedisCommand("HSET", _CHANGED_LIMITS, (topic, changed.encode()), int)


def delete_changed_limits(topic: str) -> Call[int]:
    """Return a topic to the limits of its settings. Answers 0 if none was changed."""
    return RedisCommand("HDEL", _CHANGED_LIMITS, (topic,), int)
