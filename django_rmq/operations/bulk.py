"""Runs over all slots of a topic, in small steps: their progress, their limits and their speed.

No step takes more than some thousands of messages, so Redis serves other clients between two of them. Messages that
arrive meanwhile are left alone: one that dies again is not replayed a second time. Permissions and records are those
of ``bulk_actions``.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from django_rmq.core.commands import inspect, operate
from django_rmq.core.commands.broker_interface import Broker, attempt, run_all
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.bounds import abbreviated, is_number
from django_rmq.core.model.replies import Entry
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import InvalidRequest, RmqError, ServerTrouble, SlotMoved
from django_rmq.operations.filters import Filter, call_for_page, compares, selects


@dataclass(frozen=True, slots=True)
class BulkProgress:
    """The progress of an operation."""

    done: int
    """The number of messages (pause and resume: slots) processed."""
    total: int
    """The number at the beginning; for a search, how many may match."""
    outcomes: dict[str, int]
    """Outcome → number of messages."""
    is_complete: bool = False
    """Whether the run has reached its end. Its limits may have stopped it, or a person."""
    problems: tuple[str, ...] = ()
    """Slots that could not be processed, and the reasons."""
    undo: str = ""
    """The id by which ``undo`` brings deleted messages back; empty if none are kept."""
    kept: int = 0
    """The number of deleted messages that can be brought back."""


class BulkRun:
    """An operation that advances as it is iterated over; ``result`` completes it."""

    def __init__(self, steps: Iterator[BulkProgress]) -> None:
        self._steps = steps
        self.progress = BulkProgress(0, 0, {})
        """The current progress."""

    def __iter__(self) -> Iterator[BulkProgress]:
        for progress in self._steps:
            self.progress = progress
            yield progress

    def result(self) -> BulkProgress:
        """Complete the operation, and return its final progress."""
        for _ in self:
            pass
        return self.progress

    def close(self) -> None:
        """End the run. Its steps stay done, and are recorded."""
        close = getattr(self._steps, "close", None)
        if close is not None:
            close()


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of a run, and its maximum speed. None means no limit."""

    messages: int | None = None
    seconds: float | None = None
    rate: float | None = None
    """Messages per second."""
    is_counted: bool = False
    """Whether ``messages`` was counted before, so that a run is complete that has taken as many."""

    def check(self) -> None:
        """Raise ``InvalidRequest`` for an invalid limit."""
        for name in ("messages", "seconds", "rate"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and value > 0):
                raise InvalidRequest(f"{name} must be a number above 0, got {abbreviated(value)}")


@dataclass(slots=True)
class BulkTally:
    """The results of an operation so far."""

    total: int
    done: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    trouble: ServerTrouble | None = None
    """The first error of a server, which ends the operation when ``report`` raises it."""

    def failed(self, slot: int, error: RmqError, messages: int = 0) -> None:
        """Record a slot's error, and the messages that it concerns. Nobody knows what became of those of a lost server."""
        if isinstance(error, ServerTrouble):
            self.trouble = self.trouble or error
            return
        self.problems.append(f"slot {slot}: {error}")
        if messages:
            self.done += messages
            self.outcomes["failed"] += messages

    def report(self) -> Iterator[BulkProgress]:
        """Yield the progress of a step. Raises the error of a server after it, because other servers may have done their part."""
        yield self.progress()
        if self.trouble is not None:
            raise self.trouble

    def progress(self, *, is_complete: bool = False) -> BulkProgress:
        return BulkProgress(self.done, self.total, dict(self.outcomes), is_complete, tuple(self.problems))


class BulkPace:
    """Applies the limits of an operation."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._began = time.monotonic()

    def is_over(self, done: int) -> bool:
        """Whether a limit is reached."""
        messages, seconds = self.limits.messages, self.limits.seconds
        if messages is not None and done >= messages:
            return True
        return seconds is not None and time.monotonic() - self._began >= seconds

    def step(self, done: int, most: int) -> int:
        """Return how many messages may be taken at once: those of a quarter of a second, if there is a rate."""
        if self.limits.messages is not None:
            most = min(most, self.limits.messages - done)
        if self.limits.rate is not None:
            most = min(most, round(self.limits.rate / 4))
        return max(1, most)

    def wait(self, done: int) -> None:
        """Wait until ``done`` messages may have been processed."""
        if self.limits.rate is not None:
            ahead = done / self.limits.rate - (time.monotonic() - self._began)
            if ahead > 0:
                time.sleep(ahead)


STEP = 2_000
"""Maximum number of messages in one round trip."""

PER_SLOT = 250
"""The number of messages in one script; one that changes all of them stays well below 15 ms.

