"""Calls about claims: what a Spark consumer holds."""

from __future__ import annotations

from typing import Any

from django_rmq.core.calls.call import Call
from django_rmq.core.calls.places import AtSlot
from django_rmq.core.words.answers import Claimed, ClaimRead
from django_rmq.core.words.topics import Topic


def _claimed(reply: list[Any]) -> Claimed:
    word = reply[0].decode()
    return Claimed(word, reply[1], reply[2], reply[3] == b"more") if word == "ok" else Claimed(word)


def _left(reply: list[Any]) -> tuple[str, int]:
    return reply[0].decode(), reply[1]


def _renewed(reply: list[Any]) -> int | None:
    return reply[1] if reply[0] == b"ok" else None


def _claim_read(reply: list[Any]) -> ClaimRead:
    return ClaimRead(reply[0].decode(), *reply[1:])


def claim(
    topic: Topic,
    slot: int,
    consumer: str,
    number: int,
    lease_ms: int,
    limit: int,
    max_bytes: int = 16_777_216,
) -> Call[Claimed]:
    """Move up to ``limit`` messages into claim ``number`` of ``consumer``, after the slot's upkeep.

    Where they have to be moved one by one, 2,500 at most, or 1,000 where each has to be looked at. Repeated with the
    number of an open claim it takes more. After a lost reply ask ``read_claim``.
    """
    return Call(
        "claim", AtSlot(topic, slot), (consumer, number, lease_ms, limit, max_bytes), _claimed, locals()
    )


def renew(
    topic: Topic, slot: int, consumer: str, number: int, lease_ms: int, *, seal: bool = False
) -> Call[int | None]:
    """Let the lease of a claim start again; return what it holds, or None: it is no longer there.

    ``seal``: it takes nothing more from now on, whatever request is still on its way. Only a sealed
    claim is read and acknowledged.
    """
    return Call("renew", AtSlot(topic, slot), (consumer, number, lease_ms, int(seal)), _renewed, locals())


def ack(topic: Topic, slot: int, consumer: str, number: int, limit: int = 1000) -> Call[tuple[str, int]]:
    """Forget what a sealed claim held. Answers ok, open or stale, and how much is left: ask again until 0."""
    return Call("ack", AtSlot(topic, slot), (consumer, number, limit), _left, locals())


def return_claim(
    topic: Topic, slot: int, consumer: str, number: int, *, spent: bool = False, limit: int = 1000
) -> Call[tuple[str, int]]:
    """Give back what a claim holds. Answers ok or stale, and how much is left: ask again until 0.

    ``spent``: a retry is spent, as after a time-out; else it is as if the claim had never been.
    """
    return Call("return_claim", AtSlot(topic, slot), (consumer, number, int(spent), limit), _left, locals())


def read_claim(
    topic: Topic, slot: int, consumer: str, number: int = 0, offset: int = 0, limit: int = 0
) -> Call[ClaimRead]:
    """Return the state of the consumer's newest claim and, of a sealed one, rows from rank ``offset`` on.

    With a ``number``, a claim that is no longer the newest reads as none.
    """
    return Call("read_claim", AtSlot(topic, slot), (consumer, number, offset, limit), _claim_read, locals())
