"""Decides which worker owns which slots: one pure function of topics, workers and the previous assignment.

Slots are held as runs, so that 2**20 of them cost as much as a few thousand runs. Nothing here knows how
workers find each other or how an assignment is stored. It needs only the standard library.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from django_rmq.core.coordination.quota_rounding import round_quotas
from django_rmq.core.coordination.slot_layout import Piece, lay_out


class TopicSlots(NamedTuple):
    """The properties of a topic that matter for the assignment."""

    name: str
    slots: int
    serial: bool = True
    """False: all workers that serve the topic share all of its slots, and none is assigned."""


class WorkerCapacity(NamedTuple):
    """The properties of a worker that matter for the assignment."""

    worker: str
    threads: int
    topics: frozenset[str]
    full: frozenset[str] = frozenset()
    """Those of the topics for which it has had no room for long, so that others should own the slots."""


class SlotRun(NamedTuple):
    """Slots ``start`` to ``stop - 1`` of a topic, owned by ``worker``."""

    start: int
    stop: int
    worker: str


Assignment = dict[str, tuple[SlotRun, ...]]
"""Serial topic -> its runs in order. Together they cover all of its slots, and neighbours have different owners."""


def assign(
    topics: Iterable[TopicSlots],
    workers: Iterable[WorkerCapacity],
    previous: Mapping[str, Sequence[SlotRun]],
) -> Assignment:
    """Return the new assignment. Topics that no worker serves, and those that are not serial, are left out.

    ``previous`` may be anything: runs of workers that are gone, beyond the slots, or overlapping (then the
    one that begins first counts). The order of the arguments' items does not matter.

    A topic goes to the workers that are not full for it; if all of them are, to all that serve it.

    **Balance.** The quota of worker w in topic t is ``slots(t) * threads(w) / sum of threads that serve t``.
    Of every topic it serves a worker owns its quota rounded down or up, and over all topics the sum of its
    quotas rounded down or up. Both always hold: a matrix of quotas can be rounded so that every entry and
    every row and column sum is a neighbour of its exact value, because such a rounding is a flow with
    integral bounds.

    **Movement.** A slot moves if its new owner differs from its previous one. No assignment that is balanced
    as above moves fewer slots. *Proof.* Let n(w, t) be the number an assignment gives to a worker and h(w, t)
    the number the worker held before. At least ``max(0, n - h)`` slots of t move to w, in sum ``M(n)``.
    Laying out n (``lay_out``) moves exactly M(n): every worker keeps ``min(n, h)`` of its own, and only
    surplus or ownerless slots go to the workers that lack some. It remains to choose the balanced n with the
    smallest M. With f the quota rounded down, n is f or f + 1, and M(n) is a constant plus, for each cell
    rounded up, 1 where ``h <= f`` and 0 where ``h > f``. So the cheapest rounding is wanted: a flow of unit
    arcs with these costs, which ``round_quotas`` finds by cheapest paths. It starts without negative cycles
    and creates none, so the flow has minimal cost. ∎ In particular nothing moves if the previous assignment
    is balanced (its M is 0, and no other n has an M of 0). With one topic and equal threads, a leave moves
    only the leaver's slots, and a join only the slots that the joiner gets.

    Raises ``ValueError`` for a worker or topic named twice, and for fewer than one thread or slot.
    """
    crew = sorted(workers)
    wanted = sorted(topics)
    _check(wanted, crew)
    serial = [topic for topic in wanted if topic.serial]
    serving = {topic.name: _serving(topic.name, crew) for topic in serial}
    served = [topic for topic in serial if serving[topic.name]]
    index = {one.worker: i for i, one in enumerate(crew)}

    kept = [
        _still_valid(topic, previous.get(topic.name, ()), index, set(serving[topic.name])) for topic in served
    ]
    held = [_count(runs) for runs in kept]
    shares = round_quotas(
        [topic.slots for topic in served],
        [one.threads for one in crew],
        [serving[topic.name] for topic in served],
        held,
    )
    return {
        topic.name: tuple(
            SlotRun(start, stop, crew[owner].worker)
            for start, stop, owner in lay_out(topic.slots, runs, had, share)
        )
        for topic, runs, had, share in zip(served, kept, held, shares, strict=True)
    }


def _serving(topic: str, crew: Sequence[WorkerCapacity]) -> list[int]:
    """Return the indexes of the workers that should own slots of a topic."""
    serving = [i for i, one in enumerate(crew) if topic in one.topics]
    return [i for i in serving if topic not in crew[i].full] or serving


def moved(previous: Sequence[SlotRun], now: Sequence[SlotRun]) -> int:
    """Return how many slots of a topic have another owner ``now``, or had none before."""
    same = sum(stop - start for start, stop, owner, before in _overlay(previous, now) if owner == before)
    return sum(run.stop - run.start for run in now) - same


def _overlay(previous: Sequence[SlotRun], now: Sequence[SlotRun]) -> Iterable[tuple[int, int, str, str]]:
    """Yield (start, stop, owner now, owner before) for slots that have both."""
    i = 0
    for run in now:
        while i < len(previous) and previous[i].stop <= run.start:
            i += 1
        j = i
        while j < len(previous) and previous[j].start < run.stop:
            before = previous[j]
            yield max(run.start, before.start), min(run.stop, before.stop), run.worker, before.worker
            j += 1


def _check(topics: Sequence[TopicSlots], crew: Sequence[WorkerCapacity]) -> None:
    for names in (Counter(topic.name for topic in topics), Counter(one.worker for one in crew)):
        for name, times in names.items():
            if times > 1:
                raise ValueError(f"{name} is listed {times} times")
    for topic in topics:
        if topic.slots < 1:
            raise ValueError(f"topic {topic.name} has {topic.slots} slots")
    for one in crew:
        if one.threads < 1:
            raise ValueError(f"worker {one.worker} has {one.threads} threads")


def _still_valid(
    topic: TopicSlots, runs: Sequence[SlotRun], index: Mapping[str, int], serving: set[int]
) -> list[Piece]:
    """Return the parts of the previous runs that can stay, in order and disjoint."""
    pieces: list[Piece] = []
    at = 0
    for start, stop, worker in sorted(runs):
        start, stop, owner = max(start, at), min(stop, topic.slots), index.get(worker, -1)
        if start < stop and owner in serving:
            pieces.append((start, stop, owner))
            at = stop
    return pieces


def _count(pieces: Iterable[Piece]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for start, stop, owner in pieces:
        counts[owner] += stop - start
    return counts


__all__ = ["Assignment", "SlotRun", "TopicSlots", "WorkerCapacity", "assign", "moved"]
