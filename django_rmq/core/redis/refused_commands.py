"""Finds the required commands that a server refuses, by trying each in a way that changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from uuid import uuid4

from redis.exceptions import NoPermissionError

from django_rmq.core.model.keys import SlotKeys, slot_keys, wake_channel
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import ServerRefused, ServerUnavailable, WrongType

_ZSETS = ("store", "prepare", "retry", "dead", "claimants")
_HARMLESS: tuple[tuple[Any, ...], ...] = (
    ("HSET", "field", 1),
    ("HSETNX", "field", 1),
    ("HINCRBY", "field", 1),
    ("HGET", "field"),
    ("HMGET", "field"),
    ("HEXISTS", "field"),
    ("HGETALL",),
    ("HLEN",),
    ("HSCAN", 0),
    ("HDEL", "field"),
    ("EXPIRE", 1),
    ("PEXPIRE", 1),
    ("EXISTS",),
    ("UNLINK",),
    ("TYPE",),
    ("ZADD", "XX", 0, "member"),
    ("ZREM", "member"),
    ("ZREMRANGEBYRANK", 0, -1),
    ("ZCARD",),
    ("ZCOUNT", 0, 0),
    ("ZMSCORE", "member"),
    ("ZSCORE", "member"),
    ("ZRANGE", 0, 0),
    ("ZRANGEBYSCORE", 0, 0),
    ("ZREVRANGE", 0, 0),
    ("ZRANK", "member"),
    ("ZREVRANK", "member"),
)
"""Every command of the scripts on a key, in an order that leaves nothing behind."""


def _tries(prefix: str, topics: Iterable[Topic]) -> list[tuple[Any, ...]]:
    """Return commands that need every permission, and change nothing."""
    scratch, nobody = f"{prefix}rmq:rights".encode(), uuid4().hex.encode()
    tries: list[tuple[Any, ...]] = [(command[0], scratch, *command[1:]) for command in _HARMLESS]
    tries += [("ZRANGESTORE", scratch, scratch, 0, 0), ("RENAME", scratch, scratch)]
    for topic in topics:
        for name, key in zip(SlotKeys._fields, slot_keys(prefix, topic.name, 0), strict=True):
            tries.append(("ZREM" if name in _ZSETS else "HDEL", key, nobody))
        # Slot -1 belongs to no worker.
        tries.append(("PUBLISH", wake_channel(prefix, topic.name), b"-1"))
    return tries


def refused(
    prefix: str,
    topics: Iterable[Topic],
    each: Callable[[Sequence[tuple[Any, ...]]], list[Any]],
    attempts: Iterable[Callable[[], Any]],
) -> list[str]:
    """Return the commands that the server refuses; a node that does not answer refuses nothing.

    ``each`` runs commands and returns the plain answers, errors in their places; ``attempts`` are calls that
    raise.
    """
    tries = _tries(prefix, topics)
    found = dict.fromkeys(
        f"{command[0]} {command[1].decode(errors='replace')}: {reply}"
        for command, reply in zip(tries, each(tries), strict=True)
        if isinstance(reply, NoPermissionError)
    )
    for attempt in attempts:
        try:
            attempt()
        except ServerRefused as error:
            found[str(error)] = None
        except (WrongType, ServerUnavailable):
            pass  # Nothing was refused.
    return list(found)
