"""What one change of one message breaks by itself."""

from tests.proof.slot_model.states import FRESH, Member

LIVE = {"stored": 1, "foreign": 1, "revived": 1, "committed": -1, "removed": -1, "dropped": -1, "died": -1}
DEAD = {"died": 1, "dead_merged": -1, "revived": -1, "replay_merged": -1, "removed_dead": -1}
DELIVERED = {
    "prepared": 1,
    "committed": -1,
    "failed": -1,
    "expired": -1,
    "released": -1,
    "rejected": -1,
    "ended_marked": -1,
}
SENT = {"sent": 1, "stored": -1, "merged": -1, "replaced": -1}


def misplaced(m: Member) -> str | None:
    if m.mourned and not m.dead:
        return "GRAVE"
    if m.needed and not (m.store or m.retry or m.record):
        return "LOSS"
    return "LATE" if m.store > FRESH + m.early else None


def unbalanced(before: Member, after: Member, counters: list[str]) -> bool:
    """Whether one transition's counters disagree with what it moved. Where none ever does, the ledger always balances."""

    def live(m: Member) -> int:
        return bool(m.store) + bool(m.retry) + bool(m.record)

    def total(equation: dict[str, int]) -> int:
        return sum(equation.get(name, 0) for name in counters)

    return (
        total(LIVE) != live(after) - live(before)
        or total(DEAD) != after.dead - before.dead
        or total(DELIVERED) != bool(after.record) - bool(before.record)
        or total(SENT) != 0
    )
