"""The contents of a claim, and how they go back: the rules shared by several transitions of claims."""

from __future__ import annotations

import re

from django_rmq.core.memory.collecting import join
from django_rmq.core.memory.failing import Copy, give_back, go_on
from django_rmq.core.memory.owning import own_retries
from django_rmq.core.memory.scores import budget
from django_rmq.core.memory.slot import Slot
from django_rmq.core.memory.waking import earliest

TOMBSTONE_MS = 30 * 86_400_000
"""How long a slot remembers how a consumer's newest claim ended, in ms."""

CONSUMERS = 1_000
"""The maximum number of Spark consumers that one slot remembers."""

UPKEEP = 400
"""The maximum number of deliveries that one prepare times out, and of rested messages that it returns; also
of messages of a lost claim."""

_CLAIM = re.compile(rb"(\d+) ([a-z]+) (\d+)")


def newest_claim(slot: Slot, consumer: str) -> tuple[int, str]:
    """Return number and state of the consumer's newest claim."""
    match = _CLAIM.fullmatch(slot.claims.get(consumer.encode(), b""))
    return (int(match[1]), match[2].decode()) if match else (0, "none")


def note_claim(slot: Slot, consumer: str, number: int, state: str) -> None:
    """Record the state of a claim, which is the consumer's newest."""
    slot.claims[consumer.encode()] = f"{number} {state} {slot.now_ms}".encode()


def close_claim(slot: Slot, consumer: str) -> int:
    """End the claim if it no longer holds anything; return how many messages are left."""
    if not slot.claim:
        slot.claimants.pop(consumer.encode(), None)
    return len(slot.claim)


def return_claimed(slot: Slot, limit: int, *, spent: bool) -> float | None:
    """Return up to ``limit`` messages of a claim to the slot; return when one can be taken again.

    ``spent``: as after a time-out, and at most 400. Otherwise as if never claimed.
    """
    dues: list[float | None] = []
    for index, (member, score) in enumerate(slot.claim.rows()[: min(limit, UPKEEP) if spent else limit]):
        del slot.claim[member]
        kept = slot.claim_body.pop(member, None)
        is_outdated = member in slot.body
        if kept is not None and not is_outdated:
            slot.body[member] = kept
        slot.count("claim_returned")
        if spent:
            copy = Copy.of(slot, member, score, kept)._replace(is_outdated=is_outdated)
            left = budget(slot, score, member, own_retries(slot, kept))
            dues.append(go_on(slot, copy, left, "timed_out", b"", None, 2 * index + 1))
        else:
            if is_outdated:
                join(slot, member, kept)
            dues.append(give_back(slot, member, score))
    return earliest(dues)


def forget_claimed(slot: Slot, limit: int) -> None:
    """Forget up to ``limit`` acknowledged messages, or all if nothing needs tidying up."""
    gone = list(slot.claim) if not slot.failures else [member for member, _ in slot.claim.rows()[:limit]]
    for member in gone:
        del slot.claim[member]
        slot.claim_body.pop(member, None)
        if slot.topic.is_fifo or not slot.waits(member):
            slot.failures.pop(member, None)
    slot.count("acked", len(gone))


def expire_claim(slot: Slot, limit: int) -> tuple[int, float | None]:
    """Process a claim whose lease has ended: it is lost, unless it was acknowledged before."""
    over = [name for name, ends in slot.claimants.rows()[:1] if ends <= slot.now_ms]
    if limit < 1 or not over:
        return 0, None
    consumer = over[0].decode()
    number, state = newest_claim(slot, consumer)
    held, due = len(slot.claim), None
    if state == "acked":
        forget_claimed(slot, limit)
    else:
        if state not in ("lost", "returned"):
            note_claim(slot, consumer, number, "lost")
        due = return_claimed(slot, limit, spent=state != "returned")
    return held - close_claim(slot, consumer), due


def make_room_for(slot: Slot, consumer: str) -> bool:
    """If ``consumer`` is new, forget what ended thirty days ago; return whether there is room for it."""
    if consumer.encode() in slot.claims:
        return True
    for other, record in list(slot.claims.items()):
        match = _CLAIM.fullmatch(record)
        since = int(match[3]) if match else 0
        if since < slot.now_ms - TOMBSTONE_MS and other not in slot.claimants:
            del slot.claims[other]
    return len(slot.claims) < CONSUMERS
