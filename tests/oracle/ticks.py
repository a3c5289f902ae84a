"""The ticks of schedules in their slots."""

from __future__ import annotations

import re

from django_rmq.exceptions import ServerRefused
from tests.oracle.refusing import check_not_moved
from tests.oracle.sending import place
from tests.oracle.slot import SENDING, Slot, on

_TICK = re.compile(rb"(\d+) (-?\d+)(.*)")


def _latest(slot: Slot, field: str) -> tuple[int, int, bool]:
    """Return generation and instant of the latest tick of a schedule in this slot, and whether it was found taken.

    An instant below 0: it was taken back.
    """
    match = _TICK.fullmatch(slot.control.get(field.encode(), b""))
    return (int(match[1]), int(match[2]), bool(match[3])) if match else (0, 0, False)


@on(*SENDING)
def put_tick(slot: Slot, field: str, generation: int, instant: int, member: bytes, envelope: bytes) -> str:
    if not slot.topic.takes_instants or not 999 < instant <= 1e14:
        raise ServerRefused("ERR instant is out of bounds")
    latest, last, taken = _latest(slot, field)
    if latest > generation:
        return "stale"
    if latest == generation and last >= instant and not taken:
        return "known"
    check_not_moved(slot)
    (sent,) = place(slot, [member], [instant], [envelope], "replaced")
    if sent.status == "refused":
        return "full"
    slot.control[field.encode()] = b"%d %d" % (generation, instant)
    return "stored"


@on("store", "prepare", "claim", "failures", "body", "stats", "control")
def retract(slot: Slot, field: str, generation: int, instant: int, member: bytes) -> str:
    latest, last, _ = _latest(slot, field)
    outcome = last if abs(last) == instant else 0
    if latest < generation:
        if slot.store.get(member, 0) > 999:
            del slot.store[member]
            slot.count("removed")
            slot.body.pop(member, None)
            if not slot.runs(member):
                slot.failures.pop(member, None)
            outcome = -instant
        taken = b" taken" if outcome > 0 else b""
        slot.control[field.encode()] = b"%d %d%b" % (generation, outcome, taken)
    if outcome == 0:
        return "unwritten"
    return "removed" if outcome < 0 else "written"
