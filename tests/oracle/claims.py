"""How far the scripts look, and where they begin. This is not part of the protocol.

Any choice among equals would do. It is copied from the Lua files so that whole keyspaces can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django_rmq.core.model.bounds import BATCH, CLAIM_STEP
from django_rmq.core.model.keys import consumer_key
from django_rmq.core.model.replies import Claimed, ClaimRead, Driver
from tests.oracle import upkeep
from tests.oracle.ack import end_expired, has_expired, supersede_resting
from tests.oracle.fetch import Entry, due_entries
from tests.oracle.keyspace import Hash, Memory, score_text
from tests.oracle.slot import CLAIMING, ENDING, Slot, check_batch, check_lease, grouped, on


@on(*ENDING, *CLAIMING, "inserting")
def claim(slot: Slot, consumer: str, number: int, lease_ms: int, limit: int, max_bytes: int) -> Claimed:
    check_lease(lease_ms, number)
    if slot.moved_to is not None:
        return Claimed("moved")
    limit = max(1, limit)
    kept_up = upkeep.keep_up(slot, limit)
    slot.wake_at_gate(kept_up.due, ended=kept_up.timed_out > 0)
    slot.note_undrained()
    word = may_claim(slot, consumer, number)
    if word != "ok":
        return Claimed(word)
    ours = consumer.encode() in slot.claimants
    taken, more = choose(slot, limit, max_bytes, ours=ours)
    for member, score in taken:
        del slot.store[member]
        supersede_resting(slot, member)
        slot.claim[member] = score
        if member in slot.body:
            slot.claim_body[member] = slot.body.pop(member)
    if taken:
        if number > upkeep.newest_claim(slot, consumer)[0]:
            upkeep.note_claim(slot, consumer, number, "open")
        slot.claimants[consumer.encode()] = float(slot.now_ms + lease_ms)
        slot.control[b"owner"] = consumer.encode()
        slot.count("claimed", len(taken))
    slot.note_undrained()
    return Claimed("ok", len(taken), len(slot.claim), more)


def may_claim(slot: Slot, consumer: str, number: int) -> str:
    """Return ok, or the reason why claim ``number`` of the consumer takes nothing."""
    upkeep.make_room_for(slot, consumer)
    newest, state = upkeep.newest_claim(slot, consumer)
    ours = consumer.encode() in slot.claimants
    if number < newest or (number == newest and state != "open"):
        return "stale"
    if ours and number > newest:
        return "busy" if state in ("lost", "returned") else "unfinished"
    holding = bool(slot.claimants)
    held_up = slot.topic.is_strict and bool(slot.prepare or slot.retry)
    # While a re-slotting moves messages, nothing is handed out.
    if (holding and not ours) or (slot.topic.serial and slot.prepare) or b"moving" in slot.control or held_up:
        return "busy"
    return "paused" if b"paused" in slot.control else "ok"


def choose(slot: Slot, limit: int, max_bytes: int, *, ours: bool) -> tuple[list[Entry], bool]:
    """Apply the limit and the size limit, and find the expired messages for Dead. Also return whether there is more."""
    due = due_entries(slot)
    fit = as_they_are(slot, due, limit, max_bytes)
    if fit is not None:
        return due[:fit], fit == limit or fit < len(due)
    free, more = free_to_claim(slot, due, limit, max_bytes, ours=ours)
    max_bytes = min(max_bytes, upkeep.CLAIM_STEP_BYTES)
    taken: list[Entry] = []
    expired: list[Entry] = []
    size = 0
    for member, score in free:
        envelope = slot.body.get(member)
        if has_expired(slot, envelope):
            expired.append((member, score))
            continue
        size += len(member) + len(envelope or b"")
        if taken and size > max_bytes:
            more = True
            break
        taken.append((member, score))
    for member, score in expired:
        end_expired(slot, member, score)
    return taken, more


@on("stats", "control", "claimants", "claim", "claims")
def renew_claim(slot: Slot, consumer: str, number: int, lease_ms: int, seal: int) -> int | None:
    check_lease(lease_ms)
    newest, state = upkeep.newest_claim(slot, consumer)
    if number != newest or state not in ("open", "sealed"):
        slot.count("stale")
        return None
    if seal and state == "open":
        upkeep.note_claim(slot, consumer, number, "sealed")
    slot.claimants[consumer.encode()] = float(slot.now_ms + lease_ms)
    return len(slot.claim)


@on("stats", "control", "claim", "claims", "claim_failed")
def fail_claimed(slot: Slot, consumer: str, number: int, *rest: Any) -> list[str]:
    failures = grouped(rest, 3)
    check_batch(failures)
    newest, state = upkeep.newest_claim(slot, consumer)
    words: list[str] = []
    for member, what, error in failures:
        word = "ok"
        if newest != number or state not in ("open", "sealed"):
            word = "stale"
            slot.count("stale")
        elif state == "open":
            word = "open"
        elif member not in slot.claim:
            word = "not_found"
        elif member in slot.claim_failed:
            word = "again"
        else:
            slot.claim_failed[member] = b"%s\n%s" % (what.encode(), error)
        words.append(word)
    return words


@on(*ENDING, *CLAIMING)
def ack_claim(slot: Slot, consumer: str, number: int, limit: int) -> tuple[str, int]:
    newest, state = upkeep.newest_claim(slot, consumer)
    if number != newest or state not in ("open", "sealed", "acked"):
        slot.count("stale")
        return "stale", 0
    if state == "open":
        return "open", len(slot.claim)
    if consumer.encode() not in slot.claimants:
        return "ok", 0
    if state == "sealed":
        upkeep.note_claim(slot, consumer, number, "acked")
    due = upkeep.forget_claimed(slot, min(limit, BATCH))
    left = upkeep.close_claim(slot, consumer)
    if due is not None:
        slot.note_undrained()
    slot.wake_at_gate(due, ended=left == 0)
    return "ok", left


@on(*ENDING, *CLAIMING)
def return_claim(slot: Slot, consumer: str, number: int, spent: int, limit: int) -> tuple[str, int]:
    newest, state = upkeep.newest_claim(slot, consumer)
    if number != newest or state == "acked":
        slot.count("stale")
        return "stale", 0
    if consumer.encode() not in slot.claimants:
        return "ok", 0
    # A claim whose return was begun as lost or as returned ends as that.
    if state in ("open", "sealed"):
        state = "lost" if spent else "returned"
        upkeep.note_claim(slot, consumer, number, state)
    due = upkeep.return_claimed(slot, min(limit, BATCH), spent=state == "lost")
    left = upkeep.close_claim(slot, consumer)
    slot.note_undrained()
    slot.wake_at_gate(due, ended=left == 0)
    return "ok", left


@on("claim", "claims", "claim_body")
def read_claim(slot: Slot, consumer: str, number: int, offset: int, limit: int) -> ClaimRead:
    newest, state = upkeep.newest_claim(slot, consumer)
    if number > 0 and number != newest:
        return ClaimRead("none", newest, 0, [], [])
    if state not in ("open", "sealed"):
        return ClaimRead(state, newest, 0, [], [])
    rows = slot.claim.rows()[offset : offset + min(limit, BATCH)] if state == "sealed" else []
    flat = [part for member, score in rows for part in (member, score_text(score).encode())]
    kept = [slot.claim_body.get(member) for member, _ in rows] if slot.claim_body else []
    return ClaimRead(state, newest, len(slot.claim), flat, kept)


def hold_consumer(
    memory: Memory, name: str, driver: str, checkpoint: str, about: str, lease_ms: int, starts: int, gone: str
) -> Driver | None:
    check_lease(lease_ms)
    now_ms = memory.micros() // 1000
    with memory.hash(consumer_key(memory.prefix, name)) as record:
        known = _driver(record)
        if known is not None and known.name != driver:
            is_free = (
                known.until_ms <= now_ms or record[b"checkpoint"] == checkpoint.encode() or known.name == gone
            )
            if not (starts and is_free):
                return known
        if known is None or known.name != driver:
            record |= {b"driver": driver.encode(), b"checkpoint": checkpoint.encode()}
            record |= {b"about": about.encode(), b"since": b"%d" % now_ms}
        record[b"until"] = b"%d" % (now_ms + lease_ms)
    return None


def leave_consumer(memory: Memory, name: str, driver: str) -> str:
    with memory.hash(consumer_key(memory.prefix, name)) as record:
        if b"driver" not in record or (driver and record[b"driver"] != driver.encode()):
            return "absent"
        record.pop(b"until", None)
        return "left"


def _driver(record: Hash) -> Driver | None:
    if b"driver" not in record:
        return None
    name, about = record[b"driver"].decode(), record[b"about"].decode()
    return Driver(name, about, int(record[b"since"]), int(record.get(b"until", 0)))


def free_to_claim(
    slot: Slot, due: Sequence[tuple[bytes, float]], limit: int, max_bytes: int, *, ours: bool
) -> tuple[list[tuple[bytes, float]], bool]:
    """Return what a claim may take of the ``due`` messages, and whether there may be more.

    Members in flight are left out: their newer copy waits until they end. ``ours``: the claim already holds
    something.
    """
    waiting = _in_order(slot)
    limit = upkeep.fit(waiting, slot.body, min(limit, BATCH), max_bytes)
    for scan in (limit, limit + upkeep.fit(waiting, slot.body, BATCH, max_bytes)):
        rows = due[:scan]
        free = [row for row in rows if row[0] not in slot.prepare and not (ours and row[0] in slot.claim)]
        if free or len(rows) < scan:
            break
    return free[:limit], len(rows) == scan or len(free) > limit


def as_they_are(slot: Slot, due: Sequence[tuple[bytes, float]], limit: int, max_bytes: int) -> int | None:
    """Return how many ``due`` messages a claim takes without Lua examining each. None: each has to be examined.

    All of them if few of those that wait have to be carried back, otherwise one step.
    """
    if slot.prepare or slot.claim or slot.retry or slot.body:
        return None
    n = min(len(due), limit)
    rest = len(slot.store) - n
    waiting = _in_order(slot)
    if rest <= CLAIM_STEP and rest < n:
        longest = upkeep._longest(waiting, slot.body, n)
        if rest * longest <= upkeep._step_bytes(longest) and n * longest <= max_bytes:
            return n
    return upkeep.fit(waiting, slot.body, min(n, CLAIM_STEP), max_bytes) if n else 0


def _in_order(slot: Slot) -> Sequence[tuple[bytes, float]]:
    return slot.store.rows(descending=slot.topic.is_priority)