The same bound for the same reason have ``undeclared_topics.PAGE``, ``spark.dead_messages.STEP`` and ``operate.restore``.
"""

SLOTS_AT_ONCE = 64
"""The number of slots processed in turns."""

SLOTS_PER_TRIP = 1_000
"""The number of slots in one round trip of small calls."""

STEP_BYTES = 8_388_608
"""The approximate number of bytes that one round trip reads."""

CallOf = Callable[[Topic, int, Sequence[bytes]], Call[list[str]]]
"""Makes a call from a topic, a slot and members; the call answers a word for each member."""


RunCalls = Callable[[Broker, Iterable[Call[Any]]], list[Any]]
"""Runs calls, and returns the answer or the error of each."""


class Selection(NamedTuple):
    """The messages selected for an operation."""

    topic: Topic
    queue: str
    wanted: Filter
    low: float
    """The lowest selected score."""
    high: float
    now_ms: int
    """The time from which ages are counted."""
    but: tuple[float, float] | None = None
    """Scores from the first one up to the second one, without it, are left out: an action gives messages these scores."""

    @classmethod
    def at(
        cls, topic: Topic, queue: str, wanted: Filter, now_ms: int, *, but: tuple[float, float] | None = None
    ) -> Selection:
        """Return the selection of a state at ``now_ms``: for Dead, without messages that die later."""
        low, high = wanted.scores(queue, now_ms)
        high = min(high, float(now_ms)) if queue == "dead" else high
        return cls(topic, queue, wanted, low, high, now_ms, but)

    @property
    def compares(self) -> bool:
        """Whether ``selects`` has to decide about each message, because the scores alone do not."""
        return compares(self.wanted, self.queue)

    def selects(self, slot: int, entry: Entry) -> bool:
        """Return whether an entry that Redis found within the scores is really selected."""
        if self.but is not None and self.but[0] <= entry.score < self.but[1]:
            return False
        return selects(self.wanted, self.topic, slot, self.queue, entry, self.now_ms)


@dataclass(slots=True)
class _Slot:
    slot: int
    left: int | None = None
    """The number of messages that may still be taken from the slot, or None without a bound."""
    after: tuple[str, bytes] | None = None


def count(broker: Broker, meant: Selection) -> dict[int, int]:
    """Return slot → how many of its messages have selected scores."""
    topic, wanted = meant.topic, meant.wanted
    slots: Sequence[int] = range(topic.slots) if wanted.slot is None else [wanted.slot]
    counts = {}
    calls = (inspect.count_between(topic, slot, meant.queue, meant.low, meant.high) for slot in slots)
    for slot, answer in zip(slots, attempt(broker, calls), strict=True):
        if isinstance(answer, ServerTrouble):
            raise answer
        if isinstance(answer, RmqError) or answer:
            # A slot that cannot be counted cannot be processed either, and reports its error then.
            counts[slot] = 1 if isinstance(answer, RmqError) else answer
    return counts


def _count_held(broker: Broker, meant: Selection) -> dict[int, int]:
    """Return slot → how many of its messages are selected by their scores, without those that are left out."""
    held, but = count(broker, meant), meant.but
    if but is None:
        return held
    low, high = max(meant.low, but[0]), min(meant.high, math.nextafter(but[1], -math.inf))
    there = count(broker, meant._replace(low=low, high=high)) if low <= high else {}
    return {slot: left for slot, number in held.items() if (left := number - there.get(slot, 0)) > 0}


def sweep(
    broker: Broker,
    topic: Topic,
    queue: str,
    wanted: Filter,
    call_of: CallOf | None,
    *,
    limits: Limits,
    but: tuple[float, float] | None = None,
    run: RunCalls = run_all,
) -> Iterator[BulkProgress]:
    """Perform a call on all messages of a state that ``wanted`` selects; without ``call_of`` only count them.

    ``run``: how the calls are run; the trash of an action keeps what they delete.

    ``but``: the scores that the call gives to messages, from the first up to the second. Messages that have them are left
    out, and no slot loses more than it held: a message that the call moves behind the cursor must not come again.

    Yields its progress after each step. Raises ``ServerTrouble``; the steps before it stay done.
    """
    meant = Selection.at(topic, queue, wanted, broker.now_ms(), but=but)
    held = _count_held(broker, meant)
    tally = BulkTally(sum(held.values()))
    # If the scores alone decide, the count is the answer.
    if call_of is None and not meant.compares:
        yield BulkProgress(tally.total, tally.total, {"matching": tally.total}, True)
        return
    pace = BulkPace(limits)
    yield tally.progress()
    waiting = [_Slot(slot, None if but is None else number) for slot, number in held.items()]
    while waiting:
        turn, waiting = waiting[:SLOTS_AT_ONCE], waiting[SLOTS_AT_ONCE:]
        while turn and not pace.is_over(tally.done):
            matching_slots, turn = _fetch(broker, meant, turn, pace.step(tally.done, STEP), tally)
            if call_of is None:
                matching = sum(len(members) for _, members in matching_slots)
                tally.done += matching
                tally.outcomes["matching"] += matching
            else:
                _act_in_slots(broker, topic, call_of, run, matching_slots, tally)
            pace.wait(tally.done)
            yield from tally.report()
        # A limit has stopped the run. It was the end all the same if it has taken all that was counted.
        if turn:
            counted = limits.messages if limits.is_counted else None if meant.compares else tally.total
            yield tally.progress(is_complete=counted is not None and tally.done >= counted)
            return
    yield tally.progress(is_complete=True)


def _act_in_slots(
    broker: Broker,
    topic: Topic,
    call_of: CallOf,
    run: RunCalls,
    members_of_slots: Sequence[tuple[int, Sequence[bytes]]],
    tally: BulkTally,
) -> None:
    """Perform the call on members by slot, and count the outcomes."""
    asked = [(slot, members) for slot, members in members_of_slots if members]
    answers = list(run(broker, [call_of(topic, slot, members) for slot, members in asked]))
    # While the topic is being re-slotted, a slot has either slot count.
    moved = [at for at, answer in enumerate(answers) if isinstance(answer, SlotMoved) and answer.slots]
    again = [call_of(replace(topic, slots=answers[at].slots), *asked[at]) for at in moved]
    for at, answer in zip(moved, run(broker, again) if again else (), strict=True):
        answers[at] = answer
    for (slot, members), answer in zip(asked, answers, strict=True):
        if isinstance(answer, RmqError):
            tally.failed(slot, answer, len(members))
        else:
            tally.done += len(members)
            tally.outcomes.update(answer)


def _fetch(
    broker: Broker, meant: Selection, turn: list[_Slot], step: int, tally: BulkTally
) -> tuple[list[tuple[int, list[bytes]]], list[_Slot]]:
    """Return the next selected members, by slot, and the slots that have more."""
    # If a step takes fewer messages than there are slots, the other slots wait for the next step.
    now, later = turn[:step], turn[step:]
    options: dict[str, object] = {
        "limit": max(1, min(PER_SLOT, step // len(turn))),
        "min_score": meant.low,
        "max_score": meant.high,
        "max_bytes": STEP_BYTES // len(now),
    }
    look = call_for_page(meant.wanted, max(PER_SLOT // 5, STEP * 4 // len(now)))
    calls = [look(meant.topic, one.slot, meant.queue, after=one.after, **options) for one in now]
    slots, more = [], []
    for one, page in zip(now, run_all(broker, calls), strict=True):
        if isinstance(page, RmqError):
            tally.failed(one.slot, page)
            continue
        members = [entry.member for entry in page.entries if meant.selects(one.slot, entry)][: one.left]
        slots.append((one.slot, members))
        left = None if one.left is None else one.left - len(members)
        if page.cursor is not None and left != 0:
            more.append(_Slot(one.slot, left, page.cursor))
    return slots, later + more


def purge(
    broker: Broker,
    topic: Topic,
    queue: str,
    wanted: Filter,
    *,
    limits: Limits,
    dry_run: bool,
    run: RunCalls = run_all,
) -> Iterator[BulkProgress]:
    """Delete the messages of a state by age and slot of ``wanted``, without examining them."""
    meant = Selection.at(topic, queue, wanted, broker.now_ms())
    # Messages that are sent meanwhile are not included: no slot loses more than it held.
    left = count(broker, meant)
    tally = BulkTally(sum(left.values()))
    if dry_run:
        yield BulkProgress(tally.total, tally.total, {"matching": tally.total}, True)
        return
    pace = BulkPace(limits)
    yield tally.progress()
    while left and not pace.is_over(tally.done):
        turn = list(left)[:SLOTS_AT_ONCE]
        step = max(1, min(PER_SLOT, pace.step(tally.done, STEP) // len(turn)))
        turn = turn[: pace.step(tally.done, STEP)]
        asked = {slot: min(step, left[slot]) for slot in turn}
        calls = [
            operate.purge(topic, slot, queue, meant.high, limit, min_score=meant.low)
            for slot, limit in asked.items()
        ]
        for (slot, limit), answer in zip(asked.items(), run(broker, calls), strict=True):
            if isinstance(answer, RmqError):
                tally.failed(slot, answer)
                del left[slot]
                continue
            tally.done += answer
            left[slot] -= answer
            if answer < limit or not left[slot]:
                del left[slot]
        tally.outcomes["purged"] = tally.done
        pace.wait(tally.done)
        yield from tally.report()
    tally.outcomes["purged"] = tally.done
    yield tally.progress(is_complete=not left)


def call_every_slot(
    broker: Broker, topic: Topic, call_of: Callable[[int], Call[str]]
) -> Iterator[BulkProgress]:
    """Send every slot a small call that answers a word."""
    tally = BulkTally(topic.slots)
    for first in range(0, topic.slots, SLOTS_PER_TRIP):
        slots = range(first, min(first + SLOTS_PER_TRIP, topic.slots))
        for slot, answer in zip(slots, run_all(broker, map(call_of, slots)), strict=True):
            if isinstance(answer, RmqError):
                tally.failed(slot, answer, 1)
            else:
                tally.done += 1
                tally.outcomes[answer] += 1
        yield from tally.report()
    yield tally.progress(is_complete=True)
