"""Long work over all slots of a topic, in small steps: what is done, what came of it, and how far it is.

No step takes more than some thousands of messages, so Redis serves everybody else between two of them. What comes
while the work goes on is left alone: a message that dies again is not replayed a second time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from django_rmq.core.redis.broker import Broker
from django_rmq.core.words.bounds import is_number, shown
from django_rmq.core.words.messages import Entry, Topic
from django_rmq.exceptions import InvalidRequest, RmqError, ServerTrouble
from django_rmq.operations.copies import from_entry
from django_rmq.operations.listing import Filter

STEP = 2_000
"""Messages that one round trip takes, at most."""

PER_SLOT = 250
"""Messages that one script takes: one that touches them all stays well below 15 ms."""

SLOTS_AT_ONCE = 64
"""Slots that are worked in turns."""

SLOTS_PER_TRIP = 1_000
"""Slots that are asked or told one small thing in one round trip."""

STEP_BYTES = 8_388_608
"""What one round trip reads, about."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a work is."""

    done: int
    """Messages (pause and resume: slots) that have been dealt with."""
    total: int
    """How many there were at the beginning; of a search: how many may match."""
    outcomes: dict[str, int]
    """Outcome → how many."""
    is_complete: bool = False
    """False at the end: it was stopped by its limits, or given up."""
    problems: tuple[str, ...] = ()
    """Slots that could not be worked, and why."""


