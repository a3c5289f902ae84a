"""Calls about claims, which hold all messages of a slot for a Spark consumer under one lease.

A claim grows while it is open, and is read and acknowledged once it is sealed; ``docs/state_machine.md`` has its states.
"""

from __future__ import annotations

from collections.abc import Sequence

from django_rmq.core.commands.script_call import AtSlot, Call, Reply, form, words
from django_rmq.core.model.replies import Claimed, ClaimRead, Failure, cut_error
from django_rmq.core.model.topic import Topic


def _claimed(reply: list[Reply]) -> Claimed:
    word = reply[0].decode()
    return Claimed(word, reply[1], reply[2], reply[3] == b"more") if word == "ok" else Claimed(word)


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

    If messages have to be moved one by one, at most 10,000 are moved, or 1,000 if each has to be examined. A
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
