"""The second phase: how deliveries end. ``core.commands.ack`` documents arguments and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django_rmq.core.model.replies import digest
from tests.oracle.failing import end_failed, end_marked, forget_ended, land, release_one
from tests.oracle.numbers import bounded
from tests.oracle.outcomes import note_delivery, note_end
from tests.oracle.owning import stamp
from tests.oracle.refusing import check_batch
from tests.oracle.slot import ENDING, InFlight, Slot, grouped, on
from tests.oracle.waking import earliest, note_undrained, wake_at_gate

LONGEST_DELAY_MS = 1 << 42
"""139 years: now plus this stays below ``LARGEST_WITH_RETRIES``."""


def _words(slot: Slot, held: Sequence[bool], told: Sequence[bool] = ()) -> list[str]:
    """Count and name what is stale. ``told``: which deliveries are cancelled, if their holder is to know."""
    slot.count("stale", held.count(False))
    words = ["ok" if holds else "stale" for holds in held]
    return (
        ["cancelled" if tells else word for word, tells in zip(words, told, strict=True)] if told else words
    )


@on(*ENDING)
def commit(slot: Slot, receipt: int, *members: bytes) -> list[str]:
    check_batch(members)
    words = _words(slot, [slot.is_receipt(receipt, member) for member in members])
    ending = dict.fromkeys(member for member, word in zip(members, words, strict=True) if word == "ok")
    for i, member in enumerate(ending):
        # What succeeds although it was cancelled has succeeded.
        if slot.flight(member).mark == "cancelled" or not end_marked(slot, member, i):
            flight, failure = slot.flight(member), slot.failure_of(member)
            note_end(slot, member, "done", failure, flight, failure.error if failure else b"")
            del slot.inflight[member]
            slot.count("committed", int(slot.prepare.pop(member, None) is not None))
            land(slot, member)
            forget_ended(slot, member)
    wake_at_gate(slot, None, ended=bool(ending))
    return words


@on(
    "store",
    "prepare",
    "inflight",
    "failures",
    "stats",
    "control",
    "prepare_body",
    "outcomes",
    "outcome_times",
    "delivery_outcomes",
)
def commit_delivery(slot: Slot, receipt: int, size: int, digests: bytes = b"") -> list[str]:
    is_last = slot.control.get(b"deliveries") == b"%d" % receipt
    is_marked = slot.control.get(b"marked") == b"%d" % receipt
    if not is_last or is_marked or len(slot.prepare) != size:
        return []
    if digests and len(digests) == 12 * size:
        note_delivery(slot, receipt, digests)
    else:
        for member in slot.prepare:
            note_end(slot, member, "done", None, InFlight(receipt, 0.0))
    slot.prepare.clear()
    slot.inflight.clear()
    slot.count("committed", size)
    wake_at_gate(slot, None, ended=True)
    return ["ok"] * size


@on(*ENDING)
def rollback(slot: Slot, receipt: int, *rest: Any) -> list[str]:
    failures = grouped(rest, 4)
    check_batch(failures)
    held: list[bool] = []
    told: list[bool] = []
    dues: list[float | None] = []
    for i, (member, kind, delay_ms, error) in enumerate(failures):
        held.append(slot.holds(receipt, member))
        told.append(held[-1] and slot.flight(member).mark == "cancelled")
        if held[-1]:
            left = bounded(slot.prepare[member] % 1000, 0, slot.max_retries)
            rest_ms = None if delay_ms == "" else bounded(delay_ms, 0, LONGEST_DELAY_MS)
            dues.append(end_failed(slot, member, left, kind, error, rest_ms, i))
    if any(held):
        note_undrained(slot)
    wake_at_gate(slot, earliest(dues), ended=any(held))
    return _words(slot, held, told)


@on(*ENDING)
def release(slot: Slot, receipt: int, *members: bytes) -> list[str]:
    check_batch(members)
    held: list[bool] = []
    dues: list[float | None] = []
    for i, member in enumerate(members):
        held.append(slot.holds(receipt, member))
        if held[-1] and not end_marked(slot, member, i):
            dues.append(release_one(slot, member))
    if any(held):
        note_undrained(slot)
    wake_at_gate(slot, earliest(dues), ended=any(held))
    return _words(slot, held)


@on("prepare", "inflight", "failures", "stats", "control", "outcomes", "outcome_times", "delivery_outcomes")
def progress(slot: Slot, receipt: int, member: bytes, thousandths: int, said: bytes) -> str:
    (word,) = _words(slot, [slot.holds(receipt, member)])
    if word == "ok":
        slot.noted[digest(member)] = f"running {receipt} {thousandths} {slot.now_ms}\n".encode() + said
    return word


@on("prepare", "inflight", "stats", "control")
def extend(slot: Slot, receipt: int, *members: bytes) -> list[str]:
    check_batch(members)
    held = [slot.holds(receipt, member) for member in members]
    for member, holds in zip(members, held, strict=True):
        if holds:
            slot.prepare[member] = stamp(slot, slot.flight(member).timeout, int(slot.prepare[member] % 1000))
    told = [
        holds and slot.flight(member).mark == "cancelled" for member, holds in zip(members, held, strict=True)
    ]
    return _words(slot, held, told)
