"""The history of a topic: by the minute, and permanent counters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from django_rmq.core.model.keys import history_keys, times_key
from django_rmq.core.model.ledger import Ledger
from django_rmq.core.model.replies import LATENESS_BUCKETS, SAMPLED, Counts, Sample
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import ServerRefused, WrongType
from tests.oracle.inspect import audit_ledger, count
from tests.oracle.keyspace import Hash, Memory


def sample(memory: Memory, topic: Topic, slots: Sequence[int]) -> Sample:
    if len(slots) > 256:
        raise ServerRefused("ERR too many slots")
    found: list[tuple[Counts, Ledger]] = []
    for slot in slots:
        try:
            found.append((count(memory, topic, slot), audit_ledger(memory, topic, slot)))
        except WrongType:
            continue
    oldest = [counts.oldest_due_ms for counts, _ in found if counts.oldest_due_ms is not None]
    undrained = [counts.undrained_since_ms for counts, _ in found if counts.undrained_since_ms is not None]
    return Sample(
        len(found),
        sum(counts.store for counts, _ in found),
        sum(counts.due for counts, _ in found),
        sum(counts.prepare for counts, _ in found),
        sum(counts.retry for counts, _ in found),
        sum(counts.dead for counts, _ in found),
        min(oldest, default=None),
        {name: sum(ledger[name] for _, ledger in found) for name in SAMPLED},
        min(undrained, default=None),
    )


@contextmanager
def _opened(memory: Memory, topic: Topic) -> Iterator[tuple[Hash, Hash]]:
    """Open the minutes of a topic, and the counters that are not yet in one."""
    keys = history_keys(memory.prefix, topic.name)
    with memory.hash(keys.minutes) as minutes, memory.hash(keys.pending) as pending:
        yield minutes, pending


def _raise_by(counters: Hash, name: str, number: int) -> None:
    field = name.encode()
    counters[field] = b"%d" % (int(counters.get(field, b"0")) + number)


def take_minute(memory: Memory, topic: Topic, minute: int) -> bool:
    with _opened(memory, topic) as (_, pending):
        claimed = int(pending.get(b"claimed", b"-1"))
        if minute <= claimed <= minute + 60:
            return False
        pending[b"claimed"] = b"%d" % minute
        return True


def _buckets(counts: str) -> list[int]:
    return [int(number) for number in counts.split()][:LATENESS_BUCKETS]


def count_lateness(memory: Memory, topic: Topic, counts: str) -> int:
    with _opened(memory, topic) as (_, pending):
        for bucket, number in enumerate(_buckets(counts)):
            if number:
                _raise_by(pending, f"late{bucket}", number)
        return sum(number > 0 for number in _buckets(counts))


def count_times(memory: Memory, topic: str, late: str, late_ms: int, took: str, took_us: int) -> int:
    raised = 0
    with memory.hash(times_key(memory.prefix, topic)) as times:
        for name, counts, total in (("late", late, late_ms), ("took", took, took_us)):
            fields = [(f"{name}{bucket}", number) for bucket, number in enumerate(_buckets(counts))]
            raised += sum(number > 0 for _, number in fields)
            for field, number in (*fields, (name, total)):
                if number > 0:
                    _raise_by(times, field, number)
    return raised


def store_minute(memory: Memory, topic: Topic, minute: int, record: str, keep: int) -> str:
    with _opened(memory, topic) as (minutes, pending):
        if b"%d" % minute in minutes:
            return "present"
        first = int(pending.get(b"first", b"%d" % minute))
        first = minute - keep - 1000 if first > minute else first
        last = min(minute - keep, first + 999)
        for old in range(first, last + 1):
            minutes.pop(b"%d" % old, None)
        late = {bucket: pending.pop(b"late%d" % bucket, None) for bucket in range(LATENESS_BUCKETS)}
        shown = " ".join(f"{bucket}:{found.decode()}" for bucket, found in late.items() if found)
        minutes[b"%d" % minute] = f"{record[:500]}|{shown}".encode()
        pending[b"first"] = b"%d" % max(first, last + 1)
        return "kept"
