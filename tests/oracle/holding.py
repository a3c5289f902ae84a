"""The contents of a claim, and how they go back: the rules shared by several transitions of claims."""

from __future__ import annotations

import re

from tests.oracle.bounds import CLAIM_STEP_BYTES
from tests.oracle.choosing import fit
from tests.oracle.collecting import join
from tests.oracle.failing import Copy, die, give_back, go_on
from tests.oracle.owning import own_retries
from tests.oracle.scores import budget
from tests.oracle.slot import Slot
from tests.oracle.waking import earliest

TOMBSTONE_MS = 30 * 86_400_000
"""How long a slot remembers how a consumer's newest claim ended, in ms."""

CONSUMERS = 1_000
"""The maximum number of Spark consumers that one slot remembers."""

UPKEEP = 400
"""The maximum number of deliveries that one prepare times out, and of rested messages that it returns; also
of messages of a lost claim."""

_CLAIM = re.compile(rb"(\d+) ([a-z]+) (\d+)")
_NOTE = re.compile(rb"([a-z_]+)\n(.*)", re.DOTALL)


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


def claim_shuts(slot: Slot) -> bool:
    """Return whether a claim keeps the slot to itself: on topics without an order not one that comes back."""
    if slot.topic.is_fifo:
        return bool(slot.claimants)
    return any(newest_claim(slot, name.decode())[1] not in ("lost", "returned") for name in slot.claimants)


def unclaim(slot: Slot, member: bytes) -> tuple[bytes | None, bool]:
    """Take a message out of the claim; return its body, and whether a newer one waits."""
    del slot.claim[member]
    kept, is_outdated = slot.claim_body.pop(member, None), member in slot.body
    if kept is not None and not is_outdated:
        slot.body[member] = kept
    slot.count("claim_returned")
    return kept, is_outdated


def fail_one(slot: Slot, member: bytes, score: float, index: int) -> float | None:
    """Let a claimed message fail as its query has noted, or as after a time-out; return when it can be taken again."""
    kept, is_outdated = unclaim(slot, member)
    copy = Copy.of(slot, member, score, kept)._replace(is_outdated=is_outdated)
    note = _NOTE.fullmatch(slot.claim_failed.pop(member, b""))
    what, error = (note[1].decode(), note[2]) if note else ("timed_out", b"")
    if what == "rejected":
        die(slot, copy, what, error, 1)
        return None
    left = budget(slot, score, member, own_retries(slot, kept))
    return go_on(slot, copy, left, what, error, None, 2 * index + 1)


def _first_claimed(slot: Slot, limit: int) -> list[tuple[bytes, float]]:
    """Return the first messages of the claim: at most ``limit``, and no more bytes than a step moves."""
    rows = slot.claim.rows()
    return rows[: fit(rows, slot.claim_body, limit, CLAIM_STEP_BYTES)]


def return_claimed(slot: Slot, limit: int, *, spent: bool) -> float | None:
    """Return up to ``limit`` messages of a claim to the slot; return when one can be taken again.

    ``spent``: as after a time-out, and at most 400. Otherwise as if never claimed. What the query has failed
    fails in both cases.
    """
    dues: list[float | None] = []
    most = min(limit, UPKEEP) if spent or slot.claim_failed else limit
    for index, (member, score) in enumerate(_first_claimed(slot, most)):
        if spent or member in slot.claim_failed:
            dues.append(fail_one(slot, member, score, index))
        else:
            kept, is_outdated = unclaim(slot, member)
            if is_outdated:
                join(slot, member, kept)
            dues.append(give_back(slot, member, score))
    return earliest(dues)


def forget_claimed(slot: Slot, limit: int) -> float | None:
    """Forget up to ``limit`` acknowledged messages, or all if nothing needs tidying up.

    What the query has failed is not forgotten. Returns when one of that can be taken again.
    """
    rows = slot.claim.rows()
    if slot.failures or slot.claim_failed:
        rows = _first_claimed(slot, min(limit, UPKEEP) if slot.claim_failed else limit)
    failed = {member for member, _ in rows if member in slot.claim_failed}
    dues = [
        fail_one(slot, member, score, index) for index, (member, score) in enumerate(rows) if member in failed
    ]
    gone = [member for member, _ in rows if member not in failed]
    for member in gone:
        del slot.claim[member]
        slot.claim_body.pop(member, None)
        if slot.topic.is_fifo or not slot.waits(member):
            slot.failures.pop(member, None)
    slot.count("acked", len(gone))
    return earliest(dues)


def end_unleased_claim(slot: Slot, limit: int) -> tuple[int, float | None]:
    """Process a claim whose lease has ended: it is lost, unless it was acknowledged before."""
    over = [name for name, ends in slot.claimants.rows()[:1] if ends <= slot.now_ms]
    if limit < 1 or not over:
        return 0, None
    consumer = over[0].decode()
    number, state = newest_claim(slot, consumer)
    held = len(slot.claim)
    if state == "acked":
        due = forget_claimed(slot, limit)
    else:
        # Nobody has read what was not sealed.
        state = {"open": "returned", "sealed": "lost"}.get(state, state)
        note_claim(slot, consumer, number, state)
        due = return_claimed(slot, limit, spent=state != "returned")
    return held - close_claim(slot, consumer), due


def make_room_for(slot: Slot, consumer: str) -> None:
    """If ``consumer`` is new, forget what ended thirty days ago, and if too many are left, what ended first."""
    if consumer.encode() in slot.claims:
        return
    ended = []
    for other, record in list(slot.claims.items()):
        match = _CLAIM.fullmatch(record)
        since = int(match[3]) if match else 0
        if other in slot.claimants:
            continue
        if since < slot.now_ms - TOMBSTONE_MS:
            del slot.claims[other]
        else:
            ended.append((since, other))
    if len(slot.claims) >= CONSUMERS and ended:
        del slot.claims[min(ended)[1]]
