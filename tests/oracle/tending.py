"""Operations on a whole slot: pause, configure, repair, forget."""

from __future__ import annotations

from django_rmq.core.model.keys import SlotKeys
from django_rmq.core.model.replies import RECORDS, OrphansReply
from django_rmq.exceptions import ServerRefused
from tests.oracle.owning import shortened_by
from tests.oracle.scores import floor_priority
from tests.oracle.slot import SETS, Slot, on

_HOMES = {
    "inflight": ("prepare",),
    "deaths": ("dead",),
    "body": ("store", "retry"),
    "failures": ("store", "retry", "prepare", "claim"),
    "claim_body": ("claim",),
    "prepare_body": ("prepare",),
    "claim_failed": ("claim",),
}


@on("control")
def pause(slot: Slot, _: int, paused: int) -> str:
    if paused == (b"paused" in slot.control):
        return "unchanged"
    if paused:
        slot.control[b"paused"] = b"1"
        slot.publish(-1 - slot.index)
        return "paused"
    del slot.control[b"paused"]
    slot.control.pop(b"sleeping_until", None)
    slot.publish()
    return "resumed"


RESTAMPED = 5_000
"""How many deliveries `configure` looks at, those first that time out first."""


@on("store", "prepare", "inflight", "retry", "control", "claim")
def configure(slot: Slot, apply: int) -> str:
    live = slot.store or slot.prepare or slot.retry or slot.claim
    if slot.topic.is_priority and max(16, slot.topic.max_retries) != floor_priority(slot) and live:
        return "refused"
    if apply:
        former = slot.timeout
        slot.configure()
        for member, score in slot.prepare.rows()[:RESTAMPED]:
            own = slot.flight(member).timeout
            later = shortened_by(own, former) - shortened_by(own, slot.timeout)
            slot.prepare[member] = score + later * 1000
    return "ok"


@on("stats")
def adopt(slot: Slot, drift: int, foreign: int) -> str:
    if drift < 1:
        raise ServerRefused(f"drift is out of bounds: {drift}")
    if int(slot.stats.get(b"foreign", b"0")) != foreign:
        return "changed"
    slot.count("foreign", drift)
    return "ok"


@on(*SlotKeys._fields)
def retire(slot: Slot) -> str:
    holding = ("store", "prepare", "retry", "dead", "claimants", "leaving", "claim", "inserting")
    if any(getattr(slot, name) for name in holding):
        return "holds"
    for name in set(SlotKeys._fields) - SETS:
        slot.records(name).clear()
    slot.outcome_times.clear()
    slot.delivery_outcomes.clear()
    return "retired"


@on("store", "prepare", "retry", "dead", "claim", *RECORDS)
def find_orphans(slot: Slot, kind: str, cursor: str, repair: int) -> OrphansReply:
    homes = [slot.members(home) for home in _HOMES[kind]]
    records = slot.records(kind)
    scanned = len(records)
    found = [member for member in records if not any(member in home for home in homes)]
    for member in found if repair else ():
        del records[member]
    return OrphansReply("0", scanned, found)
