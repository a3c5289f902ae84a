"""Calls about the names of Spark consumers: one driver has a name at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django_rmq.core.commands.codecs import text, word
from django_rmq.core.commands.script_call import Call, RedisCommand
from django_rmq.core.commands.script_keys import AtSlot, Named
from django_rmq.core.model.keys import consumer_key
from django_rmq.core.model.replies import Driver
from django_rmq.core.model.topic import Topic


def _taken(reply: list[Any]) -> Driver | None:
    return None if reply[0] == b"held" else _driver(reply[1:])


def _driver(reply: Sequence[Any]) -> Driver | None:
    name, about, since, until = reply
    return None if name is None else Driver(text(name), text(about or b""), int(since or 0), int(until or 0))


def _name(topic: Topic, consumer: str) -> Named:
    return Named(consumer_key, f"{topic.name}:{consumer}")


def hold_consumer(
    topic: Topic,
    consumer: str,
    driver: str,
    checkpoint: str,
    about: str,
    lease_ms: int,
    *,
    starts: bool = False,
    gone: str = "",
) -> Call[Driver | None]:
    """Hold the name of a consumer for ``driver``, or renew that. None: it holds it; else the driver that does.

    A driver that ``starts`` gets the name if its lease has ended, if it was held for the same ``checkpoint``, or
    if ``gone``, which is dead, had it. One that has held it before gets it only if nobody has had it since.
    """
    own = (driver, checkpoint, about, lease_ms, int(starts), gone)
    return Call("consumers/hold", _name(topic, consumer), own, _taken)


def leave_consumer(topic: Topic, consumer: str, driver: str = "") -> Call[str]:
    """End the lease of a consumer's name if ``driver`` has it; empty: of any driver. Answers left or absent."""
    return Call("consumers/leave", _name(topic, consumer), (driver,), word)


def driver_of_consumer(topic: Topic, consumer: str) -> Call[Driver | None]:
    """Return the driver that had the name of a consumer last. None: nobody had it for a day."""
    fields = ("driver", "about", "since", "until")
    return RedisCommand("HMGET", _name(topic, consumer), fields, _driver)


def count_consumers(topic: Topic, slot: int) -> Call[int]:
    """Return how many Spark consumers a slot remembers: at most 1,000, for thirty days after their last claim."""
    return RedisCommand("HLEN", AtSlot(topic, slot), (), int)