class Run:
    """A work that goes on as far as somebody iterates over it; ``result`` brings it to its end."""

    def __init__(self, steps: Iterator[Progress]) -> None:
        self._steps = steps
        self.progress = Progress(0, 0, {})
        """How far it is."""

    def __iter__(self) -> Iterator[Progress]:
        for progress in self._steps:
            self.progress = progress
            yield progress

    def result(self) -> Progress:
        """Do what is left, and return how it ended."""
        for _ in self:
            pass
        return self.progress

    def close(self) -> None:
        """Give up; what has been done stays done, and is recorded."""
        close = getattr(self._steps, "close", None)
        if close is not None:
            close()


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop before the end, and how fast to go; None: not."""

    messages: int | None = None
    seconds: float | None = None
    rate: float | None = None
    """Messages per second."""

    def check(self) -> None:
        """Raise ``InvalidRequest`` for what is no limit."""
        for name in ("messages", "seconds", "rate"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and value > 0):
                raise InvalidRequest(f"{name} must be a number above 0, got {shown(value)}")


Tell = Callable[[Any, int, Sequence[bytes]], Any]
"""From a pipeline, a slot and members: the call that does something to them and answers a word for each."""


@dataclass(slots=True)
class _Slot:
    slot: int
    after: tuple[str, bytes] | None = None


def count(
    broker: Broker, topic: Topic, state: str, wanted: Filter, up_to: float, now_ms: int
) -> dict[int, int]:
    """Return slot → how many messages of a state have scores that ``wanted`` allows, up to ``up_to``."""
    low, high = wanted.scores(state, now_ms)
    slots: Sequence[int] = range(topic.slots) if wanted.slot is None else [wanted.slot]
    found = {}
    for first in range(0, len(slots), SLOTS_PER_TRIP):
        part = slots[first : first + SLOTS_PER_TRIP]
        pipeline = broker.pipeline()
        for slot in part:
            pipeline.between(topic, slot, state, low, min(high, up_to))
        for slot, answer in zip(part, pipeline.execute(), strict=True):
            if isinstance(answer, ServerTrouble):
                raise answer
            if isinstance(answer, RmqError) or answer:
                # A slot that cannot be counted cannot be worked either, and says why when it is tried.
                found[slot] = 1 if isinstance(answer, RmqError) else answer
    return found


def sweep(
    broker: Broker,
    topic: Topic,
    state: str,
    wanted: Filter,
    tell: Tell | None,
    *,
    limits: Limits,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Progress]:
    """Do something to all messages of a state that ``wanted`` means. ``tell`` None: only count them.

    Yields its progress after each step. Raises ``ServerTrouble``; what was done until then stays done.
    """
    now_ms = broker.now_ms()
    up_to = float(now_ms) if state == "dead" else float("inf")
    held = count(broker, topic, state, wanted, up_to, now_ms)
    total, done = sum(held.values()), 0
    outcomes: Counter[str] = Counter()
    problems: list[str] = []
    if tell is None and not wanted.search:
        yield Progress(total, total, {"matching": total}, True)
        return
    pace = _Pace(limits, sleep)
    low, high = wanted.scores(state, now_ms)
    bounds = low, min(high, up_to)
    yield Progress(0, total, {})
    waiting = [_Slot(slot) for slot in held]
    while waiting:
        turn, waiting = waiting[:SLOTS_AT_ONCE], waiting[SLOTS_AT_ONCE:]
        while turn and not pace.is_over(done):
            step = pace.step(done, STEP)
            found, turn = _fetch(broker, topic, state, wanted, turn, bounds, step, problems)
            if tell is None:
                matching = sum(len(entries) for _, entries in found)
                done += matching
                outcomes["matching"] += matching
            else:
                pipeline = broker.pipeline()
                asked = [(slot, [entry.member for entry in entries]) for slot, entries in found if entries]
                for slot, members in asked:
                    tell(pipeline, slot, members)
                for (slot, members), answer in zip(asked, pipeline.execute(), strict=True):
                    done += len(members)
                    if isinstance(answer, ServerTrouble):
                        raise answer
                    if isinstance(answer, RmqError):
                        outcomes["failed"] += len(members)
                        problems.append(f"slot {slot}: {answer}")
                    else:
                        outcomes.update(answer)
            pace.wait(done)
            yield Progress(done, total, dict(outcomes), False, tuple(problems))
        if turn:
            yield Progress(done, total, dict(outcomes), False, tuple(problems))
            return
    yield Progress(done, total, dict(outcomes), True, tuple(problems))


def _fetch(
    broker: Broker,
    topic: Topic,
    state: str,
    wanted: Filter,
    turn: list[_Slot],
    bounds: tuple[float, float],
    step: int,
    problems: list[str],
) -> tuple[list[tuple[int, list[Entry]]], list[_Slot]]:
    """Return the next messages that are meant, by slot, and the slots that have more."""
    limit = max(1, min(PER_SLOT, step // len(turn)))
    # With fewer messages to take than slots, the others wait for the next step.
    now, later = turn[:step], turn[step:]
    search = wanted.search
    pipeline = broker.pipeline()
    for one in now:
        options: dict[str, Any] = {
            "after": one.after,
            "limit": limit,
            "min_score": bounds[0],
            "max_score": bounds[1],
            "max_bytes": STEP_BYTES // len(now),
        }
        if search:
            scan = max(PER_SLOT // 5, STEP * 4 // len(now))
            pipeline.find(topic, one.slot, state, scan=scan, **search, **options)
        else:
            pipeline.peek(topic, one.slot, state, **options)
    found, more = [], []
    for one, page in zip(now, pipeline.execute(), strict=True):
        if isinstance(page, ServerTrouble):
            raise page
        if isinstance(page, RmqError):
            problems.append(f"slot {one.slot}: {page}")
            continue
        entries = [
            entry
            for entry in page.entries
            if not search or wanted.matches(from_entry(topic, one.slot, state, entry), entry)
        ]
        found.append((one.slot, entries))
        if page.cursor is not None:
            more.append(_Slot(one.slot, page.cursor))
    return found, later + more


def purge(
    broker: Broker, topic: Topic, state: str, wanted: Filter, *, limits: Limits, dry_run: bool
) -> Iterator[Progress]:
    """Delete what a state holds, as far as age and slot of ``wanted`` say, without looking at it."""
    now_ms = broker.now_ms()
    up_to = float(now_ms) if state == "dead" else float("inf")
    held = count(broker, topic, state, wanted, up_to, now_ms)
    total, done = sum(held.values()), 0
    if dry_run:
        yield Progress(total, total, {"matching": total}, True)
        return
    pace = _Pace(limits, time.sleep)
    low, high = wanted.scores(state, now_ms)
    problems: list[str] = []
    yield Progress(0, total, {})
    # What is sent meanwhile is not part of it: no slot loses more than it held.
    left = dict(held)
    while left and not pace.is_over(done):
        turn = list(left)[:SLOTS_AT_ONCE]
        step = max(1, min(PER_SLOT, pace.step(done, STEP) // len(turn)))
        turn = turn[: pace.step(done, STEP)]
        pipeline = broker.pipeline()
        asked = [min(step, left[slot]) for slot in turn]
        for slot, limit in zip(turn, asked, strict=True):
            pipeline.purge(topic, slot, state, min(high, up_to), limit, min_score=low)
        for slot, limit, answer in zip(turn, asked, pipeline.execute(), strict=True):
            if isinstance(answer, ServerTrouble):
                raise answer
            if isinstance(answer, RmqError):
                problems.append(f"slot {slot}: {answer}")
                del left[slot]
                continue
            done += answer
            left[slot] -= answer
            if answer < limit or not left[slot]:
                del left[slot]
        pace.wait(done)
        yield Progress(done, total, {"purged": done}, False, tuple(problems))
    yield Progress(done, total, {"purged": done}, not left, tuple(problems))


def tell_every_slot(broker: Broker, topic: Topic, tell: Callable[[Any, int], Any]) -> Iterator[Progress]:
    """Tell every slot one small thing that answers a word."""
    outcomes: Counter[str] = Counter()
    problems: list[str] = []
    for first in range(0, topic.slots, SLOTS_PER_TRIP):
        slots = range(first, min(first + SLOTS_PER_TRIP, topic.slots))
        pipeline = broker.pipeline()
        for slot in slots:
            tell(pipeline, slot)
        for slot, answer in zip(slots, pipeline.execute(), strict=True):
            if isinstance(answer, ServerTrouble):
                raise answer
            if isinstance(answer, RmqError):
                outcomes["failed"] += 1
                problems.append(f"slot {slot}: {answer}")
            else:
                outcomes[answer] += 1
        is_complete = slots.stop == topic.slots
        yield Progress(slots.stop, topic.slots, dict(outcomes), is_complete, tuple(problems))


class _Pace:
    """Keeps to the limits of a work."""

    def __init__(self, limits: Limits, sleep: Callable[[float], None]) -> None:
        self.limits = limits
        self._sleep = sleep
        self._began = time.monotonic()

    def is_over(self, done: int) -> bool:
        """Whether a limit is reached."""
        messages, seconds = self.limits.messages, self.limits.seconds
        if messages is not None and done >= messages:
            return True
        return seconds is not None and time.monotonic() - self._began >= seconds

    def step(self, done: int, most: int) -> int:
        """Return how many messages may be taken at once: a quarter of a second's, where there is a rate."""
        if self.limits.messages is not None:
            most = min(most, self.limits.messages - done)
        if self.limits.rate is not None:
            most = min(most, round(self.limits.rate / 4))
        return max(1, most)

    def wait(self, done: int) -> None:
        """Wait until ``done`` messages may have been dealt with."""
        if self.limits.rate is not None:
            ahead = done / self.limits.rate - (time.monotonic() - self._began)
            if ahead > 0:
                self._sleep(ahead)


__all__ = ["Limits", "Progress", "Run", "count", "purge", "sweep", "tell_every_slot"]
