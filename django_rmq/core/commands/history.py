"""Calls that write and read the history of a topic: its depths by the minute, its lateness, and the durations of its calls.

When and by which worker they are made is decided in ``monitoring/history``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from django_rmq.core.commands.script_call import (
    AtSlots,
    Call,
    Named,
    OfHistory,
    OfKey,
    RedisCommand,
    Reply,
    moment,
    same,
    word,
)
from django_rmq.core.model import keys
from django_rmq.core.model.keys import history_keys, times_key
from django_rmq.core.model.replies import SAMPLED, TIMES, Sample, Times
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError


def _sample(reply: list[Reply]) -> Sample:
    slots, store, due, prepare, retry, dead, oldest, sums, undrained = reply
    counters = dict(zip(SAMPLED, sums, strict=True))
    return Sample(slots, store, due, prepare, retry, dead, moment(oldest), counters, moment(undrained))


def _whole(answers: list[Sample | RmqError]) -> Sample:
    """Return the sum of all parts; raise the error of a part whose node did not answer."""
    parts: list[Sample] = []
    for answer in answers:
        if isinstance(answer, RmqError):
            raise answer
        parts.append(answer)
    return reduce(Sample.plus, parts)


def sample(topic: Topic, slots: Sequence[int]) -> Call[Sample]:
    """Return sums of the depths and counters of up to 256 slots."""
    return Call("history/sample", AtSlots(topic, slots), (), _sample, join=_whole)


def take_minute(topic: Topic, minute: int) -> Call[bool]:
    """Return whether this process is the one that samples ``topic`` in this minute (since the epoch)."""
    return Call("history/take_minute", OfHistory(topic), (minute,), lambda reply: reply == b"ok")


def count_lateness(topic: Topic, counts: Sequence[int]) -> Call[int]:
    """Count deliveries by class of lateness; return the number of classes that were raised."""
    return Call("history/count_lateness", OfHistory(topic), (" ".join(map(str, counts)),), int)


def count_times(
    topic: Topic, late: Sequence[int], late_ms: int, took: Sequence[int], took_us: int
) -> Call[int]:
    """Count deliveries by lateness and calls by duration, permanently; return the number of classes that were raised."""
    return Call(
        "history/count_times",
        Named(times_key, topic.name),
        (" ".join(map(str, late)), late_ms, " ".join(map(str, took)), took_us),
        int,
    )


def store_minute(topic: Topic, minute: int, record: str, keep: int) -> Call[str]:
    """Store the record of a minute, and keep at most ``keep`` minutes. Answers kept or present."""
    return Call("history/store_minute", OfHistory(topic), (minute, record, keep), word)


def _times(key: bytes, values: list[Reply]) -> Times:
    return Times.of(keys.counters(key, zip(TIMES, values, strict=True)).values())


def times(topic: Topic) -> Call[Times]:
    """Return the counts of ``count_times`` for ``topic``. Raises ``WrongType`` for values that are not numbers."""
    return RedisCommand("HMGET", Named(times_key, topic.name), TIMES, OfKey("times", _times))


def _minutes_key(prefix: str, topic: str) -> bytes:
    return history_keys(prefix, topic).minutes


def minutes(topic: Topic, first: int, last: int) -> Call[list[bytes | None]]:
    """Return the records of up to 1,000 minutes, from ``first`` to ``last``, or None for a minute that was not sampled."""
    return RedisCommand("HMGET", Named(_minutes_key, topic.name), tuple(range(first, last + 1)), same)
