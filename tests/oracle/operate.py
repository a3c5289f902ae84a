"""The operations of people and programs: on messages, and on a slot as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from django_rmq.core.commands.operate import Deleted
from django_rmq.core.model.bounds import BATCH, MAX_PRIORITY, MAX_RETRIES_LIMIT
from django_rmq.core.model.keys import MAX_SLOTS, SlotKeys, trash_key
from django_rmq.core.model.replies import RECORDS, Death, OrphansReply, Restored
from django_rmq.exceptions import ServerRefused
from tests.oracle.accumulate import collects, dead_body, join, joined_death
from tests.oracle.ack import Copy, die, forget, note_end, supersede_resting
from tests.oracle.keyspace import Hash, bounded, floor, score_text
from tests.oracle.send import later_place, next_places
from tests.oracle.slot import (
    ENDING,
    LARGEST_WITH_RETRIES,
    OUTCOMES,
    SETS,
    Slot,
    check_batch,
    earliest,
    fraction,
    grouped,
    on,
    shortened_by,
)


@on(*ENDING, "claim")
def replay(slot: Slot, *rest: bytes) -> list[str]:
    pairs = grouped(rest, 2)
    check_batch(pairs)
    slot.check_not_moved()
    words: list[str] = []
    dues: list[float | None] = []
    for member, envelope in pairs:
        if slot.dead.pop(member, None) is None:
            words.append("not_found")
            continue
        raw = slot.deaths.pop(member, None)
        death = None if raw is None else Death.parse(raw)
        if is_outlived(slot, member, envelope, death):
            words.append("merged")
            slot.count("replay_merged")
            if not envelope and death:
                join(slot, member, death.envelope)
        else:
            words.append("replayed")
            slot.count("revived")
            again = score_again(slot, death)
            slot.store[member] = float(again)
            dues.append(0 if slot.topic.is_priority else again)
            if not envelope and death:
                envelope = death.envelope or b""
        if envelope:
            slot.body[member] = envelope
    slot.note_undrained()
    slot.wake(earliest(dues))
    return words


def is_outlived(slot: Slot, member: bytes, envelope: bytes, death: Death | None) -> bool:
    """Return whether a newer copy replaces a dead one that is replayed.

    A message in flight has a newer body than the dead copy, and keeps it unless a person has marked its end.
    """
    if slot.waits(member):
        return True
    is_older = not envelope and death is not None and death.envelope is not None
    is_older = is_older and not collects(death and death.envelope)
    return is_older and slot.runs(member) and not slot.flight(member).mark


def score_again(slot: Slot, death: Death | None) -> float:
    """Return now, or the priority that the message had, or the place behind all others in the line."""
    if slot.topic.is_fifo:
        return next_places(slot, 1)[0]
    if not slot.topic.is_priority:
        return slot.now_ms
    again = bounded(floor(float(death.score)) if death else 0, 0, MAX_PRIORITY)
    return slot.floor_priority + 1 if slot.is_retry(again) else again


def mark(slot: Slot, member: bytes, end: str, word: str) -> str:
    """Mark a delivery for its end, which only its holder or the time-out brings; return the state in which it was found."""
    waits = word in ("waiting", "resting")
    if member in slot.prepare:
        record = slot.flight(member)
        if end == "removed" and record.mark == "cancelled":
            end = "cancelled"
        outlived = "outlived" if waits and end == "buried" else record.outlived
        slot.inflight[member] = record._replace(mark=end, outlived=outlived).encode()
        slot.control[b"marked"] = b"%d" % record.receipt
    elif member not in slot.claim:
        # A message that Spark has claimed cannot be marked, and goes on.
        return word
    return "running_and_waiting" if waits else "running"


@on(*ENDING, "claim")
def bury(slot: Slot, why: bytes, *members: bytes) -> list[str]:
    check_batch(members)
    words: list[str] = []
    for member in members:
        word = "dead" if member in slot.dead else "not_found"
        if slot.waits(member):
            word = "waiting" if member in slot.store else "resting"
            # A message that Spark holds cannot be marked. If the newer copy has its own body, it stays:
            # otherwise it would be dead before the older one ends.
            if not (member in slot.claim and member in slot.body):
                bury_waiting(slot, member, why)
        words.append(mark(slot, member, "buried", word))
    slot.note_undrained()
    return words


def bury_waiting(slot: Slot, member: bytes, why: bytes) -> None:
    """Move a waiting or resting message to Dead."""
    score = slot.store.pop(member, None)
    if score is None:
        del slot.retry[member]
        failure = slot.failure_of(member)
        score = float(failure.score) if failure else 0.0
    else:
        supersede_resting(slot, member)
    die(slot, Copy.of(slot, member, score, slot.body.get(member)), "buried", why, 0)


class Keeping(NamedTuple):
    """What a deletion may keep: where, how many copies, and how many bytes of them."""

    slot: Slot
    act: str
    copies: int
    size: int

    def keep(self, rows: Sequence[tuple[str, bytes, float, bytes, bytes]]) -> tuple[int, int]:
        """Keep rows of state, member, score, failure and rest; return how many are kept, and their bytes."""
        kept: dict[bytes, bytes] = {}
        size = number = 0
        for state, member, score, failure, rest in rows:
            if number >= self.copies or size >= self.size:
                break
            head = f"{score_text(score)} {self.slot.now_us} {len(failure)}\n".encode()
            field, value = state[:1].encode() + member, head + failure + rest
            kept[field] = value
            number, size = number + 1, size + len(field) + len(value)
        with trash_of(self.slot, self.act) as trash:
            added = len(kept.keys() - trash.keys())
            trash.update(kept)
        return (added, size) if kept else (0, 0)

    def answer(self, found: Any, kept: tuple[int, int]) -> Any:
        return Deleted(found, *kept) if self.act else found


@contextmanager
def trash_of(slot: Slot, act: str) -> Iterator[Hash]:
    with slot.memory.hash(trash_key(slot.memory.prefix, slot.topic.name, slot.index, act)) as trash:
        yield trash


def copy_of(slot: Slot, state: str, member: bytes) -> tuple[str, bytes, float, bytes, bytes]:
    """Return what is kept of a copy: its state, member, score, failure, and envelope or death."""
    score = slot.members(state)[member]
    if state == "dead":
        return state, member, score, b"", slot.deaths.get(member, b"")
    # The failures of what runs are its own.
    failure = b"" if slot.runs(member) else slot.failures.get(member, b"")
    return state, member, score, failure, slot.body.get(member, b"")


def removed_copies(slot: Slot, which: str, members: Sequence[bytes]) -> Iterator[tuple[Any, ...]]:
    """Yield what ``remove`` will delete."""
    for member in members:
        lives = which != "dead" and (slot.waits(member) or slot.runs(member))
        if which != "dead":
            yield from (copy_of(slot, at, member) for at in ("store", "retry") if member in slot.members(at))
        if not lives and which in ("any", "dead") and member in slot.dead:
            yield copy_of(slot, "dead", member)


@on(*ENDING, "claim")
def remove(slot: Slot, act: str, copies: int, size: int, which: str, *members: bytes) -> Any:
    check_batch(members)
    keeping = Keeping(slot, act, copies, size)
    kept = keeping.keep(list(removed_copies(slot, which, members)))
    return keeping.answer(removed(slot, which, members), kept)


def removed(slot: Slot, which: str, members: Sequence[bytes]) -> list[str]:
    """Delete messages; return the state in which each was found."""
    if which == "cancel":
        return _cancel(slot, members)
    words: list[str] = []
    for member in members:
        word = "not_found"
        if which != "dead":
            word = mark(slot, member, "removed", remove_waiting(slot, member))
        if word == "not_found" and which != "live" and slot.dead.pop(member, None) is not None:
            slot.deaths.pop(member, None)
            slot.count("removed_dead")
            word = "dead"
        words.append(word)
    slot.note_undrained()
    return words


def remove_waiting(slot: Slot, member: bytes) -> str:
    """Delete the copy that waits or rests; return the state in which it was found."""
    waited = slot.store.pop(member, None) is not None
    rested = slot.retry.pop(member, None) is not None
    if not (waited or rested):
        return "not_found"
    slot.count("removed", waited + rested)
    if not slot.runs(member):
        note_end(slot, member, "removed", slot.failure_of(member), None)
    forget(slot, member)
    return "waiting" if waited else "resting"


def _cancel(slot: Slot, members: Sequence[bytes]) -> list[str]:
    words: list[str] = []
    for member in members:
        word = remove_waiting(slot, member)
        if member not in slot.claim:
            word = mark(slot, member, "cancelled", word)
        elif word == "not_found":
            word = "claimed"
        words.append(word)
    slot.note_undrained()
    if any(word.startswith("running") for word in words):
        slot.publish(-1 - MAX_SLOTS - slot.index)
    return words


@on("dead", "deaths", "stats")
def discard(slot: Slot, act: str, copies: int, size: int, *rest: Any) -> Any:
    pairs = grouped(rest, 2)
    check_batch(pairs)
    keeping = Keeping(slot, act, copies, size)
    seen = [member for score, member in pairs if slot.dead.get(member) == float(score)]
    kept = keeping.keep([copy_of(slot, "dead", member) for member in seen])
    words: list[str] = []
    for score, member in pairs:
        died = slot.dead.get(member)
        if died is None:
            words.append("not_found")
        elif died != float(score):
            words.append("changed")
        else:
            del slot.dead[member]
            slot.deaths.pop(member, None)
            slot.count("removed_dead")
            words.append("dead")
    return keeping.answer(words, kept)


@on("store", "retry", "prepare", "stats", "control", "claim")
def reschedule(slot: Slot, *rest: Any) -> list[str]:
    pairs = grouped(rest, 2)
    check_batch(pairs)
    slot.check_fresh([score for score, _ in pairs])
    words: list[str] = []
    dues: list[float | None] = []
    for score, member in pairs:
        waiting, due = slot.store.get(member), float(score)
        if waiting is not None and not slot.is_retry(waiting):
            slot.store[member] = due = later_place(slot, score) if slot.topic.is_fifo else due
            words.append("waiting")
        elif slot.waits(member) and slot.topic.is_priority:
            words.append("refused")
            continue
        elif slot.waits(member):
            rest_until(slot, member, score)
            words.append("resting")
        else:
            words.append("running" if slot.runs(member) else "not_found")
            continue
        slot.count("rescheduled")
        dues.append(0 if slot.topic.is_priority else due)
    slot.wake(earliest(dues))
    return words


def rest_until(slot: Slot, member: bytes, score: int) -> None:
    """Let a message that waits as a retry rest until then, so that its score still carries its retries."""
    waiting, resting = slot.store.pop(member, None), slot.retry.get(member)
    if waiting is not None and resting is not None:
        slot.count("dropped")
    q = floor(waiting) if waiting is not None else fraction(resting or 0.0)
    rest = min(score, LARGEST_WITH_RETRIES)
    slot.retry[member] = rest + bounded(q, 1, MAX_RETRIES_LIMIT) / 1024


@on("store", "retry", "dead", "prepare", "deaths", "failures", "body", "stats", "claim", "control", *OUTCOMES)
def purge(
    slot: Slot, act: str, copies: int, size: int, state: str, lowest: str, highest: str, limit: int
) -> Any:
    emptied = slot.members(state)
    found = [member for member, score in emptied.rows() if float(lowest) <= score <= float(highest)]
    gone = found[: min(limit, BATCH)]
    keeping = Keeping(slot, act, copies, size)
    kept = keeping.keep([copy_of(slot, state, member) for member in gone])
    for member in gone:
        del emptied[member]
        if state == "dead":
            slot.deaths.pop(member, None)
        else:
            if not (slot.waits(member) or slot.runs(member)):
                note_end(slot, member, "removed", slot.failure_of(member), None)
            forget(slot, member)
    slot.count("purged_dead" if state == "dead" else "purged", len(gone))
    if gone:
        slot.note_undrained()
    return keeping.answer(len(gone), kept)


@on(*ENDING, "claim")
def restore(slot: Slot, act: str, _cursor: str, _limit: int) -> Restored:
    slot.check_not_moved()
    back = merged = 0
    dues: list[float | None] = []
    with trash_of(slot, act) as trash:
        for state in ("store", "retry", "dead"):
            for field in [field for field in trash if field[:1] == state[:1].encode()]:
                head, _, value = trash.pop(field).partition(b"\n")
                score, deleted_us, length = head.split()
                failure, rest = value[: int(length)], value[int(length) :]
                if state == "dead":
                    is_back = restore_dead(slot, field[1:], float(score), rest)
                else:
                    is_back = restore_live(
                        slot, state, field[1:], float(score), int(deleted_us), failure, rest
                    )
                    if is_back:
                        dues.append(0 if slot.topic.is_priority and state == "store" else float(score))
                back, merged = back + is_back, merged + (not is_back)
    slot.note_undrained()
    slot.wake(earliest(dues))
    return Restored("0", back, merged)


def restore_dead(slot: Slot, member: bytes, score: float, rest: bytes) -> bool:
    """Bring a dead copy back, unless the message has died again since; return whether it is back."""
    slot.count("restored_dead")
    if member in slot.dead:
        slot.count("dead_merged")
        if member in slot.deaths:
            slot.deaths[member] = joined_death(slot.deaths[member], dead_body(rest))
        return False
    slot.dead[member] = score
    if rest:
        slot.deaths[member] = rest
    return True


def restore_live(
    slot: Slot, state: str, member: bytes, score: float, deleted_us: int, failure: bytes, rest: bytes
) -> bool:
    """Bring back a copy that waited or rested, unless there is a newer one; return whether it is back."""
    slot.count("restored")
    is_fresh = state == "store" and not slot.is_retry(score)
    if slot.waits(member) or runs_newer(slot, member, is_fresh, deleted_us, rest):
        slot.count("dropped")
        if slot.waits(member):
            join(slot, member, rest)
        return False
    slot.members(state)[member] = score
    if failure:
        slot.failures.setdefault(member, failure)
    if rest:
        slot.body[member] = rest
    return True


def runs_newer(slot: Slot, member: bytes, is_fresh: bool, deleted_us: int, rest: bytes) -> bool:
    """Return whether a copy that runs is newer than one that was deleted at ``deleted_us``, or may be."""
    if collects(rest):
        return False
    if member in slot.claim:
        return not is_fresh or bool(rest)
    if member not in slot.prepare:
        return False
    record = slot.flight(member)
    return not is_fresh or (not record.mark and record.receipt > deleted_us)


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
    if slot.topic.is_priority and max(16, slot.topic.max_retries) != slot.floor_priority and live:
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
