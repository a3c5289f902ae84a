"""Calls by which people and programs change messages and slots, apart from sending and consuming.

Who may make them is decided in ``operations``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

from django_rmq.core.commands.script_call import (
    AtSlot,
    Call,
    InTrash,
    Reply,
    form,
    moved,
    number,
    word,
    words,
)
from django_rmq.core.model.replies import RECORDS, OrphansReply, Restored, cut_error
from django_rmq.core.model.topic import Topic

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_NONE_KEPT = (0, 0)
"""The first arguments of a script that deletes: how many copies it keeps, and how many bytes of them."""


class TrashShare(NamedTuple):
    """Where an action keeps what it deletes, and how much of it one call may keep."""

    act: str
    copies: int
    size: int
    """In bytes. The last copy of a slot may exceed it."""


class Deleted(NamedTuple, Generic[T_co]):
    """The answer of a call that keeps what it deletes."""

    answer: T_co
    kept: int
    """The number of copies that can be brought back: none if Redis is full."""
    kept_bytes: int


def _deleted(decode: Callable[[Reply], T]) -> Callable[[Reply], T]:
    return lambda reply: decode(reply[0])


def _replayed(count: int) -> Callable[[Reply], list[str]]:
    def parse(reply: list[bytes]) -> list[str]:
        moved(reply)
        return words(count)(reply)

    return parse


def _orphans(reply: list[Reply]) -> OrphansReply:
    return OrphansReply(reply[0].decode(), reply[1], reply[2])


def replay(
    topic: Topic, slot: int, members: Sequence[bytes], envelopes: Sequence[bytes] = ()
) -> Call[list[str]]:
    """Send dead messages again with their full number of retries. Answers replayed, merged or not_found.

    ``envelopes``: new bodies of keyed messages; empty where the body does not change.
    """
    return Call(
        "replay",
        AtSlot(topic, slot),
        tuple(chain.from_iterable(zip(members, envelopes or [b""] * len(members), strict=True))),
        _replayed(len(members)),
    )


def bury(topic: Topic, slot: int, members: Sequence[bytes], why: str = "") -> Call[list[str]]:
    """Put messages into Dead by hand. Answers the state in which each was found."""
    return Call(
        form("bury", topic),
        AtSlot(topic, slot),
        (cut_error(why), *members),
        words(len(members)),
    )


def remove(topic: Topic, slot: int, members: Sequence[bytes], which: str = "any") -> Call[list[str]]:
    """Delete messages by hand: ``live``, ``dead``, or ``any`` (live, else dead). Answers like ``bury``."""
    return Call(
        form("remove", topic),
        InTrash(topic, slot),
        (*_NONE_KEPT, which, *members),
        _deleted(words(len(members))),
    )


def cancel(topic: Topic, slot: int, members: Sequence[bytes]) -> Call[list[str]]:
    """Delete messages that wait or rest, and notify the consumers of those in flight.

    Answers like ``bury``, or claimed if Spark has the message, and cannot be notified.
    """
    return remove(topic, slot, members, "cancel")


def discard(topic: Topic, slot: int, scores: Sequence[float], members: Sequence[bytes]) -> Call[list[str]]:
    """Delete dead messages that died at ``scores`` (ms). Answers dead, changed (died again since) or not_found."""
    return Call(
        "discard",
        InTrash(topic, slot),
        (*_NONE_KEPT, *chain.from_iterable(zip(map(number, scores), members, strict=True))),
        _deleted(words(len(members))),
    )


def reschedule(topic: Topic, slot: int, scores: Sequence[int], members: Sequence[bytes]) -> Call[list[str]]:
    """Give waiting messages a new due time or priority. Answers the state in which each was found, or refused."""
    return Call(
        "reschedule",
        AtSlot(topic, slot),
        tuple(chain.from_iterable(zip(scores, members, strict=True))),
        words(len(members)),
    )


def purge(
    topic: Topic,
    slot: int,
    state: str,
    up_to: float = float("inf"),
    limit: int = 1000,
    *,
    min_score: float = float("-inf"),
) -> Call[int]:
    """Delete up to ``limit`` messages of store, retry or dead with scores up to ``up_to``; return their number."""
    if state not in ("store", "retry", "dead"):
        raise ValueError(f"cannot purge {state!r}: the state must be store, retry or dead")
    return Call(
        form("purge", topic),
        InTrash(topic, slot),
        (*_NONE_KEPT, state, number(min_score), number(up_to), limit),
        _deleted(int),
    )


def into_trash(call: Call[T], trash: TrashShare) -> Call[Deleted[T]]:
    """Return a call of ``remove``, ``purge`` or ``discard`` that keeps for an hour what it deletes."""
    assert isinstance(call.place, InTrash), call
    decode = call.decode
    assert callable(decode), call

    def deleted(reply: list[Reply]) -> Deleted[T]:
        return Deleted(decode(reply), reply[1], reply[2])

    place = call.place._replace(act=trash.act)
    return Call(call.script, place, (trash.copies, trash.size, *call.own[len(_NONE_KEPT) :]), deleted)


def _restored(reply: list[Reply]) -> Restored:
    moved(reply)
    return Restored(reply[1].decode(), reply[2], reply[3])


def restore(topic: Topic, slot: int, act: str, cursor: str = "0", limit: int = 250) -> Call[Restored]:
    """Bring back about ``limit`` copies that ``act`` has deleted from the slot, from ``cursor`` on.

    The default is that of ``operations.bulk.PER_SLOT``.
    Raises ``SlotMoved`` if the slot now has another slot count.
    """
    return Call("restore", InTrash(topic, slot, act), (cursor, limit), _restored)


def pause(topic: Topic, slot: int, paused: bool = True) -> Call[str]:
    """Stop deliveries of the slot, or resume them. Answers paused, resumed or unchanged."""
    # The script publishes the number of the slot, which its keys have only within their names.
    return Call("pause", AtSlot(topic, slot), (slot, int(paused)), word)


def adopt(topic: Topic, slot: int, drift: int, foreign: int) -> Call[str]:
    """Record ``drift`` messages beyond the ledger as foreign, if the ledger has ``foreign`` of them.

    Answers ok or changed.
    """
    return Call("adopt", AtSlot(topic, slot), (drift, foreign), word)


def find_orphans(
    topic: Topic, slot: int, kind: str, cursor: str = "0", repair: bool = False
) -> Call[OrphansReply]:
    """Examine some records of a kind for those that belong to no message; with ``repair``, delete those."""
    if kind not in RECORDS:
        raise ValueError(f"unknown kind of records: {kind!r}")
    return Call("find_orphans", AtSlot(topic, slot), (kind, cursor, int(repair)), _orphans)
