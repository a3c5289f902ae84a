"""The plan of an assignment (``AssignmentPlan``), which says which worker owns which slots since when, as coordinators store it.

Which worker gets which slots is decided by ``assignment``. The records by which workers know each other are in
``worker_records``. A plan is compact JSON:

    {"workers": [id, …], "times": [s, …], "topics": {name: [length, worker, time, length, worker, time, …]}}

The spans of a topic follow each other from slot 0, so only their lengths are written; ``worker`` and ``time`` are indexes. 2**20
slots of 50 workers take some 2 KB when fresh, and some 50 KB after hundreds of workers came and went. Where the plan is stored
is the subject of the coordinators.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from django_rmq.core.coordination import Holding, Owned, Worker
from django_rmq.core.coordination.assignment import Assignment, SlotRun, join_neighbours
from django_rmq.core.model.bounds import OTHER_FORM
from django_rmq.core.model.replies import Roster

MAX_SPANS = 20_000
"""The maximum number of spans of a topic, which limits the size of the text. Beyond it, neighbours of one
owner are merged and the earlier times forgotten."""


class Span(NamedTuple):
    """Slots ``start`` to ``stop - 1``, owned by ``worker`` since ``since`` (seconds since the epoch)."""

    start: int
    stop: int
    worker: str
    since: int


@dataclass(frozen=True, slots=True)
class AssignmentPlan:
    """Topic -> its spans in order, without gaps."""

    topics: dict[str, tuple[Span, ...]]

    def encode(self) -> str:
        """Return the plan as text, the same for equal plans."""
        workers = sorted({span.worker for spans in self.topics.values() for span in spans})
        times = sorted({span.since for spans in self.topics.values() for span in spans})
        worker_at = {worker: i for i, worker in enumerate(workers)}
        time_at = {time: i for i, time in enumerate(times)}
        topics = {
            name: [
                number
                for start, stop, worker, since in spans
                for number in (stop - start, worker_at[worker], time_at[since])
            ]
            for name, spans in sorted(self.topics.items())
        }
        return json.dumps({"workers": workers, "times": times, "topics": topics}, separators=(",", ":"))

    @classmethod
    def decode(cls, raw: bytes) -> AssignmentPlan:
        """Read the output of ``encode``. Raises ``ValueError`` for anything else."""
        try:
            plan = json.loads(raw)
            workers = [str(worker) for worker in plan["workers"]]
            times = [int(time) for time in plan["times"]]
            topics = {
                str(name): tuple(_spans(numbers, workers, times)) for name, numbers in plan["topics"].items()
            }
        except OTHER_FORM as error:
            raise ValueError(f"not a valid assignment: {error!r}") from error
        return cls(topics)

    @property
    def holdings(self) -> list[Holding]:
        """The owners and since when they own, by topic and slot."""
        return [Holding(name, *span) for name, spans in sorted(self.topics.items()) for span in spans]

    def runs(self) -> Assignment:
        """Return the owners, without times."""
        return {name: tuple(_runs(spans)) for name, spans in self.topics.items()}

    def renewed(self, assignment: Assignment, now: int) -> AssignmentPlan:
        """Return ``assignment`` with the times of this plan for slots whose owner stays, and ``now`` for the others."""
        topics = {}
        for name, runs in assignment.items():
            spans = tuple(_since(runs, self.topics.get(name, ()), now))
            topics[name] = spans if len(spans) <= MAX_SPANS else tuple(_merged(spans))
        return AssignmentPlan(topics)

    def owned_by(self, worker: Worker) -> Owned:
        """Return the slots of ``worker`` in the topics that it serves."""
        owned: Owned = {}
        for topic in worker.topics:
            mine = [span for span in self.topics.get(topic.name, ()) if span.worker == worker.id]
            ranges = tuple(range(run.start, run.stop) for run in _runs(mine))
            if ranges and topic.serial:
                owned[topic.name] = ranges
        return owned

    def flaw(self, workers: Mapping[str, Worker]) -> str:
        """Return why this cannot be the assignment of ``workers``; empty if it can."""
        serving: dict[str, dict[str, int]] = {}
        for worker in workers.values():
            for topic in worker.topics:
                if topic.serial:
                    serving.setdefault(topic.name, {})[worker.id] = topic.slots
        for name in serving:
            if name not in self.topics:
                return f"topic {name} is not assigned"
        for name, spans in self.topics.items():
            live_workers = serving.get(name, {})
            for owner in {span.worker for span in spans}:
                if owner not in live_workers:
                    return f"slots of topic {name} belong to {owner}, which does not serve it"
            slots = spans[-1].stop if spans else 0
            if live_workers and slots not in live_workers.values():
                return f"topic {name} is assigned up to slot {slots} only"
        return ""


def _spans(numbers: list[int], workers: list[str], times: list[int]) -> Iterator[Span]:
    at = 0
    for length, worker, since in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True):
        if not (type(length) is type(worker) is type(since) is int and length > 0 <= min(worker, since)):
            raise ValueError(f"not a valid span: {length!r}, {worker!r}, {since!r}")
        yield Span(at, at + length, workers[worker], times[since])
        at += length


def _runs(spans: Iterable[Span]) -> list[SlotRun]:
    return [SlotRun(*run) for run in join_neighbours(span[:3] for span in spans)]


def _since(runs: Iterable[SlotRun], before: tuple[Span, ...], now: int) -> Iterator[Span]:
    """Split runs if a part of them had another owner before."""
    i = 0
    for start, stop, worker in runs:
        while i < len(before) and before[i].stop <= start:
            i += 1
        j, fresh = i, start
        while j < len(before) and before[j].start < stop:
            old = before[j]
            if old.worker == worker:
                begin, end = max(start, old.start), min(stop, old.stop)
                if fresh < begin:
                    yield Span(fresh, begin, worker, now)
                yield Span(begin, end, worker, old.since)
                fresh = end
            j += 1
        if fresh < stop:
            yield Span(fresh, stop, worker, now)


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Merge neighbours of one owner into one span; it has owned all of it since the latest of their times."""
    merged: list[Span] = []
    for start, stop, worker, since in spans:
        if merged and merged[-1].worker == worker:
            start, _, _, before = merged.pop()
            since = max(before, since)
        merged.append(Span(start, stop, worker, since))
    return merged


def plan_of_roster(roster: Roster) -> AssignmentPlan:
    """Return the assignment in a roster; an empty one if there is none, or another program wrote it."""
    return _decoded(roster.plan) if roster.plan else AssignmentPlan({})


@lru_cache(maxsize=1)
def _decoded(plan: bytes) -> AssignmentPlan:
    """Return what a plan says. It rarely changes, and those who show it read it every few seconds."""
    try:
        return AssignmentPlan.decode(plan)
    except ValueError:
        # The first worker computes the assignment again.
        return AssignmentPlan({})
