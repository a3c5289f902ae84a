"""What became of messages, on topics with OUTCOME_RETENTION. ``Slot.write_outcomes`` keeps it, at the end of a transition."""

from __future__ import annotations

from django_rmq.core.model.replies import FailureRecord, digest, error_class
from tests.oracle.slot import InFlight, Slot


def note_outcome(
    slot: Slot, member: bytes, state: str, reason: str, attempts: int, error: bytes, flight: InFlight | None
) -> None:
    """Note how a message ended. ``flight``: the delivery in which it did; None: it ended without one."""
    if slot.topic.outcome_retention_ms:
        delivered_ms = flight.receipt // 1000 if flight else 0
        worker = slot.control.get(b"owner", b"") if flight and flight.receipt else b""
        head = f"{state} {reason} {attempts} {delivered_ms} {slot.now_ms} {error_class(error.decode(errors='replace'))}\n"
        slot.noted[digest(member)] = head.encode() + worker


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
