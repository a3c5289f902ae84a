"""Calls that give slots another definition or another number, or end them.

Those of a re-slotting may be repeated (``reslotting`` defines their order).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from django_rmq.core.commands.script_call import AtSlot, Call, Reply, moment, word
from django_rmq.core.model.replies import CopyReply, Handover, ReslotProgress
from django_rmq.core.model.topic import Topic


def _handover(reply: list[Reply]) -> Handover:
    word = reply[0].decode()
    if len(reply) == 1:
        return Handover(word)
    parts = iter(reply[3])
    rows = [
        CopyReply(state.decode(), member, score.decode(), failure, rest)
        for state, member, score, failure, rest in zip(parts, parts, parts, parts, parts, strict=True)
    ]
    return Handover(word, int(reply[1]), int(reply[2]), rows)


def _progress(reply: list[Reply]) -> ReslotProgress:
    slots, reslot, shut, paused, deliveries, in_flight, claims, rescheduled, revived, ticket = reply
    return ReslotProgress(
        moment(slots),
        int(reslot or 0),
        bool(shut),
        bool(paused),
        int(deliveries or 0),
        in_flight,
        claims,
        int(rescheduled or 0),
        int(revived or 0),
        int(ticket or 0),
    )


def shut(topic: Topic, slot: int, reslot: int, *, fresh: bool = False, only_empty: bool = False) -> Call[str]:
    """Give the slot the slot count of ``topic`` and stop its deliveries. Answers shut, known, stale or holds."""
    return Call("shut", AtSlot(topic, slot), (slot, reslot, int(fresh), int(only_empty)), word)


def reopen(topic: Topic, slot: int, reslot: int, *, deliveries: int = 0, paused: bool = False) -> Call[str]:
    """Deliver messages again, with receipts above ``deliveries``. Answers open, known or stale."""
    return Call("reopen", AtSlot(topic, slot), (slot, reslot, deliveries, int(paused)), word)


def reslot_progress(topic: Topic, slot: int) -> Call[ReslotProgress]:
    """Return how far a re-slotting has progressed in the slot."""
    return Call("reslot_progress", AtSlot(topic, slot), (), _progress)


def move_out(
    topic: Topic,
    slot: int,
    reslot: int,
    target: int,
    members: Sequence[tuple[str, bytes]] = (),
    *,
    arrived: int = 0,
    max_bytes: int = 1_048_576,
) -> Call[Handover]:
    """Take up to 250 pairs (state, member) out for slot ``target``.

    ``arrived``: the earlier ticket known to have arrived.
    """
    return Call(
        "move_out",
        AtSlot(topic, slot),
        (reslot, arrived or "", target, max_bytes, *chain.from_iterable(members)),
        _handover,
    )


def move_in(
    topic: Topic, slot: int, reslot: int, source: int, ticket: int, rows: Sequence[CopyReply]
) -> Call[str]:
    """Take in the messages that left slot ``source`` with ``ticket``, once. Answers in, known or stale."""
    return Call("move_in", AtSlot(topic, slot), (reslot, source, ticket, *chain.from_iterable(rows)), word)


def configure(topic: Topic, slot: int, apply: bool = True) -> Call[str]:
    """Give the slot its topic's time-out, retries and slot count. Answers ok or refused."""
    return Call("configure", AtSlot(topic, slot), (int(apply),), word)


def retire(topic: Topic, slot: int) -> Call[str]:
    """Delete the keys of an empty slot of a topic that is no longer used.

    Answers retired, or holds if nothing was changed.
    """
    return Call("retire", AtSlot(topic, slot), (), word)
