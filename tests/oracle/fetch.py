"""The first phase: who owns a slot, in which order messages are taken, and how many of them, by the slot's MAX_RATE, too.

Where any choice among equals would do, it is that of the Lua files, so that whole keyspaces can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from django_rmq.core.model.bounds import BATCH, NEVER
from django_rmq.core.model.keys import slot_keys
from django_rmq.core.model.replies import Acquired, Delivery, HeldReply, Prepared
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import ServerRefused, WrongType
from tests.oracle.ack import end_expired, has_expired, supersede_resting
from tests.oracle.keyspace import Memory, score_text
from tests.oracle.slot import CLAIMING, ENDING, GATE, InFlight, Slot, earlier, on, opened, own_timeout
from tests.oracle.upkeep import claim_shuts, keep_up


def look_further(slot: Slot) -> int:
    """Return how much farther a prepare looks, once, if everything it sees is already in flight."""
    return min(len(slot.prepare) + len(slot.claim), 1000)


def turned(
    slot: Slot, free: list[tuple[bytes, float]], score: float, limit: int, receipt: int
) -> list[tuple[bytes, float]]:
    """Take a part of the group of ``score``, which exceeds the limit, from a start that changes with every prepare."""
    above = [row for row in free if row[1] > score]
    group = [row for row in slot.store.rows(descending=True) if row[1] == score]
    start = (slot.micros * 16_807 + receipt % 1_000_003 * 69_621) % 2_147_483_647 % len(group)
    want = min(len(group), limit - len(above) + look_further(slot))
    return above + [row for row in (group[start:] + group[:start])[:want] if not slot.runs(row[0])]


Entry = tuple[bytes, float]
"""A member and its score."""

Cursor = tuple[str, bytes]
"""The score of an entry as a text, and its member."""


def cursor(score: str, member: bytes) -> Cursor | None:
    """Return the entry after which to continue. None: from the beginning."""
    return None if score == "" else (score, member)


class Candidates(NamedTuple):
    """The messages that a prepare may take."""

    free: list[Entry]
    """The free entries, in the order in which they are taken."""
    complete: bool
    """Whether there are no others."""
    last: Entry | None
    """The last entry seen, including busy ones."""


def is_behind(member: bytes, score: float, after: Cursor | None, descending: bool) -> bool:
    """Whether an entry comes after ``after`` in its order."""
    if after is None:
        return True
    at = (float(after[0]), after[1])
    return (score, member) < at if descending else (score, member) > at


def due_entries(slot: Slot) -> list[Entry]:
    """Return the due entries in the order in which they are taken; on time topics, those whose time has come."""
    rows = slot.store.rows(descending=slot.topic.is_priority)
    return rows if slot.topic.is_priority else [row for row in rows if slot.is_due(row[1])]


def retries_apart(slot: Slot, after: Cursor | None) -> tuple[list[Entry], list[Entry]]:
    """Return what is due after ``after``. From the head of a time topic on, retries are separate from fresh messages."""
    priority = slot.topic.is_priority
    waiting = [row for row in slot.store.rows(descending=priority) if is_behind(*row, after, priority)]
    if priority:
        return waiting, []
    apart = after is None and not slot.topic.is_fifo
    resting = [row for row in waiting if row[1] <= 999] if apart else []
    return [row for row in waiting[len(resting) :] if slot.is_due(row[1])], resting


def candidates(slot: Slot, limit: int, receipt: int, after: Cursor | None) -> Candidates:
    """Return what prepare may take. Members in flight are left out: their newer copy waits until they end."""
    waiting, resting = retries_apart(slot, after)
    for scan in (limit, limit + look_further(slot)):
        rows, late = waiting[:scan], resting[:scan]
        complete = len(late) < scan and len(rows) < scan
        free = [row for row in rows if not slot.runs(row[0])]
        rested = [row for row in late if not slot.runs(row[0])]
        if free or rested or complete:
            break
    seen = rows or late
    last = seen[-1] if seen else None
    if rested:
        share = share_of_retries(limit, receipt, len(rested), len(free))
        complete = complete and share == len(rested)
        free = rested[:share] + free
    if slot.topic.is_priority and after is None and last and (len(free) > limit or not complete):
        score = free[limit - 1][1] if len(free) >= limit else last[1]
        complete = complete and len(free) <= limit
        free = turned(slot, free, score, limit, receipt)
    return Candidates(free, complete, last)


def share_of_retries(limit: int, receipt: int, rested: int, fresh: int) -> int:
    """Return how many retries a prepare takes: at most half of the limit while fresh messages are due.

    If the limit is odd, the extra one alternates.
    """
    return min(rested, max(limit // 2 + limit % 2 * (receipt % 2), limit - fresh))


def emptied_at(slot: Slot) -> int:
    """Return when (µs) the bucket was last empty, as if it had filled from then on without an end."""
    depth = max(slot.topic.slot_each_us, 100_000)
    empty = int(slot.control.get(b"spent_us", 0))
    if empty > slot.now_us + depth:  # the clock was set back in the meantime
        empty = 0
    return max(empty, slot.now_us - depth)


def pace(slot: Slot) -> tuple[int, int]:
    """Return how many messages may be delivered now, and the ms at which there is one more."""
    empty, each = emptied_at(slot), slot.topic.slot_each_us
    return (slot.now_us - empty) // each, -((empty + each) // -1000)


def spend(slot: Slot, messages: int) -> int | None:
    """Spend deliveries. Return the ms at which there is another; None: there is one now."""
    slot.control[b"spent_us"] = b"%d" % (emptied_at(slot) + messages * slot.topic.slot_each_us)
    left, at = pace(slot)
    return at if left < 1 else None


def next_epoch(slot: Slot) -> int:
    """Acquire the slot: raise its epoch."""
    epoch = int(slot.control.get(b"epoch", 0)) + 1
    slot.control[b"epoch"] = b"%d" % epoch
    return epoch


@on("control")
def acquire(slot: Slot) -> int:
    try:
        return next_epoch(slot)
    except ValueError:
        raise ServerRefused("ERR hash value is not an integer") from None


def acquire_slots(memory: Memory, topic: Topic, slots: Sequence[int]) -> list[Acquired]:
    if len(slots) > 1024:
        raise ServerRefused("ERR too many slots")
    with memory.lock:
        return [_acquire_one(memory, topic, slot) for slot in slots]


def _acquire_one(memory: Memory, topic: Topic, index: int) -> Acquired:
    """Acquire a slot, and fall asleep at once if it is empty."""
    keys = slot_keys(memory.prefix, topic.name, index)
    with suppress(WrongType, ValueError), opened(memory, topic, index, ["control"]) as slot:
        epoch = next_epoch(slot)
        slots = b"%d" % topic.slots
        is_open = (
            not slot.control.keys() & {b"paused", b"moving"} and slot.control.get(b"slots", slots) == slots
        )
        holding = {keys.store, keys.retry, keys.prepare, keys.claimants} & memory.keyspace.keys()
        if holding or not is_open:
            return Acquired(epoch, is_asleep=False)
        slot.control[b"slots"] = slots
        slot.control.setdefault(b"timeout", b"%d" % topic.timeout)
        slot.control.setdefault(b"max_retries", b"%d" % topic.max_retries)
        slot.sleep_until(NEVER)
        return Acquired(epoch, is_asleep=True)
    return Acquired(None, is_asleep=False)


@on("prepare", "inflight", "prepare_body", "control")
def list_held(slot: Slot, owner: str, offset: int, limit: int) -> list[HeldReply] | None:
    holder = slot.control.get(b"owner")
    if holder != owner.encode():
        return None if holder is not None and slot.prepare else []
    found = []
    for member, score in slot.prepare.rows()[offset : offset + min(limit, BATCH)]:
        record = slot.flight(member)
        delivery = Delivery(member, record.score, int(score) % 1000, slot.prepare_body.get(member))
        found.append(HeldReply(delivery, record.receipt, bool(record.mark), record.timeout))
    return found


class Chosen(NamedTuple):
    """The candidates that are handed out."""

    taken: list[Delivery]
    expired: list[Entry]
    refused: bool
    """Whether the first one has to be alone, and is not."""
    cut: bool
    """Whether some free messages were left for the next prepare."""


@on(*ENDING, *CLAIMING)
def prepare(
    slot: Slot,
    owner: str,
    epoch: int | str,
    inbox: bytes,
    limit: int,
    max_bytes: int,
    after_score: str,
    after_member: bytes,
) -> Prepared:
    after = cursor(after_score, after_member)
    if slot.moved_to is not None:
        return Prepared("moved", slots=slot.moved_to)
    if epoch != "" and int(epoch) < int(slot.control.get(b"epoch", epoch)):
        slot.count("fenced")
        return Prepared("fenced")
    note_offer(slot, inbox, epoch)
    limit = max(1, min(limit, BATCH))
    is_behind = keep_up(slot, limit).is_behind
    word = at_the_gate(slot, owner)
    if word != "open":
        return idle(slot, word, GATE if word == "busy" else None, at_once=is_behind)
    if not slot.topic.serial:
        limit = min(limit, slot.room - len(slot.prepare))
    if slot.topic.slot_each_us:
        allowed, refilled = pace(slot)
        if allowed < 1:
            return idle(slot, "busy", None, at_once=is_behind, at=refilled)
        limit = min(limit, allowed)
    if slot.topic.serial and len(slot.prepare) == 1 and is_suspicious(slot, next(iter(slot.prepare))):
        return idle(slot, "busy", GATE, at_once=is_behind)
    is_wary, receipt = bool(slot.failures), next_receipt(slot)
    found = candidates(slot, limit, receipt, after)
    chosen = choose(slot, found.free[:limit], max_bytes)
    # The bodies of expired messages count, too: they have been read with the others.
    traits = traits_of(slot, chosen.taken) if chosen.taken else None
    for member, score in chosen.expired:
        end_expired(slot, member, score)
    if traits is None:
        return empty_handed(slot, found, chosen, is_behind)
    is_alone = not slot.prepare
    hand_out(slot, owner, receipt, chosen.taken)
    if is_wary or any(each.member in slot.prepare_body for each in chosen.taken):
        slot.control[b"marked"] = b"%d" % receipt
    more = chosen.cut or not found.complete or len(found.free) > limit
    at = spend(slot, len(chosen.taken)) if slot.topic.slot_each_us else None
    due = earlier(slot.next_due(at_once=is_behind or (more and at is None)), at)
    sleeping = None
    if is_alone and not slot.claimants and after is None and not (more or is_behind or traits[0]):
        waiting = slot.next_due(at_once=False, awaits_ends=True)
        sleeping = NEVER if waiting is None else waiting
        slot.sleep_until(sleeping)
    return Prepared(
        "ok",
        due,
        receipt,
        chosen.taken,
        None,
        None,
        *traits,
        is_alone and not is_wary,
        not is_alone,
        sleeping,
    )


def next_receipt(slot: Slot) -> int:
    """Return a number above all before it, lost ones too: a hybrid logical clock in µs. Odd and even take turns."""
    receipt = int(slot.control.get(b"deliveries", 0)) + 1
    ahead = max(0, slot.now_us - receipt)
    return receipt + ahead + ahead % 2


def idle(slot: Slot, word: str, sleep: int | None, *, at_once: bool, at: int | None = None) -> Prepared:
    """Record that the caller sleeps: until its due time, or ``at``, only a wake-up reaches it."""
    if sleep is not None:
        slot.sleep_until(sleep)
    slot.note_undrained()
    return Prepared(word, earlier(slot.next_due(at_once=at_once), at))


def at_the_gate(slot: Slot, owner: str) -> str:
    """Return open, or the reason why nothing is handed out: busy or paused."""
    serial, in_flight = slot.topic.serial, len(slot.prepare)
    shut = in_flight >= slot.room
    if serial:
        shut = slot.control.get(b"owner") != owner.encode() and bool(in_flight or claim_shuts(slot))
    if slot.topic.is_strict:
        shut = shut or bool(in_flight or slot.claimants or slot.retry)
    # While a re-slotting moves messages, nothing is handed out.
    if shut or b"moving" in slot.control:
        return "busy"
    if b"paused" in slot.control:
        return "paused"
    return "open"


def traits_of(slot: Slot, taken: Sequence[Delivery]) -> tuple[bool, int | None, bool]:
    """Return ``is_suspect``, ``timeout`` and ``is_plain`` of what is about to be handed out."""
    own = [seconds for each in taken if (seconds := own_timeout(each.envelope)) is not None]
    timeout = min(slot.timeout, *own) if own else None
    is_plain = not slot.body and all(each.retries_left == slot.topic.max_retries for each in taken)
    return is_suspicious(slot, taken[0].member), timeout, is_plain


def is_suspicious(slot: Slot, member: bytes) -> bool:
    """Return whether its last delivery timed out. It is then handed out alone, because it may kill its process."""
    return slot.failures.get(member, b"").startswith((b"timed_out ", b"overran "))


def choose(slot: Slot, free: Sequence[Entry], max_bytes: int) -> Chosen:
    """Apply the size limit, hand out a suspect alone, and find the expired messages for Dead."""
    taken: list[Delivery] = []
    expired: list[Entry] = []
    size = 0
    for i, (member, score) in enumerate(free):
        envelope = slot.body.get(member)
        if has_expired(slot, envelope):
            expired.append((member, score))
            continue
        alone = is_suspicious(slot, member)
        size += len(member) + len(envelope or b"")
        refused = alone and slot.topic.serial and bool(slot.prepare) and not taken
        if refused or (taken and (alone or size > max_bytes)):
            return Chosen(taken, expired, refused, cut=True)
        left = slot.budget(score, member, slot.own_retries(envelope))
        taken.append(Delivery(member, score, left, envelope or None))
        if alone:
            return Chosen(taken, expired, refused=False, cut=i + 1 < len(free))
    return Chosen(taken, expired, refused=False, cut=False)


def hand_out(slot: Slot, owner: str, receipt: int, taken: Sequence[Delivery]) -> None:
    """Move the chosen messages to Prepare."""
    for member, score, left, envelope in taken:
        timeout = own_timeout(envelope)
        del slot.store[member]
        supersede_resting(slot, member)
        slot.prepare[member] = slot.stamp(timeout, left)
        slot.inflight[member] = InFlight(receipt, score, timeout=timeout).encode()
        if member in slot.body:
            # A delivery has its own copy of the body, because a newer one may arrive while it runs.
            slot.prepare_body[member] = slot.body.pop(member)
    slot.control[b"owner"] = owner.encode()
    slot.control[b"deliveries"] = b"%d" % receipt
    slot.count("prepared", len(taken))
    slot.note_undrained()


def note_offer(slot: Slot, inbox: bytes, epoch: int | str) -> None:
    """Record that sends may push single messages to the caller, or no longer."""
    if inbox and epoch != "":
        slot.control |= {b"inbox": inbox, b"inbox_epoch": b"%d" % int(epoch)}
    else:
        slot.control.pop(b"inbox", None)
        slot.control.pop(b"inbox_epoch", None)


def empty_handed(slot: Slot, found: Candidates, chosen: Chosen, is_behind: bool) -> Prepared:
    """Return why nothing was taken although the gate is open, and when to ask again."""
    if chosen.refused:
        return idle(slot, "busy", GATE, at_once=is_behind)
    if chosen.expired:
        return idle(slot, "empty", None, at_once=True)
    if found.last is not None and not found.complete:
        slot.note_undrained()
        return Prepared("more", slot.now_ms, cursor=(score_text(found.last[1]), found.last[0]))
    if found.last is not None:
        return idle(slot, "busy", GATE, at_once=is_behind)
    due = slot.next_due(at_once=is_behind)
    return idle(slot, "empty", NEVER if due is None else due, at_once=is_behind)
