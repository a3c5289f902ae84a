"""Calls about claims, each of which holds messages of one slot for a Spark consumer under one lease, and about these consumers.

A claim grows while it is open, and is read and acknowledged once it is sealed; ``docs/state_machine.md`` has its states.
"""

from __future__ import annotations

from collections.abc import Sequence

from django_rmq.core.commands.script_call import (
    AtSlot,
    Call,
    Named,
    RedisCommand,
    Reply,
    form,
    text,
    word,
    words,
)
from django_rmq.core.model.keys import consumer_key
from django_rmq.core.model.replies import Claimed, ClaimRead, Driver, Failure, cut_error
from django_rmq.core.model.topic import Topic


def _claimed(reply: list[Reply]) -> Claimed:
    answer = reply[0].decode()
    return Claimed(answer, reply[1], reply[2], reply[3] == b"more") if answer == "ok" else Claimed(answer)


def _left(reply: list[Reply]) -> tuple[str, int]:
    return reply[0].decode(), reply[1]


def _renewed(reply: list[Reply]) -> int | None:
    return reply[1] if reply[0] == b"ok" else None


def _claim_read(reply: list[Reply]) -> ClaimRead:
    return ClaimRead(reply[0].decode(), *reply[1:])


def _written(failures: Sequence[Failure]) -> list[object]:
    return [part for member, kind, _, error in failures for part in (member, kind, cut_error(error))]


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

    If messages have to be moved one by one, at most 4,000 are moved, or 1,000 if each has to be examined. A
    repeated call with the number of an open claim takes more messages. After a lost reply, call
    ``read_claim``.
    """
    return Call(
        form("claim", topic),
        AtSlot(topic, slot),
        (consumer, number, lease_ms, limit, max_bytes),
        _claimed,
    )


def renew_claim(
    topic: Topic, slot: int, consumer: str, number: int, lease_ms: int, *, seal: bool = False
) -> Call[int | None]:
    """Restart the lease of a claim; return what the claim holds, or None if it no longer exists.

    ``seal``: from now on the claim takes no more messages, even for requests that are already on their way.
    Only a sealed claim can be read and acknowledged.
    """
    return Call("renew_claim", AtSlot(topic, slot), (consumer, number, lease_ms, int(seal)), _renewed)


def ack_claim(
    topic: Topic, slot: int, consumer: str, number: int, limit: int = 1000
) -> Call[tuple[str, int]]:
    """Delete the messages of a sealed claim; those that ``fail_claimed`` has noted are tried again, or die.

    Answers ok, open or stale, and how much is left; repeat until 0.
    """
    return Call(form("ack_claim", topic), AtSlot(topic, slot), (consumer, number, limit), _left)


def fail_claimed(
    topic: Topic, slot: int, consumer: str, number: int, failures: Sequence[Failure]
) -> Call[list[str]]:
    """Note messages of a sealed claim as failed. They stay in the claim, and use a retry when it ends, however it ends.

    Kinds are failed and rejected (Dead at once). A failure's delay is ignored: the topic's back-off applies.
    Answers for each ok, again (noted before, and that stays), not_found, open (not sealed) or stale.
    """
    return Call(
        "fail_claimed",
        AtSlot(topic, slot),
        (consumer, number, *_written(failures)),
        words(len(failures)),
    )


def return_claim(
    topic: Topic, slot: int, consumer: str, number: int, *, spent: bool = False, limit: int = 1000
) -> Call[tuple[str, int]]:
    """Return the messages of a claim to the slot. Answers ok or stale, and how much is left; repeat until 0.

    ``spent``: each message uses a retry, as after a time-out. Otherwise the messages are as they were before
    the claim. Messages that ``fail_claimed`` has noted fail in both cases.
    """
    return Call(
        form("return_claim", topic),
        AtSlot(topic, slot),
        (consumer, number, int(spent), limit),
        _left,
    )


def read_claim(
    topic: Topic, slot: int, consumer: str, number: int = 0, offset: int = 0, limit: int = 0
) -> Call[ClaimRead]:
    """Return the state of the consumer's newest claim and, if it is sealed, its rows from rank ``offset``.

    With ``number``, a claim that is no longer the newest is reported as none.
    """
    return Call("read_claim", AtSlot(topic, slot), (consumer, number, offset, limit), _claim_read)


def _taken(reply: list[Reply]) -> Driver | None:
    return None if reply[0] == b"held" else _driver(reply[1:])


def _driver(reply: Sequence[Reply]) -> Driver | None:
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
    """Hold the name of a consumer for ``driver``, or renew its lease. Return None, or the other driver that has the name.

    A driver that ``starts`` gets the name if its lease has ended, if it was held for the same ``checkpoint``, or if the dead
    driver ``gone`` had it. A driver that held the name before gets it only if no other one has had it since.
    """
    own = (driver, checkpoint, about, lease_ms, int(starts), gone)
    return Call("spark_consumers/hold_consumer", _name(topic, consumer), own, _taken)


def leave_consumer(topic: Topic, consumer: str, driver: str = "") -> Call[str]:
    """End the lease of a consumer's name if ``driver`` has it; an empty text means any driver. Answers left or absent."""
    return Call("spark_consumers/leave_consumer", _name(topic, consumer), (driver,), word)


def driver_of_consumer(topic: Topic, consumer: str) -> Call[Driver | None]:
    """Return the last driver that had the name of a consumer, or None if no driver has had it for a day."""
    fields = ("driver", "about", "since", "until")
    return RedisCommand("HMGET", _name(topic, consumer), fields, _driver)


def reported_loss(topic: Topic, consumer: str) -> Call[str]:
    """Return what ``report_loss`` has noted last under the name of a consumer, or an empty text."""
    return RedisCommand("HMGET", _name(topic, consumer), ("reported",), lambda reply: text(reply[0] or b""))


def report_loss(topic: Topic, consumer: str, claim: str) -> Call[int]:
    """Note under the name of a consumer, which a driver holds, that the loss of ``claim`` is reported."""
    return RedisCommand("HSET", _name(topic, consumer), ("reported", claim), int)


def count_consumers(topic: Topic, slot: int) -> Call[int]:
    """Return how many Spark consumers a slot remembers: at most 1,000, for thirty days after their last claim."""
    # The fields of the slot's key ``claims`` are the consumers. ``script_call`` has the key of each plain command.
    return RedisCommand("HLEN", AtSlot(topic, slot), (), int)
