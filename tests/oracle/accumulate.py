"""Topics with ACCUMULATE: the bodies of merged sends are kept in one envelope."""

from __future__ import annotations

import re

from django_rmq.core.model.replies import Death
from tests.oracle.slot import Slot

_COLLECTS = re.compile(rb"0\d+ ")
_ENVELOPE = re.compile(rb"\d+ [^\n]*\n")


def collects(envelope: bytes | None) -> bool:
    """Return whether an envelope may hold several bodies."""
    return envelope is not None and _COLLECTS.match(envelope) is not None


def opened(envelope: bytes) -> tuple[int | None, int]:
    """Return where the head ends, and the number of bodies."""
    at = envelope.find(b"\n")
    if at < 0:
        return None, 0
    number = envelope[at + 1 : at + 10]
    return at + 1, int(number) if number.isdigit() else 0


def joined(older: bytes, newer: bytes) -> bytes:
    """Return the bodies of two copies, the older ones first, with the head of the newer one."""
    (behind, had), (at, more) = opened(older), opened(newer)
    if behind is None or at is None:
        return newer
    return newer[:at] + b"%09d " % (had + more) + older[behind + 10 :] + newer[at + 10 :]


def joined_if(older: bytes | None, newer: bytes | None) -> bytes | None:
    """Return the newer envelope, with the bodies of the older one if both collect."""
    if older is not None and newer is not None and collects(older) and collects(newer):
        return joined(older, newer)
    return newer


def dead_body(record: bytes | None) -> bytes | None:
    try:
        return Death.parse(record).envelope if record else None
    except ValueError:
        return None


def joined_death(record: bytes, older: bytes | None) -> bytes:
    """Return the record of a death with the bodies of an older copy before its own."""
    newer = dead_body(record)
    found = joined_if(older, newer)
    return record if newer is None or found is None else record[: len(record) - len(newer)] + found


def join(slot: Slot, member: bytes, older: bytes | None) -> None:
    """Put the bodies of an older copy before those of the copy that waits."""
    found = joined_if(older, slot.body.get(member))
    if found is not None:
        slot.body[member] = found


def as_collecting(envelope: bytes) -> bytes:
    """Return an envelope as one that collects; a sender with other settings has written it otherwise."""
    if collects(envelope) or not _ENVELOPE.match(envelope):
        return envelope
    head, newline, body = envelope.partition(b"\n")
    return b"0" + head + newline + b"%09d %d:" % (1, len(body)) + body


def collect(slot: Slot, had: bytes | None, envelope: bytes) -> tuple[bytes | None, bool]:
    """Return the envelope of a send with the bodies that its message had, and whether it is full.

    None: there is no room for another body, so it is full, too.
    """
    envelope = as_collecting(envelope)
    if had is not None:
        envelope = joined(as_collecting(had), envelope)
    _, number = opened(envelope)
    most = slot.topic.accumulate or 0
    if had is not None and (number > most or len(envelope) > slot.topic.max_body):
        return None, True
    return envelope, number >= most
