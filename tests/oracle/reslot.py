"""Re-slotting of a single slot; ``reslotting`` defines the order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from django_rmq.core.model.replies import CopyReply, FailureRecord, Handover, ReslotProgress
from django_rmq.core.model.topic import TopicType
from django_rmq.exceptions import ServerRefused
from tests.oracle.accumulate import collects, dead_body, join, joined_death
from tests.oracle.ack import forget, supersede_resting
from tests.oracle.keyspace import score_text
from tests.oracle.send import LARGEST, prolonged
from tests.oracle.slot import ENDING, Slot, grouped, on

MOVED = 250
"""The maximum number of messages that one hand-over of a re-slotting takes from slot to slot."""


def is_shut_by(slot: Slot, reslot: int) -> bool:
    return int(slot.control.get(b"reslot", 0)) == reslot and b"moving" in slot.control


@on("control", "store", "prepare", "retry", "dead", "claimants", "stats", "inserting")
def shut(slot: Slot, _: int, reslot: int, fresh: int, only_empty: int) -> str:
    known = int(slot.control.get(b"reslot", 0))
    if known >= reslot:
        return "known" if known == reslot else "stale"
    if only_empty and any((slot.store, slot.prepare, slot.retry, slot.dead, slot.claimants)):
        return "holds"
    slot.control.pop(b"sleeping_until", None)
    slot.control |= {b"slots": b"%d" % slot.topic.slots, b"reslot": b"%d" % reslot, b"moving": b"1"}
    if fresh:
        slot.configure()
    slot.publish()
    return "shut"


@on("control", "arrived")
def reopen(slot: Slot, _: int, reslot: int, deliveries: int, paused: int) -> str:
    if int(slot.control.get(b"reslot", 0)) != reslot:
        return "stale"
    if b"moving" not in slot.control:
        return "known"
    del slot.control[b"moving"]
    slot.control.pop(b"sleeping_until", None)
    slot.arrived.clear()
    if deliveries > int(slot.control.get(b"deliveries", 0)):
        slot.control[b"deliveries"] = b"%d" % deliveries
    if paused:
        slot.control[b"paused"] = b"1"
    slot.publish()
    return "open"


@on("control", "prepare", "claimants", "stats", "leaving")
def reslot_progress(slot: Slot) -> ReslotProgress:
    slots = slot.control.get(b"slots")
    return ReslotProgress(
        None if slots is None else int(slots),
        int(slot.control.get(b"reslot", 0)),
        b"moving" in slot.control,
        b"paused" in slot.control,
        int(slot.control.get(b"deliveries", 0)),
        len(slot.prepare),
        len(slot.claimants),
        int(slot.stats.get(b"rescheduled", 0)),
        int(slot.stats.get(b"revived", 0)),
        int(slot.leaving.get(b"ticket", 0)),
    )


@on(*ENDING, "claimants", "leaving")
def move_out(
    slot: Slot, reslot: int, arrived: int | str, target: int, max_bytes: int, *rest: Any
) -> Handover:
    members = grouped(rest, 2)
    if len(members) > MOVED:
        raise ServerRefused("ERR too many members")
    if not is_shut_by(slot, reslot):
        return Handover("stale")
    staged = int(slot.leaving.get(b"ticket", 0))
    if staged and staged != arrived:
        return Handover("staged", staged, int(slot.leaving[b"target"]), staged_rows(slot))
    slot.leaving.clear()
    if slot.prepare or slot.claimants:
        return Handover("busy")
    rows = rows_of(slot, members, max_bytes)
    if not rows:
        return Handover("nothing")
    ticket = int(slot.control.get(b"tickets", 0)) + 1
    slot.control[b"tickets"] = b"%d" % ticket
    slot.leaving |= {b"ticket": b"%d" % ticket, b"target": b"%d" % target, b"rows": b"%d" % len(rows)}
    for n, row in enumerate(rows, 1):
        parts = (row.state.encode(), row.member, row.score.encode(), row.failure, row.rest)
        for name, part in zip(CopyReply._fields, parts, strict=True):
            slot.leaving[f"{name}{n}".encode()] = part
        take_out(slot, row.state, row.member)
    slot.note_undrained()
    return Handover("moved", ticket, target, rows)


def staged_rows(slot: Slot) -> list[CopyReply]:
    """Return what left with the newest ticket."""
    return [
        CopyReply(
            slot.leaving[b"state%d" % n].decode(),
            slot.leaving[b"member%d" % n],
            slot.leaving[b"score%d" % n].decode(),
            slot.leaving[b"failure%d" % n],
            slot.leaving[b"rest%d" % n],
        )
        for n in range(1, int(slot.leaving[b"rows"]) + 1)
    ]


def rows_of(slot: Slot, members: Sequence[tuple[Any, ...]], max_bytes: int) -> list[CopyReply]:
    """Return the rows of ``members`` that are there, as they leave; at least one, whatever its size."""
    rows: list[CopyReply] = []
    size = 0
    for state, member in dict.fromkeys(members):
        score = slot.members(state).get(member)
        if score is None or (rows and size >= max_bytes):
            continue
        failure = b"" if state == "dead" else slot.failures.get(member, b"")
        rest = (slot.deaths if state == "dead" else slot.body).get(member, b"")
        rows.append(CopyReply(state, member, score_text(score), failure, rest))
        size += len(member) + len(failure) + len(rest)
    return rows


def take_out(slot: Slot, state: str, member: bytes) -> None:
    """Remove the leaving messages from their place."""
    del slot.members(state)[member]
    if state == "dead":
        slot.deaths.pop(member, None)
        slot.count("moved_dead_out")
    else:
        forget(slot, member)
        slot.count("moved_out")


@on("store", "retry", "dead", "deaths", "failures", "body", "stats", "control", "arrived")
def move_in(slot: Slot, reslot: int, source: int, ticket: int, *rest: Any) -> str:
    rows = [CopyReply(*row) for row in grouped(rest, len(CopyReply._fields))]
    if len(rows) > MOVED:
        raise ServerRefused("ERR too many members")
    if not is_shut_by(slot, reslot):
        return "stale"
    if int(slot.arrived.get(b"%d" % source, 0)) >= ticket:
        return "known"
    for row in rows:
        if row.state == "dead":
            take_in_dead(slot, row)
        else:
            take_in(slot, row)
    slot.arrived[b"%d" % source] = b"%d" % ticket
    slot.note_undrained()
    return "in"


def take_in_dead(slot: Slot, row: CopyReply) -> None:
    """Take in dead messages; of two copies, the one that died last stays."""
    score, died = float(row.score), slot.dead.get(row.member)
    if died is not None:
        slot.count("dead_merged")
    there = slot.deaths.get(row.member, b"") if died is not None else b""
    if died is None or score > died:
        slot.dead[row.member] = score
        rest = joined_death(row.rest, dead_body(there)) if there else row.rest
        if rest:
            slot.deaths[row.member] = rest
    elif there:
        slot.deaths[row.member] = joined_death(there, dead_body(row.rest))
    slot.count("moved_dead_in")


def take_in(slot: Slot, row: CopyReply) -> None:
    """Take in waiting or resting messages. A message sent here since stays, and merges with an earlier time."""
    member, score, waiting = row.member, float(row.score), slot.store.get(row.member)
    fresh = row.state == "store" and not slot.is_retry(score)
    if waiting is not None and not slot.is_retry(waiting):
        # It merges with the message that it would have met, which keeps its time only on range_merge topics.
        slot.count("dropped")
        if fresh and slot.topic.debounce_ms:
            score = prolonged(slot, math.floor(max(0, min(LARGEST, waiting))) - slot.now_ms, score)
        if fresh and slot.topic.type is TopicType.RANGE_MERGE:
            slot.store[member] = score
        if slot.topic.is_fifo:
            failed = FailureRecord.parse(row.failure) if row.state == "retry" and row.failure else None
            slot.store[member] = min(waiting, float(failed.score) if failed else score)
    elif fresh or not slot.waits(member):
        supersede_resting(slot, member)
        if waiting is not None:
            slot.count("dropped")
        (slot.retry if row.state == "retry" else slot.store)[member] = score
        if row.rest and not collects(row.rest):
            slot.body[member] = row.rest
    else:
        slot.count("dropped")
    if row.failure:
        slot.failures.setdefault(member, row.failure)
    if row.rest and member not in slot.body:
        slot.body[member] = row.rest
    elif collects(row.rest):
        join(slot, member, row.rest)
    slot.count("moved_in")
