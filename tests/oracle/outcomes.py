"""What became of messages, on topics with OUTCOME_RETENTION. ``Slot.write_outcomes`` keeps it, at the end of a transition."""

from __future__ import annotations

import math

from django_rmq.core.model.replies import MOST, FailureRecord, digest, error_class
from tests.oracle.slot import InFlight, Slot


def note_outcome(
    slot: Slot, member: bytes, state: str, reason: str, attempts: int, error: bytes, flight: InFlight | None
) -> None:
    """Note how a message ended. ``flight``: the delivery in which it did; None: it ended without one."""
    if slot.topic.outcome_retention_ms:
        slot.noted[digest(member)] = _record(slot, state, reason, attempts, error, flight)


def _record(
    slot: Slot, state: str, reason: str, attempts: int, error: bytes, flight: InFlight | None
) -> bytes:
    delivered_ms = flight.receipt // 1000 if flight else 0
    worker = slot.control.get(b"owner", b"") if flight and flight.receipt else b""
    head = f"{state} {reason} {attempts} {delivered_ms} {slot.now_ms} {error_class(error.decode(errors='replace'))}\n"
    return head.encode() + worker


def note_delivery(slot: Slot, receipt: int, digests: bytes) -> None:
    """Note once how all messages of a delivery ended. ``digests``: 12 bytes for each of them."""
    retention_ms = slot.topic.outcome_retention_ms
    if not retention_ms:
        return
    texts, size = slot.delivery_outcomes, len(digests) // 12
    noted = size + max([_number(text) for text in texts], default=0)
    later = [at + 1 for at in (*texts.values(), *slot.outcome_times.values())]
    record = _record(slot, "done", "-", 1, b"", InFlight(receipt, 0.0))
    texts[b"%d %d\n" % (noted, size) + digests + record] = max([float(slot.now_ms), *later])
    for text, at in texts.rows()[:3]:
        if at <= slot.now_ms - retention_ms or noted - _number(text) >= MOST:
            del texts[text]


def _number(text: bytes) -> int:
    return int(text.split(b" ")[0])


def find_outcome(slot: Slot, found: bytes) -> bytes | None:
    """Return the last note of the message with the digest ``found``, unless it is too old."""
    retention_ms = slot.topic.outcome_retention_ms
    if not retention_ms:
        return None
    oldest, outcome = float(slot.now_ms - retention_ms), None
    if slot.outcome_times.get(found, -math.inf) > oldest:
        oldest, outcome = slot.outcome_times[found], slot.outcomes[found]
    for text, at in slot.delivery_outcomes.rows():
        head, _, rest = text.partition(b"\n")
        end = 12 * int(head.split()[1])
        parts = [rest[start : start + 12] for start in range(0, end, 12)]
        if at > oldest and bytes.fromhex(found.decode()) in parts:
            outcome = rest[end:]
    return outcome


def note_end(
    slot: Slot,
    member: bytes,
    state: str,
    failure: FailureRecord | None,
    flight: InFlight | None,
    error: bytes = b"",
) -> None:
    """Note the end of a message that did not die: its attempts are its failures, and the delivery in which it ended."""
    attempts = (failure.times if failure else 0) + (flight is not None)
    note_outcome(slot, member, state, "-", attempts, error, flight)
